"""Categories `scores`, from products of queries and keys to weights, and `gate`, factors for the output of heads."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import ScoreNormalizer, among_largest, merge_heads, to_heads
from tfm_blocks.blocks.layers.linear import Linear, fill_ones, fill_zeros
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Rate

BETA = {"beta > 0": "the more alike, the more attention"}


@block("softmax", "x: B T D -> B T D", category="scores", where=BETA, source="Vaswani et al. 2017, equation 1")
class Softmax(ScoreNormalizer):
    """softmax(β s); `beta` defaults to 1/√(width of a head).

    As a node it is the softmax over the width D, where β is 1/√D: x_BTD -> x_BTD.

    Use: the scores of the paper.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.normalize(self.transform(x_BTD * self.beta))


@block(
    "softcap",
    "x: B T D -> B T D",
    category="scores",
    where={**BETA, "cap > 0": "scores are cut to a range around 0"},
    source="Gemma Team 2024 (Gemma 2), section 2",
)
class Softcap(Softmax):
    """softmax(cap · tanh(β s / cap)), which bounds scores by `cap`; `beta` defaults to 1/√(width of a head).

    As a node it acts on the width D, where β is 1/√D: x_BTD -> x_BTD.

    Also known as: logit soft-capping.
    Use: weights of Gemma 2.
    """

    fused = False

    def __init__(self, D: int, *, cap: float = 50.0, beta: float | None = None) -> None:
        super().__init__(D, beta=beta)
        self.cap = cap

    def transform(self, scores_BHTS: Tensor) -> Tensor:
        return torch.tanh(scores_BHTS / self.cap) * self.cap


@block(
    "top_scores",
    "x: B T D -> B T D",
    category="scores",
    where={**BETA, "k >= 1": "a query attends to at least one key"},
    source="Zhao et al. 2019, explicit sparse transformer, section 2",
)
class TopScores(Softmax):
    """softmax over the `k` largest scores β s of each query; the other keys get the weight 0.

    Keys whose score equals the k-th largest are kept too. Scores that differ only by rounding, such as those of a
    repeated token in attention without positions, may be chosen differently in training and in decoding. As a node it
    acts on the width D, where β is 1/√D: x_BTD -> x_BTD.

    Also known as: explicit sparse transformer, top-k attention.
    Use: queries that attend to a few keys.
    """

    fused = False

    def __init__(self, D: int, *, k: int = 8, beta: float | None = None) -> None:
        super().__init__(D, beta=beta)
        self.k = k

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        return torch.softmax(scores_BHTS.masked_fill(~among_largest(scores_BHTS, self.k), -math.inf), -1)


@block(
    "forgetful", "x: B T D -> B T D", category="scores", where=BETA, source="Liu et al. 2022, forgetful causal masking"
)
class Forgetful(Softmax):
    """`softmax` that ignores each key at the rate `forget` in training, for all queries and heads; never the first key.

    In attention with windows, each block of queries draws the ignored keys of its window. A query all of whose visible
    keys are ignored weighs them equally. As a node it is the softmax over the width D, where β is 1/√D: x_BTD -> x_BTD.

    Also known as: forgetful causal mask, FCM.
    Use: language models that do not rely on single earlier tokens.
    """

    def __init__(self, D: int, *, forget: Rate = 0.15, beta: float | None = None) -> None:
        super().__init__(D, beta=beta)
        self.forget = forget

    @property
    def fused(self) -> bool:  # type: ignore[override]
        """Return True if no key is ignored, so that torch's own kernel computes all of it."""
        return not self.training or self.forget == 0

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        if not self.fused:
            size = (scores_BHTS.shape[0], *[1] * (scores_BHTS.ndim - 2), scores_BHTS.shape[-1])
            ignored = torch.rand(size, device=scores_BHTS.device) < self.forget
            ignored[..., 0] = False
            lowest = torch.finfo(scores_BHTS.dtype).min / 2  # above the bias of masked keys
            scores_BHTS = torch.where(ignored & (scores_BHTS > lowest), lowest, scores_BHTS)
        return torch.softmax(scores_BHTS, -1)


@block(
    "sigmoid_scores",
    "x: B T D -> B T D",
    category="scores",
    where={**BETA, "offset <= 0": "weights of many keys add up, so each begins below 1/2"},
    source="Ramapuram et al. 2024, equation 3",
)
class SigmoidScores(Softmax):
    """σ(β s + `offset`) for each key separately; the weights of a query need not sum to 1.

    Ramapuram et al. set `offset` to -ln(n) for sequences of n positions, so that the weights initially sum to about 1.
    As a node it acts on the width D, where β is 1/√D: x_BTD -> x_BTD.

    Also known as: sigmoid attention.
    Use: attention without competition between keys.
    """

    fused = False
    sums_to_one = False

    def __init__(self, D: int, *, offset: float = -5.0, beta: float | None = None) -> None:
        super().__init__(D, beta=beta)
        self.offset = offset

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        return torch.sigmoid(scores_BHTS + self.offset)


@block(
    "sink",
    "x: B T D -> B T D",
    category="scores",
    where={
        **BETA,
        "heads >= 1": "there is at least one head",
        "D % heads == 0": "the width must split evenly into heads",
    },
    source="OpenAI 2025 (gpt-oss), section 2.2; Xiao et al. 2023, section 3",
)
class Sink(ScoreNormalizer):
    """exp(β s_j) / (exp(b) + Σ exp(β s)) with a learned sink b for each head, so a head can attend to nothing.

    `beta` defaults to 1/√(width of a head). Attention sets `heads` to its number of heads. As a node it acts on each of
    `heads` parts of the width D, where β is 1/√D: x_BTD -> x_BTD. b is initially 0.

    Also known as: attention sink, softmax with a learned offset.
    Use: weights of gpt-oss; a head can attend to nothing.
    """

    fused = False
    sums_to_one = False

    def __init__(self, D: int, *, heads: int, beta: float | None = None) -> None:
        super().__init__(D, beta=beta)
        self.weight = nn.Parameter(torch.empty(heads))

    initialise = fill_zeros

    def normalize(self, scores_BHTS: Tensor) -> Tensor:
        B, H, T, S = scores_BHTS.shape
        sink_BHT1 = self.weight.to(scores_BHTS.dtype).view(H, 1, 1).expand(B, H, T, 1)
        return torch.softmax(torch.cat([scores_BHTS, sink_BHT1], 3), 3)[..., :S]

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BHTK = to_heads(x_BTD, len(self.weight))
        return merge_heads(self.normalize(x_BHTK * self.beta))


SIGNATURE = "x: B T D, y: B T E -> B T E"


@block("sigmoid_gate", SIGNATURE, category="gate", source="Qiu et al. 2025, section 2.2, elementwise gate (G1)")
class SigmoidGate(Linear):
    """y ⊙ σ(W x + b): x_BTD, y_BTE -> y_BTE.

    As the `gate` of an attention, y is the output of all heads and x the input of the attention. If `bias` is null, the
    gate has a bias if the projections to queries, keys and values have one; as a node it has one.

    Also known as: gated attention.
    Use: attention with `gate: sigmoid_gate`, as in Qwen3-Next.
    Cost: d · E multiply-adds for each position.
    """

    def __init__(self, D: int, E: int, *, bias: bool | None = None) -> None:
        super().__init__(D, E, bias=bias is not False)

    def forward(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:  # type: ignore[override]
        return y_BTE * torch.sigmoid(super().forward(x_BTD))


@block(
    "headwise_gate",
    SIGNATURE,
    category="gate",
    where={"heads >= 1": "there is at least one head", "E % heads == 0": "the width must split evenly into heads"},
    source="Qiu et al. 2025, section 2.2, headwise gate (G1)",
)
class HeadwiseGate(Linear):
    """`sigmoid_gate` with one factor for each head: x_BTD, y_BTE -> y_BTE.

    Each of `heads` equal parts of y is multiplied by its factor σ(w x + b). Attention sets `heads`,
    and the default of `bias` as for `sigmoid_gate`.

    Cost: d · heads multiply-adds for each position.
    """

    def __init__(self, D: int, *, heads: int, bias: bool | None = None) -> None:
        super().__init__(D, heads, bias=bias is not False)

    def forward(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:  # type: ignore[override]
        y_BTHK = torch.unflatten(y_BTE, 2, (self.out_features, -1))
        return (y_BTHK * torch.sigmoid(super().forward(x_BTD))[..., None]).flatten(2)


@block(
    "head_gain",
    SIGNATURE,
    category="gate",
    where={"heads >= 1": "there is at least one head", "E % heads == 0": "the width must split evenly into heads"},
    source="Shleifer et al. 2021 (NormFormer), section 2.1, head-wise scaling",
)
class HeadGain(nn.Module):
    """y times a learned number for each of `heads` equal parts, initially 1: x_BTD, y_BTE -> y_BTE; x has no effect.

    Also known as: HeadScale of NormFormer.
    Use: attention with `gate: head_gain`.
    """

    weight_roles: ClassVar = {"weight": "gain"}

    def __init__(self, *, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    initialise = fill_ones

    def forward(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:
        return (torch.unflatten(y_BTE, 2, (len(self.weight), -1)) * self.weight[:, None]).flatten(2)


@block("glu_gate", SIGNATURE, category="gate", source="Huang et al. 2019, attention on attention, equation 2")
class GLUGate(nn.Module):
    """(W [x; y] + b) ⊙ σ(V [x; y] + c): x_BTD, y_BTE -> y_BTE.

    As the `gate` of an attention, y is the output of all heads and x the input of the attention. If `bias` is null, the
    gate has biases if the projections to queries, keys and values have them; as a node it has them.

    Also known as: attention on attention, AoA.
    Use: attention with `gate: glu_gate`.
    Cost: 2 · (d + E) · E multiply-adds for each position.
    """

    def __init__(self, D: int, E: int, *, bias: bool | None = None) -> None:
        super().__init__()
        self.map = Linear(D + E, 2 * E, parts=2, bias=bias is not False)

    def forward(self, x_BTD: Tensor, y_BTE: Tensor) -> Tensor:
        return F.glu(self.map(torch.cat((x_BTD, y_BTE), 2)), 2)
