"""Mixtures of experts: many feed-forward networks; a few of them process each position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.feedforward import RELU, SILU, WIDTH, FeedForward, GatedFeedForward
from tfm_blocks.blocks.layers.expert_linear import BiasedExpertLinear, ExpertLinear
from tfm_blocks.blocks.layers.linear import Dropout, Linear
from tfm_blocks.blocks.layers.state import mean_of_kept
from tfm_blocks.blocks.routing import TINY, Routing
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Part, Rate, Router

SOFTMAX_ROUTER = Part("softmax_router")
BIASED_ROUTER = Part("biased_softmax_router")
QUICK_GELU = Part("quick_gelu")
SIGNATURE = "x: B T D -> B T D, loss"
ROUTED = {
    **WIDTH,
    "experts >= 1": "there is at least one expert",
    "top_k >= 1": "a position goes through at least one expert",
    "top_k <= experts": "a position goes through no expert twice",
    "top_k > renormalise": "the renormalised weight of one expert alone is always 1, so no choice could be learned",
    "balance >= 0": "a loss for balance is not below 0",
}
RULES = {**ROUTED, "shared >= 0": "there cannot be fewer than no shared experts"}


class Choice(NamedTuple):
    """The experts of each position: p_BTE, weights that sum to 1, and the indices and weights of the K chosen ones."""

    p_BTE: Tensor
    chosen_BTK: Tensor
    weight_BTK: Tensor


class ExpertRouter(nn.Module):
    """Choose the `top_k` experts with the highest scores of `routing`, from the logits W x: x_BTD -> Choice."""

    weight_roles: ClassVar = {"map.weight": "router"}

    def __init__(self, D: int, *, experts: int, top_k: int, renormalise: bool, routing: Part) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalise = renormalise
        self.map = Linear(D, experts, bias=False)
        self.routing: Routing = REGISTRY.make(routing, experts)
        if top_k > self.routing.candidates:
            raise ValueError(
                f"top_k must be at most the {self.routing.candidates} experts of top_groups groups, but is {top_k}"
            )

    def forward(self, x_BTD: Tensor) -> Choice:
        z_BTE: Tensor = self.map(x_BTD)
        p_BTE = self.routing.weights(z_BTE)
        chosen_BTK = self.routing.restrict(self.routing.scores(p_BTE)).topk(self.top_k, 2).indices
        weight_BTK = p_BTE.gather(2, chosen_BTK)
        if self.renormalise:
            weight_BTK = weight_BTK / (weight_BTK.sum(2, keepdim=True) + TINY)
        return Choice(self.routing.probabilities(p_BTE), chosen_BTK, weight_BTK * self.routing.scale)


def imbalance(choice: Choice, fraction_BE: Tensor, keep_BT: Tensor) -> Tensor:
    """Return the balance loss E Σ_e f_e P_e of each sequence: loss_B.

    f_e is `fraction_BE`, P_e the mean probability of expert e at the sequence's kept positions. Equal fractions give 1;
    choosing always the same expert gives E. The loss of a sequence does not depend on other sequences of the batch.
    Source: Dai et al. 2024, equations 12 to 14.
    """
    return fraction_BE.shape[1] * (fraction_BE * mean_of_kept(choice.p_BTE, keep_BT)).sum(1)


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


class Experts(nn.Module):
    """f(x W1) W2 with separate weights for each expert, on rows sorted by expert: x_RD, ends_E -> x_RD."""

    def __init__(self, D: int, *, d_ff: int, experts: int, activation: Activation, activation_dropout: Rate) -> None:
        super().__init__()
        self.inner = ExpertLinear(experts, D, d_ff, depth_scaled=(0,))
        self.out = ExpertLinear(experts, d_ff, D, depth_scaled=(0,))
        self.activation: nn.Module = REGISTRY.make(activation, d_ff)
        self.dropout = Dropout(activation_dropout)

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        y_RD: Tensor = self.out(self.dropout(self.between(self.inner(x_RD, ends_E))), ends_E)
        return y_RD

    def between(self, x_RF: Tensor) -> Tensor:
        return self.activation(x_RF[None])[0]  # type: ignore[no-any-return]


class GatedExperts(Experts):
    """(f(x W1) ⊙ (x V)) W2; W1 and V are the two halves of a single map."""

    def __init__(self, D: int, *, d_ff: int, experts: int, **options: Any) -> None:
        super().__init__(D, d_ff=d_ff, experts=experts, **options)
        self.inner = ExpertLinear(experts, D, 2 * d_ff, parts=2, depth_scaled=(1,))

    def between(self, x_RF: Tensor) -> Tensor:
        gate_RF, x_RF = x_RF.chunk(2, 1)
        return super().between(gate_RF) * x_RF


class ClampedExperts(GatedExperts):
    """(f(min(x W1 + b1, l)) ⊙ (clamp(x V + c, -l, l) + 1)) W2 + b2 with the `limit` l."""

    def __init__(self, D: int, *, d_ff: int, experts: int, limit: float, **options: Any) -> None:
        super().__init__(D, d_ff=d_ff, experts=experts, **options)
        self.inner = BiasedExpertLinear(experts, D, 2 * d_ff, parts=2, depth_scaled=(1,))
        self.out = BiasedExpertLinear(experts, d_ff, D, depth_scaled=(0,))
        self.limit = limit

    def between(self, x_RF: Tensor) -> Tensor:
        gate_RF, x_RF = x_RF.chunk(2, 1)
        return Experts.between(self, gate_RF.clamp(max=self.limit)) * (x_RF.clamp(-self.limit, self.limit) + 1)


class SharedExpert(GatedFeedForward):
    """σ(w · x) times the output of a `gated_ffn`: x_BTD -> x_BTD."""

    weight_roles: ClassVar = {"gate.weight": "router"}

    def __init__(self, D: int, **options: Any) -> None:
        super().__init__(D, **options)
        self.gate = Linear(D, 1, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x_BTD)) * super().forward(x_BTD)


class Mixture(nn.Module):
    """A router, experts, and a shared expert for every position, with `shared` times the width of an expert.

    `expert` and `always` construct them. Subclasses pass on the keyword-only arguments.
    """

    def __init__(
        self,
        D: int,
        expert: Callable[..., Experts],
        always: Callable[..., nn.Module],
        shared: int,
        *,
        d_ff: int,
        experts: int,
        top_k: int = 2,
        router: Router = SOFTMAX_ROUTER,
        renormalise: bool = True,
        balance: float = 0.01,
        activation: Activation = SILU,
        activation_dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        inner: dict[str, Any] = {"activation": activation, "activation_dropout": activation_dropout}
        self.router = ExpertRouter(D, experts=experts, top_k=top_k, renormalise=renormalise, routing=router)
        self.experts = expert(D, d_ff=d_ff, experts=experts, **inner)
        self.shared = always(D, d_ff=shared * d_ff, bias=False, **inner) if shared else None
        self.balance = balance

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> tuple[Tensor, Tensor]:
        choice = self.router(x_BTD)
        y_BTD = through_experts(self.experts, x_BTD, choice)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        times_BTE = F.one_hot(choice.chosen_BTK, choice.p_BTE.shape[2]).sum(2)
        fraction_BE = mean_of_kept(times_BTE.to(choice.p_BTE.dtype), keep_BT) / choice.chosen_BTK.shape[2]
        loss_B = imbalance(choice, fraction_BE, keep_BT) + self.router.routing.balancing(fraction_BE)
        return y_BTD, self.balance * loss_B


@block(
    "moe",
    SIGNATURE,
    branch=True,
    where=RULES,
    source="Fedus et al. 2022, equations 1, 2 and 4 to 6; Shazeer et al. 2017",
)
class MixtureOfExperts(Mixture):
    """Σ p_e(x) · ffn_e(x) over the `top_k` chosen of `experts` feed-forward networks: x_BTD -> x_BTD, loss_B.

    `router` computes p from the logits W x and chooses the experts; by default p = softmax(W x), and the experts with
    the largest p are chosen. With `renormalise` the weights of the chosen experts sum to 1, which is a softmax after
    the choice (Shazeer et al. 2017, Mixtral); without, they come from a softmax before it (Switch, DeepSeekMoE). Every
    position also passes through `shared` experts, a feed-forward network of `shared` times the width. The maps have no
    biases. No position is dropped. The loss is `balance` times E Σ f_e P_e for each sequence, without its padding: f_e
    is the fraction of the choices of expert e and P_e its mean probability.

    Also known as: mixture of experts, MoE, sparse MoE.
    Use: more parameters at the arithmetic of `top_k` experts.
    Cost: 2 · top_k · d · d_ff multiply-adds for each position, and the same for each shared expert.
    Example: experts: 8
    """

    def __init__(self, D: int, *, shared: int = 0, activation: Activation = RELU, **options: Any) -> None:
        super().__init__(D, Experts, FeedForward, shared, activation=activation, **options)


@block(
    "gated_moe", SIGNATURE, branch=True, where=RULES, source="Jiang et al. 2024 (Mixtral), section 2.1; Dai et al. 2024"
)
class GatedMixtureOfExperts(Mixture):
    """`moe` with gated experts, as in `gated_ffn`: x_BTD -> x_BTD, loss_B.

    Also known as: sparse MoE with SwiGLU experts.
    Use: Mixtral, DeepSeek-V2 and V3, OLMoE.
    Cost: 3 · top_k · d · d_ff multiply-adds for each position, and the same for each shared expert.
    Example: experts: 8
    """

    def __init__(self, D: int, *, shared: int = 0, **options: Any) -> None:
        super().__init__(D, GatedExperts, GatedFeedForward, shared, **options)


@block(
    "shared_gate_moe",
    SIGNATURE,
    branch=True,
    where={**ROUTED, "shared >= 1": "the gate needs a shared expert"},
    source="Qwen Team 2024 (Qwen1.5-MoE), the shared expert of the published code",
)
class SharedGateMixtureOfExperts(Mixture):
    """`gated_moe` with the output of the shared experts multiplied by σ(w · x): x_BTD -> x_BTD, loss_B.

    Use: weights of Qwen2-MoE.
    Cost: as `gated_moe`, and d multiply-adds for the gate.
    Example: experts: 8
    """

    def __init__(self, D: int, *, shared: int = 1, **options: Any) -> None:
        super().__init__(D, GatedExperts, SharedExpert, shared, **options)


@block(
    "clamped_moe",
    SIGNATURE,
    branch=True,
    where={**ROUTED, "limit > 0": "values are clamped to a range around 0"},
    source="OpenAI 2025 (gpt-oss), section 2.2, and the published code",
)
class ClampedMixtureOfExperts(Mixture):
    """`gated_moe` with biases, and with values clamped before the gate: x_BTD -> x_BTD, loss_B.

    An expert is (f(min(x W1 + b1, l)) ⊙ (clamp(x V + c, -l, l) + 1)) W2 + b2, where l is `limit`. There is no shared
    expert. The router has biases too.

    Use: weights of gpt-oss.
    Cost: as `gated_moe`.
    Example: experts: 8
    """

    def __init__(
        self,
        D: int,
        *,
        limit: float = 7.0,
        router: Router = BIASED_ROUTER,
        activation: Activation = QUICK_GELU,
        **options: Any,
    ) -> None:
        expert = partial(ClampedExperts, limit=limit)
        super().__init__(D, expert, GatedFeedForward, 0, router=router, activation=activation, **options)
