"""A plug-in whose blocks each break one rule of the contract. Tests copy it into a folder, and train with it."""

from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block

Mask = Literal["causal"] | None


class Mean(nn.Module):
    """The mean of the kept positions up to the present, stepped as it is read: right, and the parent of wrong blocks."""

    def __init__(self, D: int, *, mask: Mask = None) -> None:
        super().__init__()
        self.width = D
        self.causal = mask == "causal"

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        keep_BT1 = keep_BT[:, :, None].to(x_BTD.dtype)
        sums_BTD, counts_BT1 = (x_BTD * keep_BT1).cumsum(1), keep_BT1.cumsum(1).clamp(min=1)
        return sums_BTD / counts_BT1 if self.causal else (sums_BTD[:, -1:] / counts_BT1[:, -1:]).expand_as(x_BTD)

    def start(self, *, room: CacheShape) -> State:
        return State(moving={"sum_BD": room.like.new_zeros(room.rows, self.width)})

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        state.moving["sum_BD"] = state.moving["sum_BD"] + x_R1D[:, 0]
        return state.moving["sum_BD"][:, None] / (state.position + 1), state


@block("right", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class Right(Mean):
    """Breaks no rule."""


@block("leaks", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class Leaks(Mean):
    """Its forward reads later positions, whatever the mask."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        kept_BTD = x_BTD * keep_BT[:, :, None]
        return (kept_BTD.sum(1, keepdim=True) / keep_BT.sum(1)[:, None, None].clamp(min=1)).expand_as(x_BTD)


@block("leaks_later", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class LeaksLater(Leaks):
    """It leaks as soon as its gain, which starts at 0, has learned."""

    def __init__(self, D: int, *, mask: Mask = None) -> None:
        super().__init__(D, mask=mask)
        self.gain = nn.Parameter(torch.empty(()))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.zeros_(self.gain)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        return x_BTD + self.gain * super().forward(x_BTD, keep_BT=keep_BT)

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        y_R1D, state = super().step(x_R1D, state)
        return x_R1D + self.gain * y_R1D, state


@block("forgets_sees", "x: B T D -> B T D", branch=True, source="a test")
class ForgetsSees(nn.Module):
    """It reads the position before, and declares nothing."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + nn.functional.pad(x_BTD, (0, 0, 1, 0))[:, :-1]


@block("ignores_padding", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class IgnoresPadding(Mean):
    """Without a mask, its mean has the padding."""

    def forward(self, x_BTD: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, keep_BT=torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device))


@block("ignores_padding_of_kv", "x: B T D, kv: B S E -> B T D", branch=True, sees={"kv": "all"}, source="a test")
class IgnoresPaddingOfKv(nn.Module):
    """Adds the mean of kv, with its padding."""

    def __init__(self, D: int, E: int) -> None:
        super().__init__()
        self.map = nn.Linear(E, D)

    def forward(self, x_BTD: Tensor, kv_BSE: Tensor) -> Tensor:
        return x_BTD + self.map(kv_BSE.mean(1, keepdim=True))


@block("steps_otherwise", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class StepsOtherwise(Mean):
    """It divides by the number of tokens before the present one."""

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        y_R1D, state = super().step(x_R1D, state)
        return y_R1D * (state.position + 1) / max(1, state.position), state


@block("remembers_on_itself", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class RemembersOnItself(Mean):
    """Its sum stays where it is when a search reorders hypotheses."""

    def start(self, *, room: CacheShape) -> State:
        self.sum_BD = room.like.new_zeros(room.rows, self.width)
        return State()

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        if len(self.sum_BD) != len(x_R1D):
            self.sum_BD = self.sum_BD.repeat_interleave(len(x_R1D) // len(self.sum_BD), 0)
        self.sum_BD = self.sum_BD + x_R1D[:, 0]
        return self.sum_BD[:, None] / (state.position + 1), state


@block("centres_time", "x: B N D -> B N D", category="position", source="a test")
class CentresTime(nn.Module):
    """Subtracts the mean of all positions from queries and keys."""

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        return x_BHNK - x_BHNK.mean(2, keepdim=True)

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND


@block("other_axis", "x: B T D -> B T D", category="scores", source="a test")
class OtherAxis(nn.Module):
    """Its softmax is over the queries."""

    fused = False
    sums_to_one = False
    beta = 1.0

    def transform(self, scores_BHTS: Tensor) -> Tensor:
        return scores_BHTS

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        return torch.softmax(scores_BHTS, -2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD


@block("time_norm", "x: B T D -> B T D", category="norm", source="a test")
class TimeNorm(nn.Module):
    """Normalises over the positions."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (x_BTD - x_BTD.mean(1, keepdim=True)) / (1 + x_BTD.square().mean(1, keepdim=True)).sqrt()


@block("running_maximum", "x: B T D -> B T D", category="activation", source="a test")
class RunningMaximum(nn.Module):
    """The largest number of the positions so far; of any shape."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.cummax(-2)[0]


@block("draws_in_eval", "x: B T D -> B T D", source="a test")
class DrawsInEval(nn.Module):
    """Noise that stays on."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + torch.randn_like(x_BTD)


@block("mixes_rows", "x: B T D -> B T D", source="a test")
class MixesRows(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD - x_BTD.mean(0, keepdim=True)


@block("divides_by_0", "x: B T D -> B T D", branch=True, sees={"x": "mask"}, source="a test")
class DividesBy0(Mean):
    """NaN where no position before is kept."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        keep_BT1 = keep_BT[:, :, None].to(x_BTD.dtype)
        sums_BTD, counts_BT1 = (x_BTD * keep_BT1).cumsum(1), keep_BT1.cumsum(1)
        return sums_BTD / counts_BT1 if self.causal else (sums_BTD[:, -1:] / counts_BT1[:, -1:]).expand_as(x_BTD)


@block("reads_numbers", "x: B T D -> B T D", source="a test")
class ReadsNumbers(nn.Module):
    """The output shape depends on a value, which the meta device does not have."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * 2 if x_BTD.sum().item() > 0 else x_BTD


class HasGain(nn.Module):
    """The parent of wrong blocks with a gain."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(D))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.ones_(self.gain)


@block("learns_nothing", "x: B T D -> B T D", source="a test")
class LearnsNothing(HasGain):
    """Its gain gets no gradient."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.gain.detach()


@block("cuts_its_input", "x: B T D -> B T D", source="a test")
class CutsItsInput(nn.Module):
    """It has no parameters, and its input gets no gradient."""

    def __init__(self, D: int) -> None:
        super().__init__()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return 2 * x_BTD.detach()


@block("has_weights", "x: B T D -> B T D", weightless=True, source="a test")
class HasWeights(HasGain):
    """It is declared weightless and has a gain."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.gain


@block("starts_anyhow", "x: B T D -> B T D", source="a test")
class StartsAnyhow(HasGain):
    """Its gain starts with numbers of no seed."""

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.normal_(self.gain)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.gain


@block("breaks", "x: B T D -> B T D", source="a test")
class Breaks(nn.Module):
    """An error on a device with numbers."""

    def forward(self, x_BTD: Tensor) -> Any:
        if not x_BTD.is_meta:
            raise RuntimeError("no kernel for this device")
        return x_BTD
