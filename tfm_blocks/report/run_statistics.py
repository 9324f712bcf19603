"""Line statistics of a run's test set. Statistics of translations are cached in the user's cache."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.runs.folder import TRANSLATIONS
from tfm_blocks.runs.row_results import read_losses, read_translations
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.measures import Floats, answer_statistics, line_statistics

FORMAT = 1  # version of the cached file; increase it when the statistics change
FILE = "statistics.npz"


def run_statistics(run: SavedRun, tokenizer: str, notes: list[str]) -> dict[str, Floats]:
    """Return the statistics by measure. A missing or damaged file adds a note and yields no statistics."""
    statistics: dict[str, Floats] = {}
    try:
        if "accuracy" in run.scores:
            lines = read_translations(run.folder)
            statistics |= answer_statistics([line.output for line in lines], [line.reference for line in lines])
        elif run.scores:
            statistics |= _of_translations(run.translated_in or run.folder, tokenizer)
        losses_N3 = None if run.translated_in else read_losses(run.folder)
    except RunError as error:
        notes.append(f"{error.problems[0].address} {error.problems[0].rule}")
        return statistics
    if losses_N3 is not None:
        statistics |= {"loss": losses_N3[:, [0, 2]], "perplexity": losses_N3[:, [1, 2]]}
    return statistics


def _of_translations(folder: Path, tokenizer: str) -> dict[str, Floats]:
    """Return the statistics of the translations, from the cache if it is usable, since TER is slow."""
    lines = read_translations(folder)
    outputs, references = [line.output for line in lines], [line.reference for line in lines]
    text = hashlib.sha256((folder / TRANSLATIONS).read_bytes()).hexdigest()
    key = cache_key(FORMAT, version("sacrebleu"), tokenizer, text)

    def build(place: Path) -> None:
        np.savez_compressed(place / FILE, **line_statistics(outputs, references, tokenizer))  # type: ignore[arg-type]

    kept = cache_folder(None) / "line-statistics" / key
    with suppress(ConfigError, OSError), np.load(find_or_build(kept, build) / FILE) as arrays:
        return dict(arrays)
    return line_statistics(outputs, references, tokenizer)
