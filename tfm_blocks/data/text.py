"""Line-aligned text files, plain or gzipped: line N of one side translates line N of the other.

Only \\n and \\r\\n end a line; a byte order mark at the start is dropped; the last line needs no end.
A wrong file is an error: missing (ConfigError), not UTF-8, a damaged .gz, unequal numbers of lines (DataError).
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from tfm_blocks.data.settings import TextSettings
from tfm_blocks.errors import ConfigError, DataError, Place, Problem

UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextPairs:
    """The two files of a split; `address` is its key in the config."""

    address: str
    src: Path
    tgt: Path
    groups: Sequence[str] = ()

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each line of both files, read as it is asked for. Raises DataError."""
        pairs = zip_longest(read_lines(self.src, f"{self.address}.src"), read_lines(self.tgt, f"{self.address}.tgt"))
        for number, (src, tgt) in enumerate(pairs):
            if src is None or tgt is None:
                raise self._unequal(number, 1 + sum(1 for _ in pairs))
            yield src, tgt

    def _unequal(self, both: int, more: int) -> DataError:
        """`both` lines pair up, then one side has `more`."""
        src = sum(1 for _ in read_lines(self.src, f"{self.address}.src"))
        counts = (both + more, both) if src > both else (both, both + more)
        rule = f"line N must translate line N, but {self.src} has {counts[0]:,} lines and {self.tgt} has {counts[1]:,}"
        return DataError(Problem(self.address, rule, help="the files come from two versions, or one was cut"))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of both files' bytes."""
        digests = []
        for path in (self.src, self.tgt):
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return "-".join(digests)


def text_splits(settings: TextSettings) -> dict[str, TextPairs]:
    """train, val and test. Raises ConfigError that lists every file that is not there."""
    folder = Path(settings.dir).expanduser()
    splits = {
        name: TextPairs(f"data.{name}", folder / columns.src, folder / columns.tgt)
        for name, columns in (("train", settings.train), ("val", settings.val), ("test", settings.test))
    }
    problems = [
        Problem(f"{split.address}.{side}", f"there is no file {path}", help=_file_help(folder))
        for split in splits.values()
        for side, path in (("src", split.src), ("tgt", split.tgt))
        if not path.is_file()
    ]
    if problems:
        raise ConfigError(problems)
    return splits


def _file_help(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder} either: write data.dir=PATH"
    there = sorted(path.name for path in folder.iterdir())
    return f"{folder} has {', '.join(there[:12])}{', …' if len(there) > 12 else ''}" if there else f"{folder} is empty"


def read_lines(path: Path, address: str) -> Iterator[str]:
    """The lines without their ends. Raises DataError with file and line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(UTF8_MARK)
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8, but holds the byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
        help = f"iconv -f latin1 -t utf-8 {path.name}, if it is Latin-1"
        raise DataError(Problem(address, rule, Place(str(path), number, error.start + 1), help=help)) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        rule = f"the gzipped file is damaged: {error}"
        raise DataError(Problem(address, rule, Place(str(path), number + 1), help="fetch it again")) from None
    except OSError as error:
        raise DataError(Problem(address, f"cannot be read: {error.strerror}", Place(str(path)))) from None
