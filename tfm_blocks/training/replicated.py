"""Scalar parameters of a sharded network: FSDP2 shards only tensors with a dimension, so every process keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


def replicate_scalars(network: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Replace each scalar parameter by a replicated DTensor and return these parameters, which FSDP has to ignore.

    Modules read their scalars as plain tensors. A backward pass averages the gradients of a scalar over the processes.
    """
    replicas: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        scalars = {name: one for name, one in module._parameters.items() if one is not None and not one.ndim}
        for name, scalar in scalars.items():
            if scalar not in replicas:
                replicas[scalar] = _replica(scalar, mesh)
            module._parameters[name] = replicas[scalar]
        if scalars:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: property(_reader(name)) for name in scalars})
    return set(replicas.values())


def _replica(scalar: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(scalar.detach(), mesh, [Replicate()]), requires_grad=scalar.requires_grad)


def _reader(name: str) -> Callable[[nn.Module], Tensor]:
    """Return the getter of a property that gives the local tensor of a replica."""

    def read(module: nn.Module) -> Tensor:
        replica = cast(DTensor, module._parameters[name])
        same = replica.redistribute(placements=replica.placements)  # its backward pass exchanges the gradients
        return same.to_local(grad_placements=[Partial("avg")])

    return read
