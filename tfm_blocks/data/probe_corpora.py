"""The corpora of a probe task: generated examples, kept in the cache."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.data.corpus import FORMAT, Corpus
from tfm_blocks.data.encoding import write_examples
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.probes.task import ProbeTask, running_task


def probe_corpora(settings: ProbeSettings, tell: Callable[[str], None]) -> tuple[Tokenizer, dict[str, Corpus]]:
    """Return the tokenizer, whose tokens are the alphabet of the task, and the corpus of each split.

    The rows of a test set are grouped by length, with the same number of examples for each length. The key in the cache
    contains everything that determines the examples.
    """
    task, seed = settings.probe, settings.seed
    tokenizer = Tokenizer.of_words(task.alphabet)
    assert tokenizer.size == settings.vocab, "the names of an alphabet are unique"
    corpora = {}
    for name in ("val", "test", "train"):
        lengths, count = settings.lengths[name], settings.counts[name]
        by_length = name == "test" and bool(lengths)
        parts = [(length,) for length in lengths] if by_length else [lengths]
        key = cache_key(FORMAT, _code(type(task)), type(task).__name__, asdict(task), seed, name, parts, count)

        def build(folder: Path, name: str = name, parts: Sequence[Sequence[int]] = parts, count: int = count) -> None:
            examples = (task.examples(seed, name, part, count) for part in parts)
            with running_task(type(task)):
                write_examples(folder, chain.from_iterable(examples), tokenizer)

        groups = [str(length) for length in lengths for _ in range(count)] if by_length else []
        built = find_or_build(cache_folder(settings.cache) / "probes" / key, build)
        corpora[name] = corpus = Corpus(built, tokenizer, groups)
        text = f" of length {', '.join(map(str, dict.fromkeys(lengths)))}" if by_length else ""
        tell(f"data: {settings.task}, {settings.size}: {len(corpus):,} {name} examples{text}")
    tell(f"data: vocabulary of {tokenizer.size:,} tokens")
    return tokenizer, corpora


@cache
def _code(task: type[ProbeTask]) -> str:
    """Return a hash of the code that generates examples, so that a change of it makes new ones.

    The code is the module of the task and of each base class, with the other modules of its package.
    """
    files = set[Path]()
    for name in {base.__module__ for base in task.__mro__}:
        file = getattr(sys.modules[name], "__file__", None)
        if file and name not in sys.stdlib_module_names:
            files |= set(Path(file).parent.glob("*.py")) if sys.modules[name].__package__ else {Path(file)}
    ordered = sorted(files, key=lambda file: file.parts[-2:])
    return hashlib.sha256(b"".join(file.read_bytes() for file in ordered)).hexdigest()
