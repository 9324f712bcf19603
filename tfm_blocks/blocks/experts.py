"""Mixtures of experts: many feed-forward networks; a few of them process each position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.activation import RELU
from tfm_blocks.blocks.feedforward import WIDTH, FeedForward, GatedFeedForward
from tfm_blocks.blocks.layers.expert_linear import BiasedExpertLinear, ExpertLinear
from tfm_blocks.blocks.layers.linear import Dropout, Linear
from tfm_blocks.blocks.layers.state import mean_of_kept
from tfm_blocks.blocks.routing import TINY, Routing
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Norm, Part, Rate, Router

SOFTMAX_ROUTER = Part("softmax_router")
EXPERTS = {
    **WIDTH,
    "experts >= 1": "there is at least one expert",
    "shared >= 0": "there cannot be fewer than no shared experts",
    "shared >= shared_gate": "the gate needs a shared expert",
    "limit > 0": "values are clamped to a range around 0",
    "limit * gated == limit": "the limit is for both halves of gated experts",
    "offset * gated == offset": "the offset is added to the second half of gated experts",
}
ROUTED = {
    "top_k >= 1": "a position goes through at least one expert",
    "top_k <= experts": "a position goes through no expert twice",
}


class Choice(NamedTuple):
    """The experts of each position: p_BTE, weights that sum to 1, and the indices and weights of the K chosen ones."""

    p_BTE: Tensor
    chosen_BTK: Tensor
    weight_BTK: Tensor


class ExpertRouter(nn.Module):
    """Choose the `top_k` experts with the highest scores of `routing`, from the logits W norm(x): x_BTD -> Choice."""

    weight_roles: ClassVar = {"map.weight": "router"}

    def __init__(
        self, D: int, *, experts: int, top_k: int, renormalise: bool, routing: Part, norm: Part | None = None
    ) -> None:
        super().__init__()
        self.norm: nn.Module | None = REGISTRY.make(norm, D)
        self.top_k = top_k
        self.renormalise = renormalise
        self.map = Linear(D, experts, bias=False)
        self.routing: Routing = REGISTRY.make(routing, experts, kinds=(Routing,))
        if top_k > self.routing.candidates:
            raise ValueError(
                f"top_k must be at most the {self.routing.candidates} experts of top_groups groups, but is {top_k}"
            )

    def forward(self, x_BTD: Tensor) -> Choice:
        p_BTE = self.probabilities(x_BTD)
        return self.weigh(p_BTE, self.routing.restrict(self.routing.scores(p_BTE)).topk(self.top_k, 2).indices)

    def probabilities(self, x_BTD: Tensor) -> Tensor:
        """Return the weight that each expert has if it is chosen: p_BTE."""
        z_BTE: Tensor = self.map(x_BTD if self.norm is None else self.norm(x_BTD))
        return self.routing.weights(z_BTE)

    def weigh(self, p_BTE: Tensor, chosen_BTK: Tensor) -> Choice:
        """Return the weights of the chosen experts."""
        weight_BTK = p_BTE.gather(2, chosen_BTK)
        if self.renormalise:
            weight_BTK = weight_BTK / (weight_BTK.sum(2, keepdim=True) + TINY)
        return Choice(self.routing.probabilities(p_BTE), chosen_BTK, self.routing.rescale(weight_BTK, chosen_BTK))


def through_experts(experts: nn.Module, x_BTD: Tensor, choice: Choice) -> Tensor:
    """Compute Σ_k weight_k · expert_k(x) at each position: y_BTD. `experts` maps rows sorted by expert.

    No position is dropped, and every shape is static.
    """
    B, T, D = x_BTD.shape
    K = choice.chosen_BTK.shape[2]
    expert_R, order_R = choice.chosen_BTK.flatten().sort(stable=True)
    all_E = torch.arange(choice.p_BTE.shape[2], device=x_BTD.device)
    ends_E = torch.searchsorted(expert_R, all_E, right=True)
    y_RD = experts(x_BTD.reshape(B * T, D).index_select(0, order_R // K), ends_E)
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(B * T * K, device=x_BTD.device))
    y_BTKD: Tensor = y_RD.index_select(0, back_R).view(B, T, K, D)
    return (y_BTKD * choice.weight_BTK[..., None].to(y_BTKD.dtype)).sum(2)


def gate_halves(activation: nn.Module, x_NF: Tensor, limit: float | None, offset: float) -> Tensor:
    """Compute f(a) ⊙ (b + offset) of the halves a and b of each row: x_N(2F) -> x_NF.

    With a `limit` l, a is at most l, and b lies between -l and l.
    """
    gate_NF, x_NF = x_NF.chunk(2, -1)
    if limit is not None:
        gate_NF, x_NF = gate_NF.clamp(max=limit), x_NF.clamp(-limit, limit)
    y_NF: Tensor = activation(gate_NF)
    return y_NF * (x_NF + offset if offset else x_NF)


class Experts(nn.Module):
    """f(x W1 + b1) W2 + b2 with separate weights for each expert, on rows sorted by expert: x_RD, ends_E -> x_RD.

    With `gated`, (f(x W1 + b1) ⊙ (x V + c)) W2 + b2 as in `gate_halves`; W1 and V are the halves of a single map.
    """

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        experts: int,
        gated: bool,
        bias: bool,
        limit: float | None,
        offset: float,
        activation: Activation,
        activation_dropout: Rate,
    ) -> None:
        super().__init__()
        maps = 2 if gated else 1  # from the input to the inner width
        linear = BiasedExpertLinear if bias else ExpertLinear
        self.inner = linear(experts, D, maps * d_ff, parts=maps, depth_scaled=(maps - 1,))
        self.out = linear(experts, d_ff, D, depth_scaled=(0,))
        self.gated, self.limit, self.offset = gated, limit, offset
        self.activation: nn.Module = REGISTRY.make(activation, d_ff)
        self.dropout = Dropout(activation_dropout)

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        inner_1RF = self.between(self.inner(x_RD, ends_E)[None])  # activations expect a batch
        y_RD: Tensor = self.out(self.dropout(inner_1RF[0]), ends_E)
        return y_RD

    def between(self, x_1RF: Tensor) -> Tensor:
        if self.gated:
            return gate_halves(self.activation, x_1RF, self.limit, self.offset)
        return self.activation(x_1RF)  # type: ignore[no-any-return]


class GatedSharedExpert(GatedFeedForward):
    """`gated_ffn` with the `limit` and `offset` of gated experts: x_BTD -> x_BTD."""

    def __init__(self, D: int, *, limit: float | None, offset: float, **options: Any) -> None:
        super().__init__(D, **options)
        self.limit, self.offset = limit, offset

    def between(self, x_BTF: Tensor) -> Tensor:
        return gate_halves(self.activation, x_BTF, self.limit, self.offset)


class Mixture(nn.Module):
    """Experts, and a shared expert for every position, with `shared` times the width of an expert."""

    weight_roles: ClassVar = {"shared_gate.weight": "router"}

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        experts: int,
        gated: bool = False,
        activation: Activation = RELU,
        activation_dropout: Rate = 0.0,
        bias: bool = False,
        limit: float | None = None,
        offset: float = 0.0,
        shared: int = 0,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        inner: dict[str, Any] = {"activation": activation, "activation_dropout": activation_dropout, "bias": bias}
        clamp: dict[str, Any] = {"limit": limit, "offset": offset}
        kind: Callable[..., nn.Module] = partial(GatedSharedExpert, **clamp) if gated else FeedForward
        self.experts = Experts(D, d_ff=d_ff, experts=experts, gated=gated, **clamp, **inner)
        self.shared = kind(D, d_ff=shared * d_ff, **inner) if shared else None
        self.shared_gate = Linear(D, 1, bias=False) if shared_gate else None

    def add_shared(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        """Add the output of the shared expert for x, if there is one."""
        if self.shared is None:
            return y_BTD
        shared_BTD: Tensor = self.shared(x_BTD)
        return y_BTD + (shared_BTD if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_BTD)) * shared_BTD)


class RoutedMixture(Mixture):
    """Experts whose weights a router computes, from x or from a vector of width R: each position has `top_k`."""

    def __init__(
        self,
        D: int,
        R: int | None = None,
        *,
        experts: int,
        top_k: int = 2,
        router: Router = SOFTMAX_ROUTER,
        router_norm: Norm | None = None,
        renormalise: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(D, experts=experts, **options)
        self.router = ExpertRouter(
            R or D, experts=experts, top_k=top_k, renormalise=renormalise, routing=router, norm=router_norm
        )


@block(
    "moe",
    "x: B T D, routed_by?: B T R -> B T D, loss",
    branch=True,
    where={
        **EXPERTS,
        **ROUTED,
        "top_k > renormalise": "the renormalised weight of one expert alone is always 1, so no choice could be learned",
        "balance >= 0": "a loss for balance is not below 0",
    },
    source="Fedus et al. 2022, equations 1, 2 and 4 to 6; Shazeer et al. 2017; with shared experts, Dai et al. 2024",
)
class MixtureOfExperts(RoutedMixture):
    """Σ p_e(x) · ffn_e(x) over the `top_k` chosen of `experts` feed-forward networks: x_BTD -> x_BTD, loss_B.

    `router` computes p from the logits W x and chooses the experts; by default p = softmax(W x), and the experts with
    the largest p are chosen. With `router_norm` the logits are W norm(x), while the experts read x; with the port
    `routed_by` they are computed from its vector instead (Gemma 4, which routes by the residual). With `renormalise`
    the weights of the chosen experts sum to 1, which is a softmax after the choice (Shazeer et al. 2017, Mixtral);
    without, they come from a softmax before it (Switch, DeepSeekMoE). No position is dropped. The loss is `balance`
    times E Σ f_e P_e for each sequence, without its padding: f_e is the fraction of the choices of expert e and P_e its
    mean probability.

    An expert is an `ffn` with this `activation` f, or with `gated` a `gated_ffn`: (f(x W1) ⊙ (x V)) W2. With `bias` the
    maps of experts have biases. With a `limit` l, gated experts compute (f(min(x W1, l)) ⊙ (clamp(x V, -l, l) + o)) W2,
    where o is `offset`. Every position also passes through `shared` experts, which are one such network of `shared`
    times the width; with `shared_gate` its output is multiplied by σ(w · x).

    Also known as: mixture of experts, MoE, sparse MoE.
    Use: more parameters at the arithmetic of `top_k` experts. `gated: true` with `activation: silu` are the SwiGLU
    experts of Mixtral, DeepSeek-V2 and V3 and OLMoE; with `shared_gate`, Qwen2-MoE; with a `limit`, DeepSeek-V4.
    `bias: true` are the experts of NLLB-MoE. With `gated: true`, `bias: true`, `limit: 7.0`, `offset: 1.0`,
    `activation: quick_gelu` and `router: biased_softmax_router`, they are the experts of gpt-oss.
    Cost: 2 · (top_k + shared) · d · d_ff multiply-adds for each position; with `gated`, 3 instead of 2.
    Example: experts: 8
    """

    def __init__(self, D: int, R: int | None = None, *, balance: float = 0.01, **options: Any) -> None:
        super().__init__(D, R, **options)
        self.balance = balance

    def forward(self, x_BTD: Tensor, routed_by_BTR: Tensor | None = None, *, keep_BT: Tensor) -> tuple[Tensor, Tensor]:
        choice = self.router(x_BTD if routed_by_BTR is None else routed_by_BTR)
        y_BTD = self.add_shared(through_experts(self.experts, x_BTD, choice), x_BTD)
        times_BTE = F.one_hot(choice.chosen_BTK, choice.p_BTE.shape[2]).sum(2)
        fraction_BE = mean_of_kept(times_BTE.to(choice.p_BTE.dtype), keep_BT) / choice.chosen_BTK.shape[2]
        # E Σ_e f_e P_e of each sequence, independent of the other sequences (Dai et al. 2024, equations 12 to 14):
        # equal fractions f_e give 1, and choosing always the same expert gives E
        loss_B = fraction_BE.shape[1] * (fraction_BE * mean_of_kept(choice.p_BTE, keep_BT)).sum(1)
        return y_BTD, self.balance * (loss_B + self.router.routing.balancing(fraction_BE))


@block(
    "hash_moe",
    "x: B T D, ids: ids B T -> B T D",
    branch=True,
    where={
        **EXPERTS,
        **ROUTED,
        "vocab >= 1": "each token id has experts",
        "hash_seed >= 0": "tables are numbered from 0",
    },
    source="Roller et al. 2021 (arXiv 2106.04426), section 3; DeepSeek-AI 2026 (DeepSeek-V4), section 2.1",
)
class HashMixture(RoutedMixture):
    """`moe` whose experts are chosen by the token id of a position: x_BTD, ids_BT -> x_BTD.

    A table that is not trained has the `top_k` experts of each of `vocab` ids; initially they come from a hash of the
    id and of `hash_seed`, so layers with different `hash_seed` have different tables. The weights of the chosen experts
    are p of the `router`, which chooses nothing: it has neither a `correction` nor `top_groups` below `groups`. No loss
    for balance is needed.

    Also known as: hash layers, hash routing.
    Use: the first layers of DeepSeek-V4, with `router: {block: sqrt_softplus_router, correction: false}`.
    Cost: as `moe`.
    Example: experts: 8
    """

    def __init__(self, D: int, *, vocab: int, experts: int, top_k: int = 2, hash_seed: int = 0, **options: Any) -> None:
        super().__init__(D, experts=experts, top_k=top_k, **options)
        routing = self.router.routing
        if routing.correction is not None or routing.candidates < experts:
            raise ValueError("the router of hash_moe chooses nothing: write correction: false, and leave groups out")
        self.experts_VK: Tensor
        self.register_buffer("experts_VK", hash_to_experts(vocab, experts, top_k, hash_seed))

    def forward(self, x_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        choice = self.router.weigh(self.router.probabilities(x_BTD), self.experts_VK[ids_BT])
        return self.add_shared(through_experts(self.experts, x_BTD, choice), x_BTD)


def hash_to_experts(vocab: int, experts: int, top_k: int, seed: int) -> Tensor:
    """Return `top_k` different experts of each token id: chosen_VK. The hash is the finalizer of MurmurHash3."""
    low = 2**32 - 1
    hash_V = (torch.arange(vocab) * 2654435761 + ((seed + 1) * 2246822519 & low)) & low
    for shift, factor in ((16, 2246822507), (13, 3266489909), (16, 1)):
        hash_V = ((hash_V ^ (hash_V >> shift)) * factor) & low
    # a stride that has no divisor in common with the number of experts visits every expert once
    strides = torch.tensor([stride for stride in range(1, experts + 1) if math.gcd(stride, experts) == 1])
    stride_V = strides[hash_V // experts % len(strides)]
    return (hash_V[:, None] + torch.arange(top_k) * stride_V[:, None]) % experts
