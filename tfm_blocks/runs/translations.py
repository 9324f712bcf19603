"""Read and write translations.jsonl: the finished model's translations of its test set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tfm_blocks.errors import Place, Problem, RunError
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import TRANSLATIONS, settle


@dataclass(frozen=True)
class TranslatedLine:
    """One line of the test set. The texts of several sources are joined by ` | `."""

    source: str
    output: str
    reference: str


def write_translations(run: Path, lines: Iterable[TranslatedLine]) -> None:
    """Write the file atomically, with one JSON object per line."""
    part = run / f"{TRANSLATIONS}.part"
    part.write_text("".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines), "utf-8")
    settle(part, run / TRANSLATIONS)


def read_translations(run: Path) -> list[TranslatedLine]:
    """Return the lines in the order of the test set. Raises RunError if the file is missing or damaged."""
    path = run / TRANSLATIONS
    if not path.exists():
        rule = f"has no {TRANSLATIONS}: it is not done, it does not translate, or an older version wrote it"
        raise RunError(Problem(str(run), rule, help="tfm evaluate RUN --against RUN2 tests runs on a text"))
    lines = []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        try:
            lines.append(_translation(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(Problem(str(path), f"is damaged: {error}", Place(str(path), number))) from None
    if not lines:
        raise RunError(Problem(str(path), "is damaged: it has no lines"))
    return lines


def _translation(value: object) -> TranslatedLine:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("a line is an object of texts")
    return TranslatedLine(**value)


def hash_rows(rows: Iterable[Mapping[str, str]], columns: Sequence[str]) -> str:
    """Return the SHA-256 of a test set. Runs with equal hashes were scored on the same text."""
    digest = hashlib.sha256()
    for row in rows:
        texts = [row[name] for name in columns]
        digest.update(
            (json.dumps(texts) if len(texts) > 1 else texts[0]).encode()
        )  # rows of plain text depend on settings
    return digest.hexdigest()
