"""Readable equivalents of layers and functions that are optimised for speed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.embedding import Unembed
from tfm_blocks.blocks.layers.banded import windows
from tfm_blocks.blocks.layers.expert_linear import grouped_product
from tfm_blocks.blocks.layers.linear import Dropout, Linear
from tfm_blocks.blocks.norm import LayerNorm, RMSNorm
from tfm_blocks.exchange.eject.values import CannotEjectError


def _dropout(layer: Dropout, x: Tensor) -> Tensor:
    return x if layer.rate == 0 else F.dropout(x, layer.rate, layer.training)


def _grouped_product(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    rows_E = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([x @ weight_OI.T for x, weight_OI in zip(torch.split(x_RI, rows_E), weight_EOI, strict=True)])


def _windows(x_BHTK: Tensor, block: int, reach: tuple[int, int]) -> Tensor:
    before, after = reach
    missing = -x_BHTK.shape[2] % block
    x_BHLK = F.pad(x_BHTK, (0, 0, before, missing + after))
    return x_BHLK.unfold(2, before + block + after, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


PLAIN: dict[int, Callable[..., Tensor]] = {  # by the identity of the function
    id(Dropout.forward): _dropout,
    id(grouped_product): _grouped_product,
    id(windows): _windows,
}
FORWARDS = (Linear.forward, LayerNorm.forward, RMSNorm.forward)  # compute the same as torch's


def is_leaf(module: nn.Module) -> bool:
    """Return True if the module computes the same as a layer of torch."""
    plain = isinstance(module, Unembed) and type(module).forward is Unembed.forward and not module.first_id
    return plain or type(module).forward in FORWARDS or type(module).__module__.startswith("torch.nn.modules")


def constructor(module: nn.Module) -> str:
    """Return the expression that constructs the torch layer. Raises CannotEjectError for another layer."""
    if isinstance(module, nn.Linear):
        bias = "" if module.bias is not None else ", bias=False"
        return f"nn.Linear({module.in_features}, {module.out_features}{bias})"
    if isinstance(module, nn.LayerNorm):
        options = "" if module.eps == 1e-5 else f", eps={module.eps}"
        options += "" if module.bias is not None else ", bias=False"
        return f"nn.LayerNorm({module.normalized_shape[0]}{options})"
    if isinstance(module, nn.RMSNorm):
        return f"nn.RMSNorm({module.normalized_shape[0]}, eps={module.eps})"
    raise CannotEjectError(f"the layer torch.nn.{type(module).__name__} is not supported")
