"""`at`: changes to single layers of a stack, merged into the layer's graph as a child file into its parent's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def read_index(key: str) -> int | None:
    """The index of a layer, negative from the end; None where `key` is none."""
    return int(key) if re.fullmatch(r"0|-?[1-9][0-9]{0,3}", key) else None


def merge(layer: Mapping[Any, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    """Mappings are merged key by key, lists and single values replaced whole; null removes a key."""
    merged = {str(key): value for key, value in layer.items()}
    for name, value in change.items():
        key, old = str(name), merged.get(str(name))
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
