"""`at`: changes to single layers of a stack, merged into the layer's graph like a child file into its parent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def read_index(key: str) -> int | None:
    """Parse the index of a layer, negative from the end; return None if `key` is not an index."""
    return int(key) if re.fullmatch(r"0|-?[1-9][0-9]{0,3}", key) else None


def merge(layer: Mapping[Any, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    """Merge mappings key by key; lists and single values are replaced, and null removes a key."""
    merged = {str(key): value for key, value in layer.items()}
    for name, value in change.items():
        key, old = str(name), merged.get(str(name))
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
