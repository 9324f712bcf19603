"""Multi-head attention, and its variants with memory vectors and with combined or compared heads."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    dot_product_weights,
    one_hot_values,
    renormalised,
    repeat_kv,
    weighed_attention,
    widths,
)
from tfm_blocks.blocks.layers.linear import Linear, fill_normal
from tfm_blocks.blocks.layers.multi_head import Heads, MultiHead
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Position

SIGNATURE = "x: B T D, kv?: B S E, score_bias?: heads T S -> B T D"
SEES = {"kv|x": "mask", "score_bias": "past"}
WHERE = {
    "heads >= 1": "there is at least one head",
    "D % heads == 0 unless d_head": "the width must split evenly into heads",
    "d_head >= 1": "queries and keys have a width",
    "d_value >= 1": "values have a width",
    "kv_heads >= 1": "there is at least one head of keys and values",
    "heads % kv_heads == 0": "the number of query heads must be a multiple of kv_heads",
    "clip_qkv > 0": "queries, keys and values are clamped to a range around 0",
}


@block("attention", SIGNATURE, branch=True, sees=SEES, where=WHERE, source="Vaswani et al. 2017, section 3.2.2")
class Attention(MultiHead):
    """softmax(β q k^T) v in each of H heads of width K: x_BTD, kv_BSE -> x_BTD. By default β = 1/√K and K = D / H.

    Queries come from x; keys and values come from kv, or from x if kv is not connected. Padding is masked, and with
    `mask: causal` so are later positions. `score_bias`, such as a node `relative_bias`, is added to the scores:
    bias_HTS.

    Heads: with `kv_heads` below `heads`, groups of query heads share keys and values (Ainslie et al. 2023; a single
    key-value head: Shazeer 2019). `d_head` is the width of a head, which may differ from D / H. `d_value` is the width
    of its values, by default `d_head`.

    Parts: `position` acts on queries and keys or on their scores, `selection` restricts each query to keys that it
    chooses, `scores` turns the products of queries and keys into weights, and `gate` multiplies the output of the heads
    before the output projection. `out_norm` normalises it there, all heads as one vector (Wang et al. 2022,
    sub-LayerNorm; BitNet). `qk_norm` normalises queries and keys, each head separately, before `position` acts (Henry
    et al. 2020; Dehghani et al. 2023). Other kinds: `head_gains` multiplies them by separate gains for each head,
    initially 1 (Cohere 2024, Command R+); `joint` normalises all heads of a position as one vector (OLMo Team 2025,
    OLMo 2); `post_position` normalises after `position` (Tencent 2025, Hunyuan); `queries` normalises no keys, for
    `shared_attention` whose keys are normalised before. `v_norm` normalises the values of each head (Gemma Team 2025,
    Gemma 3n).

    Forgetting: with `forget_gate`, the score of query i and key j adds Σ_{l=j+1…i} ln σ(w x_l + b), with a map w, b of
    each head (Lin et al. 2025, FoX, section 3). It needs `mask: causal`, and often replaces `position`.

    Projections: `clip_qkv` clamps queries, keys and values to ± its value (MosaicML 2023, MPT; Groeneveld et al. 2024,
    OLMo). `bias` adds biases to all projections, only to queries, keys and values (`qkv`, Bai et al. 2023, Qwen),
    only to the output projection (`out`), or to all but keys (`except_keys`, Radford et al. 2023, Whisper).

    Also known as: multi-head attention, MHA; grouped-query attention, GQA (`kv_heads` below `heads`); multi-query
    attention, MQA (`kv_heads: 1`); QK-norm (`qk_norm`); cross-attention (`kv`); forgetting attention, FoX, and
    data-dependent ALiBi (`forget_gate`).
    Use: the attention of the paper and, with its parts, of most current models.
    """

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        d_value: int | None = None,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        forget_gate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(D, E, widths(D, heads, kv_heads, d_head, d_value), mask, position, **options)
        if forget_gate and E is not None:
            raise ValueError("forget_gate reads the positions of one sequence, but kv is another: leave it out")
        if forget_gate and not self.causal:
            raise ValueError("forget_gate reads the positions from key to query: add mask: causal, or leave it out")
        self.forget = Linear(D, self.widths.heads) if forget_gate else None

    def prepare(
        self, x_BTD: Tensor, kv_BSE: Tensor | None = None, score_bias_HTS: Tensor | None = None, **masks: Any
    ) -> Heads:
        bias = score_bias_HTS
        if self.forget is not None:
            bias = _with_forgetting(bias, _sum_of_logs(self.forget(x_BTD).mT, masks["keep_BT"][:, None]))
        return super().prepare(x_BTD, kv_BSE, bias, **masks)

    def caches(self, room: CacheShape) -> dict[str, Tensor]:
        caches = super().caches(room)
        return caches if self.forget is None else {**caches, "forget": room.cache(self.widths.heads, 1)}

    def prefill(self, x_BPD: Tensor, state: State, score_bias_HTS: Tensor | None = None) -> tuple[Tensor, State]:
        bias = score_bias_HTS
        if self.forget is not None:
            gates_BHP = self.forget(x_BPD).mT
            state.fill(forget=gates_BHP[..., None])
            bias = _with_forgetting(bias, _sum_of_logs(gates_BHP))
        return super().prefill(x_BPD, state, bias)

    def append(
        self, x_BMD: Tensor, k_BGMK: Tensor, v_BGMK: Tensor, state: State, score_bias_HTS: Tensor | None = None
    ) -> tuple[Tensor, Tensor, AttentionMask]:
        k_BGSK, v_BGSK, masks = super().append(x_BMD, k_BGMK, v_BGMK, state, score_bias_HTS)
        if self.forget is not None:
            gates_BHS1 = state.append("forget", self.forget(x_BMD).mT[..., None])
            sum_BHMS = _sum_of_logs(gates_BHS1.mT, masks.mask)  # gates of other hypotheses add 0
            masks = masks.plus(sum_BHMS[..., -1:] - sum_BHMS)
        return k_BGSK, v_BGSK, masks


def _sum_of_logs(gates: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return the cumulative sums of ln σ(gates) along the last axis, where padding adds 0, in float32 or wider."""
    logs = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
    return (logs if keep is None else logs.masked_fill(~keep, 0.0)).cumsum(-1)


def _with_forgetting(bias: Tensor | None, sum_BHT: Tensor) -> Tensor:
    """Add the sum of the logarithms between each key and each query to a bias: bias_BHTT."""
    forgetting_BHTT = sum_BHT[..., None] - sum_BHT[..., None, :]
    return forgetting_BHTT if bias is None else bias + forgetting_BHTT


class SelfAttention(Attention):
    """Attention within a sequence."""

    def __init__(self, D: int, **options: Any) -> None:
        super().__init__(D, None, **options)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)


@block(
    "memory_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where={**WHERE, "memory >= 1": "there is at least one learned key"},
    source="Sukhbaatar et al. 2019, section 3, persistent vectors",
)
class MemoryAttention(Attention):
    """Attention that also attends to `memory` learned keys and values of each head: x_BTD, kv_BSE -> x_BTD.

    They have no position, and each query sees all. They are initialised from N(0, 1 / K), for K the width of a key or
    value. The reported attention weights leave them out and are renormalised.

    Also known as: persistent memory, memory key-values, all-attention.
    Use: knowledge that does not depend on the sequence.
    """

    weight_roles: ClassVar = {"memory_k": "position", "memory_v": "position"}

    def __init__(self, D: int, E: int | None, *, memory: int = 16, **options: Any) -> None:
        super().__init__(D, E, **options)
        w = self.widths
        self.memory_k = nn.Parameter(torch.empty(w.kv_heads, memory, w.key))
        self.memory_v = nn.Parameter(torch.empty(w.kv_heads, memory, w.value))

    def initialise(self, name: str, generator: Generator) -> None:
        if name in ("memory_k", "memory_v"):
            fill_normal(self, name, generator)
        else:
            super().initialise(name, generator)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BHXK = repeat_kv(_after(self.memory_k, k_BGSK), self.widths.heads)
        masks = self._with_memory(q_BHTK, k_BGSK, masks)
        w_BHTS = dot_product_weights(q_BHTK, k_BHXK, masks, self.scores)[..., self.memory_k.shape[1] :]
        return renormalised(w_BHTS)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BGXK, v_BGXK = _after(self.memory_k, k_BGSK), _after(self.memory_v, v_BGSK)
        return super().attend(q_BHTK, k_BGXK, v_BGXK, self._with_memory(q_BHTK, k_BGSK, masks))

    def _with_memory(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> AttentionMask:
        """Return the mask as one bias of the keys, before which the learned keys have the bias 0."""
        bias = masks.masked_bias(q_BHTK, k_BGSK)
        return AttentionMask() if bias is None else AttentionMask(bias=F.pad(bias, (self.memory_k.shape[1], 0)))


def _after(memory_GMK: Tensor, x_BGSK: Tensor) -> Tensor:
    """Concatenate the keys or values of the memory and of the sequence: x_BG(M+S)K."""
    return torch.cat((memory_GMK.to(x_BGSK.dtype).expand(len(x_BGSK), -1, -1, -1), x_BGSK), 2)


@block(
    "talking_heads_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Shazeer et al. 2020, talking-heads attention",
)
class TalkingHeadsAttention(Attention):
    """M₂ softmax(M₁ q k^T / √K) v, where M₁ and M₂ mix heads: x_BTD, kv_BSE -> x_BTD.

    Both are initialised to the identity plus noise N(0, 0.02²). The reported attention weights are those before M₂.

    Use: heads that exchange scores and weights.
    """

    def __init__(self, D: int, E: int | None, *, heads: int, **options: Any) -> None:
        super().__init__(D, E, heads=heads, **options)
        self.mix_scores = nn.Parameter(torch.empty(heads, heads))
        self.mix_weights = nn.Parameter(torch.empty(heads, heads))

    def initialise(self, name: str, generator: Generator) -> None:
        if name in ("mix_scores", "mix_weights"):
            mix_GH = nn.init.normal_(self.get_parameter(name), std=0.02, generator=generator)
            mix_GH.diagonal().add_(1)
        else:
            super().initialise(name, generator)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BHSK = repeat_kv(k_BGSK, self.widths.heads)
        scores_BHTS = self.scores.transform(_mixed(self.mix_scores, q_BHTK @ k_BHSK.mT * self.scores.beta))
        added = masks.masked_bias(q_BHTK, k_BGSK)
        return self.scores.normalize(scores_BHTS if added is None else scores_BHTS + added).to(q_BHTK.dtype)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        w_BHTS = _mixed(self.mix_weights, self.attention_weights(q_BHTK, k_BGSK, masks))
        return F.dropout(w_BHTS, self.dropout, self.training) @ repeat_kv(v_BGSK, self.widths.heads)


def _mixed(mix_GH: Tensor, x_BHTS: Tensor) -> Tensor:
    return torch.einsum("gh,bhts->bgts", mix_GH, x_BHTS)


@block(
    "differential_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={
        **{rule: sentence for rule, sentence in WHERE.items() if "% " not in rule},
        "D % (2 * heads) == 0 unless d_head": "the width must split evenly into two maps per head",
        "2 * heads % kv_heads == 0": "the number of query maps, two per head, must be a multiple of kv_heads",
        "lambda_start >= 0": "the second attention map is subtracted",
        "lambda_start < 1": "the second attention map is subtracted at less than the weight of the first",
        "eps > 0": "a mean of squares may be 0",
    },
    source="Ye et al. 2024, section 2.1",
)
class DifferentialAttention(SelfAttention):
    """(softmax(q₁ k₁^T / √K) - λ softmax(q₂ k₂^T / √K)) v in each head, then RMSNorm, times 1 - s: x_BTD -> x_BTD.

    Each head has two attention maps of width K = D / 2H; the second cancels noise common to both. v has width 2K. The
    value projection has 2H parts of width K; the value of head h concatenates the parts h and H + h.
    λ = exp(a·b) - exp(c·d) + s with s = `lambda_start` and vectors initialised from N(0, 0.1²). The reported attention
    weights belong to 2H maps: first the first map of every head, then the second.

    Also known as: Differential Transformer, DIFF attention.
    Use: heads that subtract common noise.
    """

    maps = 2
    weight_roles: ClassVar = {"lambdas": "gain"}
    width_rules: ClassVar = {"lambdas": "λ depends on products of vectors whose length is the width of a head"}

    def __init__(self, D: int, *, heads: int, lambda_start: float = 0.8, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(D, heads=2 * heads, **options)
        self.lambda_start, self.eps = lambda_start, eps
        self.lambdas = nn.Parameter(torch.empty(4, self.widths.key))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "lambdas":
            nn.init.normal_(self.lambdas, std=0.1, generator=generator)
        else:
            super().initialise(name, generator)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        return weighed_attention(q_BHTK, k_BGSK, one_hot_values(k_BGSK), masks, self.scores)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        v_BHSK = torch.cat(repeat_kv(v_BGSK, self.widths.heads).chunk(2, 1), 3).repeat(1, 2, 1, 1)
        first_BHTK, second_BHTK = super().attend(q_BHTK, k_BGSK, v_BHSK, masks).chunk(2, 1)
        a, b, c, d = self.lambdas
        factor = torch.exp(a @ b) - torch.exp(c @ d) + self.lambda_start
        y_BHTK = first_BHTK - factor.to(first_BHTK.dtype) * second_BHTK
        return F.rms_norm(y_BHTK, y_BHTK.shape[-1:], eps=self.eps) * (1 - self.lambda_start)
