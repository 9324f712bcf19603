"""scores/NAME/scores.json: the scores that `tfm evaluate --test` keeps in a finished run.

`translations.jsonl` beside it has the translations, as in the run folder itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfm_blocks.runs.json_file import JsonFile
from tfm_blocks.runs.row_results import TranslatedLine, write_translations
from tfm_blocks.runs.status import Score, ScoredSet

FOLDER = "scores"


@dataclass(frozen=True)
class SavedScores(JsonFile):
    """The content of scores.json.

    test: the file of the test set, or empty for the run's own. search: the settings of the search. steps: the optimizer
    updates of the weights. exact_match: a fraction. scores: from sacreBLEU.
    """

    FILE = "scores.json"

    test: str = ""
    test_set: ScoredSet = field(default_factory=ScoredSet)
    search: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    exact_match: float | None = None
    scores: tuple[Score, ...] = ()


def scores_folder(run: Path, name: str) -> Path:
    """Return the folder of the scores with this name."""
    return run / FOLDER / name


def saved_names(run: Path) -> list[str]:
    """Return the names of the scores that a run has."""
    return sorted(path.parent.name for path in (run / FOLDER).glob(f"*/{SavedScores.FILE}"))


def write_saved_scores(run: Path, name: str, saved: SavedScores, lines: Sequence[TranslatedLine]) -> None:
    """Write the translations and then the scores; earlier ones with this name are replaced. Raises OSError."""
    folder = scores_folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    write_translations(folder, lines)
    saved.write(folder)
