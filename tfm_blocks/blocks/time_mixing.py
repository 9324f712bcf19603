"""The time mixing of RWKV-7, a delta rule with separate keys for removing and for writing, and its token shift."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.decay import by_chunks
from tfm_blocks.blocks.layers.dot_product import merge_heads, to_heads
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, SlidingKernel, State, continue_from, wide_zeros
from tfm_blocks.registry.blocks import block

FASTEST = math.exp(-0.5)  # a position keeps at least the fraction exp(-FASTEST) of the memory
LONGEST = 128  # positions of a chunk: float32 has no inverse of exp(-FASTEST) to the power of 147
POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}  # initially μ = 1 - u^power, u from 0 to 1
CONSTANTS = {"rate_bias": -0.19, "removed": 0.71, "damped": 1.02, "bonus": -0.04, "gain": 1.0, "bias": 0.0}


@block(
    "rwkv7",
    "x: B T D, v?: B T E -> B T D",
    branch=True,
    sees={"x": "past", "v": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "D % heads == 0": "the width must split evenly into heads",
        "E % heads == 0": "the width of v must split evenly into heads",
        "rank >= 1": "decays and rates are products of two maps",
        "gate_rank >= 1": "the gate is a product of two maps",
        "eps > 0": "a variance may be 0",
    },
    source="Peng et al. 2025 (RWKV-7), section 4; initial μ, biases and factors as in the authors' code",
)
class RWKV7(Recurrence):
    """S_t = diag(w_t) S_{t-1} - (a_t ⊙ κ_t)^T κ_t S_{t-1} + k_t^T v_t, y_t = r_t S_t in each head: x_BTD -> x_BTD.

    The memory S decays by w in each channel of the key. Then a fraction a of its value for the key κ is removed, and v
    is written for the key k. r, w, k, v, a and g each read their own mixture of two positions, z = x_t + μ ⊙ (x_{t-1} -
    x_t), with x_0 = 0. r, k and v are linear maps of z. w = exp(-exp(-1/2) σ(tanh(z A) B + b)) and a = σ(z A B + b)
    have the rank `rank`, by default 2.5 √D, and the gate g = σ(z A) B has the rank `gate_rank`, by default 5 √D, both
    rounded to multiples of 32. κ is k ⊙ ξ, scaled to length 1. Then k is multiplied by 1 + (a - 1) ⊙ η. The output is
    (g ⊙ (norm(y) + (r · (ρ ⊙ k)) v)) W_o, with a layer norm of each head. If the port v reads a node, v is its output.
    In RWKV-7, later layers mix v with the v of the first layer in this way: `interpolate`. Training computes chunks of
    32 positions in parallel: linear cost in the length. Decoding carries S and the last x.

    Also known as: Goose, time mixing; generalised delta rule, DPLR.
    Use: long sequences at linear cost; state tracking.
    """

    weight_roles: ClassVar = {"mix": "gain", "bonus": "gain"}

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        rank: int | None = None,
        gate_rank: int | None = None,
        eps: float = 64e-5,
    ) -> None:
        super().__init__()
        self.read_width = E
        self.mixed = [name for name in POWERS if name != "v" or E is None]
        E = E or D
        rank, gate_rank = (
            max(32, 32 * round(factor * math.sqrt(D) / 32)) if chosen is None else chosen
            for factor, chosen in ((2.5, rank), (5, gate_rank))
        )
        self.heads = heads
        self.eps = eps
        self.mix = nn.Parameter(torch.empty(len(self.mixed), D))
        self.query = Linear(D, D, bias=False, heads=(heads,))
        self.key = Linear(D, D, bias=False, heads=(heads,))
        if self.read_width is None:
            self.value = Linear(D, D, bias=False, depth_scaled=(0,), heads=(heads,))
        self.fade_inner, self.fade_outer = Linear(D, rank, bias=False), Linear(rank, D, bias=False)
        self.fade_bias = nn.Parameter(torch.empty(D))
        self.rate_inner, self.rate_outer = Linear(D, rank, bias=False), Linear(rank, D, bias=False)
        self.rate_bias = nn.Parameter(torch.empty(D))
        self.gate_inner, self.gate_outer = Linear(D, gate_rank, bias=False), Linear(gate_rank, E, bias=False)
        self.removed = nn.Parameter(torch.empty(D))
        self.damped = nn.Parameter(torch.empty(D))
        self.bonus = nn.Parameter(torch.empty(D))
        self.gain = nn.Parameter(torch.empty(E))
        self.bias = nn.Parameter(torch.empty(E))
        self.out = Linear(E, D, bias=False, depth_scaled=(0,))
        self.multiplier = 1.0

    def match_base(self, base: RWKV7) -> None:
        """Divide r · (ρ ⊙ k) by the width of a head relative to the base, because no norm follows this sum."""
        own, other = (layer.out.out_features // layer.heads for layer in (self, base))
        self.multiplier = other / own

    def initialise(self, name: str, generator: Generator) -> None:
        """Fill as in the first layer of the authors' model, with values drawn where theirs are evenly spaced.

        The linear maps are initialised as elsewhere; the authors begin with zeros in the output map and in half of the
        low-rank maps.
        """
        match name:
            case "mix":
                nn.init.uniform_(self.mix, generator=generator)
                self.mix.copy_(1 - self.mix ** self.mix.new_tensor([POWERS[name] for name in self.mixed])[:, None])
            case "fade_bias":
                nn.init.uniform_(self.fade_bias, -5.5, 0.5, generator=generator)
            case _:
                nn.init.constant_(self.get_parameter(name), CONSTANTS[name])

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        E, D = self.out.in_features, self.out.out_features
        return {
            "past_R1D": like.new_zeros(rows, 1, D),
            "memory_RHKV": wide_zeros(like, rows, self.heads, D // self.heads, E // self.heads),
        }

    def forward(
        self, x_BTD: Tensor, v_BTE: Tensor | None = None, *, keep_BT: Tensor, right_padded_T: bool = True
    ) -> Tensor:
        return super().forward(side_by_side(x_BTD, v_BTE), keep_BT=keep_BT, right_padded_T=right_padded_T)

    def step(self, x_RND: Tensor, state: State, v_BTE: Tensor | None = None) -> tuple[Tensor, State]:
        return super().step(side_by_side(x_RND, v_BTE), state)

    prefill = step

    def read(self, x_BTX: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        """Read X = D + E elements of x and v, or D of x."""
        x_BTD, v_BTE = x_BTX.tensor_split((self.out.out_features,), 2)
        x_BND, past_B1D = continue_from(memory["past_R1D"], x_BTD)
        wide, change_BTD = memory["memory_RHKV"].dtype, x_BND[:, :-1] - x_BTD
        mix_MD = self.mix.to(x_BTD.dtype)
        z = {name: x_BTD + mix_MD[place] * change_BTD for place, name in enumerate(self.mixed)}
        r_BTD, k_BTD = self.query(z["r"]).to(wide), self.key(z["k"]).to(wide)
        v_BTE = (v_BTE if self.read_width else self.value(z["v"])).to(wide)
        fade_BTD = self.fade_outer(torch.tanh(self.fade_inner(z["w"]))).to(wide) + self.fade_bias.to(wide)
        log_rate_BTD = -FASTEST * torch.sigmoid(fade_BTD)
        rate_BTD = torch.sigmoid(self.rate_outer(self.rate_inner(z["a"])).to(wide) + self.rate_bias.to(wide))
        gate_BTE = self.gate_outer(torch.sigmoid(self.gate_inner(z["g"]))).to(wide)
        removed_BTD = k_BTD * self.removed.to(wide)
        k_BTD = k_BTD * (1 + (rate_BTD - 1) * self.damped.to(wide))
        parts = (r_BTD, k_BTD, v_BTE, removed_BTD, rate_BTD, log_rate_BTD)
        r_BHTK, k_BHTK, v_BHTV, removed_BHTK, rate_BHTK, log_rate_BHTK = (
            to_heads(part_BTX, self.heads) for part_BTX in parts
        )
        removed_BHTK = F.normalize(removed_BHTK, dim=3)
        keys = k_BHTK, v_BHTV, removed_BHTK, removed_BHTK * rate_BHTK
        y_BHTV, after_BHKV = by_chunks(generalised_delta_rule, memory["memory_RHKV"], r_BHTK, *keys, log_rate_BHTK)
        y_BTE = merge_heads(F.layer_norm(y_BHTV, y_BHTV.shape[3:], eps=self.eps)) * self.gain.to(wide)
        bonus_BHT1 = (r_BHTK * k_BHTK * self.bonus.to(wide).view(self.heads, 1, -1)).sum(3, keepdim=True)
        bonus_BHT1 = bonus_BHT1 * self.multiplier
        y_BTE = gate_BTE * (y_BTE + self.bias.to(wide) + merge_heads(bonus_BHT1 * v_BHTV))
        return self.out(y_BTE.to(x_BTD.dtype)), {"past_R1D": past_B1D, "memory_RHKV": after_BHKV}


def side_by_side(x_BTD: Tensor, v_BTE: Tensor | None) -> Tensor:
    """Return x and v along the width: x_BT(D+E), or x alone."""
    return x_BTD if v_BTE is None else torch.cat((x_BTD, v_BTE), 2)


def generalised_delta_rule(
    memory_BHKV: Tensor,
    q_BHCK: Tensor,
    k_BHCK: Tensor,
    v_BHCV: Tensor,
    sought_BHCK: Tensor,
    removed_BHCK: Tensor,
    log_rate_BHCK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute one chunk of S_t = diag(α_t) S_{t-1} - removed_t^T sought_t S_{t-1} + k_t^T v_t, y_t = q_t S_t.

    Return y and the last memory. α = exp(`log_rate`). Memories are computed divided by p_t = α_1 ⊙ … ⊙ α_t, so that
    the products over channels are products of matrices. 1 / p_t must be a float32, which limits the chunk. Each value
    sought_t S_{t-1} depends on earlier ones, which gives a triangular system.
    """
    if torch.compiler.is_exporting() and q_BHCK.shape[2] > LONGEST:  # torch.export reads all positions as one chunk
        raise ValueError(f"rwkv7: torch.export traces at most {LONGEST} positions, but got {q_BHCK.shape[2]}")
    passed_BHCK = log_rate_BHCK.cumsum(2)
    grown_BHCK = (-passed_BHCK).exp()
    k_BHCK, removed_BHCK, q_BHCK = k_BHCK * grown_BHCK, removed_BHCK * grown_BHCK, q_BHCK * passed_BHCK.exp()
    sought_BHCK = sought_BHCK * (passed_BHCK - log_rate_BHCK).exp()
    known_BHCV = sought_BHCK @ memory_BHKV + (sought_BHCK @ k_BHCK.mT).tril(-1) @ v_BHCV
    known_BHCV = torch.linalg.solve_triangular(
        sought_BHCK @ removed_BHCK.mT, known_BHCV, upper=False, unitriangular=True
    )
    y_BHCV = q_BHCK @ memory_BHKV + (q_BHCK @ k_BHCK.mT).tril() @ v_BHCV
    y_BHCV = y_BHCV - (q_BHCK @ removed_BHCK.mT).tril() @ known_BHCV
    after_BHKV = memory_BHKV + k_BHCK.mT @ v_BHCV - removed_BHCK.mT @ known_BHCV
    return y_BHCV, passed_BHCK[:, :, -1:].mT.exp() * after_BHKV


@block(
    "learned_shift",
    "x: B T D -> B T D",
    sees={"x": "past"},
    source="Peng et al. 2023 (RWKV), section 3.1, token shift, with a learned factor for each channel",
)
class LearnedShift(SlidingKernel):
    """x_t + μ ⊙ (x_{t-1} - x_t), with x_0 = 0 and a learned μ for each channel: x_BTD -> x_BTD.

    μ is initially uniform between 0 and 1. Decoding carries the last x.

    Also known as: token shift, lerp of two positions.
    Use: before the feed-forward network, as in the channel mixing of RWKV.
    """

    weight_roles: ClassVar = {"mix": "gain"}
    before = 1

    def __init__(self, D: int) -> None:
        super().__init__()
        self.channels = D
        self.mix = nn.Parameter(torch.empty(D))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.uniform_(self.mix, generator=generator)

    def slide(self, x_BLD: Tensor) -> Tensor:
        return x_BLD[:, 1:] + self.mix.to(x_BLD.dtype) * (x_BLD[:, :-1] - x_BLD[:, 1:])
