"""Splits of texts in columns. Row N of a file corresponds to row N of the others. Datasets by name are cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TypeVar, cast

from tfm_blocks.data.cache import cache_key, expand_home, find_or_build
from tfm_blocks.data.file_settings import HUB, MixedDocuments, MixedPairs
from tfm_blocks.data.files import (
    FORMATS_HELP,
    LINES,
    file_kind,
    file_problems,
    find_files,
    import_package,
    path_digest,
    read_fields,
)
from tfm_blocks.data.settings import LmSettings, TextSettings
from tfm_blocks.errors import ConfigError, DataError, Problem, config_error, cut, expect_none, listed
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
    expect_none(list({(problem.rule, problem.help): problem for problem in reversed(problems)}.values())[::-1])
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
        if not fields and file_kind(path) != LINES and path.exists():
            help = "data.fields={src: FIELD, tgt: FIELD}"
            yield Problem(address, f"{path.name} has fields, but data.fields does not name them", help=help)
        if fields and file_kind(path) == LINES and sum(path in paths for paths in files.values()) > 1:
            rule = f"{path.name} would be read as plain lines, without the fields that data.fields names"
            yield Problem(address, rule, help=FORMATS_HELP)


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


ReadFiles = TypeVar("ReadFiles", bound=TextSettings | LmSettings | MixedPairs | MixedDocuments)


def with_stored_splits(settings: ReadFiles, address: str, cache: Path) -> ReadFiles:
    """Return settings that read saved datasets, if `dir` is hub:NAME or hub:NAME:CONFIG. Raises ConfigError."""
    if not settings.dir.startswith(HUB):
        return settings
    files = {split: value for split in ("train", "val", "test") if (value := getattr(settings, split)) is not None}
    names = chain.from_iterable(
        chain(*value.values()) if isinstance(value, dict) else value for value in files.values()
    )
    stored = _stored_splits(settings.dir.removeprefix(HUB), list(dict.fromkeys(names)), f"{address}.dir", cache)
    folders = {
        split: {column: [stored[name] for name in names] for column, names in value.items()}
        if isinstance(value, dict)
        else [stored[name] for name in value]
        for split, value in files.items()
    }
    return cast(ReadFiles, settings.model_copy(update={"dir": str(cache), **folders}))


def _stored_splits(written: str, splits: Sequence[str], address: str, cache: Path) -> dict[str, str]:
    """Return the folder of each split in the cache, into which the library writes it unless it is there."""
    name, _, config = written.partition(":")
    if not name:
        rule = "names no dataset"
        raise config_error(address, rule, f"write {address}={HUB}NAME, or {address}={HUB}NAME:CONFIG")
    name = str(expand_home(address, name)) if name.startswith("~") else name
    datasets = import_package("datasets", "datasets", address, Path(name))
    of = (name, config) if config else (name,)
    try:
        known = datasets.get_dataset_split_names(*of)
        if unknown := [split for split in splits if split not in known]:
            rule = f"the dataset {name} has no split {unknown[0]}; its splits: {listed(known, 8)}"
            help = "name its splits: data.train=train data.val=validation data.test=test, or data.test=null"
            raise config_error(address, rule, help)
        read = datasets.load_dataset(*of, split=list(splits))
    except ConfigError:
        raise
    except Exception as error:  # of the network, of the library, or of a file
        reason = (str(error).strip().splitlines() or [""])[0]
        rule = f"the dataset {name} cannot be read: {type(error).__name__}: {cut(reason)}"
        load = f"load_dataset({', '.join(map(repr, of))}).save_to_disk(PATH)"
        help = f"check the name and the network; elsewhere, {load} stores a copy, and data.dir=PATH reads it"
        raise config_error(address, rule, help) from None
    keys = [cache_key("hub", name, config, split, x._fingerprint) for split, x in zip(splits, read, strict=True)]
    folders = [find_or_build(cache / "datasets" / key, one.save_to_disk) for key, one in zip(keys, read, strict=True)]
    return {split: str(folder.absolute()) for split, folder in zip(splits, folders, strict=True)}
