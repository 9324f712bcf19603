"""Splits of texts in columns, and the pairs of files: row N of a column corresponds to row N of the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from pathlib import Path

from tfm_blocks.data.cache import expand_home
from tfm_blocks.data.file_settings import MixedPairs
from tfm_blocks.data.files import PARQUET, file_kind, file_problems, find_files, path_digest, read_fields
from tfm_blocks.data.settings import TextSettings
from tfm_blocks.errors import ConfigError, DataError, Problem
from tfm_blocks.language.spec import TARGET


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


def find_splits(settings: TextSettings | MixedPairs, key: str = "data", *, labelled: bool = False) -> dict[str, Split]:
    """Return the splits train, val and test, unless null. Raises ConfigError that lists all missing files.

    `key` is the address of the settings in the config.
    """
    folder, fields = expand_home(f"{key}.dir", settings.dir), settings.fields or {}
    labels = [TARGET] if labelled else []
    splits: dict[str, Split] = {}
    problems: list[Problem] = []
    for split, patterns in (("train", settings.train), ("val", settings.val), ("test", settings.test)):
        if patterns is not None:
            address = f"{key}.{split}"
            files = {column: find_files(folder, names) for column, names in patterns.items()}
            splits[split] = Split(
                address, tuple(files), partial(_rows, address, files, fields, labels), partial(_digest, files, fields)
            )
            for column, names in patterns.items():
                problems += file_problems(f"{address}.{column}", folder, names)
            problems += _shard_problems(address, files, fields)
    if problems:
        raise ConfigError(
            list({(problem.rule, problem.help): problem for problem in reversed(problems)}.values())[::-1]
        )
    return splits


def join_splits(splits: Sequence[Split]) -> Split:
    """Return the rows of several splits, one after the other."""
    return replace(
        splits[0],
        rows=lambda: chain.from_iterable(split.rows() for split in splits),
        digest=lambda: "+".join(split.fingerprint for split in splits),
        groups=(),
    )


def _shard_problems(address: str, files: Mapping[str, list[Path]], fields: Mapping[str, str]) -> Iterator[Problem]:
    if len({len(paths) for paths in files.values()}) > 1:
        counts = " and ".join(f"{column} has {len(paths)}" for column, paths in files.items())
        rule = f"every column must have the same number of files, but {counts}"
        yield Problem(address, rule, help="file N of a column is read beside file N of the others, line by line")
    for path in dict.fromkeys(path for paths in files.values() for path in paths):
        if not fields and file_kind(path) == PARQUET and path.exists():
            help = "data.fields={src: COLUMN, tgt: COLUMN}"
            yield Problem(address, f"{path.name} has columns, but data.fields does not name them", help=help)


def _rows(
    address: str, files: Mapping[str, list[Path]], fields: Mapping[str, str], labels: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of file after file. Raises DataError."""
    for shard in zip(*files.values(), strict=True):
        yield from _aligned(address, dict(zip(files, shard, strict=True)), fields, labels)


def _aligned(
    address: str, files: Mapping[str, Path], fields: Mapping[str, str], labels: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield row N of every file, without reading ahead; columns of the same file are read together.

    The columns `labels` may have numbers.
    """
    columns_of_file: dict[Path, list[str]] = {}
    for column, path in files.items():
        columns_of_file.setdefault(path, []).append(column)

    def readers() -> dict[Path, Iterator[tuple[str, ...]]]:
        return {
            path: read_fields(
                path,
                [fields.get(name, "") for name in names],
                address if len(names) > 1 else f"{address}.{names[0]}",
                [place for place, name in enumerate(names) if name in labels],
            )
            for path, names in columns_of_file.items()
        }

    names = list(chain.from_iterable(columns_of_file.values()))
    order = [names.index(column) for column in files]
    for parts in zip_longest(*readers().values()):
        if None in parts:
            counts = {path: sum(1 for _ in rows) for path, rows in readers().items()}
            listed = " and ".join(f"{path} has {count:,}" for path, count in counts.items())
            rule = f"all files must have the same number of lines, but {listed} lines"
            raise DataError(Problem(address, rule, help="check for mixed versions or a truncated file"))
        texts = tuple(chain.from_iterable(parts))
        yield tuple(texts[place] for place in order)


def _digest(files: Mapping[str, list[Path]], fields: Mapping[str, str]) -> str:
    digest = "-".join("+".join(map(path_digest, paths)) for paths in files.values())
    kinds = {column: [(fields[column], file_kind(path)) for path in paths] for column, paths in files.items() if fields}
    return f"{digest} {json.dumps(kinds)}" if fields else digest
