"""The devices of this machine, on torch.accelerator: the only module that distinguishes their kinds.

An accelerator is cuda, mps, xpu, or a device type that a package registers with torch. A process has at most one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import Backend, get_backend

from tfm_blocks.errors import Problem, RunError, shown

CPU, AUTO, MPS = "cpu", "auto", "mps"
ACCELERATORS = ("cuda", MPS, "xpu")
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}  # variables that choose devices of a machine
PINS = {CPU: False, "cuda": True, MPS: False, "xpu": True}
GROUPED_KERNEL = {"cuda"}  # devices on which torch has a kernel for grouped products
Network = TypeVar("Network", bound=nn.Module)


def accelerator() -> str:
    """Return the type of the accelerator of this machine, or "" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else ""


def choose_device(name: str) -> str:
    """Return `name`; `auto` becomes the accelerator if there is one, else the CPU."""
    return accelerator() or CPU if name == AUTO else name


def on_device(network: Network, name: str) -> Network:
    """Return the network on the device `name`, as in `choose_device`. Raises RunError if the device cannot be used."""
    device = choose_device(name)
    try:
        torch.zeros((), device=device).item()
        return network.to(device)
    except (RuntimeError, AssertionError) as error:  # raised for a missing device
        rule = f"{device!r} cannot be used: {str(error).splitlines()[0]}"
        help = f"write {names_here()}: this machine has {devices_here()}"
        raise RunError(Problem("device", rule, help=help)) from None


def device_count(kind: str) -> int:
    """Return the number of devices of this machine with the type `kind`, which is not the CPU."""
    return torch.accelerator.device_count() if kind == accelerator() else 0


def devices_here() -> str:
    """Return the devices of this machine as words."""
    kind = accelerator()
    return f"a CPU and {device_count(kind)} {kind} device{'s'[: device_count(kind) > 1]}" if kind else "only a CPU"


def names_here() -> str:
    """Return the values of a device option on this machine as words."""
    return " or ".join([CPU, *filter(None, [accelerator()]), AUTO])


def kind_problem(name: str) -> tuple[str, str] | None:
    """Return the rule that `name` breaks, and a fix, unless it is `auto` or a device type of torch."""
    try:
        if name == AUTO or torch.device(name).type == name:
            return None
    except RuntimeError:  # unknown to torch
        pass
    rule = f"must be {AUTO} or a device type of torch, such as {CPU}, {', '.join(ACCELERATORS)}, but is {shown(name)}"
    return rule, f"write {names_here()}: this machine has {devices_here()}"


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a process of a run."""
    return torch.device(kind) if kind == CPU else torch.device(kind, local_rank)


def select_device(device: torch.device) -> None:
    """Make the device the current one of this process."""
    if device.type != CPU:
        torch.accelerator.set_device_index(device)


def group_device() -> str:
    """Return the type of device whose tensors the default process group exchanges."""
    return CPU if CPU in Backend.backend_capability[get_backend()] else accelerator()


def device_name(kind: str) -> str:
    """Return the name of the current accelerator, or its type if torch does not know the name."""
    name = getattr(torch.get_device_module(kind), "get_device_name", None)
    return str(name()) if name else kind


def pins_memory(kind: str) -> bool:
    """Return True if batches for such devices can wait in pinned memory. The memory of mps is the CPU's."""
    if kind not in PINS:  # a registered device may have an allocator for it
        try:
            return torch.empty(1, pin_memory=True).is_pinned()
        except RuntimeError:
            return False
    return PINS[kind]


def has_fast_bf16(kind: str) -> bool:
    """Return True if the current accelerator computes bf16 natively. For mps, torch does not report it."""
    module = torch.get_device_module(kind)
    if hasattr(module, "is_bf16_supported"):
        return bool(module.is_bf16_supported(including_emulation=False))
    supported = getattr(module, "get_amp_supported_dtype", list)  # of a registered device
    return torch.bfloat16 in supported()


@cache
def _has_float64(kind: str) -> bool:
    try:
        return torch.zeros((), dtype=torch.float64, device=kind).dtype == torch.float64
    except (TypeError, RuntimeError):
        return False


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64, in which sums of a run are exact enough, or float32 for a device without float64, such as mps."""
    return torch.float64 if _has_float64(device.type) else torch.float32


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context without autocast, for backward passes and optimizers; the meta device never has autocast."""
    return torch.autocast(CPU if device.type == "meta" else device.type, enabled=False)


def has_grouped_kernel(x: Tensor) -> bool:
    """Return True if torch has a kernel for grouped products of such tensors."""
    return x.device.type in GROUPED_KERNEL and x.dtype == torch.bfloat16


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of the device. torch.manual_seed does too, but takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type != CPU:
        module: Any = torch.get_device_module(device.type)
        seed_one = getattr(module, "manual_seed", None) or module.manual_seed_all  # all that torch requires of others
        seed_one(seed)


@contextmanager
def fork_generators(device: torch.device) -> Iterator[None]:
    """Restore the state of the generators of the CPU and of the device afterwards."""
    with torch.random.fork_rng(devices=[]):
        module: Any = torch.get_device_module(device.type if device.type == accelerator() else CPU)
        if module is torch.cpu or not getattr(module, "is_initialized", lambda: True)():
            yield
            return
        place = () if device.type == MPS else (device,)  # mps has one device
        state = module.get_rng_state(*place)
        try:
            yield
        finally:
            module.set_rng_state(state, *place)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that tensors took on an accelerator, or 0 if it is unknown."""
    with suppress(RuntimeError):  # a backend may have no allocator that counts
        return torch.accelerator.max_memory_allocated(device) if device.type == accelerator() else 0
    return 0


def release_memory() -> None:
    """Return the unused memory of the accelerator to the system."""
    with suppress(RuntimeError):
        torch.accelerator.empty_cache()


def set_threads(count: int) -> None:
    """Set the number of threads that compute the operations of the calling thread.

    This sets the number in OpenMP, from which torch and MKL read it. `torch.set_num_threads` also makes MKL start as
    many threads in each of its calls. Attention calls MKL from several threads, and is then slower:
    docs/notebook/experiments.md#the-number-of-threads. `torch.set_num_threads` is called only if torch uses another
    OpenMP or none.
    """
    torch.get_num_threads()  # the first call sets the number, so it comes first
    if os.name == "posix" and hasattr(process := ctypes.CDLL(None), "omp_set_num_threads"):
        process.omp_set_num_threads(count)
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
