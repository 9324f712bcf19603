"""Blocks of plug-ins in the ejected file: it computes the same as the block, or the block is refused."""

import functools
import math

import pytest
import torch
from torch import Tensor, nn

from tests.exchange.test_eject import loaded_in_process, small
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.errors import ConfigError
from tfm_blocks.network import incremental
from tfm_blocks.network.build import build_network
from tfm_blocks.registry.blocks import block


class Plain(nn.Module):
    """A block whose class sets no attribute."""

    most = 16
    factor = 0.5


class ReturnsInKnownIf(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        if self.most is not None:
            if x_BND.shape[1] > self.most:
                return x_BND * 2
            x_BND = x_BND + 1
        return x_BND * 3


class RaisesInKnownIf(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        if self.most is not None:  # noqa: SIM102
            if x_BND.shape[1] > 100:
                raise ValueError("too long")
        return x_BND * 3


class LastOperand(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        factor = x_BND.shape[1] > 16 and self.factor
        return x_BND * (1 + factor)


class AsksForAttributes(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        y_BND = self.scale * x_BND if hasattr(self, "scale") else x_BND
        return getattr(self, "factor", 1.0) * y_BND + getattr(self, "missing", 2.0)


class InPlace(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        y_BND = x_BND * 2
        _ = y_BND.add_(1)
        return y_BND


def doubled(function):
    @functools.wraps(function)
    def inner(self, x_BND):
        return 2 * function(self, x_BND)

    return inner


class Decorated(Plain):
    @doubled
    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND + 1


class OwnLayers(nn.Module):
    """Layers of torch without parameters."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.map, self.act, self.drop = Linear(D, D), nn.GELU(), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(D, elementwise_affine=False)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.norm(self.drop(self.act(self.map(x_BND))))


class ListsLayers(nn.Module):
    """A list of layers with weights, and one in which a layer has none."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(Linear(D, D) for _ in range(3))
        self.mixed = nn.ModuleList([Linear(D, D), nn.GELU(), Linear(D, D)])

    def forward(self, x_BND: Tensor) -> Tensor:
        for layer in self.maps[:-1]:
            x_BND = layer(x_BND)
        for layer in self.mixed:
            x_BND = layer(x_BND)
        return self.maps[-1](x_BND)


def model_of(cls, inputs="src", **options):
    """Return the spec of a small model with a block of this class."""
    axes = {"src": "B S", "tgt": "B T"}[inputs]
    cls.__doc__ = cls.__doc__ or "A block."
    block("odd", "x: B N D -> B N D" if inputs == "src" else "x: B T D -> B T D", source="a test", **options)(cls)
    graph = {"emb": {"block": "embedding", "in": inputs}, "odd": {"block": "odd"}, "logits": {"block": "unembed"}}
    return small({inputs: axes}, graph)


@pytest.mark.parametrize(
    "cls",
    [ReturnsInKnownIf, RaisesInKnownIf, LastOperand, AsksForAttributes, InPlace, Decorated, OwnLayers, ListsLayers],
    ids=lambda cls: cls.__name__,
)
def test_the_file_computes_the_same_as_the_block(registry, cls):
    network = build_network(model_of(cls), seed=1).eval()
    ejected = loaded_in_process(network.spec, network)
    for length in (3, 20):
        src_BS = torch.randint(1, 11, (2, length))
        torch.testing.assert_close(ejected(src=src_BS), network(src=src_BS), rtol=1e-4, atol=1e-5)


class HasBuffer(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.register_buffer("scale_D", torch.ones(D))

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND * self.scale_D


class HasChildWithBuffer(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.child, self.map = HasBuffer(D), Linear(D, D)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.map(self.child(x_BND))


class ReturnsInLoop(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        for factor in (2, 3):
            x_BND = x_BND * factor
            if x_BND.shape[1] > 16:
                return x_BND
        return x_BND + 1


class ReturnsInWith(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        with torch.no_grad():
            return x_BND * 2


class LoopWithElse(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        for _ in range(2):
            x_BND = x_BND * 2
        else:
            x_BND = x_BND + 1
        return x_BND


class AppendsInIf(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        terms = [x_BND]
        if x_BND.shape[1] > 16:
            terms.append(x_BND.square())
        return torch.stack(terms).sum(0)


class RoundsUp(Plain):
    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND * math.ceil(x_BND.shape[1] / 4)


class NormsTwoAxes(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((2, D // 2))

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.norm(x_BND.unflatten(2, (2, -1))).flatten(2)


REFUSED = {
    NormsTwoAxes: "a norm over several axes",
    HasBuffer: "buffers",
    HasChildWithBuffer: "buffers",
    ReturnsInLoop: "a return or raise under an unknown condition within `for`",
    ReturnsInWith: "a return or raise within `with`",
    LoopWithElse: "the `else` of a loop",
    AppendsInIf: "changes a list, a dict or an attribute under an unknown condition",
    RoundsUp: "a call of math.ceil",
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_block_that_the_file_would_compute_otherwise_is_refused(registry, cls):
    network = build_network(model_of(cls), seed=1)
    with pytest.raises(ConfigError, match=REFUSED[cls]):
        loaded_in_process(network.spec, network)


class Past(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.D = D

    def start(self, *, room: CacheShape) -> State:
        return State(moving={name: room.like.new_zeros(room.rows, 1, self.D) for name in ("last", "older")})


class Shifts(Past):
    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        padded_BTD = nn.functional.pad(x_BTD, (0, 0, 2, 0))
        return x_BTD + 10 * padded_BTD[:, 1:-1] + 100 * padded_BTD[:, :-2]

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        last_R1D = state.moving["last"]
        y_R1D = x_R1D + 10 * last_R1D + 100 * state.moving["older"]
        state.moving["last"], state.moving["older"] = x_R1D, last_R1D
        return y_R1D, state


class StartsWithFirst(Past):
    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        return x_BTD + x_BTD[:, :1]

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        if state.position == 0:
            state.moving["last"] = x_R1D
        return x_R1D + state.moving["last"], state


class Delays(Past):
    """Returns the entry of the state itself, which changes afterwards."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        return nn.functional.pad(x_BTD, (0, 0, 1, 0))[:, :-1]

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        last_R1D = state.moving["last"]
        return last_R1D, State(moving={"last": x_R1D, "older": last_R1D})


class ReplacesFixed(Past):
    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        return x_BTD.cumsum(1)

    def start(self, *, room: CacheShape) -> State:
        return State(fixed={"sum": room.like.new_zeros(room.rows, 1, self.D)})

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        state.fixed["sum"] = state.fixed["sum"] + x_R1D
        return state.fixed["sum"], state


@pytest.mark.parametrize("cls", [Shifts, Delays], ids=lambda cls: cls.__name__)
@torch.no_grad()
def test_steps_of_the_file_read_the_state_before_they_change_it(registry, cls):
    network = build_network(model_of(cls, "tgt", sees={"x": "past"}), seed=1).eval()
    ejected, tgt_BT = loaded_in_process(network.spec, network), torch.randint(1, 11, (2, 5))
    state, decoding = ejected.start(rows=2, length=5), incremental.start(network, {}, 5, sentences=2)
    for position, ids_B in enumerate(tgt_BT.T):
        x_BD, decoding = incremental.step(network, ids_B, decoding)
        step_BV = ejected.step(ids_B, state)
        torch.testing.assert_close(step_BV, network.head(x_BD), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step_BV, network(tgt=tgt_BT)[:, position], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "rule"),
    [
        (StartsWithFirst, "changes a list, a dict or an attribute under an unknown condition"),
        (ReplacesFixed, "a step that replaces a tensor of fixed or caches"),
    ],
)
def test_a_state_that_the_step_would_change_otherwise_is_refused(registry, cls, rule):
    network = build_network(model_of(cls, "tgt", sees={"x": "past"}), seed=1)
    with pytest.raises(ConfigError, match=rule):
        loaded_in_process(network.spec, network)


def test_a_tied_parameter_of_any_name_is_shared(registry):
    @block("table", "x: ids B N -> B N d_model", tieable="table", source="a test")
    class Table(nn.Module):
        """A table of vectors."""

        def __init__(self, *, vocab: int, d_model: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(vocab, d_model))

        def initialise(self, name: str, generator: torch.Generator) -> None:
            nn.init.normal_(self.table, generator=generator)

        def forward(self, x_BN: Tensor) -> Tensor:
            return nn.functional.embedding(x_BN, self.table)

    graph = {"emb": {"block": "table", "in": "src"}, "logits": {"block": "unembed", "tie": "emb"}}
    network = build_network(small({"src": "B S"}, graph), seed=1).eval()
    ejected, src_BS = loaded_in_process(network.spec, network), torch.randint(1, 11, (2, 5))
    torch.testing.assert_close(ejected(src=src_BS), network(src=src_BS))
    assert ejected.logits.block.weight is ejected.emb.block.table
