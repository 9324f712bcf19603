"""Recurrences whose memory decays element by element: the selective scan of Mamba and the RG-LRU of Griffin."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, continue_from, convolve_channels, wide_zeros
from tfm_blocks.blocks.state_space import fill_selective
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Norm

STEEPEST = 1000.0  # the maximum of the derivative of a square root, as in RecurrentGemma


def bounded_root(x: Tensor) -> Tensor:
    """Return √x with a derivative of at most `STEEPEST`, also at 0."""
    x_fixed = x.detach()
    root = x_fixed.sqrt()
    return root + (x - x_fixed) * (0.5 / root.clamp(min=0.5 / STEEPEST))


def scan(memory_BX: Tensor, log_rate_BTX: Tensor, x_BTX: Tensor) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(log_rate_t) h_{t-1} + x_t for each element: h_BTX and the last h_BX, from h_0 = `memory_BX`.

    Positions are read in turn: on a CPU, this is 2 to 7 times as fast, forward and backward, as sums over 1, 2, 4, …
    positions.
    """
    if torch.compiler.is_exporting():
        h_BTX = traced_scan(memory_BX, log_rate_BTX, x_BTX)
        return h_BTX, h_BTX[:, -1]
    h_BX, outputs = memory_BX, []
    for decay_BX, x_BX in zip(log_rate_BTX.exp().unbind(1), x_BTX.unbind(1), strict=True):
        h_BX = torch.addcmul(x_BX, decay_BX, h_BX)
        outputs.append(h_BX)
    return torch.stack(outputs, 1), h_BX


@torch.library.custom_op("tfm_blocks::scan", mutates_args=())
def traced_scan(memory_BX: Tensor, log_rate_BTX: Tensor, x_BTX: Tensor) -> Tensor:
    """Compute the outputs of `scan`. A trace of its loop would fix the number of positions; this is one operation."""
    return scan(memory_BX, log_rate_BTX, x_BTX)[0]


@traced_scan.register_fake
def _(memory_BX: Tensor, log_rate_BTX: Tensor, x_BTX: Tensor) -> Tensor:
    return x_BTX.new_empty(x_BTX.shape)


@block(
    "mamba",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "d_inner >= 1": "there is at least one channel",
        "d_state >= 1": "the memory of a channel has at least one element",
        "d_step >= 1": "the steps are a product of two maps",
        "kernel_size >= 1": "a position sees at least itself",
    },
    source="Gu and Dao 2023 (Mamba), algorithm 2 and section 3.4",
)
class Mamba(Recurrence):
    """S_t = exp(-exp(a) Δ_t) ⊙ S_{t-1} + Δ_t B_t v_t, y_t = C_t · S_t + d v_t in each channel: x_BTD -> x_BTD.

    v has `d_inner` channels, each with a memory S of `d_state` elements, which decay at separate rates exp(a) Δ. v is a
    linear map of x, followed by a causal depthwise convolution of `kernel_size` positions and silu. B and C, of width
    `d_state`, are linear maps of v. So is the step Δ = softplus(v W_r W_Δ + b) of each channel, of rank `d_step`, by
    default d_inner / 32. `selected_norm` normalises v W_r, B and C. The output is (y ⊙ silu(x W_z)) W_o. Training
    updates S position by position: linear cost in the length. Decoding carries S and the inputs of the last
    `kernel_size` - 1 positions of the convolution.

    Also known as: selective scan, S6; selective state space model.
    Use: weights of Mamba; of Jamba with `selected_norm: rmsnorm`, and of Falcon-Mamba with `plain_rmsnorm`. `mamba2` is
    faster at a larger `d_state`.
    Example: d_inner: 2*d_model
    """

    weight_roles: ClassVar = {"near": "convolution", "fade": "gain"}

    def __init__(
        self,
        D: int,
        *,
        d_inner: int,
        d_state: int = 16,
        d_step: int | None = None,
        kernel_size: int = 4,
        selected_norm: Norm | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        rank = max(1, d_inner // 32) if d_step is None else d_step
        self.parts = [rank, d_state, d_state]
        self.maps = Linear(D, 2 * d_inner, parts=2, bias=bias)
        self.near = nn.Parameter(torch.empty(d_inner, 1, kernel_size))
        self.near_bias = nn.Parameter(torch.empty(d_inner))
        self.selected = Linear(d_inner, sum(self.parts), parts=tuple(self.parts), bias=False)
        self.rank_norm: nn.Module | None = REGISTRY.make(selected_norm, rank)
        self.b_norm: nn.Module | None = REGISTRY.make(selected_norm, d_state)
        self.c_norm: nn.Module | None = REGISTRY.make(selected_norm, d_state)
        self.steps = Linear(rank, d_inner, bias=False)
        self.step_bias = nn.Parameter(torch.empty(d_inner))
        self.fade = nn.Parameter(torch.empty(d_inner, d_state))
        self.skip = nn.Parameter(torch.empty(d_inner))
        self.out = Linear(d_inner, D, bias=bias, depth_scaled=(0,))

    def initialise(self, name: str, generator: Generator) -> None:
        """Initialise the rates of each channel to 1, 2, 3 and so on, as in Mamba."""
        if name == "fade":
            rate_N = torch.arange(1, self.fade.shape[1] + 1, dtype=self.fade.dtype, device=self.fade.device)
            with torch.no_grad():
                self.fade.copy_(rate_N.log().expand_as(self.fade))
        else:
            fill_selective(self, name, generator)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        return {
            "past_RNI": like.new_zeros(rows, self.near.shape[2] - 1, len(self.near)),
            "memory_RX": wide_zeros(like, rows, self.fade.numel()),
        }

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        near_BTI, gate_BTI = self.maps(x_BTD).chunk(2, 2)
        near_BNI, past_BNI = continue_from(memory["past_RNI"], near_BTI)
        v_BTI = F.silu(convolve_channels(near_BNI, self.near[:, 0], self.near_bias))
        wide = memory["memory_RX"].dtype
        rank_BTR, b_BTN, c_BTN = (x.to(wide) for x in self._selected(v_BTI))
        step_BTI = F.softplus(self.steps(rank_BTR.to(x_BTD.dtype)).to(wide) + self.step_bias.to(wide))
        log_rate_BTIN = -self.fade.to(wide).exp() * step_BTI[..., None]
        written_BTIN = (step_BTI * v_BTI.to(wide))[..., None] * b_BTN[:, :, None]
        state_BTX, after_BX = scan(memory["memory_RX"], log_rate_BTIN.flatten(2), written_BTIN.flatten(2))
        y_BTI = (torch.unflatten(state_BTX, 2, self.fade.shape) @ c_BTN[..., None])[..., 0]
        y_BTI = (y_BTI + v_BTI.to(wide) * self.skip.to(wide)) * F.silu(gate_BTI.to(wide))
        return self.out(y_BTI.to(x_BTD.dtype)), {"past_RNI": past_BNI, "memory_RX": after_BX}

    def _selected(self, v_BTI: Tensor) -> list[Tensor]:
        """Return v W_r, B and C."""
        parts = torch.split(self.selected(v_BTI), self.parts, 2)
        norms = self.rank_norm, self.b_norm, self.c_norm
        return [x if norm is None else norm(x) for x, norm in zip(parts, norms, strict=True)]


@block(
    "rg_lru",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "D % heads == 0": "the width must split evenly into heads",
        "power > 0": "a memory decays",
    },
    source="De et al. 2024 (Griffin), equations 1 to 4; Botev et al. 2024 (RecurrentGemma)",
)
class RGLRU(Recurrence):
    """h_t = a_t ⊙ h_{t-1} + √(1 - a_t²) ⊙ i_t ⊙ x_t with a_t = exp(-`power` · softplus(Λ) r_t): x_BTD -> h_BTD.

    The gates i and r are sigmoids of linear maps of x, which mix the channels of each of the `heads` parts of the
    width. At the first position, the factor √(1 - a²) is 1. a^(1/r) is initially between 0.9 and 0.999, uniform in
    the logarithm. Training updates h position by position: linear cost in the length. Decoding carries h.

    Also known as: real-gated linear recurrent unit.
    Use: the recurrent layers of Griffin and RecurrentGemma, after a `depthwise_conv`, in parallel with a gelu branch.
    """

    weight_roles: ClassVar = {"input_gate": "recurrent", "decay_gate": "recurrent"}

    def __init__(self, D: int, *, heads: int, power: float = 8.0) -> None:
        super().__init__()
        self.power = power
        self.input_gate = nn.Parameter(torch.empty(heads, D // heads, D // heads))
        self.input_bias = nn.Parameter(torch.empty(D))
        self.decay_gate = nn.Parameter(torch.empty(heads, D // heads, D // heads))
        self.decay_bias = nn.Parameter(torch.empty(D))
        self.fade = nn.Parameter(torch.empty(D))

    def initialise(self, name: str, generator: Generator) -> None:
        weight = self.get_parameter(name)
        if name.endswith("_gate"):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
        elif name == "fade":
            nn.init.uniform_(weight, math.log(0.9), math.log(0.999), generator=generator)
            weight.neg_().div_(self.power).expm1_().log_()
        else:
            nn.init.zeros_(weight)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        return {"memory_RD": wide_zeros(like, rows, len(self.fade))}

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        wide = memory["memory_RD"].dtype
        gates = ((self.input_gate, self.input_bias), (self.decay_gate, self.decay_bias))
        input_BTD, decay_BTD = (self._gate(x_BTD, weight, bias).to(wide) for weight, bias in gates)
        log_rate_BTD = -self.power * F.softplus(self.fade.to(wide)) * decay_BTD
        factor_BTD = bounded_root(-torch.expm1(2 * log_rate_BTD))
        position_T1 = torch.arange(first, first + x_BTD.shape[1], device=x_BTD.device)[:, None]
        factor_BTD = torch.where(position_T1 == 0, 1.0, factor_BTD)
        h_BTD, after_BD = scan(memory["memory_RD"], log_rate_BTD, factor_BTD * input_BTD * x_BTD.to(wide))
        return h_BTD.to(x_BTD.dtype), {"memory_RD": after_BD}

    def _gate(self, x_BTD: Tensor, weight_HKK: Tensor, bias_D: Tensor) -> Tensor:
        """Return σ(x W + b), where W maps each part of the width to itself."""
        x_BTHK = torch.unflatten(x_BTD, 2, (len(weight_HKK), -1))
        gate_BTHK = torch.einsum("bthk,hkl->bthl", x_BTHK, weight_HKK.to(x_BTD.dtype))
        return torch.sigmoid(gate_BTHK.flatten(2) + bias_D.to(x_BTD.dtype))
