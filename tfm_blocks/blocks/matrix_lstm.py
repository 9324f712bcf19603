"""The LSTM with a matrix as memory of the xLSTM."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.decay import by_chunks, decayed_sum
from tfm_blocks.blocks.layers.dot_product import merge_heads, split_widths
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, wide_zeros
from tfm_blocks.registry.blocks import block

INPUT_BIAS = -10.0  # initial bias of the input gates
FORGET_BIASES = (3.0, 6.0)  # range of the initial biases of the forget gates


@block(
    "mlstm",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "D % heads == 0 unless d_key": "the width must split evenly into heads",
        "d_key >= 1": "queries and keys have a width",
        "d_value >= 1": "values have a width",
        "gate_cap > 0": "a bound of the gates' logarithms is positive",
        "eps > 0": "a variance may be 0",
        "normaliser_eps > 0": "the normaliser may be 0",
    },
    source="Beck et al. 2024 (xLSTM), equations 19 to 27; the layer as in Beck et al. 2025 (xLSTM 7B), section 3",
)
class MatrixLSTM(Recurrence):
    """C_t = f_t C_{t-1} + i_t k_t^T v_t, y_t = q_t C_t / max(|q_t · n_t|, 1) in each head: x_BTD -> x_BTD.

    The normaliser is n_t = f_t n_{t-1} + i_t k_t. The input gate is i = exp(cap(x W_i + b_i)), and the forget gate
    f = σ(cap(x W_f + b_f)). cap(z) = `gate_cap` · tanh(z / `gate_cap`), or z with `gate_cap: null`. b_i is initially
    -10, and b_f uniform between 3 and 6. q, k and v are linear maps of x, and q is divided by √K. In each head, q and k
    have the width `d_key`, by default D / heads, and v the width `d_value`, by default `d_key`. The output is
    (layernorm(y) ⊙ σ(x W_g)) W_o, with a norm of each head. So that they do not overflow, C and n are stored divided by
    exp(m_t), m_t = max(m_{t-1} + log f_t, log i_t); `normaliser_eps` is added to the divisor on this scale. Training
    computes chunks of 32 positions in parallel: linear cost in the length. Decoding carries C, n and m.

    Also known as: matrix LSTM, xLSTM; linear attention with exponential gates.
    Use: long sequences at linear cost; xLSTM 7B has a `d_key` of half the `d_value`.
    """

    def __init__(
        self,
        D: int,
        *,
        heads: int,
        d_key: int | None = None,
        d_value: int | None = None,
        gate_cap: float | None = 15.0,
        eps: float = 1e-6,
        normaliser_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        width = d_key or D // heads
        self.heads = heads
        self.head_widths = (width, width, d_value or width)
        self.gate_cap = gate_cap
        self.eps = eps
        self.normaliser_eps = normaliser_eps
        widths, outputs = [heads * one for one in self.head_widths], heads * self.head_widths[2]
        self.qkv = Linear(D, sum(widths), parts=widths, bias=False, depth_scaled=(2,), heads=(heads,) * 3)
        self.rates = Linear(D, 2 * heads, parts=2, bias=False)
        self.input_bias = nn.Parameter(torch.empty(heads))
        self.forget_bias = nn.Parameter(torch.empty(heads))
        self.gate = Linear(D, outputs, bias=False)
        self.gain = nn.Parameter(torch.empty(outputs))
        self.out = Linear(outputs, D, bias=False, depth_scaled=(0,))

    def initialise(self, name: str, generator: Generator) -> None:
        match name:
            case "input_bias":
                nn.init.constant_(self.input_bias, INPUT_BIAS)
            case "forget_bias":
                nn.init.uniform_(self.forget_bias, *FORGET_BIASES, generator=generator)
            case _:
                nn.init.ones_(self.gain)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        """Return C = 0, n = 0 as a last column of C, and m = 0."""
        _, K, V = self.head_widths
        return {
            "memory_RHKV": wide_zeros(like, rows, self.heads, K, V + 1),
            "largest_RH": wide_zeros(like, rows, self.heads),
        }

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        wide, before_BH = memory["memory_RHKV"].dtype, memory["largest_RH"]
        qkv_BTX = self.qkv(x_BTD).to(wide)
        q_BHTK, k_BHTK, v_BHTV = split_widths(qkv_BTX, (self.heads,) * 3, self.head_widths)
        gates_BTX = self.rates(x_BTD).to(wide) + torch.cat((self.input_bias, self.forget_bias)).to(wide)
        if self.gate_cap is not None:
            gates_BTX = self.gate_cap * torch.tanh(gates_BTX / self.gate_cap)
        input_BHT, forget_BHT = gates_BTX.mT.chunk(2, 1)
        forget_BHT = F.logsigmoid(forget_BHT)  # log f, as input_BHT is log i
        largest_BHT = largest_so_far(before_BH, input_BHT, forget_BHT)
        since_BHT = forget_BHT + torch.cat((before_BH[..., None], largest_BHT[..., :-1]), 2) - largest_BHT
        k_BHTK = k_BHTK * (input_BHT - largest_BHT).exp()[..., None]
        parts = q_BHTK / math.sqrt(q_BHTK.shape[3]), k_BHTK, F.pad(v_BHTV, (0, 1), value=1.0), since_BHT[..., None]
        sum_BHTV, after_BHKV = by_chunks(decayed_sum, memory["memory_RHKV"], *parts)
        norm_BHT1 = torch.maximum(sum_BHTV[..., -1:].abs(), (-largest_BHT).exp()[..., None]) + self.normaliser_eps
        y_BHTV = F.layer_norm(sum_BHTV[..., :-1] / norm_BHT1, v_BHTV.shape[3:], eps=self.eps)
        y_BTI = (merge_heads(y_BHTV) * self.gain.to(wide)).to(x_BTD.dtype)
        after = {"memory_RHKV": after_BHKV, "largest_RH": largest_BHT[..., -1]}
        return self.out(torch.sigmoid(self.gate(x_BTD)) * y_BTI), after


def largest_so_far(before_BH: Tensor, input_BHT: Tensor, forget_BHT: Tensor) -> Tensor:
    """Return m_t = max(m_{t-1} + forget_t, input_t), with m_0 = `before_BH`: m_BHT.

    It has no gradient: outputs do not depend on the scale exp(m) of the memory, up to eps.
    """
    passed_BHT = forget_BHT.detach().cumsum(2)
    above_BHT = input_BHT.detach() - passed_BHT
    if torch.compiler.is_exporting():  # ONNX has no cumulative maximum
        later_TT = torch.ones_like(above_BHT[0, 0, :, None] * above_BHT[0, 0], dtype=torch.bool).triu(1)
        highest_BHT = above_BHT[..., None, :].masked_fill(later_TT, -torch.inf).amax(3)
    else:
        highest_BHT = above_BHT.cummax(2).values
    return passed_BHT + torch.maximum(highest_BHT, before_BH[..., None])
