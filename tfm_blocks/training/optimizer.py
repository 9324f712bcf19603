"""Build Adam or AdamW with torch's fused kernel."""

from __future__ import annotations

from torch import nn
from torch.optim import Adam, AdamW

from tfm_blocks.training.settings import AdamWSettings, OptimizerSettings


def build_optimizer(settings: OptimizerSettings, network: nn.Module) -> Adam:
    """Return the optimizer with a learning rate of 1, which the schedule sets in each step.

    Weight decay applies to matrices, and not to biases and gains, which have one axis.
    """
    parameters = list(network.parameters())
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    beta1, beta2 = settings.betas
    kind = AdamW if isinstance(settings, AdamWSettings) else Adam
    return kind([group for group in groups if group["params"]], 1.0, (beta1, beta2), settings.eps, fused=True)
