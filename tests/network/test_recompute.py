from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tfm_blocks as tfm

MODELS = sorted(str(path) for path in (Path(__file__).parents[1] / "models").glob("*.yaml"))
KNOBS = {"layers": 3, "d_model": 16, "d_ff": 24, "heads": 2, "vocab": 40, "dropout": 0.3}


@contextmanager
def counting(kept: list[int]) -> Iterator[None]:
    """Sum the bytes that are kept for the backward pass."""

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def gradients(recomputes: bool) -> tuple[list[Tensor], int]:
    network = tfm.build("prenorm", **KNOBS).train()
    network.recomputes = recomputes
    torch.manual_seed(5)
    ids_BN = torch.randint(4, 40, (6, 9))
    kept: list[int] = []
    with counting(kept):
        x_BTD = network.trunk(src=ids_BN, tgt=ids_BN[:, :7])
    network.head(x_BTD).square().mean().backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None], sum(kept)


def test_gradients_are_the_same_with_dropout_and_less_is_kept() -> None:
    plain, much = gradients(False)
    again, little = gradients(True)
    assert len(plain) == len(again)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert little < much / 3


@pytest.mark.parametrize("name", ["tiny", "base", "decoder_only", "restricted"])
def test_every_layer_of_the_outermost_stacks_is_one(name: str) -> None:
    network = tfm.build(name, **(KNOBS | ({"layers": 2})))
    layers = network.stack_layers
    assert [call.address for layer in layers for call in layer.calls] == [call.address for call in network.calls]
    stacks = {call.node.stack for call in network.calls if call.node.stack}
    assert sum(layer.is_layer for layer in layers) == 2 * len(stacks)
