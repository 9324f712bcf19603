"""Files of text: lines, plain or compressed, and the named fields of JSON lines, TSV, Parquet and saved datasets.

Only \\n and \\r\\n end a line; a byte order mark at the start is ignored; the last line may lack a line end.
Missing files and missing packages raise ConfigError. Invalid content, such as text that is not UTF-8 or a damaged .gz,
raises DataError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from glob import glob, has_magic
from importlib import import_module
from pathlib import Path
from typing import Any

from tfm_blocks.data.cache import file_digest
from tfm_blocks.errors import ConfigError, DataError, Place, Problem, cut, listed, shown

UTF8_MARK = b"\xef\xbb\xbf"
OTHER_KINDS = {  # first bytes of files of other kinds: the kind, and a command that converts one
    b"\x1f\x8b": ("compressed with gzip, but its name does not end in .gz", "mv {name} {name}.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd, but its name does not end in .zst", "mv {name} {name}.zst"),
    b"\xfd7zXZ": ("compressed with xz", "xz -d {name}"),
    b"BZh": ("compressed with bzip2", "bzip2 -d {name}"),
    b"PK\x03\x04": ("a zip archive", "unzip {name}"),
    b"PAR1": ("a Parquet file, but its name does not end in .parquet", "mv {name} {name}.parquet"),
    b"\xff\xfe": ("UTF-16 text", "iconv -f utf-16 -t utf-8 {name}"),
    b"\xfe\xff": ("UTF-16 text", "iconv -f utf-16 -t utf-8 {name}"),
}
DATASET, DATASETS = "state.json", "dataset_dict.json"  # files in the folder of a saved dataset, and of several
COMPRESSED = (".gz", ".zst")
LINES, JSONL, TSV, PARQUET = "lines", "jsonl", "tsv", "parquet"
FIELDS_HELP = "data.fields names the fields of src and tgt: data.fields={src: FIELD, tgt: FIELD}"
FORMATS_HELP = (
    "name a file that ends in .jsonl, .ndjson, .tsv or .parquet; to convert CSV: "
    "python -c 'import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]' < x.csv > x.jsonl"
)
KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".tsv": TSV, ".parquet": PARQUET}  # by the end of a file's name


def file_kind(path: Path) -> str:
    """Return the kind of a file, by its name; a folder is a saved dataset, which is read as a Parquet file is."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return PARQUET if path.is_dir() else KINDS.get(name.suffix, LINES)


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of patterns, such as part-*.txt, and of folders, sorted by name within each.

    A name without a file is returned as it is.
    """
    return [file for pattern in patterns for file in _matches(folder, pattern)]


def _matches(folder: Path, pattern: str) -> list[Path]:
    path = folder / pattern
    if path.is_dir() and not any((path / name).is_file() for name in (DATASET, DATASETS)):
        return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if path.exists() or not has_magic(pattern):
        return [path]
    names = glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
    return sorted(file for name in names if (file := folder / name).is_file() or (file / DATASET).is_file())


def file_problems(address: str, folder: Path, patterns: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each name without a file, and for files that are named twice."""
    files = find_files(folder, patterns)
    for pattern in patterns:
        if not _matches(folder, pattern):
            yield Problem(address, f"no file matches {folder / pattern}", help=list_files(folder))
    for file in files:
        if (file / DATASETS).is_file():
            names = sorted(path.name for path in file.iterdir() if path.is_dir())
            rule = f"{file} has several datasets: {listed(names, 8)}"
            yield Problem(address, rule, help=f"name one of them: {file.name}/{names[0] if names else 'train'}")
        elif not file.exists():
            yield Problem(address, f"there is no file {file}", help=list_files(folder))
    if repeated := [str(file) for file in dict.fromkeys(files) if files.count(file) > 1]:
        rule = f"names a file more than once: {listed(repeated, 3)}"
        yield Problem(address, rule, help="remove a name, or a pattern that matches the file too")


def list_files(folder: Path) -> str:
    """Return the first files of a folder, as the help of an error about a missing file."""
    if not folder.is_dir():
        return f"the folder {folder} does not exist either: write data.dir=PATH"
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return f"the folder {folder} is empty: copy the files there, or write data.dir=PATH"
    return f"{folder} has {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"


def path_digest(path: Path) -> str:
    """Return a hash of a file, or of the tables of a saved dataset."""
    return "/".join(map(file_digest, sorted(path.glob("*.arrow")))) if path.is_dir() else file_digest(path)


def import_package(name: str, extra: str, address: str, path: Path) -> Any:
    """Return the module of an extra. Raises ConfigError if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        rule = f"{path.name} needs the package {name.removesuffix('.parquet')}, which is not installed"
        help = f"pip install -c constraints.txt 'tfm-blocks[{extra}]'"
        raise ConfigError(Problem(address, rule, Place(str(path)), help=help)) from None


def _zstd(address: str, path: Path) -> Any:
    """Return the module of Python 3.14, or its backport."""
    try:
        return import_module("compression.zstd")
    except ImportError:
        return import_package("backports.zstd", "zstd", address, path)


def read_lines(path: Path, address: str) -> Iterator[str]:
    """Yield the lines without their line ends. Raises DataError with file and line, or with the kind of the file."""
    number, zstd = 0, _zstd(address, path) if path.suffix == ".zst" else None
    damages = (zstd.ZstdError, EOFError) if zstd else (gzip.BadGzipFile, zlib.error, EOFError)
    try:
        with gzip.open(path) if path.suffix == ".gz" else zstd.open(path) if zstd else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(UTF8_MARK)
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        compressed = path.suffix in COMPRESSED
        with path.open("rb") as file:
            begin = b"" if compressed else file.read(6)
        for first, (kind, command) in OTHER_KINDS.items():
            if begin.startswith(first):
                rule = f"must be UTF-8 text, plain, .gz or .zst, but the file is {kind}"
                help = command.format(name=path.name)
                raise DataError(Problem(address, rule, Place(str(path)), help=help)) from None
        rule = f"must be UTF-8, but has the byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
        help = f"iconv -f latin1 -t utf-8 {path.stem if compressed else path.name}, if it is Latin-1"
        help = f"decompress it, then {help}" if compressed else help
        raise DataError(Problem(address, rule, Place(str(path), number, error.start + 1), help=help)) from None
    except damages as error:
        rule = f"the {'zstd' if zstd else 'gzipped'} file is damaged: {error}"
        raise DataError(Problem(address, rule, Place(str(path), number + 1), help="repeat the download")) from None
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise DataError(Problem(address, rule, Place(str(path)), help="name a file that you can read")) from None


def read_fields(
    path: Path,
    fields: Sequence[str],
    address: str,
    labels: Collection[int] = (),
    *,
    help: str = FIELDS_HELP,
    kind: str = "",
) -> Iterator[tuple[str, ...]]:
    """Yield the texts of these fields of every row; without names, and in plain text, each field is the line.

    A field of JSON lines, Parquet and datasets may be inside another one: translation.en. The fields of TSV are names
    of its first line, or, if all are numbers, columns from 1, and no line has names. The fields with the numbers
    `labels` may be numbers, or lists, which become words. Raises DataError with the row, and with `help` for a field.
    The name of the file decides its format, unless there is a `kind`.
    """
    kind = kind or (file_kind(path) if all(fields) else LINES)
    rows: Iterator[Any] = _table_rows(path, fields, address, help) if kind == PARQUET else read_lines(path, address)
    parse: Callable[[Any], Mapping[str, Any]] = partial(dict.fromkeys, fields)
    first = 1
    if kind == JSONL:
        parse = json_object
    elif kind == TSV and all(map(str.isdigit, fields)):
        parse = partial(_cells, None)
    elif kind == TSV:
        parse, first = partial(_cells, next(rows, "").split("\t")), 2
    elif kind == PARQUET:
        parse = dict
    for number, row in enumerate(rows, first):
        try:
            record = parse(row) if kind != JSONL or row.strip() else dict.fromkeys(fields, "")
            texts = tuple(text_of(record, field, label=place in labels) for place, field in enumerate(fields))
        except ValueError as error:
            raise DataError(Problem(address, str(error), Place(str(path), number), help=help)) from None
        yield texts


def _cells(names: Sequence[str] | None, line: str) -> dict[str, str]:
    """Return the cells of a line of TSV, which has no quotes. Raises ValueError if there are not as many as names."""
    cells = line.split("\t")
    if names is not None and len(cells) != len(names):
        raise ValueError(f"must have {len(names)} cells, as the first line has, but has {len(cells)}: {cut(line)}")
    return dict(zip(names or map(str, range(1, len(cells) + 1)), cells, strict=True))


def json_object(line: str) -> dict[str, Any]:
    """Return the object in a line. Raises ValueError with the rule that the line breaks."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"jsonl expects a JSON object, but the line is {cut(line)}")
    return record


def text_of(record: Mapping[str, Any], field: str, *, label: bool = False) -> str:
    """Return the text of a field, which may be inside another one: translation.en. Raises ValueError with the rule.

    A `label` may be a number or a list, which becomes words.
    """
    outer, _, inner = field.partition(".")
    if field not in record and inner and isinstance(record.get(outer), dict):
        return text_of(record[outer], inner, label=label)
    if field not in record:
        known = listed([shown(name) for name in record], 8) or "none"
        raise ValueError(f"the object has no key {shown(field)}; its keys: {known}")
    text = record[field]
    if label and not isinstance(text, str) and text is not None:
        parts = text if isinstance(text, list) else [text]
        if not all(isinstance(part, str | int | float) for part in parts):
            raise ValueError(f"{shown(field)} must be a label, a number or a list of labels, but is {shown(text)}")
        text = " ".join(map(str, parts)) if parts else "-"
    if not isinstance(text, str):
        raise ValueError(f"{shown(field)} must be a string, but is {shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(field)} has half of a surrogate pair, which is no character: {shown(text)}") from None
    return text


def _table_rows(path: Path, fields: Sequence[str], address: str, help: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file or a saved dataset. Only the columns of these fields are read."""
    try:
        if path.is_dir():
            dataset = (
                import_package("datasets", "datasets", address, path).load_from_disk(str(path)).with_format("arrow")
            )
            known: list[str] = dataset.column_names
        else:
            file = import_package("pyarrow.parquet", "parquet", address, path).ParquetFile(path)
            known = file.schema_arrow.names
        columns = {field if field in known else field.split(".")[0]: field for field in fields}
        if unknown := [field for column, field in columns.items() if column not in known]:
            rule = f"has no column {unknown[0]}; its columns: {listed(known, 8) or 'none'}"
            raise DataError(Problem(address, rule, Place(str(path)), help=help))
        names = list(columns)
        batches: Iterable[Any]
        batches = dataset.select_columns(names).iter(1024) if path.is_dir() else file.iter_batches(columns=names)
        for batch in batches:
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {cut(str(error))}"
        raise DataError(Problem(address, rule, Place(str(path)), help="repeat the download")) from None
