"""Mixtures of experts: many feed-forward networks, of which each position goes through a few."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.feedforward import RELU, SILU, WIDTH, FeedForward, GatedFeedForward
from tfm_blocks.blocks.parts.dropout import Dropout
from tfm_blocks.blocks.parts.experts import ExpertLinear
from tfm_blocks.blocks.parts.linear import Linear
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Rate

SIGNATURE = "x: B T D -> B T D, loss"
RULES = {
    **WIDTH,
    "experts >= 1": "there is at least one expert",
    "top_k >= 1": "a position goes through at least one expert",
    "top_k <= experts": "a position goes through no expert twice",
    "top_k > renormalise": "the renormalised weight of one expert alone is always 1, so no choice could be learned",
    "shared >= 0": "there cannot be fewer than no shared experts",
    "balance >= 0": "a loss for balance is not below 0",
}


class Choice(NamedTuple):
    """The experts of each position: p_BTE of all of them, and index and weight of the chosen K."""

    p_BTE: Tensor
    chosen_BTK: Tensor
    weight_BTK: Tensor


class Router(nn.Module):
    """p = softmax(W x) over the experts, and the `top_k` largest with their weights: x_BTD -> Choice.

    The softmax is in float32 under any precision.
    """

    def __init__(self, D: int, *, experts: int, top_k: int, renormalise: bool) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalise = renormalise
        self.map = Linear(D, experts, bias=False)

    def forward(self, x_BTD: Tensor) -> Choice:
        p_BTE = torch.softmax(self.map(x_BTD).float(), 2)
        weight_BTK, chosen_BTK = p_BTE.topk(self.top_k, 2)
        if self.renormalise:
            weight_BTK = weight_BTK / weight_BTK.sum(2, keepdim=True)
        return Choice(p_BTE, chosen_BTK, weight_BTK)


def imbalance(choice: Choice, keep_BT: Tensor) -> Tensor:
    """E Σ_e f_e P_e of each sequence: loss_B.

    f_e is the share of expert e in the choices of the sequence's kept positions, P_e its mean probability there. Equal
    shares give 1, and everything through one expert E. No sequence's part depends on what else is in the batch.
    Source: Dai et al. 2024, equations 12 to 14.
    """
    experts = choice.p_BTE.shape[2]
    keep_BT1 = keep_BT[:, :, None].to(choice.p_BTE.dtype)
    kept_B1 = keep_BT1.sum(1).clamp(min=1)
    times_BTE = F.one_hot(choice.chosen_BTK, experts).sum(2)
    f_BE = (times_BTE * keep_BT1).sum(1) / (kept_B1 * choice.chosen_BTK.shape[2])
    p_BE = (choice.p_BTE * keep_BT1).sum(1) / kept_B1
    return experts * (f_BE * p_BE).sum(1)


def through_experts(experts: nn.Module, x_BTD: Tensor, choice: Choice) -> Tensor:
    """Σ_k weight_k · expert_k(x) at each position: y_BTD. `experts` maps rows in the order of their experts.

    No position is dropped, however many choose an expert, and every shape is known before the run.
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
    """f(x W1) W2 with weights of each expert's own, of rows in the order of their experts: x_RD, ends_E -> x_RD."""

    def __init__(self, D: int, *, d_ff: int, experts: int, activation: Activation, activation_dropout: Rate) -> None:
        super().__init__()
        self.inner = ExpertLinear(experts, D, d_ff, shrinks=(0,))
        self.out = ExpertLinear(experts, d_ff, D, shrinks=(0,))
        self.activation: nn.Module = REGISTRY.make(activation, d_ff)
        self.dropout = Dropout(activation_dropout)

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        y_RD: Tensor = self.out(self.dropout(self.between(self.inner(x_RD, ends_E))), ends_E)
        return y_RD

    def between(self, x_RF: Tensor) -> Tensor:
        """What happens between the two maps."""
        return self.activation(x_RF[None])[0]  # type: ignore[no-any-return]


class GatedExperts(Experts):
    """(f(x W1) ⊙ (x V)) W2; W1 and V are the halves of one map."""

    def __init__(self, D: int, *, d_ff: int, experts: int, activation: Activation, activation_dropout: Rate) -> None:
        super().__init__(D, d_ff=d_ff, experts=experts, activation=activation, activation_dropout=activation_dropout)
        self.inner = ExpertLinear(experts, D, 2 * d_ff, parts=2, shrinks=(1,))

    def between(self, x_RF: Tensor) -> Tensor:
        gate_RF, x_RF = x_RF.chunk(2, 1)
        return super().between(gate_RF) * x_RF


class Mixture(nn.Module):
    """What both mixtures share: the router, the experts, and what every position goes through."""

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None, balance: float) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.balance = balance

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> tuple[Tensor, Tensor]:
        choice = self.router(x_BTD)
        y_BTD = through_experts(self.experts, x_BTD, choice)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD, self.balance * imbalance(choice, keep_BT)


@block(
    "moe",
    SIGNATURE,
    branch=True,
    where=RULES,
    source="Fedus et al. 2022, equations 1, 2 and 4 to 6; Shazeer et al. 2017",
)
class MixtureOfExperts(Mixture):
    """Σ p_e(x) · ffn_e(x) over the `top_k` likeliest of `experts` feed-forward networks: x_BTD -> x_BTD, loss_B.

    p = softmax(W x). With `renormalise` the weights of the chosen add up to 1, which is the same as a softmax after the
    choice (Shazeer et al. 2017, Mixtral); without, they are those of a softmax before it (Switch, DeepSeekMoE). Every
    position also goes through `shared` experts, which are one feed-forward network of `shared` times the width. The
    maps have no biases. No position is dropped. The loss is `balance` times E Σ f_e P_e, with f_e the share of the
    choices that fell on expert e and P_e its mean probability, a number for each sequence, without its padding.
    """

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        experts: int,
        top_k: int = 2,
        shared: int = 0,
        renormalise: bool = True,
        balance: float = 0.01,
        activation: Activation = RELU,
        activation_dropout: Rate = 0.0,
    ) -> None:
        inner: dict[str, Any] = {"activation": activation, "activation_dropout": activation_dropout}
        super().__init__(
            Router(D, experts=experts, top_k=top_k, renormalise=renormalise),
            Experts(D, d_ff=d_ff, experts=experts, **inner),
            FeedForward(D, d_ff=shared * d_ff, bias=False, **inner) if shared else None,
            balance,
        )


@block(
    "gated_moe", SIGNATURE, branch=True, where=RULES, source="Jiang et al. 2024 (Mixtral), section 2.1; Dai et al. 2024"
)
class GatedMixtureOfExperts(Mixture):
    """As `moe`, with experts that are gated as `gated_ffn` is: x_BTD -> x_BTD, loss_B."""

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        experts: int,
        top_k: int = 2,
        shared: int = 0,
        renormalise: bool = True,
        balance: float = 0.01,
        activation: Activation = SILU,
        activation_dropout: Rate = 0.0,
    ) -> None:
        inner: dict[str, Any] = {"activation": activation, "activation_dropout": activation_dropout}
        super().__init__(
            Router(D, experts=experts, top_k=top_k, renormalise=renormalise),
            GatedExperts(D, d_ff=d_ff, experts=experts, **inner),
            GatedFeedForward(D, d_ff=shared * d_ff, bias=False, **inner) if shared else None,
            balance,
        )
