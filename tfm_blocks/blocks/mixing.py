"""Blocks that combine several tensors, and the affine map and dropout as nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.layers.linear import Dropout, Linear, fill_normal, fill_zeros
from tfm_blocks.blocks.layers.state import apply_order, mean_of_kept, reading_order
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Rate


@block("sum", "xs[]: B N D -> B N D", category="join", source="He et al. 2016, equation 1, with any number of branches")
class Sum(nn.Module):
    """x1 + x2 + …: several x_BND -> x_BND.

    Also known as: residual sum.
    Use: parallel branches, as in GPT-J and PaLM.
    """

    def forward(self, xs: list[Tensor]) -> Tensor:
        out_BND = xs[0]
        for x_BND in xs[1:]:
            out_BND = out_BND + x_BND
        return out_BND


@block("mean", "xs[M]: B N D -> B N D", category="join", source="Huang et al. 2017, section 3, snapshot ensembles")
class Mean(Sum):
    """(x1 + x2 + …) / M: M tensors x_BND -> x_BND.

    Also known as: average of branches.
    Use: branches of equal weight.
    """

    def forward(self, xs: list[Tensor]) -> Tensor:
        return super().forward(xs) / len(xs)


@block("product", "xs[]: B N D -> B N D", category="join", source="Dauphin et al. 2017, section 2, gated linear units")
class Product(nn.Module):
    """x1 · x2 · …, element by element: several x_BND -> x_BND.

    Also known as: Hadamard product, multiplicative gate.
    Use: a branch that gates another one, as in LFM2 and Griffin.
    """

    def forward(self, xs: list[Tensor]) -> Tensor:
        out_BND = xs[0]
        for x_BND in xs[1:]:
            out_BND = out_BND * x_BND
        return out_BND


@block("concat", "xs[]: B N D+ -> B N D+", category="join", source="Huang et al. 2017 (DenseNet), section 3")
class Concat(nn.Module):
    """[x1; x2; …] along the width: several x_BND -> x_BND whose width is the sum of theirs.

    Also known as: concatenation of channels.
    Use: skip connections, as in a U-Net.
    """

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.cat(xs, 2)


@block("concat_sequence", "xs[]: B N+ D -> B N+ D", source="Raffel et al. 2020, section 3.2.1, sequences end to end")
class ConcatSequence(nn.Module):
    """The positions of x1, then of x2, …, then all padding: several x_BND -> x_BND on a new axis.

    Also known as: concatenation of sequences.
    Use: several sources in one cross-attention.
    """

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.cat(xs, 1)


@block("weighted_sum", "xs[M]: B N D -> B N D", source="Peters et al. 2018, equation 1")
class WeightedSum(nn.Module):
    """gain · Σ softmax(w)_m x_m: M tensors x_BND -> x_BND. The weights are initially equal, the gain 1.

    Also known as: scalar mix, ELMo mix.
    Use: a decoder that reads all encoder layers, as `model=transparent`.
    Example: in: encoder.*
    """

    def __init__(self, M: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(M))
        self.gain = nn.Parameter(torch.empty(()))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.get_parameter(name), 1.0 if name == "gain" else 0.0)

    def forward(self, xs: list[Tensor]) -> Tensor:
        weights_M = torch.softmax(self.weight, 0) * self.gain
        return torch.stack([x_BND * weight for x_BND, weight in zip(xs, weights_M.unbind(), strict=True)]).sum(0)


@block(
    "gate",
    "x: B N D, ys[M]: B N E -> B N E",
    category="join",
    source="Jacobs et al. 1991, gating network, here linear and at each position",
)
class Gate(nn.Module):
    """Σ softmax(W x + b)_m y_m at each position: x_BND and M tensors y_BNE -> y_BNE. x is the input of the branches.

    Also known as: gated mixture of branches.
    Use: branches whose weights depend on the position.
    Cost: d · M multiply-adds for each position.
    """

    def __init__(self, D: int, M: int, *, bias: bool = True) -> None:
        super().__init__()
        self.map = Linear(D, M, bias=bias)

    def forward(self, x_BND: Tensor, ys: list[Tensor]) -> Tensor:
        weights_BNM = torch.softmax(self.map(x_BND), 2)
        return (torch.stack(ys, 3) * weights_BNM[:, :, None]).sum(3)


@block(
    "gru_gate",
    "x: B N D, ys[M]: B N D -> B N D",
    category="join",
    where={"carry >= 0": "at first the gate keeps at least half of its input"},
    source="Parisotto et al. 2019 (GTrXL), section 3.2, gated-recurrent-unit-type gating",
)
class GRUGate(nn.Module):
    """(1 - z) ⊙ h + z ⊙ x, a GRU cell whose input is y = Σ y_m and whose state is x: x_BND, y_BND -> x_BND.

    z = σ(W_z y + U_z x + `carry`), r = σ(W_r y + U_r x), h = tanh(W_h y + r ⊙ U_h x), all with biases. x is the input
    of the branches, so this join replaces the residual connection. A large `carry` keeps most of x at first.

    Also known as: gated residual, GTrXL gating.
    Use: a parallel of one branch with a norm inside, without `add`.
    Cost: 6 · d² multiply-adds for each position.
    """

    def __init__(self, D: int, M: int, *, carry: float = 2.0) -> None:
        super().__init__()
        self.carry = carry
        self.of_y = Linear(D, 3 * D, parts=3)
        self.of_x = Linear(D, 3 * D, parts=3)

    def forward(self, x_BND: Tensor, ys: list[Tensor]) -> Tensor:
        y_r, y_z, y_h = self.of_y(torch.stack(ys).sum(0)).chunk(3, 2)
        x_r, x_z, x_h = self.of_x(x_BND).chunk(3, 2)
        z_BND = torch.sigmoid(y_z + x_z + self.carry)
        h_BND = torch.tanh(y_h + torch.sigmoid(y_r + x_r) * x_h)
        return h_BND + z_BND * (x_BND - h_BND)


@block(
    "interpolate",
    "x: B N D, start: B N E, end: B N E -> B N E",
    where={"rank >= 1": "a gate of low rank is a product of two maps"},
    source="Srivastava et al. 2015, equation 3, highway networks; between values of layers: Peng et al. 2025 (RWKV-7)",
)
class Interpolate(nn.Module):
    """start + (end - start) ⊙ σ(x W + b) for each channel: x_BND, start_BNE, end_BNE -> y_BNE.

    With a `rank`, W is a product of two matrices. b is initially 0.

    Also known as: highway gate, lerp; value residual of RWKV-7.
    Use: values that are a mixture of this layer's values and the first layer's.
    Cost: d · E multiply-adds for each position; (d + E) · rank with a `rank`.
    Example: start: value, end: decoder.0.value, rank: 32
    """

    def __init__(self, D: int, E: int, *, rank: int | None = None) -> None:
        super().__init__()
        self.inner = nn.Identity() if rank is None else Linear(D, rank, bias=False)
        self.outer = Linear(D if rank is None else rank, E)

    def forward(self, x_BND: Tensor, start_BNE: Tensor, end_BNE: Tensor) -> Tensor:
        return start_BNE + (end_BNE - start_BNE) * torch.sigmoid(self.outer(self.inner(x_BND)))


@block(
    "pool_positions",
    "x: B N D -> B N D",
    sees={"x": "all"},
    source="Reimers and Gurevych 2019 (Sentence-BERT), section 3, pooling strategies",
)
class Pool(nn.Module):
    """Give all positions the mean, the maximum or the vector of the first position: x_BND -> x_BND.

    Padding is left out; a sequence of padding alone gets 0. With `kind: none` each position keeps its vector.

    Also known as: mean pooling, max pooling, CLS pooling.
    Use: before the output of a classifier, which reads the first position.
    """

    def __init__(self, *, kind: Literal["mean", "max", "first", "none"] = "mean") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x_BND: Tensor, *, keep_BN: Tensor) -> Tensor:
        if self.kind == "none":
            return x_BND
        if self.kind == "mean":
            return mean_of_kept(x_BND, keep_BN)[:, None].expand_as(x_BND)
        if self.kind == "first":
            first_B11 = keep_BN.int().argmax(1)[:, None, None]
            pooled_B1D = x_BND.take_along_dim(first_B11, 1)
        else:
            pooled_B1D = x_BND.masked_fill(~keep_BN[:, :, None], -torch.inf).amax(1, keepdim=True)
        return pooled_B1D.masked_fill(~keep_BN.any(1)[:, None, None], 0).expand_as(x_BND)


@block(
    "learned_tokens",
    "x: B N D -> B tokens+N D",
    sees={"x": "all"},
    where={"tokens >= 1": "there is at least one learned token"},
    source="Burtsev et al. 2020, section 3.1, memory tokens; Dosovitskiy et al. 2021 (ViT), equation 1, class token",
)
class LearnedTokens(nn.Module):
    """Put `tokens` learned vectors before the sequence: x_BND -> y_BMD, with M = `tokens` + N positions.

    Padding comes last.

    Also known as: memory tokens, register tokens, class token, soft prompt.
    Use: encoders; `drop_tokens` removes the added positions.
    Example: tokens: 4
    """

    weight_roles: ClassVar = {"weight": "position"}

    def __init__(self, D: int, *, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, D))

    initialise = fill_normal

    def forward(self, x_BND: Tensor, *, keep_BN: Tensor, right_padded_N: bool = True) -> Tensor:
        if not right_padded_N:
            x_BND = apply_order(x_BND, reading_order(keep_BN))
        return torch.cat([self.weight.to(x_BND.dtype).expand(x_BND.shape[0], -1, -1), x_BND], 1)


@block(
    "drop_tokens",
    "x: B N D -> B N-tokens D",
    sees={"x": "all"},
    where={"tokens >= 1": "at least one position is removed"},
    source="Burtsev et al. 2020, section 3.1, memory tokens",
)
class DropTokens(nn.Module):
    """Remove the `tokens` positions that `learned_tokens` added: x_BMD -> y_BND, with N = M - `tokens` positions.

    Use: before the output of a model that predicts a token at each position of its input.
    Example: in: {block: learned_tokens, tokens: 4}, tokens: 4
    """

    def __init__(self, *, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x_BMD: Tensor) -> Tensor:
        return x_BMD[:, self.tokens :]


@block(
    "look_ahead",
    "x: B N D -> B N D",
    sees={"x": "all"},
    where={"by >= 1": "later positions are read"},
    source="DeepSeek-AI 2024 (DeepSeek-V3), equation 21, Emb(t_{i+k})",
)
class LookAhead(nn.Module):
    """y_i = x_{i + by}, and 0 where that position is padding or past the end: x_BND -> x_BND.

    Also known as: shift to the left.
    Use: the embedding of the next token in a branch that `predict_ahead` reads.
    """

    def __init__(self, *, by: int = 1) -> None:
        super().__init__()
        self.by = by

    def forward(self, x_BND: Tensor, *, keep_BN: Tensor) -> Tensor:
        kept_BND = x_BND.masked_fill(~keep_BN[:, :, None], 0)
        later_BND = kept_BND[:, self.by :]
        return torch.cat([later_BND, torch.zeros_like(x_BND[:, : x_BND.shape[1] - later_BND.shape[1]])], 1)


@block(
    "predict_ahead",
    "x: B T D, ahead[]: B T D -> B T D",
    sees={"ahead": "nothing"},
    source="Gloeckle et al. 2024, section 2; DeepSeek-AI 2024 (DeepSeek-V3), section 2.2",
)
class PredictAhead(nn.Module):
    """x, unchanged: x_BTD -> x_BTD. In training, the head also reads each of `ahead`, which predicts a later token.

    The first of `ahead` predicts the token after the next, the second the token after that. The output does not depend
    on them, so decoding does not compute them, and they may read later tokens of the target.

    Also known as: multi-token prediction, MTP.
    Use: the node before the output of a model for `objective=several_tokens`.
    """

    def forward(self, x_BTD: Tensor, ahead: Sequence[Tensor] = ()) -> Tensor:
        return x_BTD


@block(
    "linear",
    "x: B N D -> B N d_out",
    where={"d_out >= 1": "the width is at least 1"},
    source="Vaswani et al. 2017, section 3.4, a learned linear transformation",
)
class LinearBlock(Linear):
    """x W^T + b: x_BND -> y_BN(d_out). With `zero`, W is initially 0.

    Also known as: dense layer, projection.
    Use: inputs of vectors, and changes of width.
    Cost: d · d_out multiply-adds for each position.
    Example: d_out: 512
    """

    def __init__(self, D: int, *, d_out: int, bias: bool = True, zero: bool = False) -> None:
        super().__init__(D, d_out, bias=bias)
        self.zero = zero

    def initialise(self, name: str, generator: Generator) -> None:
        fill_zeros(self, name, generator) if self.zero else super().initialise(name, generator)


@block("dropout", "x: B N D -> B N D", source="Srivastava et al. 2014, section 4")
class DropoutBlock(Dropout):
    """In training, set each element to 0 with probability `dropout`, and divide the others by 1 - dropout.

    Use: dropout at a place of your own; add & norm has its own.
    """

    def __init__(self, *, dropout: Rate = 0.0) -> None:
        super().__init__(dropout)
