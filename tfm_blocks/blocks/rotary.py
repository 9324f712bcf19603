"""Rotary positions: queries and keys are turned by angles that grow with the position."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tfm_blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block

PairLayout = Literal["halves", "pairs"]
WHERE = {
    "share > 0": "some of the width turns",
    "share <= 1": "no more than the width turns",
    "base > 1": "wavelengths grow",
    "factor > 0": "positions are divided by a factor above 0",
}


@block(
    "rotary",
    "x: B N D -> B N D",
    category="position",
    where=WHERE,
    source="Su et al. 2021, section 3.2.2; Chen et al. 2023 (factor)",
)
class Rotary(nn.Module):
    """Pairs of numbers turned by the angle pos / factor · base^(-2i/R), so that q·k depends on the distance alone.

    As the `position` of an attention it acts on each head of queries and keys, of which the first R = `share` · K
    numbers turn; as a node on the width: x_BND -> x_BND. The two numbers of a pair are R / 2 apart, as in Llama, or
    with `layout: pairs` neighbours, as in the paper. A `factor` above 1 is for sequences longer than those trained on.
    """

    gain = 1.0  # of what is turned

    def __init__(
        self, D: int, *, base: float = 10000.0, share: float = 1.0, layout: PairLayout = "halves", factor: float = 1.0
    ) -> None:
        super().__init__()
        self.turned = int(D * share)
        if self.turned % 2 or not self.turned:
            raise ValueError(f"pairs of numbers turn, but share · {D} is {self.turned}: it must be even and above 0")
        self.base = base
        self.layout = layout
        self.factor = factor

    def frequencies(self, device: torch.device) -> Tensor:
        """How far each pair turns from one position to the next, in radians: frequency_I."""
        return self._unscaled(device) / self.factor

    def _unscaled(self, device: torch.device) -> Tensor:
        even_I = torch.arange(0, self.turned, 2, dtype=torch.float32, device=device)
        return 1.0 / self.base ** (even_I / self.turned)

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """x_BHNK -> x_BHNK, or any tensor whose last axes are positions and the width."""
        turning, rest = torch.split(x_BHNK, [self.turned, x_BHNK.shape[-1] - self.turned], -1)
        angles_NI = positions_N.float()[:, None] * self.frequencies(x_BHNK.device)
        cos_NI, sin_NI = ((one * self.gain).to(x_BHNK.dtype) for one in (angles_NI.cos(), angles_NI.sin()))
        if self.layout == "pairs":
            a, b = torch.unflatten(turning, -1, (-1, 2)).unbind(-1)
            turned = torch.stack((a * cos_NI - b * sin_NI, b * cos_NI + a * sin_NI), -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat((a * cos_NI - b * sin_NI, b * cos_NI + a * sin_NI), -1)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.rotate(x_BND, torch.arange(x_BND.shape[1], device=x_BND.device))

    def start(self, *, room: CacheShape) -> State:
        """Nothing to remember but the position."""
        return State()

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """The first positions."""
        return self.forward(x_BPD), state

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """The next position."""
        return self.rotate(x_R1D, torch.arange(state.position, state.position + 1, device=x_R1D.device)), state


@block(
    "yarn",
    "x: B N D -> B N D",
    category="position",
    where={
        **WHERE,
        "factor >= 1": "sequences grow by the factor",
        "trained_length >= 1": "a length in positions",
        "slow > 0": "pairs turn some part of a turn",
        "fast > slow": "a fast pair turns more often",
        "attention_factor > 0": "queries and keys are multiplied by a factor above 0",
    },
    source="Peng et al. 2023, section 3.4",
)
class Yarn(Rotary):
    """`rotary` for sequences `factor` times longer than `trained_length`: slow pairs turn slower, fast ones do not.

    Pairs that turn less than `slow` times within the trained length are slowed by the factor, those that turn more than
    `fast` times keep their pace, and those between are mixed. The first and the last pair of this range are rounded
    outwards to whole pairs unless `truncate` is false. What is turned is multiplied by `attention_factor`, which is
    0.1 ln(factor) + 1 unless given. x_BND -> x_BND.
    """

    def __init__(
        self,
        D: int,
        *,
        trained_length: int,
        factor: float = 4.0,
        base: float = 10000.0,
        share: float = 1.0,
        layout: PairLayout = "halves",
        fast: float = 32.0,
        slow: float = 1.0,
        truncate: bool = True,
        attention_factor: float | None = None,
    ) -> None:
        super().__init__(D, base=base, share=share, layout=layout, factor=factor)
        self.gain = 0.1 * math.log(factor) + 1.0 if attention_factor is None else attention_factor
        first, last = self._pair(fast, trained_length), self._pair(slow, trained_length)
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        self.first, self.last = max(first, 0), min(last, self.turned - 1)

    def _pair(self, turns: float, length: int) -> float:
        """Which pair turns so many times within the length."""
        return self.turned * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def frequencies(self, device: torch.device) -> Tensor:
        fast_I = self._unscaled(device)
        index_I = torch.arange(len(fast_I), dtype=torch.float32, device=device)
        width = self.last - self.first or 0.001
        slowed_I = ((index_I - self.first) / width).clamp(0, 1)
        return fast_I / self.factor * slowed_I + fast_I * (1 - slowed_I)


@block(
    "llama3_rotary",
    "x: B N D -> B N D",
    category="position",
    where={
        **WHERE,
        "trained_length >= 1": "a length in positions",
        "slow > 0": "pairs turn some part of a turn",
        "fast > slow": "a fast pair turns more often",
    },
    source="Llama 3.1, the rotary scaling of the published code (Grattafiori et al. 2024)",
)
class Llama3Rotary(Rotary):
    """`rotary` in which pairs that turn less than `slow` times within `trained_length` are slowed by `factor`.

    Those that turn more than `fast` times keep their pace, and those between are mixed by how often they turn.
    x_BND -> x_BND.
    """

    def __init__(
        self,
        D: int,
        *,
        factor: float = 8.0,
        trained_length: int = 8192,
        base: float = 500000.0,
        share: float = 1.0,
        layout: PairLayout = "halves",
        fast: float = 4.0,
        slow: float = 1.0,
    ) -> None:
        super().__init__(D, base=base, share=share, layout=layout, factor=factor)
        self.trained_length, self.fast, self.slow = trained_length, fast, slow

    def frequencies(self, device: torch.device) -> Tensor:
        fast_I = self._unscaled(device)
        turns_I = self.trained_length * fast_I / (2 * math.pi)
        kept_I = ((turns_I - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return fast_I / self.factor * (1 - kept_I) + fast_I * kept_I


@block(
    "longrope",
    "x: B N D -> B N D",
    category="position",
    where={
        **WHERE,
        "factor >= 1": "sequences grow by the factor",
        "trained_length >= 2": "a length in positions",
        "attention_factor > 0": "queries and keys are multiplied by a factor above 0",
    },
    source="Ding et al. 2024 (LongRoPE), section 3.2; Abdin et al. 2024 (Phi-3)",
)
class LongRotary(Rotary):
    """`rotary` whose pairs are slowed each by its own factor: x_BND -> x_BND.

    `factors` has one number for each pair, or one for all. What is turned is multiplied by `attention_factor`, which is
    √(1 + ln(factor) / ln(trained_length)) unless given, for sequences `factor` times longer than `trained_length`.
    Published models have two lists: write the short one for sequences up to the trained length, else the long one.
    """

    def __init__(
        self,
        D: int,
        *,
        factors: list[float],
        trained_length: int,
        factor: float = 1.0,
        base: float = 10000.0,
        share: float = 1.0,
        layout: PairLayout = "halves",
        attention_factor: float | None = None,
    ) -> None:
        super().__init__(D, base=base, share=share, layout=layout, factor=factor)
        pairs = self.turned // 2
        if len(factors) not in (1, pairs):
            raise ValueError(f"factors must be one number or one for each of {pairs} pairs, but are {len(factors)}")
        if min(factors) <= 0:
            raise ValueError(f"factors must be above 0, but one is {min(factors)}")
        self.factors = factors
        gain = math.sqrt(1 + math.log(factor) / math.log(trained_length))
        self.gain = gain if attention_factor is None else attention_factor

    def frequencies(self, device: torch.device) -> Tensor:
        return self._unscaled(device) / torch.tensor(self.factors, dtype=torch.float32, device=device)
