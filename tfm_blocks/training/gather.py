"""Gather a value from every rank as JSON; torch's `all_gather_object` would unpickle it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_gather, get_world_size

from tfm_blocks.devices import group_device


def gather_json(value: Any) -> list[Any]:
    """Return the JSON value of each rank, by rank. All ranks must call it."""
    device = group_device()
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [int(size) for size in _gather(torch.tensor([len(text)], device=device))]
    texts = _gather(torch.nn.functional.pad(text, (0, max(sizes) - len(text))))
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes, strict=True)]


def _gather(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size())]
    all_gather(gathered, tensor)
    return gathered
