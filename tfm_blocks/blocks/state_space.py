"""The selective state space of Mamba-2."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import merge_heads
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, continue_from, convolve_channels
from tfm_blocks.blocks.linear_attention import by_chunks, decayed_sum, fill_log_rates, fill_step_biases
from tfm_blocks.registry.blocks import block


def fill_selective(selective: nn.Module, name: str, generator: Generator) -> None:
    """Initialise the convolution, the steps and the factors of Mamba and Mamba-2 as their authors do."""
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


@block(
    "mamba2",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "d_inner >= 1": "there is at least one channel",
        "d_inner % heads == 0": "the inner width must split evenly into heads",
        "groups >= 1": "the heads belong to at least one group",
        "heads % groups == 0": "the heads must split evenly into groups",
        "d_state >= 1": "the memory has at least one row",
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
    is rmsnorm(y ⊙ silu(x W_z)) W_o, with a norm over each group. Training computes chunks of 32 positions in parallel
    (state space duality): linear cost in the length. Decoding carries S.

    Also known as: state space duality, SSD; selective state space model, SSM.
    Use: long sequences at linear cost, alone or beside attention, as in Bamba, Nemotron-H and Zamba2.
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
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.widths = [d_inner, groups * d_state, groups * d_state]  # of v, B and C
        self.parts = [d_inner, sum(self.widths), heads]  # of the gate, what is convolved, and the steps
        self.steps = (step_min, step_max)
        self.eps = eps
        self.maps = Linear(D, sum(self.parts), parts=(d_inner, *self.widths, heads), bias=bias)
        self.near = nn.Parameter(torch.empty(sum(self.widths), 1, kernel_size))
        self.near_bias = nn.Parameter(torch.empty(sum(self.widths)))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.fade = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.gain = nn.Parameter(torch.empty(d_inner))
        self.out = Linear(d_inner, D, bias=bias, depth_scaled=(0,))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "fade":
            fill_log_rates(self.fade, generator)
        else:
            fill_selective(self, name, generator)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        d_inner, d_state = self.widths[0], self.widths[1] // self.groups
        wide = torch.promote_types(like.dtype, torch.float32)
        return {
            "past_RNC": like.new_zeros(rows, self.near.shape[2] - 1, len(self.near)),
            "memory_RHKV": like.new_zeros(rows, self.heads, d_state, d_inner // self.heads, dtype=wide),
        }

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        gate_BTI, near_BTC, step_BTH = torch.split(self.maps(x_BTD), self.parts, 2)
        near_BNC, past_BNC = continue_from(memory["past_RNC"], near_BTC)
        wide = memory["memory_RHKV"].dtype
        near_BTC = F.silu(convolve_channels(near_BNC, self.near[:, 0], self.near_bias)).to(wide)
        v_BTI, *b_c_BTX = torch.split(near_BTC, self.widths, 2)
        v_BHTV = torch.unflatten(v_BTI, 2, (self.heads, -1)).transpose(1, 2)
        b_c_BTGK = (torch.unflatten(x_BTX, 2, (self.groups, -1)) for x_BTX in b_c_BTX)
        k_BHTK, q_BHTK = (x_BTGK.repeat_interleave(self.heads // self.groups, 2).transpose(1, 2) for x_BTGK in b_c_BTGK)
        step_BHT = F.softplus(step_BTH.to(wide) + self.step_bias.to(wide)).clamp(*self.steps).mT
        log_rate_BHT1 = -self.fade.to(wide).exp()[:, None, None] * step_BHT[..., None]
        parts = q_BHTK, k_BHTK, v_BHTV * step_BHT[..., None], log_rate_BHT1
        y_BHTV, after_BHKV = by_chunks(decayed_sum, memory["memory_RHKV"], *parts)
        y_BHTV = y_BHTV + v_BHTV * self.skip.to(wide)[:, None, None]
        y_BTGI = torch.unflatten(merge_heads(y_BHTV) * F.silu(gate_BTI.to(wide)), 2, (self.groups, -1))
        y_BTI = F.rms_norm(y_BTGI, y_BTGI.shape[3:], eps=self.eps).flatten(2) * self.gain.to(wide)
        return self.out(y_BTI.to(x_BTD.dtype)), {"past_RNC": past_BNC, "memory_RHKV": after_BHKV}
