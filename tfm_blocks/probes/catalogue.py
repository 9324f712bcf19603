"""The probe tasks by name."""

from __future__ import annotations

from tfm_blocks.probes.addition import Addition
from tfm_blocks.probes.arithmetic import Arithmetic, ArithmeticBrackets
from tfm_blocks.probes.bits import EvenPairs, Parity
from tfm_blocks.probes.copying import Compression, SelectiveCopying
from tfm_blocks.probes.cycle_navigation import CycleNavigation
from tfm_blocks.probes.fuzzy_recall import FuzzyRecall
from tfm_blocks.probes.memorisation import Memorisation
from tfm_blocks.probes.missing_duplicate import MissingDuplicate
from tfm_blocks.probes.mqar import Mqar
from tfm_blocks.probes.recall import InContextRecall, NoisyRecall
from tfm_blocks.probes.scan import Scan
from tfm_blocks.probes.stack_manipulation import StackManipulation
from tfm_blocks.probes.strings import BucketSort, Copy, OddsFirst, Reverse, ReverseString, Sort
from tfm_blocks.probes.task import ProbeTask
from tfm_blocks.probes.word_problem import WordProblem

TASKS: dict[str, type[ProbeTask]] = {
    "mqar": Mqar,
    "in_context_recall": InContextRecall,
    "fuzzy_recall": FuzzyRecall,
    "noisy_recall": NoisyRecall,
    "selective_copying": SelectiveCopying,
    "compression": Compression,
    "memorisation": Memorisation,
    "parity": Parity,
    "even_pairs": EvenPairs,
    "cycle_navigation": CycleNavigation,
    "arithmetic": Arithmetic,
    "arithmetic_brackets": ArithmeticBrackets,
    "word_problem": WordProblem,
    "reverse_string": ReverseString,
    "odds_first": OddsFirst,
    "bucket_sort": BucketSort,
    "missing_duplicate": MissingDuplicate,
    "stack_manipulation": StackManipulation,
    "scan": Scan,
    "copy": Copy,
    "reverse": Reverse,
    "sort": Sort,
    "addition": Addition,
}
