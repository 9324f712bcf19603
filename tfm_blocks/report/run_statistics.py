"""The line statistics of the test set of a run. Those of its translations are kept in the user's cache."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.runs.folder import TRANSLATIONS
from tfm_blocks.runs.losses import read_losses
from tfm_blocks.runs.record import RunRecord
from tfm_blocks.runs.translations import read_translations
from tfm_blocks.scoring.line_statistics import Floats, line_statistics

FORMAT = 1  # of the cached file; a change of the statistics takes another number
FILE = "statistics.npz"


def run_statistics(run: RunRecord, tokenizer: str, notes: list[str]) -> dict[str, Floats]:
    """Return the statistics by measure; a file that is missing or damaged adds to `notes` and gives none."""
    found: dict[str, Floats] = {}
    try:
        if run.scores:
            found |= _of_translations(run.folder, tokenizer)
        losses_N3 = read_losses(run.folder)
    except RunError as error:
        notes.append(f"{error.problems[0].address} {error.problems[0].rule}")
        return found
    if losses_N3 is not None:
        found |= {"loss": losses_N3[:, [0, 2]], "perplexity": losses_N3[:, [1, 2]]}
    return found


def _of_translations(folder: Path, tokenizer: str) -> dict[str, Floats]:
    """TER takes a second for a thousand lines, so nothing is computed twice; an unusable cache is done without."""
    lines = read_translations(folder)
    outputs, references = [one.output for one in lines], [one.reference for one in lines]
    text = hashlib.sha256((folder / TRANSLATIONS).read_bytes()).hexdigest()
    key = cache_key(FORMAT, version("sacrebleu"), tokenizer, text)

    def build(place: Path) -> None:
        np.savez_compressed(place / FILE, **line_statistics(outputs, references, tokenizer))  # type: ignore[arg-type]

    kept = cache_folder(None) / "line-statistics" / key
    with suppress(ConfigError, OSError), np.load(find_or_build(kept, build) / FILE) as arrays:
        return dict(arrays)
    return line_statistics(outputs, references, tokenizer)
