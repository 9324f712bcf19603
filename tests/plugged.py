"""Blocks of another package, for tests. They are removed from the registry; tests that need them use the fixture `plugged`."""

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import REGISTRY, block

_before = dict(REGISTRY.blocks)


@block("shift", "x: B T D -> B T D", branch=True, sees={"x": "past"}, source="a test")
class Shift(nn.Module):
    """x_t + share · x_(t-1). It has no `prefill`, and its state moves with the hypotheses."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(D))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.normal_(self.share, generator=generator)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        kept_BTD = x_BTD.masked_fill(~keep_BT[:, :, None], 0)
        return x_BTD + self.share * nn.functional.pad(kept_BTD, (0, 0, 1, 0))[:, :-1]

    def start(self, *, room: CacheShape) -> State:
        return State(moving={"x_R1D": room.like.new_zeros(room.rows, 1, len(self.share))})

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        y_R1D = x_R1D + self.share * state.moving["x_R1D"]
        state.moving["x_R1D"] = x_R1D
        return y_R1D, state


@block("tally", "x: B T D, ys[]: B T D -> B T D", branch=True, sees={"x": "past", "ys": "past"}, source="a test")
class Tally(nn.Module):
    """The sum over all inputs and all positions so far. It has no `prefill`."""

    def forward(self, x_BTD: Tensor, ys_BTD: list[Tensor], *, keep_BT: Tensor) -> Tensor:
        return sum(ys_BTD, start=x_BTD).masked_fill(~keep_BT[:, :, None], 0).cumsum(1)

    def start(self, *, room: CacheShape) -> State:
        return State(moving={"sum_R1D": room.like.new_zeros(room.rows, 1, 1)})

    def step(self, x_R1D: Tensor, state: State, ys_BTD: list[Tensor]) -> tuple[Tensor, State]:
        state.moving["sum_R1D"] = state.moving["sum_R1D"] + sum(ys_BTD, start=x_R1D)
        return state.moving["sum_R1D"], state


@block("tally_all", "xs[]: B T D -> B T D", sees={"xs": "past"}, source="a test")
class TallyAll(Tally):
    """The sum over all inputs, the first among them, and all positions so far."""

    def forward(self, xs_BTD: list[Tensor], *, keep_BT: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(xs_BTD[0], xs_BTD[1:], keep_BT=keep_BT)

    def step(self, xs_R1D: list[Tensor], state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        return super().step(xs_R1D[0], state, xs_R1D[1:])


@block("pool", "x: B T D, kv: B S E -> B T D", branch=True, sees={"kv": "all"}, source="a test")
class Pool(nn.Module):
    """Adds a map of the mean of kv to each position of x, and has no state."""

    def __init__(self, D: int, E: int) -> None:
        super().__init__()
        self.map = Linear(E, D)

    def forward(self, x_BTD: Tensor, kv_BSE: Tensor, *, keep_BS: Tensor) -> Tensor:
        kept_BSE = kv_BSE.masked_fill(~keep_BS[:, :, None], 0)
        return x_BTD + self.map(kept_BSE.sum(1, keepdim=True) / keep_BS.sum(1)[:, None, None])


@block("blend", "x: B T D, a?: B T D, b?: B T D -> B T D", branch=True, source="a test")
class Blend(nn.Module):
    """x + 2 a + 3 b, of what is given."""

    def forward(self, x_BTD: Tensor, a_BTD: Tensor | None = None, b_BTD: Tensor | None = None) -> Tensor:
        out_BTD = x_BTD
        for factor, other_BTD in ((2, a_BTD), (3, b_BTD)):
            out_BTD = out_BTD if other_BTD is None else out_BTD + factor * other_BTD
        return out_BTD


@block("counted", "x: B T D -> B T D, loss", branch=True, source="a test")
class Counted(nn.Module):
    """x times rising numbers that are saved, with numbers that are not, and the mean square as its loss."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.register_buffer("rising", torch.arange(D))
        self.register_buffer("scale", torch.linspace(1, 2, D), persistent=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        y_BTD = x_BTD * (1 + self.rising) * self.scale
        return y_BTD, y_BTD.square().mean()


PLUGGED = {name: info for name, info in REGISTRY.blocks.items() if name not in _before}
for _name in PLUGGED:
    del REGISTRY.blocks[_name]
