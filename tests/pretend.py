"""A pretended accelerator: tensors on the device "pretend" have separate memory, and the CPU computes their values.

It refuses operations on tensors of two devices, and records each time the CPU would wait for a real device: values that
the host reads, results whose shape depends on values, and tensors that are sent from the host. Its random numbers come
from a generator of the device. A process that finds the entry point of `backend_folder` on its path has the device, and
nothing else, as its accelerator; PRETEND_LACKS lists operations and dtypes that the device refuses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _DummyBackendModule, _DummyDeviceGuard, _DummyPrivateUse1Hook

NAME = "pretend"
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::set_")
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select")
READS += ("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave")
CAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "scaled_dot_product_attention")


@dataclass
class Traffic:
    """The operations with which the host waited for the device or sent it a tensor."""

    reads: list[str] = field(default_factory=list)
    sends: list[str] = field(default_factory=list)


watching: list[Traffic] = []
DEVICES = int(os.environ.get("PRETEND_DEVICES", "1"))
LACKS = frozenset(filter(None, os.environ.get("PRETEND_LACKS", "").split(",")))


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Record the traffic between the host and the device."""
    watching.append(Traffic())
    try:
        yield watching[-1]
    finally:
        watching.pop()


class Pretend(Tensor):
    """A tensor on the device; `memory` is a CPU tensor that only this module reads."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> Pretend:
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, memory.shape, device=torch.device(NAME, 0), **layout)
        tensor.memory = memory
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the values with the device, as tensors of CUDA are saved."""
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (self.memory, self.dtype, f"{NAME}:0", self.requires_grad)

    def tolist(self) -> Any:
        for watched in watching:
            watched.reads.append("tolist")
        return self.memory.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # as it is without inference mode
            return func.decompose(*args, **kwargs)
        return compute(func, args, kwargs)


@torch.inference_mode(False)  # a wrapper that is an inference tensor cannot change in place
def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation on the CPU. Raises RuntimeError for tensors of two devices."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    name = func._schema.name
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if name not in COPIES and any(not isinstance(tensor, Pretend) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{name}: expected all tensors on one device, but found cpu and {NAME}")
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise RuntimeError(f"{name}: expected a generator of {NAME}, but found one of the CPU")
    _record(name, func, tensors, device)
    _expect_kernel(name, leaves, device)
    plain = [_on_cpu(leaf) for leaf in leaves]
    if torch.Tag.inplace_view in func.tags:  # the tensor of the device changes its shape too
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    args, kwargs = pytree.tree_unflatten(plain, spec)
    with _device_generator() if torch.Tag.nondeterministic_seeded in func.tags else nullcontext():
        out = FUSED.get(name, func)(*args, **kwargs)
    if out is None:  # of operations on lists, in place
        return None
    if name.endswith("_") and leaves and isinstance(leaves[0], Pretend):
        return leaves[0]
    if (device is not None and device.type == "cpu") or name == "aten::_local_scalar_dense":
        return out
    if name == "aten::copy_" and not isinstance(leaves[0], Pretend):
        return leaves[0]
    return pytree.tree_map(lambda value: Pretend(value) if isinstance(value, Tensor) else value, out)


def _expect_kernel(name: str, leaves: list[Any], device: torch.device | None) -> None:
    """Raise the errors that mps raises for what it lacks."""
    if name in LACKS:
        raise NotImplementedError(f"The operator '{name}' is not currently implemented for the {NAME} device.")
    if "float64" not in LACKS or (device is not None and device.type == "cpu"):
        return
    there = device is not None or any(isinstance(leaf, Pretend) for leaf in leaves)
    wide = torch.float64 in leaves or any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in leaves)
    if there and wide and name != "aten::copy_":
        raise TypeError(f"Cannot convert a {NAME} tensor to float64: the device does not support it")


generator = torch.Generator()


@contextmanager
def _device_generator() -> Iterator[None]:
    """Draw from the generator of the device, and leave the generator of the CPU as it is."""
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, Pretend):
        return leaf.memory
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _record(name: str, func: Any, tensors: list[Tensor], device: torch.device | None) -> None:
    there = [isinstance(tensor, Pretend) for tensor in tensors]
    masks = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
        tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]
    )
    counted = name == "aten::repeat_interleave" and "output_size" in str(func._schema) and len(tensors) < 2
    to_host = name in COPIES and there and there[-1] and (device or torch.device(NAME)).type == "cpu"
    to_host |= name == "aten::copy_" and there == [False, True]
    from_host = name in COPIES and there and not there[-1] and (device is None or device.type == NAME)
    for watched in watching:
        if (name in READS and not counted and any(there)) or masks or to_host:
            watched.reads.append(name)
        elif from_host and any(there) | (device is not None):
            watched.sends.append(name)


def _lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_cell = grad_hy * o * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    parts = [grad_cell * g * i * (1 - i), grad_cell * cx * f * (1 - f), grad_cell * i * (1 - g**2)]
    gates = torch.cat([*parts, grad_hy * cy.tanh() * o * (1 - o)], 1)
    return gates, grad_cell * f, gates.sum(0)


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, in_), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    to_n = grad_hy * (1 - z) * (1 - n**2)
    to_r, to_z = to_n * hn * r * (1 - r), grad_hy * (hx - n) * z * (1 - z)
    input_gates, hidden_gates = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    return input_gates, hidden_gates, grad_hy * z, input_gates.sum(0), hidden_gates.sum(0)


FUSED = {  # kernels of accelerators that the CPU does not have
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


class _Backend(_DummyBackendModule, ModuleType):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_available(self) -> bool:
        return available

    def device_count(self) -> int:
        return 1  # the threads of autograd are counted once

    def manual_seed_all(self, seed: int) -> None:
        generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        generator.set_state(state)


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return available


def _under_autocast(operation: Any) -> Any:
    """Return the operation with its floating-point tensors in the precision of autocast."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            leaves = [
                leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return operation(*args, **kwargs)

    return cast


def _arange(*args: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:
    return Pretend(torch.arange(*args, dtype=dtype))


def _from_numbers(make: Any) -> Any:
    """Return torch.tensor or torch.as_tensor, which torch cannot call for a device in Python, and record the numbers."""

    def made(values: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(values, device=device, **options)  # type: ignore[no-any-return]
        return make(values, **options).to(torch.device(NAME, 0))  # type: ignore[no-any-return]

    return made


available = False  # True in a process whose accelerator it is


@cache
def register() -> torch.device:
    """Register the device, without methods such as `Module.pretend`, which other tests would see.

    It must precede the first backward pass of the process. torch then hides each other accelerator.
    """
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Backend(NAME))
    torch._C._acc.register_python_privateuseone_hook(_Hook())
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())
    fallbacks, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    fallbacks.fallback(lambda operation, *args, **kwargs: compute(operation, args, kwargs), "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):
        kernels.impl(overload, _arange, "PrivateUse1")
    for name in CAST:
        kernels.impl(name, _under_autocast(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _device_constructors()  # its cache has the functions of torch, which read the device of a `with` statement
    torch.tensor, torch.as_tensor = _from_numbers(torch.tensor), _from_numbers(torch.as_tensor)
    LIBRARIES.extend((fallbacks, kernels))
    return torch.device(NAME, 0)


LIBRARIES: list[torch.library.Library] = []  # registrations last as long as these objects


if not torch.cuda.is_available():  # `pytest -m gpu` uses the CUDA device
    register()


def everywhere() -> None:
    """Make the device the accelerator of this process; torch calls this when it is imported.

    torch counts one device of a backend in Python, and has the threads of autograd for that one. PRETEND_DEVICES replaces
    the count, and the tensors of each process say that they are on device 0.
    """
    global available
    register()
    available = True
    torch.__future__.set_swap_module_params_on_conversion(True)
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("host", _HostGroup, devices=[NAME])
    if DEVICES > 1:
        torch.accelerator.device_count = lambda: DEVICES
        torch.accelerator.set_device_index = lambda device: None


class _Done(Work):
    """A collective that has ended."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(output)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class _HostGroup(ProcessGroup):
    """Collectives of tensors on the device, which gloo computes in the memory of the host."""

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "host"

    def _get_backend(self, device: torch.device) -> _HostGroup:
        return self

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        self.gloo.allreduce(_memory(tensors), opts).wait()
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        self.gloo.broadcast(_memory(tensors), opts).wait()
        return _Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        self.gloo.allgather([_memory(tensors) for tensors in outputs], _memory(inputs), opts).wait()
        return _Done(outputs)

    def barrier(self, opts: Any = None) -> Work:
        self.gloo.barrier(opts).wait()
        return _Done([])


def _memory(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.memory if isinstance(tensor, Pretend) else tensor for tensor in tensors]


def backend_folder(folder: Path) -> Path:
    """Write the entry point with which torch loads the device into processes that have the folder on their path."""
    package = folder / f"{NAME}-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = tests.pretend:everywhere\n")
    return folder


def there(value: Any) -> Any:
    """Return a tensor or a module on the device. Tied parameters stay tied."""
    device = register()
    if isinstance(value, Tensor):
        return value.to(device)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return value.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def without_shortcuts() -> None:
    """Let the CPU compute all positions in the chunks of an accelerator, so that it rounds and draws alike."""
    from tfm_blocks.blocks.layers.linear import Dropout
    from tfm_blocks.network import call
    from tfm_blocks.training import objective
    from tfm_blocks.translation import beam

    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's kernel too
    call._has_padding = lambda keep_BN: False
    objective.chunk_size = lambda x_ND: 4096
    beam.chunk = len
    Dropout.forward = lambda self, x: torch.dropout(x, self.rate, self.training)
