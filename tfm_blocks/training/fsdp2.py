"""Sharded training: each process holds a shard of the weights, gradients and optimizer state (FSDP2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import all_weights, fill, saved_weights


def replicate_scalars(network: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Replace each scalar parameter by a replicated DTensor and return these parameters, which FSDP has to ignore.

    Modules read their scalars as plain tensors. Their gradients differ between processes until `average_scalars`.
    """
    replicas: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        scalars = {name: one for name, one in module._parameters.items() if one is not None and not one.ndim}
        for name, scalar in scalars.items():
            if scalar not in replicas:
                replica = distribute_tensor(scalar.detach(), mesh, [Replicate()])
                replicas[scalar] = nn.Parameter(replica, requires_grad=scalar.requires_grad)
            module._parameters[name] = replicas[scalar]
        if scalars:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: property(_reader(name)) for name in scalars})
    return set(replicas.values())


def _reader(name: str) -> Callable[[nn.Module], Tensor]:
    """Return the getter of a property that gives the local tensor of a replica."""

    def read(module: nn.Module) -> Tensor:
        return cast(DTensor, module._parameters[name]).to_local()

    return read


def average_scalars(network: nn.Module) -> None:
    """Average the gradients of the scalars of a sharded network over the processes. All processes must call it.

    The backward pass does not average them: the loss runs the head once for each chunk of its positions, so the
    processes would average the gradients of the head's scalars different numbers of times.
    """
    for parameter in network.parameters():
        if not parameter.ndim and isinstance(parameter.grad, DTensor):
            own, mesh = parameter.grad.to_local(), parameter.grad.device_mesh
            parameter.grad = DTensor.from_local(own, mesh, [Partial("avg")]).redistribute(placements=[Replicate()])


Tree = TypeVar("Tree")


def full_tensors(values: Tree) -> Tree:
    """Replace the sharded tensors in `values` by full tensors. All processes must call it."""
    return cast(Tree, tree_map_only(DTensor, lambda shard: shard.full_tensor(), values))


def _shard_like(value: Tensor, like: Tensor) -> Tensor:
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def fill_shares(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Load full tensors by name into the network; each process takes its shard."""
    weights = all_weights(network)
    shares = {name: _shard_like(tensor.to(weights[name].device), weights[name]) for name, tensor in tensors.items()}
    fill(network, shares)


def units_of(network: Network) -> list[nn.Module]:
    """Return the layers of stacks, as containers, whose parameters are not used outside of the layer."""
    users: defaultdict[nn.Parameter, set[nn.Module | None]] = defaultdict(set)
    for layer in network.stack_layers:
        for call in layer.calls:
            for parameter in call.own_parameters:
                users[parameter].add(layer.container)
    for parameter in network.head_parameters():
        users[parameter].add(None)
    containers = dict.fromkeys(layer.container for layer in network.stack_layers if layer.container is not None)
    return [layer for layer in containers if all(users[parameter] == {layer} for parameter in layer.parameters())]


def shard(network: Network, mesh: DeviceMesh) -> None:
    """Shard each layer of a stack, and then the rest of the network. A sharded network stays as it is."""
    if isinstance(network, FSDPModule):
        return
    scalars = replicate_scalars(network, mesh)
    for unit in (*units_of(network), network):
        fully_shard(unit, mesh=mesh, ignored_params=scalars)
    register_fsdp_forward_method(network, "trunk_with_losses")
    network.by_layer = True


class FSDP2Strategy(ModelParallelStrategy):
    """Each process keeps a shard of every weight but scalars, of its gradient and of the optimizer's state.

    In a step, the weights of a layer are gathered for its forward pass, and for its backward pass. Weights outside of
    stacks are gathered from the first forward to the backward. All processes therefore need the same number of
    micro-batches. A validation gathers all weights, because the processes have different numbers of batches.
    Checkpoints hold full tensors, in the format of every other run.
    """

    def __init__(self, world: int) -> None:
        super().__init__(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def network(self) -> Network:
        return cast(Network, cast(Any, self.lightning_module).network)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Exchange gradients after every micro-batch: no process has memory for the gradients of all weights."""
        yield

    def post_backward(self, closure_loss: Tensor) -> None:
        average_scalars(self.network)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return full_tensors(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = checkpoint["state_dict"]  # lists a tied weight under each of its names
        fill_shares(self.network, {name: state[f"network.{name}"] for name in saved_weights(self.network)})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_tensors(optimizer.state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict({**state, "state": _shard_state(optimizer, state["state"])})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)


def _shard_state(optimizer: Optimizer, states: Mapping[int, Any]) -> dict[int, Any]:
    """Return the optimizer state by parameter number; tensors with the parameter's shape are sharded like it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        number: {
            name: _shard_like(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value
            for name, value in state.items()
        }
        for number, state in states.items()
        for like in [parameters[number]]
    }


class WholeWhileScored(Callback):
    """Gather all weights of a sharded network for a validation or test, and shard them afterwards."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for unit in _sharded(pl_module):
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for unit in _sharded(pl_module):
            unit.set_reshard_after_forward(not isinstance(unit, Network), recurse=False)
            unit.reshard()

    on_test_start = on_validation_start
    on_test_end = on_validation_end


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
