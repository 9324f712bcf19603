"""A real training step on the CPU, counted by torch: multiply-adds by FlopCounterMode, bytes by the allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.layout import Batch
from tfm_blocks.language.spec import Axis, Spec
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.cost import axis_lengths
from tfm_blocks.network.graph import Network
from tfm_blocks.scaling.step_trace import Batching
from tfm_blocks.training.objective import Objective

aten = torch.ops.aten
CPU_ATTENTION = {  # FlopCounterMode has no formula for the CPU's kernel; these are its formulas for CUDA's
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g, q, k, v
    ),
}


def spec_of(model: str, *overrides: str) -> Spec:
    composed = compose_model(model, list(overrides))
    return check_model(composed.model, composed.sources)


def batching_of(spec: Spec, rows: int) -> Batching:
    lengths = axis_lengths(network_without_values(spec), {})
    return Batching(rows, lengths, sum(lengths.values()))


class RealStep:
    """A network, an optimizer with initialised moments, and a batch of random ids without padding.

    `make` returns the objective of the network, which predicts the fraction `rate` of the positions.
    """

    def __init__(
        self,
        spec: Spec,
        batching: Batching,
        *,
        bf16: bool = False,
        recomputes: bool = False,
        make: Callable[[Network], Objective] = lambda network: Objective(network, 0.1),
        rate: float = 1.0,
    ) -> None:
        self.network = build_network(spec, seed=1).train()
        self.network.recomputes = recomputes
        self.bf16 = bf16
        self.objective = make(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), fused=True)
        self.batch = _batch(spec, batching, rate)
        self.run()
        self.weights = sum(parameter.nbytes for parameter in self.network.parameters())
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        self.moments = sum(tensor.nbytes for tensor in states)

    def run(self) -> None:
        """Train one step, and free the gradients."""
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward_and_backward(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss, _ = self.objective.loss(self.batch)
        loss.backward()

    def multiply_adds(self) -> int:
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
            self.forward_and_backward()
        self.optimizer.zero_grad()
        return counter.get_total_flops() // 2

    def peak(self) -> int:
        """Return the peak bytes of a step: the weights, the moments and what the allocator reports."""
        return self.weights + self.moments + _allocated(self.run)


def _allocated(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _batch(spec: Spec, batching: Batching, rate: float) -> Batch:
    inputs = {}
    for input in spec.inputs:
        shape = [batching.lengths.get(axis.name, batching.rows) for axis in input.shape if isinstance(axis, Axis)]
        inputs[input.name] = torch.randint(4, 30, shape)
    exit = str(spec.nodes[-1].shape[1])
    labels_BT = torch.randint(4, 30, (batching.rows, batching.lengths[exit]))
    kept_N = torch.arange(round(rate * labels_BT.numel()))
    return Batch(inputs, labels_BT, kept_N, uniforms_N=torch.rand(len(kept_N)))
