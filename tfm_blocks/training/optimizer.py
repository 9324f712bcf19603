"""Adam and AdamW in one fused kernel."""

from __future__ import annotations

from torch import nn
from torch.optim import Adam, AdamW

from tfm_blocks.training.settings import AdamWSettings, OptimizerSettings


def build_optimizer(settings: OptimizerSettings, network: nn.Module) -> Adam:
    """Each step sets the learning rate that the schedule says. Biases and gains, having one axis, are not decayed."""
    parameters = list(network.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    beta1, beta2 = settings.betas
    kind = AdamW if isinstance(settings, AdamWSettings) else Adam
    return kind([group for group in groups if group["params"]], 1.0, (beta1, beta2), settings.eps, fused=True)
