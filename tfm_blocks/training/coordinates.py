"""The size of every node's output during a few training steps: mean |x|, which should not depend on the width."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tfm_blocks.blocks.embedding import Unembed
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import build_network, network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.training.groups import build_optimizer
from tfm_blocks.training.optimizer_settings import OptimizerSettings, read_optimizer
from tfm_blocks.training.optimizers import SPECTRAL

Sizes = dict[str, list[float]]
ADAMW: dict[str, Any] = {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS_BY_NAME = {"adamw": ADAMW, "muon": {"name": "muon", "scale": SPECTRAL, "weight_decay": 0.0, "others": ADAMW}}


@dataclass(frozen=True)
class Training:
    """A short training on one batch of random tokens: `batch` sequences of `length` tokens, at the rate `rate`."""

    steps: int
    batch: int
    length: int
    rate: float
    optimizer: str = "adamw"

    def measure(self, spec: Spec, seed: int) -> Sizes:
        """Return mean |x| of each node's output before each step and after the last, by the node's folded address.

        The layers of a stack are folded into their mean. `ADDRESS branch` is the output of a block before the
        operations after it.
        """
        network = build_network(spec, seed=seed)
        recorder = _Recorder(network)
        optimizer = optimizer_of(network, self.optimizer)
        inputs = self._inputs(network, seed)
        sizes: defaultdict[str, list[float]] = defaultdict(list)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # of dropout
            for _ in range(self.steps + 1):
                means, loss = recorder.forward(inputs, seed)
                for node, mean in means.items():
                    sizes[node].append(mean)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                for group in optimizer.param_groups:
                    group["lr"] = self.rate * group["rate"]
                optimizer.step()
        return dict(sizes)

    def seconds(self, spec: Spec, settings: OptimizerSettings | None = None, seed: int = 1) -> float:
        """Return the seconds of an optimizer step on the CPU in float32: the least of `steps` steps after the first.

        Without `settings`, the optimizer is `optimizer`. The loss has a prediction at each position.
        """
        network = build_network(spec, seed=seed)
        optimizer = build_optimizer(settings, network) if settings else optimizer_of(network, self.optimizer)
        inputs, durations = self._inputs(network, seed), list[float]()
        for group in optimizer.param_groups:
            group["lr"] = self.rate * group["rate"]
        for _ in range(self.steps + 1):
            start = time.perf_counter()
            logits = network(**inputs)
            labels = torch.randint(1, logits.shape[-1], logits.shape[:-1])
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(logits.flatten(0, -2), labels.flatten()))
            optimizer.step()
            durations.append(time.perf_counter() - start)
        return min(durations[1:])

    def _inputs(self, network: Network, seed: int) -> dict[str, Tensor]:
        """Draw the batch: ids from 1 on that each reader of the input knows, or normally distributed vectors."""
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for tensor in network.spec.inputs:
            length = int(min(self.length, network.longest(tensor.name).tokens))
            shape = [
                size if isinstance(size, int) else self.batch if place == 0 else length
                for place, size in enumerate(tensor.shape)
            ]
            sizes = [node.arguments["vocab"] for node, name in network.spec.tables if name == tensor.name]
            vocab = min(sizes, default=network.spec.sink.shape[-1])
            assert isinstance(vocab, int)
            ids = torch.randint(1, vocab, shape, generator=generator)
            drawn[tensor.name] = ids if tensor.tokens else torch.randn(shape, generator=generator)
        return drawn


def optimizer_of(network: Network, name: str = "adamw") -> Optimizer:
    """Return AdamW or Muon without decay, with the factors of the network's parametrisation."""
    return build_optimizer(read_optimizer(OPTIMIZERS_BY_NAME[name]), network)


class _Recorder:
    """Runs a network node by node, and records the outputs of nodes and of their blocks."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.outputs: dict[nn.Module, Tensor] = {}
        for call in network.all_calls:
            call.block.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.outputs[module] = output[0] if isinstance(output, tuple) else output

    def forward(self, inputs: Mapping[str, Tensor], seed: int) -> tuple[dict[str, float], Tensor]:
        """Return mean |x| by folded address, and the loss for random labels, with the losses of blocks."""
        network, losses = self.network, dict[str, Tensor]()
        values, keeps = network.begin(inputs, None)
        means: defaultdict[str, list[float]] = defaultdict(list)
        for call in network.calls:
            value = values[call.address] = call(values, keeps, losses)
            means[address := fold(call.address)].append(_mean(value))
            if call.node.block and call.node.post:
                means[f"{address} branch"].append(_mean(self.outputs[call.block]))
        logits = network.head(values[network.exit])
        for call in network.head_calls[:-1]:
            means[fold(call.address)].append(_mean(self.outputs[call.block]))
        means[fold(network.spec.sink.address)].append(_mean(logits))
        first = max(1, network.first_predicted)
        generator = torch.Generator().manual_seed(seed + 1)
        labels = torch.randint(first, logits.shape[-1], logits.shape[:-1], generator=generator)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten()) + sum(own.mean() for own in losses.values())
        return {node: sum(own) / len(own) for node, own in means.items()}, loss


def logit_nodes(spec: Spec) -> set[str]:
    """Return the folded addresses of the nodes that compute logits: the output head, and those after it."""
    nodes = set()
    for call in reversed(network_without_values(spec).head_calls):
        nodes.add(fold(call.address))
        if isinstance(call.block, Unembed):
            break
    return nodes


def fold(address: str) -> str:
    """Return an address with `i` in place of the indices of layers."""
    return pattern(address).replace("*", "i")


def _mean(x: Tensor) -> float:
    """Return the mean of |x| over finite elements: ids without a row have logits of -inf."""
    sizes = x.detach().abs()
    return float(sizes[sizes.isfinite()].mean())
