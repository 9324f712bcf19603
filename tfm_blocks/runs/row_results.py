"""Results for each row of the scored split: translations.jsonl of the test set, and losses.csv."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tfm_blocks.errors import Place, Problem, RunError
from tfm_blocks.runs.files import damaged, read_bytes, read_text, write_bytes
from tfm_blocks.runs.folder import LOSSES, TRANSLATIONS
from tfm_blocks.runs.records import SavedScores, scores_folder

LOSS_COLUMNS = ("loss", "nll", "tokens", "bytes", "correct", "labels")
CORPUS = "corpus"  # a further column
Losses = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TranslatedLine:
    """One line of the test set. The texts of several sources are joined by ` | `."""

    source: str
    output: str
    reference: str


def write_translations(run: Path, lines: Iterable[TranslatedLine]) -> None:
    """Write the file atomically, with one JSON object per line."""
    text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    write_bytes(run / TRANSLATIONS, text.encode("utf-8"))


def read_translations(run: Path) -> list[TranslatedLine]:
    """Return the lines in the order of the test set. Raises RunError if the file is missing or damaged."""
    path = run / TRANSLATIONS
    if not path.exists():
        rule = f"has no {TRANSLATIONS}: it is not done, or it does not translate"
        raise RunError(Problem(str(run), rule, help="tfm evaluate RUN --against RUN2 tests runs on a text"))
    lines = []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                raise ValueError("a line is an object of texts")
            lines.append(TranslatedLine(**value))
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path), number))) from None
    if not lines:
        raise RunError(Problem(str(path), "is damaged: it has no lines"))
    return lines


def write_losses(run: Path, losses_N6: Losses, corpora: Sequence[str] = ()) -> None:
    """Write one line per row: the sums over its target tokens of the loss and of -log p, their number, and its bytes.

    The last two numbers are the labels that the model ranks first, and all labels, which are fewer than the tokens in
    masked diffusion. A row is a document if the text is packed and the model generates text; other rows have 0 bytes.
    `corpora` name the corpus of each row of a mix, in another column.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*LOSS_COLUMNS, CORPUS) if corpora else LOSS_COLUMNS)
    numbers = ([float(loss), float(nll), *map(int, counts)] for loss, nll, *counts in losses_N6)
    names = ([name] for name in corpora) if corpora else repeat([])
    writer.writerows([*row, *name] for row, name in zip(numbers, names, strict=False))
    write_bytes(run / LOSSES, text.getvalue().encode("utf-8"))


def read_losses(run: Path) -> Losses | None:
    """Return losses_N6 in the order of the split; None if the file does not exist. Raises RunError if it is damaged."""
    return read_losses_of_corpora(run)[0]


def read_losses_of_corpora(run: Path) -> tuple[Losses | None, list[str]]:
    """Return what `read_losses` returns, and the corpus of each row if they are a mix."""
    path, width = run / LOSSES, len(LOSS_COLUMNS)
    if not path.exists():
        return None, []
    text = read_text(path)
    try:
        header, *rows = (line.split(",") for line in text.splitlines())
        corpora = [row.pop() for row in rows] if header[width:] == [CORPUS] else []
        losses_NK = np.array([[float(number) for number in row] for row in rows], np.float64)
        if tuple(header[:width]) != LOSS_COLUMNS or losses_NK.shape != (len(rows), width):
            raise ValueError(f"it needs a line {','.join(LOSS_COLUMNS)}, then a number per column")
        if not rows or not np.isfinite(losses_NK).all() or losses_NK[:, 2].min() < 1:
            raise ValueError("losses must be finite, and each row must have a token")
    except ValueError as error:
        raise damaged(path, error) from None
    return losses_NK, corpora


def hash_rows(rows: Iterable[Mapping[str, str]], columns: Sequence[str]) -> str:
    """Return the SHA-256 of a test set. Runs with equal hashes were scored on the same text."""
    digest = hashlib.sha256()
    for row in rows:
        texts = [row[name] for name in columns]
        digest.update((json.dumps(texts) if len(texts) > 1 else texts[0]).encode())
    return digest.hexdigest()


def write_saved_scores(
    run: Path, name: str, saved: SavedScores, lines: Sequence[TranslatedLine] = (), losses_D2: Losses | None = None
) -> None:
    """Write the translations, or -log p and the predicted tokens of each text, and then the scores.

    Earlier ones with this name are replaced. Raises OSError.
    """
    folder = scores_folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    if lines:
        write_translations(folder, lines)
    if losses_D2 is not None:
        write_losses(folder, np.pad(losses_D2[:, [0, 0, 1]], ((0, 0), (0, 3))))
    saved.write(folder)
