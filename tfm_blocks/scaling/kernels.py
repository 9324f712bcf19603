"""The table of kernels that a trace can count: kernels of this CPU, and of CUDA on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# torch.amp, "CUDA Op-Specific Behavior": the operations that blocks use
TO_BF16 = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d"}
)
TO_FLOAT32 = frozenset(
    {
        *("softmax", "log_softmax", "layer_norm", "group_norm", "norm", "normalize", "cosine_similarity"),
        *("exp", "expm1", "log", "log1p", "pow", "__pow__", "rsqrt", "reciprocal", "__rtruediv__"),
        *("softplus", "sum", "prod", "cumsum", "cumprod", "logsumexp"),
    }
)
FLASH_DTYPES = (torch.bfloat16, torch.float16)


class CudaKernels(TorchFunctionMode):
    """Replace dropout and attention by CUDA's kernels, and convert dtypes like autocast on CUDA.

    The meta device has no autocast. The dtypes are converted where autocast is enabled for the CPU, so that the blocks
    can disable it. As in autocast, the bfloat16 copy of a weight is kept for later operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Tensor] = {}  # by the id of the weight

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if torch.is_autocast_enabled("cpu"):
            if name in TO_BF16 or name == "scaled_dot_product_attention":
                args, kwargs = tree_map_only(Tensor, self._to_bf16, (args, kwargs))
            elif name in TO_FLOAT32:
                half = torch.bfloat16
                args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype == half else x, (args, kwargs))
        kernel: Callable[..., Any] = {"scaled_dot_product_attention": _attention, "dropout": _dropout}.get(
            name, function
        )
        return kernel(*args, **kwargs)

    def _to_bf16(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.bfloat16)
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = tensor.to(torch.bfloat16)
        return self.copies[id(tensor)]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keep a byte for each element, as the CUDA kernel does."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Run FlashAttention if its conditions hold, else the memory-efficient kernel, which takes masks and float32."""
    if attn_mask is None and q_BHTK.dtype in FLASH_DTYPES and q_BHTK.shape[-1] == v_BHSK.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q_BHTK, k_BHSK, v_BHSK, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    bias = None
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        added = torch.where(attn_mask, 0.0, -torch.inf) if is_bool else attn_mask
        bias = added.to(q_BHTK.dtype).expand(*q_BHTK.shape[:3], k_BHSK.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q_BHTK, k_BHSK, v_BHSK, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


KERNELS: dict[str, Callable[[], FakeTensorMode | CudaKernels]] = {"cpu": FakeTensorMode, "cuda": CudaKernels}
