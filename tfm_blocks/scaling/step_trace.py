"""Run a training step without data or memory, and count its multiply-adds, its memory traffic and its live bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from tfm_blocks.data.layout import Batch
from tfm_blocks.language.spec import Axis, Spec
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.call import Values
from tfm_blocks.network.graph import Network
from tfm_blocks.training.loss import Objective

SMOOTHING = 0.1  # any value above 0 has the same cost
aten = torch.ops.aten
FLOPS = {  # FlopCounterMode counts CUDA's fused attention, and not the CPU's
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
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


@dataclass(frozen=True)
class Batching:
    """The rows of a micro-batch, the tokens of each sequence axis, and the tokens of a row. No token is padding."""

    rows: int
    lengths: Mapping[str, int]
    row_tokens: int


@dataclass(frozen=True)
class StepTrace:
    """The counts of a forward and backward pass of one micro-batch on one device, in multiply-adds and bytes.

    `kept` are the bytes that the forward pass of the trunk leaves for the backward pass. `peak` are all live bytes
    at their maximum, with the weights and the gradients that exist then. `peak_besides` is the maximum without them.
    """

    multiply_adds: int
    traffic: int
    kept: int
    peak: int
    peak_besides: int


def trace_step(
    spec: Spec, batching: Batching, *, device: Literal["cpu", "cuda"], bf16: bool, recomputes: bool
) -> StepTrace:
    """Trace the pass that training runs, in float32 or under autocast to bfloat16.

    On `cpu` it counts the tensors of the CPU's kernels. On `cuda` it counts the tensors of CUDA's kernels, which run on
    the meta device; no CUDA device is needed.
    """
    counter = _Counter()
    place = "cpu" if device == "cpu" else "meta"
    with FakeTensorMode() if device == "cpu" else CudaKernels(), counter:
        network = network_without_values(spec, place).train()
        network.recomputes = recomputes
        counter.follow_gradients(network)
        before = counter.live
        batch = _batch(network, batching, place)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            kept, loss = _forward(network, batch, counter)
            _backward(loss)
    return StepTrace(counter.flops // 2, counter.traffic, kept - before, counter.peak, counter.peak_besides)


def _forward(network: Network, batch: Batch, counter: _Counter) -> tuple[int, Tensor]:
    """Return the live bytes after the trunk, and the loss. The head computes its gradients with the loss."""
    kept = []

    def trunk(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Values]:
        output = network.trunk_with_losses(inputs)
        kept.append(counter.live)
        return output

    loss, _ = Objective(network, SMOOTHING, trunk).loss(batch)
    return kept[0], loss


def _backward(loss: Tensor) -> None:
    """Run `loss.backward()`, which itself would disable CudaKernels for the layers that it recomputes."""
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _batch(network: Network, batching: Batching, device: str) -> Batch:
    """Return a batch whose every position is predicted."""
    sizes = {"B": batching.rows, **batching.lengths}
    inputs = {}
    for input in network.spec.inputs:
        shape = [sizes.get(axis.name, batching.rows) if isinstance(axis, Axis) else axis for axis in input.shape]
        dtype = torch.int64 if input.tokens else torch.float32
        inputs[input.name] = torch.ones(shape, dtype=dtype, device=device)
    exit = network.spec.nodes[-1].shape[1]
    length = batching.lengths[exit.name] if isinstance(exit, Axis) else exit
    labels_BT = torch.ones(batching.rows, length, dtype=torch.int64, device=device)
    return Batch(inputs, labels_BT, torch.ones(labels_BT.numel(), dtype=torch.int64, device=device))


class _Counter(TorchDispatchMode):
    """Count the multiply-adds and the traffic of operations, and the bytes of the tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.traffic = self.live = self.peak = self.peak_besides = 0
        self.weights_and_gradients = 0
        self.storages: set[int] = set()

    def follow_gradients(self, network: Network) -> None:
        """Count the weights, and each gradient from the moment when it is complete."""
        self.weights_and_gradients = sum(parameter.nbytes for parameter in network.parameters())

        def add_gradient(parameter: Tensor) -> None:
            self.weights_and_gradients += parameter.nbytes

        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(add_gradient)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # the batch has no padding: `keep.all()`
        result = function(*args, **kwargs)
        if formula := FLOPS.get(function._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)
        self._count(function, list(_tensors((args, kwargs))), list(_tensors(result)))
        return result

    def _count(self, function: Any, read: list[Tensor], written: list[Tensor]) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in read}
        fresh = [tensor for tensor in written if tensor.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self._add(tensor.untyped_storage())
        is_view = not fresh and not function._schema.is_mutable
        if not is_view and "empty" not in function.__name__:
            self.traffic += sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in (*read, *written))

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return
        self.storages.add(key)
        weakref.finalize(storage, self._remove, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.peak_besides = max(self.peak_besides, self.live - self.weights_and_gradients)

    def _remove(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.live -= size


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


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
                args, kwargs = tree_map_only(Tensor, _to_float32, (args, kwargs))
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


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


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
