"""The selective state spaces of Mamba-2 and Mamba-3."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.decay import by_chunks, decayed_sum, fill_log_rates, fill_step_biases
from tfm_blocks.blocks.layers.dot_product import merge_heads, repeat_kv, rotate_adjacent, to_heads
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, continue_from, convolve_channels, wide_zeros
from tfm_blocks.registry.blocks import block

GateNorm = Literal["after", "before", "none"]


def fill_selective(selective: nn.Module, name: str, generator: Generator) -> None:
    """Initialise the convolution, the steps and the factors of Mamba and Mamba-2 as their authors do, with biases 0."""
    weight = selective.get_parameter(name)
    match name:
        case "near":
            bound = weight.shape[2] ** -0.5
            nn.init.uniform_(weight, -bound, bound, generator=generator)
        case "near_bias":
            nn.init.zeros_(weight)
        case "step_bias":
            fill_step_biases(weight, generator)
        case _:
            nn.init.ones_(weight)


HEADS = {
    "heads >= 1": "there is at least one head",
    "d_inner >= 1": "there is at least one channel",
    "d_inner % heads == 0": "the inner width must split evenly into heads",
    "groups >= 1": "the heads belong to at least one group",
    "heads % groups == 0": "the heads must split evenly into groups",
    "d_state >= 1": "the memory has at least one row",
}


@block(
    "mamba2",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        **HEADS,
        "kernel_size >= 1": "a position sees at least itself",
        "step_min >= 0": "a step is a length of time",
        "step_max > step_min": "steps are between the two",
        "eps > 0": "a mean of squares may be 0",
    },
    source="Dao and Gu 2024 (Mamba-2), sections 6 and 7",
)
class Mamba2(Recurrence):
    """S_t = exp(-exp(a) Δ_t) S_{t-1} + Δ_t B_t^T v_t, y_t = C_t S_t + d v_t in each head: x_BTD -> x_BTD.

    v has `d_inner` channels in `heads` heads. B and C have `d_state` channels, which the heads of each of the `groups`
    share. All three are linear maps of x, followed by a causal depthwise convolution of `kernel_size` positions and
    silu. The step Δ = softplus(x W_Δ + b), between `step_min` and `step_max`, a and d belong to each head. The output
    is rmsnorm(y ⊙ silu(x W_z)) W_o, with a norm over each group. `gate_norm: before` normalises before the gate,
    (rmsnorm(y) ⊙ silu(x W_z)) W_o, and `none` does not normalise. Training computes chunks of 32 positions in parallel
    (state space duality): linear cost in the length. Decoding carries S and the inputs of the last `kernel_size` - 1
    positions of the convolution.

    Also known as: state space duality, SSD; selective state space model, SSM.
    Use: long sequences at linear cost, alone or beside attention, as in Bamba, Nemotron-H and Zamba2; with `gate_norm:
    none`, as in Falcon-H1.
    Example: d_inner: 2*d_model, d_state: 16
    """

    weight_roles: ClassVar = {"near": "convolution"}

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        d_inner: int,
        d_state: int = 128,
        groups: int = 1,
        kernel_size: int = 4,
        bias: bool = False,
        step_min: float = 0.0,
        step_max: float = 1e9,
        gate_norm: GateNorm = "after",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.widths = [d_inner, groups * d_state, groups * d_state]  # of v, B and C
        self.parts = [d_inner, sum(self.widths), heads]  # of the gate, what is convolved, and the steps
        self.steps = (step_min, step_max)
        self.gate_norm = gate_norm
        self.eps = eps
        self.maps = Linear(D, sum(self.parts), parts=(d_inner, *self.widths, heads), bias=bias)
        self.near = nn.Parameter(torch.empty(sum(self.widths), 1, kernel_size))
        self.near_bias = nn.Parameter(torch.empty(sum(self.widths)))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.fade = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.gain = None if gate_norm == "none" else nn.Parameter(torch.empty(d_inner))
        self.out = Linear(d_inner, D, bias=bias, depth_scaled=(0,))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "fade":
            fill_log_rates(self.fade, generator)
        else:
            fill_selective(self, name, generator)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        d_inner, d_state = self.widths[0], self.widths[1] // self.groups
        return {
            "past_RNC": like.new_zeros(rows, self.near.shape[2] - 1, len(self.near)),
            "memory_RHKV": wide_zeros(like, rows, self.heads, d_state, d_inner // self.heads),
        }

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        gate_BTI, near_BTC, step_BTH = torch.split(self.maps(x_BTD), self.parts, 2)
        near_BNC, past_BNC = continue_from(memory["past_RNC"], near_BTC)
        wide = memory["memory_RHKV"].dtype
        near_BTC = F.silu(convolve_channels(near_BNC, self.near[:, 0], self.near_bias)).to(wide)
        v_BTI, *b_c_BTX = torch.split(near_BTC, self.widths, 2)
        v_BHTV = to_heads(v_BTI, self.heads)
        b_c_BTGK = (torch.unflatten(x_BTX, 2, (self.groups, -1)) for x_BTX in b_c_BTX)
        k_BHTK, q_BHTK = (x_BTGK.repeat_interleave(self.heads // self.groups, 2).transpose(1, 2) for x_BTGK in b_c_BTGK)
        step_BHT = F.softplus(step_BTH.to(wide) + self.step_bias.to(wide)).clamp(*self.steps).mT
        log_rate_BHT1 = -self.fade.to(wide).exp()[:, None, None] * step_BHT[..., None]
        parts = q_BHTK, k_BHTK, v_BHTV * step_BHT[..., None], log_rate_BHT1
        y_BHTV, after_BHKV = by_chunks(decayed_sum, memory["memory_RHKV"], *parts)
        y_BHTV = y_BHTV + v_BHTV * self.skip.to(wide)[:, None, None]
        y_BTI = self._gated(merge_heads(y_BHTV), F.silu(gate_BTI.to(wide)))
        return self.out(y_BTI.to(x_BTD.dtype)), {"past_RNC": past_BNC, "memory_RHKV": after_BHKV}

    def _gated(self, y_BTI: Tensor, gate_BTI: Tensor) -> Tensor:
        if self.gate_norm != "before":
            y_BTI = y_BTI * gate_BTI
        if self.gain is not None:
            y_BTGI = torch.unflatten(y_BTI, 2, (self.groups, -1))
            y_BTI = F.rms_norm(y_BTGI, y_BTGI.shape[3:], eps=self.eps).flatten(2) * self.gain.to(y_BTI.dtype)
        return y_BTI * gate_BTI if self.gate_norm == "before" else y_BTI


def trapezoidal_sum(
    memory_BHKV: Tensor,
    last_k_BHK: Tensor,
    last_v_BHV: Tensor,
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    now_BHT: Tensor,
    before_BHT: Tensor,
    log_rate_BHT: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = α_t (S_{t-1} + before_t k_{t-1}^T v_{t-1}) + now_t k_t^T v_t, y_t = q_t S_t: y and the last S.

    The chunks sum the products of earlier positions, each with its weights at its own and at the next position.
    """
    earlier_BHTK = torch.cat((last_k_BHK[:, :, None], k_BHTK[:, :, :-1]), 2)
    earlier_BHTV = torch.cat((last_v_BHV[:, :, None], v_BHTV[:, :, :-1]), 2)
    weight_BHT = (F.pad(now_BHT[:, :, :-1], (1, 0)) + before_BHT) * log_rate_BHT.exp()
    parts = q_BHTK, earlier_BHTK, earlier_BHTV * weight_BHT[..., None], log_rate_BHT[..., None]
    y_BHTV, after_BHKV = by_chunks(decayed_sum, memory_BHKV, *parts)
    now_BHTV = v_BHTV * now_BHT[..., None]
    y_BHTV = y_BHTV + (q_BHTK * k_BHTK).sum(3, keepdim=True) * now_BHTV
    return y_BHTV, after_BHKV + k_BHTK[:, :, -1, :, None] * now_BHTV[:, :, -1, None]


@block(
    "mamba3",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        **HEADS,
        "rotated > 0": "some rows rotate",
        "rotated <= 1": "no more than all rows rotate",
        "d_state * rotated >= 2": "at least one pair of rows rotates",
        "rate_min >= 0": "a memory decays or stays",
        "eps > 0": "a mean of squares may be 0",
    },
    source="Lahoti et al. 2026 (Mamba-3, arXiv:2603.15569), section 3",
)
class Mamba3(Recurrence):
    """S_t = α_t (S_{t-1} + (1 - λ_t) Δ_t B_{t-1}^T v_{t-1}) + λ_t Δ_t B_t^T v_t, y_t = C_t S_t + d v_t in each head.

    x_BTD -> x_BTD, with α = exp(-a Δ). v has `d_inner` channels in `heads` heads. B and C have `d_state` channels,
    which the heads of each of the `groups` share. v, B and C are linear maps of x, without a convolution. B and C are
    normalised (rmsnorm), then each head adds biases, initially 1, and rotates pairs of adjacent channels among the
    first `rotated` · d_state. The angle is the sum of π tanh(x W_θ) Δ over all positions so far, so that the decays are
    complex. Δ = softplus(x W_Δ + b), a = softplus(x W_a), at least `rate_min`, λ = σ(x W_λ) and d belong to each head.
    The output is (y ⊙ silu(x W_z)) W_o. Training computes chunks of 32 positions in parallel: linear cost in the
    length. Decoding carries S, the last B and v, and the angles. Each head has one input and one output (the SISO form
    of the paper).

    Also known as: exponential-trapezoidal state space model; complex-valued SSM, data-dependent RoPE.
    Use: as `mamba2`, and for state tracking, such as parity, which needs rotations or negative decays.
    Example: d_inner: 2*d_model, d_state: 16
    """

    weight_roles: ClassVar = {"b_bias": "bias", "c_bias": "bias"}

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        d_inner: int,
        d_state: int = 128,
        groups: int = 1,
        rotated: float = 0.5,
        rate_min: float = 1e-4,
        bias: bool = False,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.rate_min = rate_min
        self.eps = eps
        width, self.pairs = groups * d_state, int(d_state * rotated) // 2
        self.parts = [d_inner, d_inner, width, width, heads, heads, heads, self.pairs]
        self.maps = Linear(D, sum(self.parts), parts=tuple(self.parts), bias=bias)
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.b_gain = nn.Parameter(torch.empty(d_state))
        self.b_bias = nn.Parameter(torch.empty(heads, d_state))
        self.c_gain = nn.Parameter(torch.empty(d_state))
        self.c_bias = nn.Parameter(torch.empty(heads, d_state))
        self.skip = nn.Parameter(torch.empty(heads))
        self.out = Linear(d_inner, D, bias=bias, depth_scaled=(0,))

    initialise = fill_selective

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        d_state, d_value = len(self.b_gain), self.parts[0] // self.heads
        return {
            "memory_RHKV": wide_zeros(like, rows, self.heads, d_state, d_value),
            "k_RHK": wide_zeros(like, rows, self.heads, d_state),
            "v_RHV": wide_zeros(like, rows, self.heads, d_value),
            "angle_RHP": wide_zeros(like, rows, self.heads, self.pairs),
        }

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        wide = memory["memory_RHKV"].dtype
        gate_BTI, v_BTI, b_BTX, c_BTX, step_BTH, rate_BTH, now_BTH, angle_BTP = (
            x.to(wide) for x in torch.split(self.maps(x_BTD), self.parts, 2)
        )
        v_BHTV, now_BHT = to_heads(v_BTI, self.heads), torch.sigmoid(now_BTH).mT
        step_BHT = F.softplus(step_BTH + self.step_bias.to(wide)).mT
        log_rate_BHT = -F.softplus(rate_BTH).clamp(min=self.rate_min).mT * step_BHT
        turn_BHTP = math.pi * torch.tanh(angle_BTP)[:, None] * step_BHT[..., None]
        angle_BHTP = memory["angle_RHP"][:, :, None].double() + turn_BHTP.double().cumsum(2)  # many turns in long rows
        angle_BHTP = angle_BHTP.remainder(2 * math.pi).to(wide)
        k_BHTK = self._rotated(b_BTX, self.b_gain, self.b_bias, angle_BHTP)
        q_BHTK = self._rotated(c_BTX, self.c_gain, self.c_bias, angle_BHTP)
        written = k_BHTK, v_BHTV, now_BHT * step_BHT, (1 - now_BHT) * step_BHT
        last = memory["memory_RHKV"], memory["k_RHK"], memory["v_RHV"]
        y_BHTV, after_BHKV = trapezoidal_sum(*last, q_BHTK, *written, log_rate_BHT)
        y_BTI = merge_heads(y_BHTV + v_BHTV * self.skip.to(wide)[:, None, None]) * F.silu(gate_BTI)
        after = {
            "memory_RHKV": after_BHKV,
            "k_RHK": k_BHTK[:, :, -1],
            "v_RHV": v_BHTV[:, :, -1],
            "angle_RHP": angle_BHTP[:, :, -1],
        }
        return self.out(y_BTI.to(x_BTD.dtype)), after

    def _rotated(self, x_BTX: Tensor, gain_K: Tensor, bias_HK: Tensor, angle_BHTP: Tensor) -> Tensor:
        """Normalise B or C of each group, add the biases of each head and rotate: x_BHTK."""
        x_BGTK = F.rms_norm(to_heads(x_BTX, self.groups), gain_K.shape, gain_K.to(x_BTX.dtype), self.eps)
        x_BHTK = repeat_kv(x_BGTK, self.heads) + bias_HK.to(x_BTX.dtype)[:, None]
        return rotate_adjacent(x_BHTK, angle_BHTP.cos(), angle_BHTP.sin())
