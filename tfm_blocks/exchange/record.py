"""published.json: the parts of an imported folder that the run has in no other file, from which export restores it.

A run folder can come from anybody: the names of files are a closed list, and no text keeps a key that names code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfm_blocks.data.published_tokenizer import without_code
from tfm_blocks.errors import cut, shown
from tfm_blocks.exchange.folder import CONFIG, DTYPES, INDEX, PLAIN_NAME, shards
from tfm_blocks.runs.files import JsonFile

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
        """Return the object in a text. Raises ValueError."""
        value = json.loads(self.texts[name], parse_constant=lambda name: None)
        if not isinstance(value, dict):
            raise ValueError(f"texts.{name} must be a JSON object")
        return value


def inherit_record(start: Path, run: Path) -> None:
    """Give a run that starts from an imported model the texts of its folder, whose keys export writes again."""
    record = PublishedFile.read_or_empty(start)
    texts = {name: text for name, text in record.texts.items() if name != INDEX}
    if texts:
        PublishedFile(record.family, texts).write(run)


LEFTOVERS = "published.safetensors"  # tensors that the model does not use, such as a table of fixed positions
