"""Datasets by name: the library datasets, an extra, reads them, and the cache stores each split once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from tfm_blocks.data.cache import cache_key, expand_home, find_or_build
from tfm_blocks.data.file_settings import HUB, MixedDocuments, MixedPairs
from tfm_blocks.data.files import import_package
from tfm_blocks.data.settings import LmSettings, TextSettings
from tfm_blocks.errors import ConfigError, Problem, cut, listed

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
        raise ConfigError(Problem(address, rule, help=f"write {address}={HUB}NAME, or {address}={HUB}NAME:CONFIG"))
    name = str(expand_home(address, name)) if name.startswith("~") else name
    datasets = import_package("datasets", "datasets", address, Path(name))
    of = (name, config) if config else (name,)
    try:
        known = datasets.get_dataset_split_names(*of)
        if unknown := [split for split in splits if split not in known]:
            rule = f"the dataset {name} has no split {unknown[0]}; its splits: {listed(known, 8)}"
            help = "name its splits: data.train=train data.val=validation data.test=test, or data.test=null"
            raise ConfigError(Problem(address, rule, help=help))
        read = datasets.load_dataset(*of, split=list(splits))
    except ConfigError:
        raise
    except Exception as error:  # of the network, of the library, or of a file
        reason = (str(error).strip().splitlines() or [""])[0]
        rule = f"the dataset {name} cannot be read: {type(error).__name__}: {cut(reason)}"
        load = f"load_dataset({', '.join(map(repr, of))}).save_to_disk(PATH)"
        help = f"check the name and the network; elsewhere, {load} stores a copy, and data.dir=PATH reads it"
        raise ConfigError(Problem(address, rule, help=help)) from None
    keys = [cache_key("hub", name, config, split, x._fingerprint) for split, x in zip(splits, read, strict=True)]
    folders = [
        find_or_build(cache / "datasets" / key, partial(_save, one)) for key, one in zip(keys, read, strict=True)
    ]
    return {split: str(folder.absolute()) for split, folder in zip(splits, folders, strict=True)}


def _save(dataset: Any, folder: Path) -> None:
    dataset.save_to_disk(str(folder))
