"""Position encodings that are added to embeddings, or to queries and keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.linear import Dropout, fill_normal
from tfm_blocks.blocks.layers.state import Positional, State
from tfm_blocks.blocks.mixing import DropoutBlock
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Rate


class AddedPosition(Positional, ABC):
    """Add a vector for each position, then apply dropout: x_BND -> x_BND. Positions count from 0."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    @abstractmethod
    def table(self, first: int, x_BND: Tensor) -> Tensor:
        """Return the vectors_ND of N positions from `first` on, where N is the length of `x_BND`."""

    def computed_values(self, like: Tensor) -> Tensor:
        """Return the vectors of the first positions, as many as `like` has rows; none if it is not a matrix."""
        return self.table(0, like[None]) if like.ndim == 2 else like.new_empty(0)

    def forward(self, x_BND: Tensor) -> Tensor:
        out_BND: Tensor = self.dropout(x_BND + self.table(0, x_BND))
        return out_BND

    def step(self, x_BND: Tensor, state: State) -> tuple[Tensor, State]:
        return self.dropout(x_BND + self.table(state.position, x_BND)), state


@block(
    "sinusoidal",
    "x: B N D -> B N D",
    category="position",
    source="Vaswani et al. 2017, section 3.5",
    where={"D % 2 == 0": "sines and cosines come in pairs"},
)
class Sinusoidal(AddedPosition):
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same; PE(pos + h) is a rotation of PE(pos).

    With `layout: halves` all sines come first, then all cosines, as in the paper's code. As the `position` of an
    attention it is added only to the queries and keys, over the width of all heads, without dropout.

    Also known as: sine-cosine positional encoding.
    Use: the positions of the paper: a node after the embedding, or a position of attention.
    """

    def __init__(self, D: int, *, layout: Literal["pairs", "halves"] = "pairs", dropout: Rate = 0.0) -> None:
        super().__init__(dropout)
        self.layout = layout

    def table(self, first: int, x_BND: Tensor) -> Tensor:
        N, D = x_BND.shape[1:]
        positions_N = torch.arange(first, first + N, dtype=torch.float32, device=x_BND.device)
        return self.sines(positions_N, D).to(x_BND.dtype)

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """Add the encodings of their positions to the queries or keys of all heads: x_BHNK -> x_BHNK."""
        _, H, _, K = x_BHNK.shape
        if H * K % 2:
            raise ValueError(f"sines and cosines come in pairs, but the heads have {H * K} numbers together")
        table_ND = self.sines(positions_N.float(), H * K).to(x_BHNK.dtype)
        return x_BHNK + torch.unflatten(table_ND, 1, (H, K)).transpose(0, 1)

    def sines(self, positions_N: Tensor, D: int) -> Tensor:
        """Return the encodings of positions: table_ND."""
        even_I = torch.arange(0, D, 2, dtype=torch.float32, device=positions_N.device)
        angles_NI = positions_N[:, None] * torch.exp(even_I * (-math.log(10000.0) / D))
        if self.layout == "halves":
            return torch.cat((angles_NI.sin(), angles_NI.cos()), dim=1)
        return torch.stack((angles_NI.sin(), angles_NI.cos()), dim=2).flatten(1)


@block(
    "fairseq_sinusoidal",
    "x: B N D -> B N D",
    category="position",
    source="Ott et al. 2019 (fairseq); tensor2tensor (Vaswani et al. 2018)",
    where={
        "D % 2 == 0": "sines and cosines come in pairs",
        "D >= 4": "there are a shortest and a longest wavelength",
        "offset >= 0": "positions are not below 0",
    },
)
class FairseqSinusoidal(Sinusoidal):
    """`sinusoidal` in halves with the frequencies 10000^(-i/(D/2 - 1)): x_BND -> x_BND. Positions count from `offset`.

    The last frequency is 1/10000. M2M100 and NLLB use this block, with the padding id plus 1 as `offset`.

    Use: weights of fairseq, Marian and M2M100.
    """

    def __init__(self, D: int, *, offset: int = 2, dropout: Rate = 0.0) -> None:
        super().__init__(D, layout="halves", dropout=dropout)
        self.offset = offset

    def sines(self, positions_N: Tensor, D: int) -> Tensor:
        if D < 4:
            raise ValueError(f"fairseq_sinusoidal needs at least 4 numbers, but the width is {D}")
        index_I = torch.arange(D // 2, dtype=torch.float32, device=positions_N.device)
        frequency_I = torch.exp(index_I * (-math.log(10000.0) / (D // 2 - 1)))
        angles_NI = (positions_N + self.offset)[:, None] * frequency_I
        return torch.cat((angles_NI.sin(), angles_NI.cos()), dim=1)


@block(
    "timestep",
    "x: B N D -> B N D",
    weightless=True,
    source="Dehghani et al. 2019, section 2.1, the coordinate of the time step",
    where={"D % 2 == 0": "sines and cosines come in pairs", "step >= 0": "steps are counted from 0 or 1"},
)
class Timestep(Sinusoidal):
    """x + PE(step) at every position, with PE of `sinusoidal`: x_BND -> x_BND.

    In a layer that shares its weights, `step: i+1` distinguishes its applications.
    """

    def __init__(self, D: int, *, step: int, layout: Literal["pairs", "halves"] = "pairs") -> None:
        super().__init__(D, layout=layout)
        self.index = step

    def table(self, first: int, x_BND: Tensor) -> Tensor:
        index_1 = torch.full((1,), float(self.index), device=x_BND.device)
        return self.sines(index_1, x_BND.shape[2]).to(x_BND.dtype)


@block(
    "learned_position",
    "x: B N D -> B N D",
    source="Gehring et al. 2017, section 3.1",
    where={"max_length >= 1": "the table has at least one position"},
)
class LearnedPosition(AddedPosition):
    """A learned vector for each of `max_length` positions. A longer sequence raises ValueError.

    Also known as: learned absolute positions.
    Use: BERT, GPT-2 and BART; no sequence can be longer than `max_length`.
    Example: max_length: 512
    """

    weight_roles: ClassVar = {"weight": "position"}

    def __init__(self, D: int, *, max_length: int = 1024, dropout: Rate = 0.0) -> None:
        super().__init__(dropout)
        self.max_length = max_length
        self.weight = nn.Parameter(torch.empty(max_length, D))

    initialise = fill_normal

    def table(self, first: int, x_BND: Tensor) -> Tensor:
        N, most = x_BND.shape[1], self.max_length
        if first + N > most:
            raise ValueError(f"learned_position has {most} positions, but the sequence has {first + N}")
        return self.weight[first : first + N]


@block(
    "random_position",
    "x: B N D -> B N D",
    source="Ruoss et al. 2023, section 3",
    where={
        "D % 2 == 0": "sines and cosines come in pairs",
        "max_length >= 1": "there is at least one position",
        "range >= max_length": "positions are drawn without replacement",
    },
)
class RandomPosition(Sinusoidal):
    """`sinusoidal` at N positions drawn from 0 to `range` - 1 without replacement, in ascending order: x_BND -> x_BND.

    In training each batch has its own draw, so that short sequences meet the positions of long ones. In evaluation a
    sequence has the first N of `max_length` positions of a fixed draw, so that padding and decoding step by step do
    not change them. A longer sequence raises ValueError.

    Also known as: randomised positional encodings.
    Use: sequences longer than in training.
    Example: max_length: 512
    """

    def __init__(self, D: int, *, range: int = 2048, max_length: int = 512, dropout: Rate = 0.0) -> None:
        super().__init__(D, dropout=dropout)
        self.range = range
        self.max_length = max_length

    def table(self, first: int, x_BND: Tensor) -> Tensor:
        N, most = x_BND.shape[1], self.max_length
        if first + N > most:
            raise ValueError(f"random_position has {most} positions, but the sequence has {first + N}")
        fixed = None if self.training else torch.Generator().manual_seed(0)
        drawn_N = torch.randperm(self.range, generator=fixed)[: N if self.training else most].sort().values
        positions_N = drawn_N[first : first + N].to(x_BND.device, torch.float32)
        return self.sines(positions_N, x_BND.shape[2]).to(x_BND.dtype)


@block(
    "none",
    "x: B N D -> B N D",
    category="position",
    source="Haviv et al. 2022: a causal decoder learns the order by itself",
)
class NoPosition(DropoutBlock):
    """Return x, with the dropout of position blocks: x_BND -> x_BND.

    As the `position` of an attention it leaves queries and keys unchanged, without dropout.

    Also known as: identity; NoPE.
    Use: a child file that removes the position block of its parent; attention without positions, as in Kimi Linear.
    """

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """Return x_BHNK."""
        return x_BHNK
