"""Read and write the scores that `tfm evaluate --test` keeps in a finished run, below `scores/NAME/`.

`scores.json` has the scores and the settings of the search. `translations.jsonl` has the translations, as in the run
folder itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.runs.files import read_or_empty
from tfm_blocks.runs.folder import finite_or_null, write_json
from tfm_blocks.runs.translations import TranslatedLine, write_translations
from tfm_blocks.runs.values import count_at, list_at, mapping_at, number_at, text_at

FOLDER = "scores"
FILE = "scores.json"
FORMAT = 1


@dataclass(frozen=True)
class SavedScores:
    """The content of scores.json.

    test: the file of the test set, or empty for the run's own. test_set: its `rows` and `sha256`. search: the settings
    that differ from those of a greedy search. steps: optimizer updates of the weights. exact_match: a fraction. scores:
    those of sacreBLEU, as in status.json.
    """

    test: str
    test_set: Mapping[str, Any]
    search: Mapping[str, Any]
    steps: int | None
    exact_match: float | None
    scores: Sequence[Mapping[str, Any]]


def scores_folder(run: Path, name: str) -> Path:
    """Return the folder of the scores with this name."""
    return run / FOLDER / name


def saved_names(run: Path) -> list[str]:
    """Return the names of the scores that a run has."""
    return sorted(path.parent.name for path in (run / FOLDER).glob(f"*/{FILE}"))


def write_saved_scores(run: Path, name: str, saved: SavedScores, lines: Sequence[TranslatedLine]) -> None:
    """Write the translations and then the scores; earlier ones with this name are replaced. Raises OSError."""
    folder = scores_folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    write_translations(folder, lines)
    write_json(folder / FILE, {"format": FORMAT, **{key: finite_or_null(one) for key, one in asdict(saved).items()}})


def read_saved_scores(run: Path, name: str) -> SavedScores:
    """Read scores.json. Values of another type, and all values of a missing or damaged file, count as missing."""
    values = read_or_empty(scores_folder(run, name) / FILE)
    return SavedScores(
        text_at(values, "test"),
        mapping_at(values, "test_set"),
        mapping_at(values, "search"),
        count_at(values, "steps"),
        number_at(values, "exact_match"),
        tuple(score for score in list_at(values, "scores") if isinstance(score, dict)),
    )
