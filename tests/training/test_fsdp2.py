"""Which modules FSDP shards and gathers together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import tfm_blocks as tfm
from tfm_blocks.network.graph import Network
from tfm_blocks.training.fsdp2 import full_tensors, shard

KNOBS = {"layers": 3, "d_model": 16, "d_ff": 24, "heads": 2, "vocab": 40, "dropout": 0.0}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Start a process group of one rank, in which FSDP uses the same collectives as with several."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def loss(network: Network) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids_BN = torch.randint(4, 40, (6, 9), generator=generator)
    inputs = {one.name: ids_BN[:, :7] for one in network.spec.inputs}
    return network.head(network.trunk_with_losses(inputs)[0]).square().mean()


def gradients(network: Network, recomputes: bool) -> dict[str, Tensor]:
    network.recomputes = recomputes
    value = loss(network)
    value.backward()
    grads = {name: one.grad for name, one in network.named_parameters() if one.grad is not None}
    return {"loss": value.detach(), **full_tensors(grads)}


MODELS = {
    "tiny": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "prenorm": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "decoder_only": [f"decoder.{layer}" for layer in range(3)],
    "universal": ["encoder.0", "decoder.0"],
    "rezero": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "transparent": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_each_layer_of_a_stack_is_a_unit_of_fsdp_and_gradients_are_the_same(
    mesh: DeviceMesh, name: str, recomputes: bool
) -> None:
    expected = gradients(tfm.build(name, **KNOBS), False)
    network = tfm.build(name, **KNOBS)
    shard(network, mesh)
    units = [address for address, one in network.named_modules() if isinstance(one, FSDPModule)]
    assert sorted(units) == sorted(["", *MODELS[name]])
    assert all(isinstance(parameter, DTensor) for parameter in network.parameters())
    for _ in range(2):
        network.zero_grad()
        grads = gradients(network, recomputes)
        assert grads.keys() == expected.keys()
        for address, tensor in expected.items():
            torch.testing.assert_close(grads[address], tensor, rtol=0, atol=1e-6)
    layers = {address: one for address, one in network.named_parameters() if address.startswith(tuple(MODELS[name]))}
    assert layers and all(isinstance(parameter, DTensor) for parameter in layers.values()), "resharded after a step"
