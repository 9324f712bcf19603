"""The documents of packed text: which tokens of which rows belong to each, and how many bytes it has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE = "documents.bin"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """The documents of packed rows, which do not depend on the tokenizer.

    `bytes_D` counts the bytes of each in UTF-8, and one for its end. Each eos ends a piece of text; `document_P` is the
    document of each piece, and `first_R` the piece at the beginning of each row. `sha256` is a hash of the texts.
    """

    bytes_D: Ints
    document_P: Ints
    first_R: Ints
    sha256: str

    @classmethod
    def read(cls, folder: Path, sha256: str, ends_R: Ints) -> Documents:
        """Read the file of `write`; `ends_R` counts the eos of each row."""
        pieces_D, bytes_D = np.fromfile(folder / FILE, np.int64).reshape(-1, 2).T
        return cls(bytes_D, np.repeat(np.arange(len(pieces_D)), pieces_D), np.cumsum(ends_R) - ends_R, sha256)

    @classmethod
    def join(cls, parts: Sequence[Documents], rows_R: Ints) -> Documents:
        """Return the documents of several corpora, whose rows, one corpus after the other, are read as `rows_R`."""
        documents = np.cumsum([0, *(len(part.bytes_D) for part in parts)])
        pieces = np.cumsum([0, *(len(part.document_P) for part in parts)])
        numbered = zip(parts, documents, pieces, strict=False)
        document_P, first_R = zip(
            *((part.document_P + document, part.first_R + piece) for part, document, piece in numbered), strict=True
        )
        digest = hashlib.sha256(" ".join(part.sha256 for part in parts).encode()).hexdigest()
        bytes_D = np.concatenate([part.bytes_D for part in parts])
        return cls(bytes_D, np.concatenate(document_P), np.concatenate(first_R)[rows_R], digest)


class DocumentWriter:
    """Collects what `Documents` needs of the texts of a corpus."""

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []
        self._digest = hashlib.sha256()

    def add(self, text: str, pieces: int) -> None:
        """Add a document, which `pieces` eos end, usually one."""
        encoded = text.encode()
        self._sizes.append((pieces, len(encoded) + 1))
        self._digest.update(hashlib.sha256(encoded).digest())

    def write(self, folder: Path) -> str:
        """Write the file, and return the hash of the texts."""
        np.array(self._sizes, np.int64).tofile(folder / FILE)
        return self._digest.hexdigest()
