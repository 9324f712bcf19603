"""Datasets by name: the library datasets, an extra, reads them, and the cache stores each split once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

from tfm_blocks.data.cache import cache_key, find_or_build
from tfm_blocks.data.files import import_package
from tfm_blocks.data.settings import HUB, LmSettings, MixedDocuments, MixedPairs, TextSettings
from tfm_blocks.errors import ConfigError, Problem, cut, listed

ReadFiles = TypeVar("ReadFiles", bound=TextSettings | LmSettings | MixedPairs | MixedDocuments)


def with_stored_splits(settings: ReadFiles, address: str, cache: Path) -> ReadFiles:
    """Return settings that read saved datasets, if `dir` is hub:NAME or hub:NAME:CONFIG. Raises ConfigError."""
    if not settings.dir.startswith(HUB):
        return settings
    name, _, config = settings.dir.removeprefix(HUB).partition(":")

    def stored(names: Sequence[str]) -> list[str]:
        return [str(_stored_split(name, config, split, address, cache)) for split in names]

    files = {split: getattr(settings, split) for split in ("train", "val", "test")}
    folders = {
        split: {column: stored(names) for column, names in value.items()} if isinstance(value, dict) else stored(value)
        for split, value in files.items()
        if value is not None
    }
    return cast(ReadFiles, settings.model_copy(update={"dir": str(cache), **folders}))


def _stored_split(name: str, config: str, split: str, address: str, cache: Path) -> Path:
    """Return the folder of a split in the cache, for which the library reads the dataset unless it is there."""
    datasets = import_package("datasets", "datasets", f"{address}.dir", Path(name))
    try:
        known = datasets.get_dataset_split_names(name, config or None)
        if split not in known:
            rule = f"the dataset {name} has no split {split}; its splits: {listed(known, 8)}"
            help = "name its splits: data.train=train data.val=validation data.test=test, or data.test=null"
            raise ConfigError(Problem(f"{address}.dir", rule, help=help))
        dataset = datasets.load_dataset(name, config or None, split=split)
    except ConfigError:
        raise
    except Exception as error:  # of the network, of the library, or of a file
        reason = (str(error).strip().splitlines() or [""])[0]
        rule = f"the dataset {name} cannot be read: {type(error).__name__}: {cut(reason)}"
        help = (
            f"check the name and the network; elsewhere, load_dataset({name!r}).save_to_disk(PATH) stores a copy, and "
        )
        raise ConfigError(Problem(f"{address}.dir", rule, help=help + "data.dir=PATH reads it")) from None
    key = cache_key("hub", name, config, split, dataset._fingerprint)
    return find_or_build(cache / "datasets" / key, lambda folder: dataset.save_to_disk(str(folder)))
