"""Encoded pairs in memory-mapped files: five million of them cost tens of megabytes of memory, not gigabytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
CHUNK = 8192  # pairs that are encoded at a time


class Corpus:
    """Pairs of id sequences without bos and eos, as `write_corpus` left them in `folder`.

    `src_lengths_N` and `tgt_lengths_N` are int32; `sources` and `references` are the text of each side, exactly as
    written; `groups` names a group for each pair, or is empty; `skipped` counts what was left out, by reason.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, groups: Sequence[str] = ()) -> None:
        about = json.loads((folder / "about.json").read_text())
        lengths_N2 = np.fromfile(folder / "lengths.bin", dtype=np.int32).reshape(-1, 2)
        self.src_lengths_N, self.tgt_lengths_N = np.ascontiguousarray(lengths_N2.T)
        self._bounds = np.concatenate(([0], np.cumsum(lengths_N2, dtype=np.int64)))
        self._ids = np.memmap(folder / "ids.bin", dtype=about["dtype"], mode="r")
        self.skipped: dict[str, int] = about["skipped"]
        self.sources: Sequence[str] = Decoded(len(self), self.src_ids, tokenizer)
        self.references: Sequence[str] = Decoded(len(self), self.tgt_ids, tokenizer)
        self.groups = groups

    def __len__(self) -> int:
        return len(self.src_lengths_N)

    def src_ids(self, pair: int) -> Ids:
        """The source of a pair: a view of the file."""
        return self._ids[self._bounds[2 * pair] : self._bounds[2 * pair + 1]]

    def tgt_ids(self, pair: int) -> Ids:
        """The target of a pair: a view of the file."""
        return self._ids[self._bounds[2 * pair + 1] : self._bounds[2 * pair + 2]]


class Decoded(Sequence[str]):
    """The text of one side, made from the ids when asked for: the tokenizer gives back exactly what it read."""

    def __init__(self, size: int, ids_of: Callable[[int], Ids], tokenizer: Tokenizer) -> None:
        self._size, self._ids_of, self._tokenizer = size, ids_of, tokenizer

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        pairs = range(self._size)[place]
        if isinstance(pairs, int):
            return self._tokenizer.decode(self._ids_of(pairs).tolist())
        return [self[pair] for pair in pairs]


def write_corpus(
    folder: Path, pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer, *, max_length: int | None
) -> None:
    """Encodes `pairs` into `folder`, a chunk at a time.

    With `max_length` a pair with a blank side or more tokens than that on a side is skipped and counted.
    """
    skipped = {"blank": 0, "long": 0}
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    rest = iter(pairs)
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "lengths.bin").open("wb") as lengths_file:
        while chunk := list(islice(rest, CHUNK)):
            encoded = tokenizer.encode_batch(list(chain.from_iterable(chunk)))
            kept: list[list[int]] = []
            for (src, tgt), src_ids, tgt_ids in zip(chunk, encoded[::2], encoded[1::2], strict=True):
                if max_length is not None and not (src.strip() and tgt.strip()):
                    skipped["blank"] += 1
                elif max_length is not None and max(len(src_ids), len(tgt_ids)) > max_length:
                    skipped["long"] += 1
                else:
                    kept += (src_ids, tgt_ids)
            np.fromiter(chain.from_iterable(kept), dtype).tofile(ids_file)
            np.fromiter(map(len, kept), np.int32).tofile(lengths_file)
    (folder / "about.json").write_text(json.dumps({"dtype": np.dtype(dtype).name, "skipped": skipped}))
