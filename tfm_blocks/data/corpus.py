"""Encoded text in memory-mapped files: five million pairs cost tens of megabytes of memory, not gigabytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
CHUNK = 8192  # rows that are encoded at a time
LONGEST = 4096  # tokens of a held-out column; the memory and time of a network can grow as their square


class Corpus:
    """Rows of id sequences without bos and eos, one for each of `columns`, as `folder` holds them.

    `lengths_NC` is int32; `text` has the text of each column, exactly as written; `groups` names a group for each row,
    or is empty; `skipped` counts what was left out, by reason, `cut` the rows that were longer.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, groups: Sequence[str] = ()) -> None:
        about = json.loads((folder / "about.json").read_text())
        self._opened_with = folder, tokenizer, groups
        self.columns: tuple[str, ...] = tuple(about["columns"])
        self.lengths_NC = np.fromfile(folder / "lengths.bin", dtype=np.int32).reshape(-1, len(self.columns))
        self._bounds = np.concatenate(([0], np.cumsum(self.lengths_NC, dtype=np.int64)))
        mapped = np.memmap(folder / "ids.bin", dtype=about["dtype"], mode="r")
        self._ids = mapped.view(np.ndarray)  # of which a slice takes a tenth of the time
        self.skipped: dict[str, int] = about["skipped"]
        self.cut: int = about["cut"]
        self.text: dict[str, Sequence[str]] = {
            column: Decoded(len(self), self._reader(column), tokenizer) for column in self.columns
        }
        self.groups = groups

    def __reduce__(self) -> tuple[type[Corpus], tuple[Path, Tokenizer, Sequence[str]]]:
        """Pickle the folder instead of its content: another process maps the same files."""
        return Corpus, self._opened_with

    def __len__(self) -> int:
        return len(self.lengths_NC)

    def lengths_N(self, column: str) -> npt.NDArray[np.int32]:
        """The tokens of every row."""
        lengths_N: npt.NDArray[np.int32] = self.lengths_NC[:, self.columns.index(column)]
        return lengths_N

    def ids(self, column: str, row: int) -> Ids:
        """The sequence of a row: a view of the file."""
        place = row * len(self.columns) + self.columns.index(column)
        return self._ids[self._bounds[place] : self._bounds[place + 1]]

    def rows(self, rows: slice) -> list[dict[str, str]]:
        """The text of some rows, by column."""
        return [{name: self.text[name][row] for name in self.columns} for row in range(len(self))[rows]]

    def _reader(self, column: str) -> Callable[[int], Ids]:
        return lambda row: self.ids(column, row)


class Decoded(Sequence[str]):
    """The text of a column, made from the ids when asked for: the tokenizer gives back exactly what it read."""

    def __init__(self, size: int, ids_of: Callable[[int], Ids], tokenizer: Tokenizer) -> None:
        self._size, self._ids_of, self._tokenizer = size, ids_of, tokenizer

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        rows = range(self._size)[place]
        if isinstance(rows, int):
            return self._tokenizer.decode(self._ids_of(rows).tolist())
        return [self[row] for row in rows]


def write_corpus(
    folder: Path,
    columns: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
) -> None:
    """Encodes rows of text into `folder`, a chunk at a time.

    With `max_length` a row with a blank column or more tokens than that in one is skipped and counted. Without it, as
    for held-out text, every row is kept; what a column has beyond LONGEST tokens is cut, and the row counted.
    """
    left_out = {"blank": 0, "long": 0, "cut": 0}

    def kept() -> Iterator[list[int]]:
        rest = iter(rows)
        while chunk := list(islice(rest, CHUNK)):
            encoded = iter(tokenizer.encode_batch(list(chain.from_iterable(chunk))))
            for texts in chunk:
                ids = list(islice(encoded, len(columns)))
                longest = max(map(len, ids))
                if max_length is None:
                    left_out["cut"] += longest > LONGEST
                    yield from (one[:LONGEST] for one in ids)
                elif not all(text.strip() for text in texts):
                    left_out["blank"] += 1
                elif longest > max_length:
                    left_out["long"] += 1
                else:
                    yield from ids

    _write(folder, columns, kept(), tokenizer, left_out)


def write_packed(folder: Path, column: str, lines: Iterable[str], tokenizer: Tokenizer, *, context: int) -> None:
    """Encodes lines of text end to end, eos after each, and cuts them into rows of `context` tokens.

    Blank lines are skipped and counted; the last row is as long as what is left.
    """
    left_out = {"blank": 0, "long": 0, "cut": 0}

    def packed() -> Iterator[list[int]]:
        left: list[int] = []
        rest = iter(lines)
        while chunk := list(islice(rest, CHUNK)):
            written = [line for line in chunk if line.strip()]
            left_out["blank"] += len(chunk) - len(written)
            for ids in tokenizer.encode_batch(written):
                left += [*ids, Tokenizer.EOS]
            whole = len(left) // context * context
            yield from (left[start : start + context] for start in range(0, whole, context))
            left = left[whole:]
        if left:
            yield left

    _write(folder, [column], packed(), tokenizer, left_out)


def _write(
    folder: Path, columns: Sequence[str], sequences: Iterator[list[int]], tokenizer: Tokenizer, left_out: dict[str, int]
) -> None:
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "lengths.bin").open("wb") as lengths_file:
        while chunk := list(islice(sequences, CHUNK * len(columns))):
            np.fromiter(chain.from_iterable(chunk), dtype).tofile(ids_file)
            np.fromiter(map(len, chunk), np.int32).tofile(lengths_file)
    cut = left_out.pop("cut")
    about = {"columns": list(columns), "dtype": np.dtype(dtype).name, "skipped": left_out, "cut": cut}
    (folder / "about.json").write_text(json.dumps(about))
