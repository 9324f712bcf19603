"""Line-aligned text files, plain or gzipped: line N of a column corresponds to line N of the others.

Only \\n and \\r\\n end a line; a byte order mark at the start is ignored; the last line may lack a line end.
Missing files raise ConfigError. Text that is not UTF-8, a damaged .gz and unequal line counts raise DataError.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from tfm_blocks.data.home import expand_home
from tfm_blocks.data.settings import LmSettings, TextSettings
from tfm_blocks.errors import ConfigError, DataError, Place, Problem
from tfm_blocks.language.spec import TARGET

UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextFiles:
    """The files of a split by column. `address` is the split's key in the config."""

    address: str
    files: Mapping[str, Path]
    groups: Sequence[str] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(self.files)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield line N of every file, without reading ahead. Raises DataError."""
        rows = zip_longest(*(read_lines(path, f"{self.address}.{name}") for name, path in self.files.items()))
        for number, row in enumerate(rows):
            if None in row:
                raise self._unequal_lines(number)
            yield row

    def _unequal_lines(self, number: int) -> DataError:
        """Return the error for files of different length, of which one has only `number` lines."""
        counts = {path: sum(1 for _ in read_lines(path, self.address)) for path in self.files.values()}
        listed = " and ".join(f"{path} has {count:,}" for path, count in counts.items())
        rule = f"all files must have the same number of lines, but {listed} lines"
        return DataError(Problem(self.address, rule, help="check for mixed versions or a truncated file"))

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of each file."""
        digests = []
        for path in self.files.values():
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return "-".join(digests)


def find_splits(settings: TextSettings | LmSettings) -> dict[str, TextFiles]:
    """Return the splits train, val and, unless null, test. Raises ConfigError that lists all missing files."""
    folder = expand_home("data.dir", settings.dir)
    configured = {"train": settings.train, "val": settings.val, "test": settings.test}
    splits = {name: _files(f"data.{name}", folder, files) for name, files in configured.items() if files is not None}
    problems = [
        Problem(_address(split, name), f"there is no file {path}", help=_file_help(folder))
        for split in splits.values()
        for name, path in split.files.items()
        if not path.is_file()
    ]
    if problems:
        raise ConfigError(problems)
    return splits


def _files(address: str, folder: Path, files: Mapping[str, str] | str) -> TextFiles:
    by_column = {TARGET: files} if isinstance(files, str) else files
    return TextFiles(address, {name: folder / file for name, file in by_column.items()})


def _address(split: TextFiles, name: str) -> str:
    return split.address if len(split.files) == 1 else f"{split.address}.{name}"


def _file_help(folder: Path) -> str:
    if not folder.is_dir():
        return f"the folder {folder} does not exist either: write data.dir=PATH"
    names = sorted(path.name for path in folder.iterdir())
    return f"{folder} has {', '.join(names[:12])}{', …' if len(names) > 12 else ''}" if names else f"{folder} is empty"


def read_lines(path: Path, address: str) -> Iterator[str]:
    """Yield the lines without their line ends. Raises DataError with file and line."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(UTF8_MARK)
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8, but has the byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
        help = f"iconv -f latin1 -t utf-8 {path.name}, if it is Latin-1"
        raise DataError(Problem(address, rule, Place(str(path), number, error.start + 1), help=help)) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        rule = f"the gzipped file is damaged: {error}"
        raise DataError(Problem(address, rule, Place(str(path), number + 1), help="download it again")) from None
    except OSError as error:
        raise DataError(Problem(address, f"cannot be read: {error.strerror}", Place(str(path)))) from None
