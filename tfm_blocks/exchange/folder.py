"""A folder with a published model: config.json, safetensors and tokenizer files. Nothing in it is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfm_blocks.data.published_tokenizer import without_code
from tfm_blocks.data.tokenizer_format import expect_small
from tfm_blocks.errors import cut, run_error, shown
from tfm_blocks.runs.files import JsonFile, damaged, read_json
from tfm_blocks.runs.folder import expect_utf8

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
MOST_TENSORS = 200_000
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class StoredTensor:
    """The file, name, shape and dtype of a tensor."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PublishedFolder:
    """A folder whose weights were found; `tensors` has the tensors of all its files, by the names of its family."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    def load(self) -> dict[str, Tensor]:
        """Return all tensors. Raises RunError if one is not finite."""
        loaded = {}
        for file in sorted({tensor.file for tensor in self.tensors.values()}):
            with _opened(self.path / file) as content:
                for name, tensor in self.tensors.items():
                    if tensor.file == file:
                        loaded[name] = content.get_tensor(tensor.name)
        for name, values in loaded.items():
            if not values.isfinite().all():
                raise run_error(str(self.path), f"{name} has values that are not finite")
        return loaded

    def is_equal(self, *tensors: StoredTensor) -> bool:
        """Return True if two tensors have equal shapes and values. Raises RunError."""
        if len({tensor.shape for tensor in tensors}) > 1:
            return False
        with _opened(self.path / tensors[0].file) as one, _opened(self.path / tensors[1].file) as other:
            return torch.equal(one.get_tensor(tensors[0].name).float(), other.get_tensor(tensors[1].name).float())


def open_folder(path: Path) -> PublishedFolder:
    """Read the headers of the weights of a folder. Raises RunError."""
    if not path.is_dir():
        help = "name a folder with config.json and *.safetensors; from the Hub: hf download NAME --local-dir FOLDER"
        raise run_error(str(path), "there is no such folder", help)
    files = [SINGLE]
    if not (path / SINGLE).is_file():
        if not (path / INDEX).is_file():
            pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
            if not pickles:
                raise run_error(str(path), f"has no {SINGLE} and no {INDEX}")
            rule = f"has its weights in {pickles[0]}, a pickle, which can execute any code when it is read"
            help = "save the model with transformers: model.save_pretrained(FOLDER) writes safetensors"
            raise run_error(str(path), rule, help)
        try:
            files = shards(read_small_json(path / INDEX))
        except ValueError as error:
            raise damaged(path / INDEX, error) from None
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        with _opened(path / file) as content:
            names, where = content.keys(), str(path / file)
            if len(names) > MOST_TENSORS:
                raise run_error(where, f"has {len(names):,} tensors, but at most {MOST_TENSORS:,} are read")
            for name in names:
                if name in tensors:
                    raise run_error(where, f"has the tensor {name}, which {tensors[name].file} has too")
                part = content.get_slice(name)
                tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return PublishedFolder(path, tensors)


def read_small_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of at most LARGEST_FILE bytes. Raises RunError."""
    expect_small(path)
    return read_json(path)


def shards(index: Mapping[str, Any]) -> list[str]:
    """Return the files of an index. Raises ValueError for a name that is not a plain name of a file beside it."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError("weight_map must be a mapping of names to files")
    for name, file in files.items():
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
            raise ValueError(f"{shown(name)} is in {shown(file)}, which is not the name of a file here")
    return sorted(set(files.values()))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises RunError if it is missing or damaged."""
    if not path.is_file():
        raise run_error(str(path), "the file is missing")
    expect_utf8(path)
    try:
        with safe_open(path, "pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from None


def metadata_of(folder: PublishedFolder) -> dict[str, dict[str, str]]:
    """Return the metadata of each file of weights."""
    metadata = {}
    for file in sorted({tensor.file for tensor in folder.tensors.values()}):
        with _opened(folder.path / file) as content:
            metadata[file] = content.metadata() or {}
    return metadata


GENERATION = "generation_config.json"
KEPT = (CONFIG, INDEX, GENERATION)


@dataclass(frozen=True)
class PublishedFile(JsonFile):
    """The content of published.json.

    texts: small JSON files of the folder by name, config.json among them. tensors: the file and the type of each
    tensor; empty in a run that was trained further. metadata: of each file of weights.
    """

    FILE = "published.json"

    family: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for the name of a file that is not in a published folder, and for a key that names code."""
        for name, text in self.texts.items():
            if name not in KEPT:
                raise ValueError(f"texts has {shown(name)}, which is not one of {', '.join(KEPT)}")
            if keys := without_code(text.encode())[1]:
                raise ValueError(f"texts.{name} has {', '.join(keys)}, which names code")
            if name == INDEX:
                shards(self.parsed(name))
        for name, place in self.tensors.items():
            if len(place) != 2 or not PLAIN_NAME.fullmatch(place[0]) or place[1] not in DTYPES:
                raise ValueError(f"tensors.{cut(name)} must be a file here and a type, but is {shown(place)}")

    def parsed(self, name: str) -> dict[str, Any]:
        """Return the object in a text, with NaN and infinities as transformers 5 writes them. Raises ValueError."""
        value = json.loads(self.texts[name], parse_constant=lambda constant: {"__float__": constant})
        if not isinstance(value, dict):
            raise ValueError(f"texts.{name} must be a JSON object")
        return value


def inherit_record(start: Path, run: Path) -> None:
    """Give a run that starts from an imported model the texts of its folder, whose keys export restores."""
    record = PublishedFile.read_or_empty(start)
    texts = {name: text for name, text in record.texts.items() if name != INDEX}
    if texts:
        PublishedFile(record.family, texts).write(run)


LEFTOVERS = "published.safetensors"  # tensors that the model does not use, such as a table of fixed positions
