"""Line-aligned text files, plain or gzipped: line N of a column corresponds to line N of the others.

Only \\n and \\r\\n end a line; a byte order mark at the start is ignored; the last line may lack a line end.
Missing files raise ConfigError. Text that is not UTF-8, a damaged .gz and unequal line counts raise DataError.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, zip_longest
from pathlib import Path

from tfm_blocks.data.cache import expand_home, file_digest
from tfm_blocks.data.settings import TextSettings
from tfm_blocks.errors import ConfigError, DataError, Place, Problem

UTF8_MARK = b"\xef\xbb\xbf"
OTHER_KINDS = {  # first bytes of files of other kinds: the kind, and a command that converts one
    b"\x1f\x8b": ("compressed with gzip, but its name does not end in .gz", "mv {name} {name}.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -d {name}"),
    b"\xfd7zXZ": ("compressed with xz", "xz -d {name}"),
    b"BZh": ("compressed with bzip2", "bzip2 -d {name}"),
    b"PK\x03\x04": ("a zip archive", "unzip {name}"),
    b"PAR1": ("a Parquet file", "write its text to a plain file"),
    b"\xff\xfe": ("UTF-16 text", "iconv -f utf-16 -t utf-8 {name}"),
    b"\xfe\xff": ("UTF-16 text", "iconv -f utf-16 -t utf-8 {name}"),
}


@dataclass(frozen=True)
class Split:
    """Rows of text that can be read repeatedly, one text per column; `address` is the split's key in the config.

    `groups` names a group for each row, or is empty. `digest` returns a hash of the text.
    """

    address: str
    columns: tuple[str, ...]
    rows: Callable[[], Iterator[tuple[str, ...]]]
    digest: Callable[[], str]
    groups: Sequence[str] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Return the digest, computed once."""
        return self.digest()

    def first(self, count: int) -> Split:
        """Return the first rows; later rows are not read, so their errors are not detected."""
        return replace(
            self,
            rows=lambda: islice(self.rows(), count),
            digest=lambda: f"{self.fingerprint} {count}",
            groups=self.groups[:count],
        )


def find_splits(settings: TextSettings) -> dict[str, Split]:
    """Return the splits train, val and, unless null, test. Raises ConfigError that lists all missing files."""
    folder = expand_home("data.dir", settings.dir)
    splits, problems = {}, []
    for split, files in (("train", settings.train), ("val", settings.val), ("test", settings.test)):
        if files is not None:
            paths = {column: folder / file for column, file in files.items()}
            splits[split] = Split(
                f"data.{split}", tuple(paths), partial(_rows, f"data.{split}", paths), partial(_digest, paths.values())
            )
            for column, path in paths.items():
                if not path.is_file():
                    address = f"data.{split}.{column}"
                    problems.append(Problem(address, f"there is no file {path}", help=list_files(folder)))
    if problems:
        raise ConfigError(problems)
    return splits


def _rows(address: str, files: Mapping[str, Path]) -> Iterator[tuple[str, ...]]:
    """Yield line N of every file, without reading ahead. Raises DataError."""
    for row in zip_longest(*(read_lines(path, f"{address}.{column}") for column, path in files.items())):
        if None in row:
            counts = {path: sum(1 for _ in read_lines(path, address)) for path in files.values()}
            listed = " and ".join(f"{path} has {count:,}" for path, count in counts.items())
            rule = f"all files must have the same number of lines, but {listed} lines"
            raise DataError(Problem(address, rule, help="check for mixed versions or a truncated file"))
        yield row


def _digest(files: Iterable[Path]) -> str:
    return "-".join(map(file_digest, files))


def list_files(folder: Path) -> str:
    """Return the first files of a folder, as the help of an error about a missing file."""
    if not folder.is_dir():
        return f"the folder {folder} does not exist either: write data.dir=PATH"
    names = sorted(path.name for path in folder.iterdir())
    return f"{folder} has {', '.join(names[:12])}{', …' if len(names) > 12 else ''}" if names else f"{folder} is empty"


def read_lines(path: Path, address: str) -> Iterator[str]:
    """Yield the lines without their line ends. Raises DataError with file and line, or with the kind of the file."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(UTF8_MARK)
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            begin = file.read(6)
        for first, (kind, command) in OTHER_KINDS.items():
            if begin.startswith(first):
                rule = f"must be UTF-8 text, plain or .gz, but the file is {kind}"
                help = command.format(name=path.name)
                raise DataError(Problem(address, rule, Place(str(path)), help=help)) from None
        rule = f"must be UTF-8, but has the byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
        help = f"iconv -f latin1 -t utf-8 {path.name}, if it is Latin-1"
        raise DataError(Problem(address, rule, Place(str(path), number, error.start + 1), help=help)) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        rule = f"the gzipped file is damaged: {error}"
        raise DataError(Problem(address, rule, Place(str(path), number + 1), help="download it again")) from None
    except OSError as error:
        raise DataError(Problem(address, f"cannot be read: {error.strerror}", Place(str(path)))) from None
