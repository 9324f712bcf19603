"""Category `router`: how a mixture of experts chooses and weights experts from their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.activation import sqrt_softplus
from tfm_blocks.registry.blocks import block

TINY = 1e-20  # added to a sum of weights, which may all underflow to 0
INITIAL = {"bias": 0.0, "correction": 0.0, "expert_scales": 1.0}


class Routing(nn.Module, ABC):
    """The routing of a mixture of experts: z_BTE, the logits of E experts, -> score_BTE, which selects the experts.

    The experts form `groups` of equal size, in order. Only experts of the `top_groups` best groups can be chosen; the
    score of a group is the sum of its `leaders` best scores. `routed_scale` multiplies the chosen weights, and with
    `expert_scales` also a learned factor of each expert, initially 1.

    With `correction`, a learned bias b is added to the weights for the choice alone. It balances the load: b is
    initially 0, and its gradient is the fraction of the choices of an expert minus 1 / E, as in `balancing`.
    """

    leaders = 1

    def __init__(
        self,
        E: int,
        *,
        groups: int = 1,
        top_groups: int = 1,
        routed_scale: float = 1.0,
        expert_scales: bool = False,
        correction: bool = False,
    ) -> None:
        super().__init__()
        if E % groups:
            raise ValueError(f"groups must divide the number of experts, but groups = {groups}, experts = {E}")
        self.groups, self.top_groups, self.scale = groups, top_groups, routed_scale
        self.candidates = E // groups * top_groups
        self.correction = nn.Parameter(torch.empty(E)) if correction else None
        self.expert_scales = nn.Parameter(torch.empty(E)) if expert_scales else None

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.get_parameter(name), INITIAL[name])

    @abstractmethod
    def weights(self, z_BTE: Tensor) -> Tensor:
        """Return the weight that each expert has if it is chosen: p_BTE, in float32 under any precision."""

    def scores(self, p_BTE: Tensor) -> Tensor:
        """Return the scores of experts with these weights."""
        return p_BTE if self.correction is None else p_BTE + self.correction.float()

    def probabilities(self, p_BTE: Tensor) -> Tensor:
        """Return the weights, normalised so that the weights of a position sum to 1."""
        return p_BTE

    def forward(self, z_BTE: Tensor) -> Tensor:
        return self.scores(self.weights(z_BTE))

    def restrict(self, score_BTE: Tensor) -> Tensor:
        """Set the scores outside the best groups to -inf."""
        if self.top_groups == self.groups:
            return score_BTE
        score_BTGX = torch.unflatten(score_BTE, 2, (self.groups, -1))
        group_BTG = score_BTGX.topk(min(self.leaders, score_BTGX.shape[3]), 3).values.sum(3)
        best_BTN = group_BTG.topk(self.top_groups, 2).indices
        kept_BTG = torch.zeros_like(group_BTG, dtype=torch.bool).scatter(2, best_BTN, True)
        return score_BTGX.masked_fill(~kept_BTG[..., None], -torch.inf).flatten(2)

    def rescale(self, weight_BTK: Tensor, chosen_BTK: Tensor) -> Tensor:
        """Multiply the weights of the chosen experts by their scales."""
        if self.expert_scales is not None:
            weight_BTK = weight_BTK * self.expert_scales[chosen_BTK]
        return weight_BTK * self.scale

    def balancing(self, fraction_BE: Tensor) -> Tensor:
        """Return a loss_B of value 0 whose gradient for the correction is the fraction of the choices minus 1 / E."""
        if self.correction is None:
            return fraction_BE.new_zeros(fraction_BE.shape[0])
        zero_E = self.correction - self.correction.detach()
        return (zero_E * (fraction_BE - 1 / fraction_BE.shape[1])).sum(1)


GROUPS = {
    "groups >= 1": "there is at least one group of experts",
    "top_groups >= 1": "experts come from at least one group",
    "top_groups <= groups": "there are no more groups to choose from",
    "routed_scale > 0": "weights are multiplied by a scale above 0",
}


@block(
    "softmax_router",
    "z: B T E -> B T E",
    category="router",
    where=GROUPS,
    source="Shazeer et al. 2017, section 2.1; with groups, DeepSeek-AI 2024 (DeepSeek-V2), section 2.2.2; "
    "with correction, Wang et al. 2024 (arXiv 2408.15664), algorithm 1, as in ERNIE 4.5 (Baidu 2025)",
)
class SoftmaxRouter(Routing):
    """p = softmax(z) of the experts' logits z; the experts with the largest p are chosen: z_BTE -> p_BTE.

    With `groups` and `top_groups`, only experts of the groups with the largest p are candidates. The weights of the
    chosen experts are multiplied by `routed_scale`, and with `expert_scales` by a learned factor of each expert,
    initially 1.

    With `correction`, the experts with the largest p + b are chosen, and their weights are p. b balances the load: it
    is initially 0, and its gradient is `balance` times (f - 1 / E), where f is the expert's fraction of the choices. So
    each optimizer step makes busy experts less likely. With `balance: 0` b is constant. As a node it returns p + b.

    Also known as: top-k gating.
    Use: Mixtral and most mixtures of experts; with `correction`, ERNIE 4.5; with `expert_scales`, Gemma 4.
    """

    def weights(self, z_BTE: Tensor) -> Tensor:
        return torch.softmax(z_BTE.float(), 2)


@block(
    "biased_softmax_router",
    "z: B T E -> B T E",
    category="router",
    where=GROUPS,
    source="OpenAI 2025 (gpt-oss), section 2.2",
)
class BiasedSoftmaxRouter(Routing):
    """p = softmax(z + b) with a learned bias b of each expert, initially 0; otherwise `softmax_router`: z_BTE -> p_BTE.

    Use: weights of gpt-oss; NLLB-MoE with a bias of the router.
    """

    def __init__(self, E: int, **options: Any) -> None:
        super().__init__(E, **options)
        self.bias = nn.Parameter(torch.empty(E))

    def weights(self, z_BTE: Tensor) -> Tensor:
        return torch.softmax((z_BTE + self.bias).float(), 2)


@block(
    "sigmoid_router",
    "z: B T E -> B T E",
    category="router",
    where=GROUPS,
    source="DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2, equations 12 to 16; Wang et al. 2024",
)
class SigmoidRouter(Routing):
    """s = σ(z); the experts with the largest s + b are chosen, and their weights are s: z_BTE -> p_BTE.

    b is the `correction` of `softmax_router`; with `correction: false` there is none. The score of a group is the sum
    of its two best s + b; the other arguments are as in `softmax_router`. As a node it returns s + b.

    Use: DeepSeek-V3.
    """

    leaders = 2

    def __init__(self, E: int, *, correction: bool = True, **options: Any) -> None:
        super().__init__(E, correction=correction, **options)

    def weights(self, z_BTE: Tensor) -> Tensor:
        return torch.sigmoid(z_BTE.float())

    def probabilities(self, p_BTE: Tensor) -> Tensor:
        return p_BTE / (p_BTE.sum(2, keepdim=True) + TINY)


@block(
    "sqrt_softplus_router",
    "z: B T E -> B T E",
    category="router",
    where=GROUPS,
    source="DeepSeek-AI 2026 (DeepSeek-V4), section 2.1, and the published code",
)
class SqrtSoftplusRouter(SigmoidRouter):
    """`sigmoid_router` with s = √(log(1 + exp(z))): z_BTE -> p_BTE.

    Use: DeepSeek-V4.
    """

    def weights(self, z_BTE: Tensor) -> Tensor:
        return sqrt_softplus(z_BTE.float())
