"""published.json: the parts of an imported folder that the run has in no other file, from which export restores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfm_blocks.runs.json_file import JsonFile


@dataclass(frozen=True)
class PublishedFile(JsonFile):
    """The content of published.json.

    texts: small JSON files of the folder by name, config.json among them. tensors: the file and the type of each
    tensor. metadata: of each file of weights.
    """

    FILE = "published.json"

    family: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


LEFTOVERS = "published.safetensors"  # tensors that the model does not use, such as a table of fixed positions
