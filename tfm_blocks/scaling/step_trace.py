"""Run a training step without data or memory, and count its multiply-adds, its memory traffic and its live bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tfm_blocks.data.layout import Batch
from tfm_blocks.data.objectives import NEXT_TOKEN, MaskingSettings, ObjectiveSettings, ReplacedTokenSettings
from tfm_blocks.devices import CPU
from tfm_blocks.language.spec import Axis, Spec
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.call import Values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import attach_generator
from tfm_blocks.scaling.kernels import KERNELS
from tfm_blocks.training.objective import AHEAD, Objective, SeveralTokensObjective, Trunk, make_objective
from tfm_blocks.training.settings import LossSettings

SMOOTHING = 0.1  # any value above 0 has the same cost
aten = torch.ops.aten
FLOPS = {  # FlopCounterMode counts the fused attention of accelerators, and not the CPU's
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


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


@dataclass(frozen=True)
class PlannedObjective:
    """The objective of a step, its losses, and the model that it needs besides: a teacher or a generator."""

    objective: ObjectiveSettings = NEXT_TOKEN
    losses: LossSettings = field(default_factory=LossSettings)
    companion: Spec | None = None

    def networks(self, spec: Spec, place: str = "meta") -> tuple[Network, Network | None]:
        """Return the network that is trained, with its generator, and the teacher. Nothing is allocated on `meta`."""
        network = network_without_values(spec, place)
        if self.companion is None:
            return network, None
        other = network_without_values(self.companion, place)
        if not isinstance(self.objective, ReplacedTokenSettings):
            return network, other
        attach_generator(network, other)
        return network, None

    def make_objective(self, network: Network, teacher: Network | None, trunk: Trunk) -> Objective:
        """Return the objective, as training makes it; a model with branches for later tokens trains them."""
        options = network, SMOOTHING, trunk, self.losses
        if any(node.block == AHEAD for node in network.spec.nodes):
            return SeveralTokensObjective(*options)
        return make_objective(self.objective, *options, teacher)


PLAIN_OBJECTIVE = PlannedObjective()


def trace_step(
    spec: Spec,
    batching: Batching,
    *,
    device: str,
    bf16: bool,
    recomputes: bool,
    frozen: Sequence[str] = (),
    training: PlannedObjective = PLAIN_OBJECTIVE,
) -> StepTrace:
    """Trace the pass that training runs, in float32 or under autocast to bfloat16, without the weights `frozen`.

    It counts the tensors of the kernels of a type of device, a key of KERNELS. No device but the CPU is needed.
    """
    counter = _Counter()
    place = device if device == CPU else "meta"
    with KERNELS[device](), counter:
        network, teacher = training.networks(spec, place)
        network.train()
        if frozen:
            network.freeze(frozen)
        network.recomputes = recomputes
        counter.follow_gradients(network)
        before, kept = counter.live, list[int]()

        def trunk(*arguments: Any) -> tuple[Tensor, Values]:
            output = network.trunk_with_losses(*arguments)
            kept.append(counter.live)
            return output

        batch = _batch(network, batching, training.objective, place)
        objective = training.make_objective(network, teacher, trunk)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = objective.loss(batch)[0]  # the head computes its gradients with the loss
        # loss.backward() itself would disable the kernels' mode for the layers that it recomputes
        ones, options = (torch.ones_like(loss),), {"allow_unreachable": True, "accumulate_grad": True}
        _engine_run_backward((loss,), ones, False, False, (), **options)
    return StepTrace(counter.flops // 2, counter.traffic, kept[0] - before, counter.peak, counter.peak_besides)


def _batch(network: Network, batching: Batching, objective: ObjectiveSettings, device: str) -> Batch:
    """Return a batch whose every position is predicted, or the fraction that the objective hides."""
    sizes = {"B": batching.rows, **batching.lengths}
    inputs = {}
    for input in network.spec.inputs:
        shape = [sizes.get(axis.name, batching.rows) if isinstance(axis, Axis) else axis for axis in input.shape]
        dtype = torch.int64 if input.tokens else torch.float32
        inputs[input.name] = torch.ones(shape, dtype=dtype, device=device)
    exit = network.spec.nodes[-1].shape[1]
    length = batching.lengths[exit.name] if isinstance(exit, Axis) else exit
    labels_BT = torch.ones(batching.rows, length, dtype=torch.int64, device=device)
    rate = objective.rate if isinstance(objective, MaskingSettings) else 1.0
    kept_N = torch.ones(max(1, round(rate * labels_BT.numel())), dtype=torch.int64, device=device)
    return Batch(inputs, labels_BT, kept_N, uniforms_N=torch.ones(len(kept_N), device=device))


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
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(add_gradient)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # the batch has no padding: `keep.all()`
        result = function(*args, **kwargs)
        if formula := FLOPS.get(function._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)
        read = list(_tensors((args, kwargs)))
        written = list(_tensors(result))
        known = {tensor.untyped_storage()._cdata for tensor in read}
        fresh = [tensor for tensor in written if tensor.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self._add(tensor.untyped_storage())
        is_view = not fresh and not function._schema.is_mutable
        if not is_view and "empty" not in function.__name__:
            self.traffic += sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in (*read, *written))
        return result

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
