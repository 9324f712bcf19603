"""Linear attention: retention decays its memory, and the gated delta rule also corrects it."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.decay import by_chunks, decay, decayed_sum, fill_log_rates, fill_step_biases
from tfm_blocks.blocks.layers.dot_product import (
    merge_heads,
    repeat_kv,
    rotate_adjacent,
    split_heads,
    split_widths,
    to_heads,
)
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, continue_from, convolve_channels, wide_zeros
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Norm

SHORTEST = 1e-6  # added to squared lengths, which may be 0


@block(
    "retention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "D % heads == 0 unless d_head": "the width must split evenly into heads",
        "d_head >= 1": "a head has a width",
        "slope >= 0": "the memory must not grow",
        "eps > 0": "a variance may be 0",
    },
    source="Sun et al. 2023, equations 5 to 8; Qin et al. 2024, section 3; MiniMax 2025, section 2.2",
)
class Retention(Recurrence):
    """(silu(x W_g) ⊙ norm(y)) W_o with y_t = q_t S_t, S_t = γ S_{t-1} + k_t^T v_t / √K in each head: x_BTD -> x_BTD.

    q, k and v are linear maps of x, of the width K = `d_head`, by default D / heads. q and k are rotated by their
    position as in rotary embeddings, unless `rotate` is false. Head h decays at its own rate, γ = 1 - 2^(-5-h), and its
    outputs are normalised to mean 0 and variance 1. Training computes chunks of 32 positions in parallel, y = (q k^T ⊙
    γ^distance) v, and carries S between them: linear cost in the length. Decoding carries only S.

    With a `slope` m, head h of H decays at the rate γ = exp(-m · 2^(-8 (h + 1) / H)). `qkv_activation` acts on q, k and
    v. `out_norm` normalises the outputs of all heads as one vector instead; `eps` then has no effect. With
    `gate_activation: sigmoid`, σ takes the place of silu.

    Also known as: RetNet, multi-scale retention; lightning attention of MiniMax-01 (`slope: 1.0`).
    Use: long sequences at linear cost; decoding keeps a state of fixed size.
    """

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        d_head: int | None = None,
        rotate: bool = True,
        slope: float | None = None,
        qkv_activation: Activation | None = None,
        out_norm: Norm | None = None,
        gate_activation: Literal["silu", "sigmoid"] = "silu",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        K = d_head or D // heads
        if rotate and K % 2:
            raise ValueError(f"heads are rotated in pairs, but their width is {K}: add rotate: false")
        self.heads, self.rotate, self.slope, self.eps = heads, rotate, slope, eps
        self.qkv = Linear(D, 3 * heads * K, parts=3, bias=False, depth_scaled=(2,), heads=(heads,) * 3)
        self.qkv_activation = REGISTRY.make(qkv_activation, 3 * heads * K)
        self.gate = Linear(D, heads * K, bias=False)
        self.gate_activation = torch.sigmoid if gate_activation == "sigmoid" else F.silu
        self.out_norm: nn.Module | None = REGISTRY.make(out_norm, heads * K)
        self.out = Linear(heads * K, D, bias=False, depth_scaled=(0,))

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        K = self.out.in_features // self.heads
        return {"memory_RHKK": wide_zeros(like, rows, self.heads, K, K)}

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        wide, qkv_BTX = memory["memory_RHKK"].dtype, self.qkv(x_BTD)
        if self.qkv_activation is not None:
            qkv_BTX = self.qkv_activation(qkv_BTX)
        q_BHTK, k_BHTK, v_BHTK = split_heads(qkv_BTX.to(wide), self.heads, 3)
        if self.rotate:
            q_BHTK, k_BHTK = rotated(q_BHTK, first), rotated(k_BHTK, first)
        q_k_v = q_BHTK, k_BHTK / math.sqrt(k_BHTK.shape[3]), v_BHTK
        log_rate_1HT1 = -self.rates(q_BHTK)[:, None, None].expand(1, -1, x_BTD.shape[1], -1)
        y_BHTK, after_BHKK = by_chunks(decayed_sum, memory["memory_RHKK"], *q_k_v, log_rate_1HT1)
        if self.out_norm is None:
            y_BTX = merge_heads(F.layer_norm(y_BHTK, y_BHTK.shape[3:], eps=self.eps)).to(x_BTD.dtype)
        else:
            y_BTX = self.out_norm(merge_heads(y_BHTK).to(x_BTD.dtype))
        return self.out(self.gate_activation(self.gate(x_BTD)) * y_BTX), {"memory_RHKK": after_BHKK}

    def rates(self, like: Tensor) -> Tensor:
        """Return -ln γ of each head: rate_H, with the device and dtype of `like`."""
        head_H = torch.arange(self.heads, dtype=like.dtype, device=like.device)
        if self.slope is None:
            return -torch.log1p(-torch.exp2(-5 - head_H))
        return self.slope * torch.exp2(-8 / self.heads * (head_H + 1))

    computed_values = rates  # MiniMax stores them


def rotated(x_BHTK: Tensor, first: int) -> Tensor:
    """Rotate the elements 2i and 2i+1 of each position t by the angle (first + t) / 10000^(2i/K)."""
    T, K = x_BHTK.shape[2:]
    position_T = torch.arange(first, first + T, dtype=x_BHTK.dtype, device=x_BHTK.device)
    even_I = torch.arange(0, K, 2, dtype=x_BHTK.dtype, device=x_BHTK.device)
    angle_TI = position_T[:, None] * torch.exp(even_I * (-math.log(10000.0) / K))
    return rotate_adjacent(x_BHTK, angle_TI.cos(), angle_TI.sin())


@block(
    "gated_delta_rule",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "key_heads >= 1": "there is at least one head of queries and keys",
        "heads % key_heads == 0": "the number of heads must be a multiple of key_heads",
        "D % heads == 0 unless d_key": "the width must split evenly into heads",
        "d_key >= 1": "queries and keys have a width",
        "d_value >= 1": "values have a width",
        "kernel_size >= 1": "a position sees at least itself",
        "gate_rank >= 1": "the gate is a product of two maps",
        "eps > 0": "a mean of squares may be 0",
        "beta_max > 0": "a position writes some of its value",
        "beta_max <= 2": "above 2 the memory would grow",
        "steps >= 1": "a position writes at least once",
    },
    source="Yang et al. 2024 (Gated Delta Networks), section 3.1, equation 10; starting rates as in Mamba 2; decay of "
    "channels: Kimi Team 2025 (Kimi Linear), section 3; steps: Siems et al. 2025 (DeltaProduct), section 3",
)
class GatedDeltaRule(Recurrence):
    """S_t = α_t S_{t-1} + β_t k_t^T (v_t - k_t α_t S_{t-1}), y_t = q_t S_t / √K in each head: x_BTD -> x_BTD.

    The memory S decays by α; then a fraction β of its value for the key is replaced by the new value. q, k and v are
    linear maps of x, followed by a causal depthwise convolution of `kernel_size` positions and silu; q and k have
    length 1. In each head, q and k have the width `d_key`, by default D / heads, and v the width `d_value`, by default
    `d_key`. With `key_heads` below `heads`, groups of heads share q and k. β = `beta_max` · σ(W_β x). α =
    exp(-exp(a) softplus(W_α x + b)) for each head, or for each row of its S with `decay: channel`. The output is
    (rmsnorm(y) ⊙ silu(x W_g)) W_o, or has σ in the place of silu with `gate_activation: sigmoid`. `gate_rank` is the
    rank of W_g and of the W_α of channels, by default full. With `beta_max: 2` the memory's transition can have
    negative eigenvalues, which state tracking needs (Grazzi et al. 2024). With `steps` above 1, a position decays S
    once and then writes as often, each time with its own k, v and β: its transition is a product. Training computes
    chunks of 32 writes in parallel. Decoding carries S and the inputs of the last `kernel_size` - 1 positions of the
    convolution.

    Also known as: Gated DeltaNet; Kimi Delta Attention, KDA (`decay: channel`); Gated DeltaProduct (`steps: 2`); linear
    attention with a delta rule.
    Use: long sequences at linear cost, as in Qwen3-Next and Kimi Linear.
    """

    weight_roles: ClassVar = {"near": "convolution"}

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        key_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        kernel_size: int = 4,
        eps: float = 1e-6,
        beta_max: float = 1.0,
        decay: Literal["head", "channel"] = "head",
        gate_activation: Literal["silu", "sigmoid"] = "silu",
        gate_rank: int | None = None,
        steps: int = 1,
    ) -> None:
        super().__init__()
        groups = key_heads or heads
        self.memories, self.steps = heads, steps
        self.heads = (groups, steps * groups, steps * heads)  # of queries, keys and values
        width = d_key or D // heads
        self.head_widths = (width, width, d_value or width)
        self.kernel_size, self.eps, self.beta_max = kernel_size, eps, beta_max
        self.activation = torch.sigmoid if gate_activation == "sigmoid" else F.silu
        widths = [count * width for count, width in zip(self.heads, self.head_widths, strict=True)]
        decays = heads if decay == "head" else heads * width
        self.qkv = Linear(D, sum(widths), parts=widths, bias=False, depth_scaled=(2,), heads=self.heads)
        self.near = nn.Parameter(torch.empty(sum(widths), kernel_size))
        if decay == "head":
            self.rates = Linear(D, (steps + 1) * heads, parts=(steps * heads, heads), bias=False)
        else:
            self.rates = Linear(D, steps * heads, bias=False)
            self.channel_rates = _map_of_rank(D, decays, gate_rank)
        self.fade = nn.Parameter(torch.empty(heads))
        self.fade_bias = nn.Parameter(torch.empty(decays))
        outputs = heads * self.head_widths[2]
        self.gate = _map_of_rank(D, outputs, gate_rank)
        self.gain = nn.Parameter(torch.empty(self.head_widths[2]))
        self.out = Linear(outputs, D, bias=False, depth_scaled=(0,))

    def initialise(self, name: str, generator: Generator) -> None:
        match name:
            case "near":
                nn.init.uniform_(self.near, -(self.kernel_size**-0.5), self.kernel_size**-0.5, generator=generator)
            case "fade":
                fill_log_rates(self.fade, generator)
            case "fade_bias":
                fill_step_biases(self.fade_bias, generator)
            case _:
                nn.init.ones_(self.gain)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        _, K, V = self.head_widths
        return {
            "past_RND": like.new_zeros(rows, self.kernel_size - 1, len(self.near)),
            "memory_RHKV": wide_zeros(like, rows, self.memories, K, V),
        }

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        qkv_BND, past_BND = continue_from(memory["past_RND"], self.qkv(x_BTD))
        wide = memory["memory_RHKV"].dtype
        qkv_BTD = F.silu(convolve_channels(qkv_BND, self.near)).to(wide)
        q_BGTK, k_BXTK, v_BXTV = split_widths(qkv_BTD, self.heads, self.head_widths)
        q_BGLK = q_BGTK if self.steps == 1 else q_BGTK.repeat_interleave(self.steps, 2)
        q_k = _of_length_1(q_BGLK), _of_length_1(self._written(k_BXTK))
        q_BHLK, k_BHLK = (repeat_kv(x_BGLK, self.memories) for x_BGLK in q_k)
        q_k_v = q_BHLK / math.sqrt(q_BHLK.shape[3]), k_BHLK, self._written(v_BXTV)
        y_BHLV, after_BHKV = by_chunks(delta_rule, memory["memory_RHKV"], *q_k_v, *self._rates(x_BTD, wide))
        y_BHTV = y_BHLV[:, :, self.steps - 1 :: self.steps]
        y_BTI = merge_heads(F.rms_norm(y_BHTV, y_BHTV.shape[3:], self.gain.to(wide), self.eps)).to(x_BTD.dtype)
        return self.out(self.activation(self.gate(x_BTD)) * y_BTI), {"past_RND": past_BND, "memory_RHKV": after_BHKV}

    def _rates(self, x_BTD: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return β_BHL of each write, and log α_BHLK of each row of the memory before it, or log α_BHL1 of all rows."""
        rates_BXT, writes = self.rates(x_BTD).to(wide).mT, self.heads[2]
        by_channel = hasattr(self, "channel_rates")
        step_BTX = self.channel_rates(x_BTD).to(wide) if by_channel else rates_BXT[:, writes:].mT
        step_BHTK = to_heads(step_BTX + self.fade_bias.to(wide), self.memories)
        log_rate_BHTK = -self.fade.to(wide)[:, None, None].exp() * F.softplus(step_BHTK)
        if self.steps > 1:  # only the first write of a position decays
            others = torch.zeros_like(log_rate_BHTK).repeat(1, self.steps - 1, 1, 1)
            log_rate_BHTK = self._written(torch.cat((log_rate_BHTK, others), 1))
        return self._written(rates_BXT[:, :writes]).sigmoid() * self.beta_max, log_rate_BHTK

    def _written(self, x_BXT: Tensor) -> Tensor:
        """Put the writes of a position, which are `steps` blocks of heads, one after the other: x_BXT… -> x_BHL…."""
        if self.steps == 1:
            return x_BXT
        return torch.unflatten(x_BXT, 1, (self.steps, -1)).movedim(1, 3).flatten(2, 3)


def _of_length_1(x_BHTK: Tensor) -> Tensor:
    return x_BHTK * (x_BHTK.square().sum(3, keepdim=True) + SHORTEST).rsqrt()


def _map_of_rank(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    """Return a linear map without bias, or the product of two that goes through `rank` values."""
    if rank is None:
        return Linear(inputs, outputs, bias=False)
    return nn.Sequential(Linear(inputs, rank, bias=False), Linear(rank, outputs, bias=False))


def delta_rule(
    memory_BHKV: Tensor, q_BHCK: Tensor, k_BHCK: Tensor, v_BHCV: Tensor, beta_BHC: Tensor, log_rate_BHCK: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one chunk of the rule: the outputs of its positions, and the memory after them.

    Position i writes w_i = β_i (v_i - v̂_i), where v̂_i is the memory's value for k_i at that time. It depends on the
    writes of earlier positions, which gives a triangular system (section 3.3).
    """
    fade, beta_BHC1 = decay(log_rate_BHCK), beta_BHC[..., None]
    of_keys_BHCC, of_queries_BHCC = fade.products(k_BHCK, k_BHCK, q_BHCK)
    known_BHCV = (k_BHCK * fade.since_start) @ memory_BHKV
    written_BHCV = torch.linalg.solve_triangular(
        beta_BHC1 * of_keys_BHCC, beta_BHC1 * (v_BHCV - known_BHCV), upper=False, unitriangular=True
    )
    y_BHCV = (q_BHCK * fade.since_start) @ memory_BHKV + of_queries_BHCC @ written_BHCV
    return y_BHCV, memory_BHKV * fade.whole + (k_BHCK * fade.until_end).mT @ written_BHCV
