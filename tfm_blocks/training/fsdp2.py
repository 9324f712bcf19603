"""Training whose weights, gradients and optimizer state are shared out among the processes (FSDP2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from tfm_blocks.network.graph import Network
from tfm_blocks.runs.model import fill, weights_of
from tfm_blocks.training.replicated import replicate_scalars

Tree = TypeVar("Tree")


def full_tensors(values: Tree) -> Tree:
    """The same with whole tensors in place of shares of them, for which all processes must ask; the rest as it is."""
    return cast(Tree, tree_map_only(DTensor, lambda share: share.full_tensor(), values))


def _share_of(value: Tensor, like: Tensor) -> Tensor:
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def fill_shares(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Fills the network from whole tensors by name, each process its share."""
    own = weights_of(network)
    fill(network, {name: _share_of(tensors[name].to(one.device), one) for name, one in own.items()})


def units_of(network: Network) -> list[nn.Module]:
    """Return the containers of the layers of stacks whose parameters nothing outside of the container uses."""
    users: defaultdict[nn.Parameter, set[nn.Module | None]] = defaultdict(set)
    for layer in network.stack_layers:
        for call in layer.calls:
            for parameter in call.module.parameters():
                users[parameter].add(layer.container)
    for parameter in network.head_parameters():
        users[parameter].add(None)
    containers = dict.fromkeys(layer.container for layer in network.stack_layers if layer.container is not None)
    return [one for one in containers if all(users[parameter] == {one} for parameter in one.parameters())]


def shard(network: Network, mesh: DeviceMesh) -> None:
    """Shard each layer of a stack, and then the rest of the network. Do nothing if that is done."""
    if isinstance(network, FSDPModule):
        return
    scalars = replicate_scalars(network, mesh)
    for unit in (*units_of(network), network):
        fully_shard(unit, mesh=mesh, ignored_params=scalars)
    register_fsdp_forward_method(network, "trunk_with_losses")
    network.by_layer = True


class FSDP2Strategy(ModelParallelStrategy):
    """Each process keeps a shard of every weight but scalars, of its gradient and of the optimizer's state.

    In a step a layer of a stack is gathered while it computes, forward and again backward, and everything outside of
    stacks from the first forward to the backward. So all processes have the same number of micro-batches. A validation
    gathers all weights, because the processes differ in their batches. Checkpoints hold whole tensors, in the format of
    every other run.
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
        """Exchange gradients after every micro-batch: no process has room for those of the whole network."""
        yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return full_tensors(self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        prefix = "network."
        state = checkpoint["state_dict"]
        fill_shares(self.network, {name.removeprefix(prefix): one for name, one in state.items()})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_tensors(optimizer.state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict({**state, "state": _shared(optimizer, state["state"])})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)


def _shared(optimizer: Optimizer, states: Mapping[int, Any]) -> dict[int, Any]:
    """The optimizer's state by the number of the parameter, where a tensor of its shape is shared out as it is."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {
        number: {
            name: _share_of(value, parameters[number]) if value.shape == parameters[number].shape else value
            for name, value in state.items()
        }
        for number, state in states.items()
    }


class WholeWhileScored(Callback):
    """Keeps the weights whole while a network that is shared out is validated or tested."""

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
    return [one for one in module.modules() if isinstance(one, FSDPModule)]
