"""Rotary position embeddings: queries and keys are rotated by angles proportional to the position."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.dot_product import Span, rotate_adjacent, rotate_heads
from tfm_blocks.blocks.layers.state import Positional, State
from tfm_blocks.registry.blocks import block

PairLayout = Literal["halves", "pairs"]
FACTORS = (1e-6, 1e6)  # bounds of divisors of frequencies, within which no rotation overflows
WHERE = {
    "share > 0": "some of the width turns",
    "share <= 1": "no more than the width turns",
    "D * share >= 2": "at least one pair turns",
    "D * share // 1 % 2 == 0": "pairs turn, so the width that turns must be even",
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
class Rotary(Positional):
    """Rotate pairs of elements by the angle pos / factor · base^(-2i/R), so that q·k depends only on the distance.

    As the `position` of an attention it rotates the first R = `share` · K elements of each head of queries and keys. As
    a node it acts on the width: x_BND -> x_BND. The two elements of a pair are R / 2 apart, as in Llama, or adjacent
    with `layout: pairs`, as in the paper. A `factor` above 1 extends the context beyond the trained length.

    Also known as: RoPE, rotary position embedding.
    Use: the usual choice of decoders since Llama; in self-attention only.
    """

    gain = 1.0  # multiplies the rotated elements
    max_length: int | None = None

    def __init__(
        self, D: int, *, base: float = 10000.0, share: float = 1.0, layout: PairLayout = "halves", factor: float = 1.0
    ) -> None:
        super().__init__()
        self.rotated = int(D * share)
        if self.rotated % 2 or not self.rotated:
            raise ValueError(f"share · {D} is {self.rotated}: it must be even and above 0, since pairs are rotated")
        self.base = base
        self.layout = layout
        self.factor = factor

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the rotation of each pair per position, in radians: frequency_I."""
        return self._unscaled(device) / self.factor

    def _unscaled(self, device: torch.device) -> Tensor:
        even_I = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=device)
        return 1.0 / self.base ** (even_I / self.rotated)

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """Rotate x_BHNK -> x_BHNK, or any tensor whose last axes are positions and the width."""
        pairs, rest = torch.split(x_BHNK, [self.rotated, x_BHNK.shape[-1] - self.rotated], -1)
        angles_NI = positions_N.float()[:, None] * self.frequencies(x_BHNK.device)
        cos_NI, sin_NI = ((x * self.gain).to(x_BHNK.dtype) for x in (angles_NI.cos(), angles_NI.sin()))
        if self.layout == "pairs":
            rotated = rotate_adjacent(pairs, cos_NI, sin_NI)
        else:
            a, b = pairs.chunk(2, -1)
            rotated = torch.cat((a * cos_NI - b * sin_NI, b * cos_NI + a * sin_NI), -1)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated

    def forward(self, x_BND: Tensor) -> Tensor:
        return rotate_heads(self, x_BND, Span(0, x_BND.shape[1]))

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        return rotate_heads(self, x_R1D, Span(state.position, 1)), state


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
    """`rotary` for sequences `factor` times longer than `trained_length`: only low frequencies are divided by it.

    Pairs with fewer than `slow` rotations within the trained length are divided by `factor`, pairs with more than
    `fast` rotations keep their frequency, and those between are interpolated. The bounds of that range are rounded
    outwards to whole pairs unless `truncate` is false. Rotated elements are multiplied by `attention_factor`, by
    default 0.1 ln(factor) + 1. x_BND -> x_BND.

    Also known as: YaRN.
    Use: a rotary model on longer sequences than it was trained on.
    Example: trained_length: 4096
    """

    def __init__(
        self,
        D: int,
        *,
        trained_length: int,
        factor: float = 4.0,
        fast: float = 32.0,
        slow: float = 1.0,
        truncate: bool = True,
        attention_factor: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(D, factor=factor, **options)
        self.gain = 0.1 * math.log(factor) + 1.0 if attention_factor is None else attention_factor
        first, last = self._pair(fast, trained_length), self._pair(slow, trained_length)
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        self.first, self.last = max(first, 0), min(last, self.rotated - 1)

    def _pair(self, rotations: float, length: int) -> float:
        """Return the index of the pair with that number of rotations within the length."""
        return self.rotated * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(self.base))

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
    """`rotary` in which pairs with fewer than `slow` rotations within `trained_length` are divided by `factor`.

    Pairs with more than `fast` rotations keep their frequency; those between are interpolated by their rotations.
    x_BND -> x_BND.

    Also known as: RoPE scaling of Llama 3.1.
    Use: weights of Llama 3.1 and later.
    """

    def __init__(
        self,
        D: int,
        *,
        factor: float = 8.0,
        trained_length: int = 8192,
        base: float = 500000.0,
        fast: float = 4.0,
        slow: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(D, base=base, factor=factor, **options)
        self.trained_length, self.fast, self.slow = trained_length, fast, slow

    def frequencies(self, device: torch.device) -> Tensor:
        fast_I = self._unscaled(device)
        rotations_I = self.trained_length * fast_I / (2 * math.pi)
        kept_I = ((rotations_I - self.slow) / (self.fast - self.slow)).clamp(0, 1)
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
        "max_length >= 1": "there is at least one position",
    },
    source="Ding et al. 2024 (LongRoPE), section 3.2; Abdin et al. 2024 (Phi-3)",
)
class LongRotary(Rotary):
    """`rotary` with a separate factor for each frequency: x_BND -> x_BND.

    `factors` has one divisor for each pair, or a single one for all. Rotated elements are multiplied by
    `attention_factor`, by default √(1 + ln(factor) / ln(trained_length)), for sequences `factor` times longer than
    `trained_length`. A sequence longer than `max_length` raises ValueError. Published models have two lists: the short
    one up to the trained length, which is then the `max_length`, and the long one for all lengths.

    Also known as: LongRoPE.
    Use: weights of Phi-3 with long context.
    Example: factors: [2.0], trained_length: 4096
    """

    def __init__(
        self,
        D: int,
        *,
        factors: list[float],
        trained_length: int,
        attention_factor: float | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(D, **options)
        pairs = self.rotated // 2
        if len(factors) not in (1, pairs):
            raise ValueError(f"factors must be one number or one for each of {pairs} pairs, but are {len(factors)}")
        for factor in factors:
            if not FACTORS[0] <= factor <= FACTORS[1]:
                raise ValueError(f"factors must be from {FACTORS[0]} to {FACTORS[1]}, but one is {factor}")
        self.factors, self.max_length = factors, max_length
        gain = math.sqrt(1 + math.log(self.factor) / math.log(trained_length))
        self.gain = gain if attention_factor is None else attention_factor

    def frequencies(self, device: torch.device) -> Tensor:
        return self._unscaled(device) / torch.tensor(self.factors, dtype=torch.float32, device=device)


@block(
    "xpos",
    "x: B N D -> B N D",
    category="position",
    where={**WHERE, "scale_base > 0": "a distance in positions"},
    source="Sun et al. 2022 (length-extrapolatable transformer), section 2.2",
)
class XPos(Rotary):
    """`rotary` whose pairs decay with the distance: q·k of pair i is multiplied by ζ_i^(distance / `scale_base`).

    ζ_i = (2i / R + 0.4) / 1.4, where R is the rotated width. Queries are multiplied by ζ_i^(pos / scale_base), keys are
    divided by it, so positions must stay below about 60 · scale_base in float32. As a node it acts on the width as on
    queries: x_BND -> x_BND.

    Also known as: xPos, LeX.
    Use: causal attention to sequences longer than in training.
    """

    def __init__(self, D: int, *, scale_base: float = 512.0, **options: Any) -> None:
        super().__init__(D, **options)
        self.scale_base = scale_base

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        return self._decayed(super().rotate(x_BHNK, positions_N), positions_N / self.scale_base)

    def rotate_keys(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        return self._decayed(super().rotate(x_BHNK, positions_N), -positions_N / self.scale_base)

    def _decayed(self, x_BHNK: Tensor, power_N: Tensor) -> Tensor:
        pairs, rest = torch.split(x_BHNK, [self.rotated, x_BHNK.shape[-1] - self.rotated], -1)
        even_I = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=x_BHNK.device)
        zeta_NI = ((even_I / self.rotated + 0.4) / 1.4) ** power_N[:, None]
        zeta_NR = zeta_NI.repeat_interleave(2, 1) if self.layout == "pairs" else zeta_NI.repeat(1, 2)
        return torch.cat((pairs * zeta_NR.to(x_BHNK.dtype), rest), -1)
