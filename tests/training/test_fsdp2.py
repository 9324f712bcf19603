"""Which modules FSDP shards and gathers together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import tfm_blocks as tfm
from tests.network.small import network as small_network
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import saved_weights, weights_of
from tfm_blocks.training.fsdp2 import FSDP2Strategy, _shard_state, full_tensors, shard
from tfm_blocks.training.loss import smoothed_loss

KNOBS = {"layers": 3, "d_model": 16, "d_ff": 24, "heads": 2, "vocab": 40, "dropout": 0.0}


@contextmanager
def one_rank_of(world: int, backend: str, store: Any) -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=world)
    yield init_device_mesh("cpu", (world,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Start a process group of one rank, in which FSDP uses the same collectives as with several."""
    with one_rank_of(1, "gloo", HashStore()) as mesh:
        yield mesh


@pytest.fixture
def mesh_of_two() -> Iterator[DeviceMesh]:
    """Start a process group whose collectives communicate with no other rank."""
    with one_rank_of(2, "fake", FakeStore()) as mesh:
        yield mesh


def loss(network: Network) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids_BN = torch.randint(4, 40, (6, 9), generator=generator)
    inputs = {one.name: ids_BN[:, :7] for one in network.spec.inputs}
    return network.head(network.trunk_with_losses(inputs)[0]).square().mean()


def gradients(network: Network, recomputes: bool) -> dict[str, Tensor]:
    network.recomputes = recomputes
    held = dict(network.named_parameters())  # as an optimizer does, from before the step
    value = loss(network)
    value.backward()
    grads = {name: one.grad for name, one in held.items() if one.grad is not None}
    return {"loss": value.detach(), **full_tensors(grads)}


MODELS = {
    "tiny": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "prenorm": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "decoder_only": [f"decoder.{layer}" for layer in range(3)],
    "universal": ["encoder.0", "decoder.0"],
    "rezero": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "transparent": [f"{side}.{layer}" for side in ("encoder", "decoder") for layer in range(3)],
    "parallel": [f"both.{branch}.{layer}" for branch in "ab" for layer in range(2)],
    "classifier": [f"encoder.{layer}" for layer in range(3)],
}


def built(name: str) -> Network:
    """Return a model of the repository, of a classifier only the head is trained, or a parallel of two stacks."""
    if name != "parallel":
        network = tfm.build(name, **KNOBS)
        if name == "classifier":
            network.freeze(one for one, _ in network.named_parameters() if not one.startswith("logits."))
        return network
    stack = {"repeat": 2, "layer": {"ffn": {"block": "ffn", "add_norm": "pre"}}}
    graph = {
        "emb": {"block": "embedding", "in": "src", "vocab": 40},
        "both": {"parallel": {"a": stack, "b": stack}, "join": "sum"},
        "map": {"block": "linear", "d_out": 8},
    }
    return small_network({"src": "B S"}, graph)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_each_layer_of_a_stack_is_a_unit_of_fsdp_and_gradients_are_the_same(
    mesh: DeviceMesh, name: str, recomputes: bool
) -> None:
    expected = gradients(built(name), False)
    network = built(name)
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


class Exchanges(TorchDispatchMode):
    """Count the exchanges between processes within the context."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch calls the exchanges
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def test_the_number_of_exchanges_does_not_depend_on_the_number_of_positions(mesh_of_two: DeviceMesh) -> None:
    head = {"norm": {"block": "scalenorm"}, "map": {"block": "linear", "d_out": 40}}
    network = small_network({"src": "B S"}, {"emb": {"block": "embedding", "in": "src", "vocab": 40}, **head})
    shard(network, mesh_of_two)
    ids_BN = torch.randint(4, 40, (1, 6), generator=torch.Generator().manual_seed(1))
    counts = []
    for chunk in (2, 6):
        with Exchanges() as exchanges:
            x_ND = network.trunk_with_losses({"src": ids_BN})[0][0]
            sums = smoothed_loss(network.head, network.head_parameters(), x_ND, ids_BN[0], smoothing=0.0, chunk=chunk)
            sums.total.backward()
        counts.append(exchanges.count)
    assert counts[0] == counts[1]


def test_a_checkpoint_of_adapters_loads_without_the_weights_of_their_base(mesh: DeviceMesh) -> None:
    adapt = "model.adapt.a={where: {role: matrix}, rank: 2, alpha: 4}"
    composed = compose_model("tiny", [*(f"{knob}={value}" for knob, value in KNOBS.items()), adapt])
    network = build_network(check_model(composed.model, composed.sources), seed=1)
    base = {name: weight.clone() for name, weight in weights_of(network).items()}
    saved = {name: weight + 1 for name, weight in saved_weights(network).items()}
    shard(network, mesh)
    strategy = FSDP2Strategy(1)
    strategy._lightning_module = SimpleNamespace(network=network)  # type: ignore[assignment]
    strategy.load_model_state_dict({"state_dict": {f"network.{name}": weight for name, weight in saved.items()}})
    loaded = full_tensors(weights_of(network))
    assert saved and loaded.keys() == base.keys()
    assert all(torch.equal(weight, saved.get(name, base[name])) for name, weight in loaded.items())


def test_a_restored_state_of_an_optimizer_may_contain_a_value_that_is_not_a_tensor() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    state = {0: {"step": 7, "mean": torch.ones(3, 2)}}
    assert _shard_state(torch.optim.SGD([weight]), state) == state
