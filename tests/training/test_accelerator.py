"""Accelerator checks without an accelerator: a training step on torch's meta device, whose tensors have no values.

Operations on tensors of two devices raise, and so do operations that make the CPU wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.network.examples import DEFAULT
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.layout import Batch, batch_of
from tfm_blocks.language.spec import names
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.call import losses_of
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import StepBatches
from tfm_blocks.training.loss import Objective, backward_scale
from tfm_blocks.training.metrics import StepSums, Throughput

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
OWN = sorted(str(path) for path in (Path(__file__).parents[1] / "models").glob("*.yaml"))
MODELS = [*SHIPPED, *OWN]
META = torch.device("meta")


class NothingFromTheProcessor(TorchFunctionMode):
    """Raise if a tensor is made from Python numbers, whose copy to a device blocks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        listed = function is torch.Tensor.__getitem__ and isinstance(args[1], list)
        if listed or function in (torch.tensor, torch.as_tensor, torch.from_numpy):
            raise RuntimeError(f"{function} sends the device what Python has")
        return function(*args, **(kwargs or {}))


def network_at_its_size(model: str, device: str) -> Network:
    """Return a model that reads text, or skip the test."""
    spec = check_model(compose_model(model, []).model)
    if any(not one.tokens for one in spec.inputs):
        pytest.skip("reads vectors, and training reads text")
    network = network_without_values(spec) if device == "meta" else build_network(spec, seed=1).to(device)
    return network.train()


def batch_for(network: Network) -> Batch:
    ids_BN = torch.randint(4, 40, (3, 8))
    ids_BN[1, 5:] = 0
    return batch_of(dict.fromkeys(names(network.spec.inputs), ids_BN), ids_BN)


def take_step(network: Network, batch: Batch, there: Batch) -> tuple[StepSums, Throughput]:
    """Run a training step without the optimizer and without logging; `there` is on the device."""
    device = there.labels_BT.device
    steps, pace = StepSums(losses_of(network.spec)).to(device), Throughput().to(device)
    loss, sums = Objective(network, 0.1).loss(there)
    (loss * backward_scale(loss, 0.1)).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    steps.update(sums, StepBatches(21, [batch]), norm, ~norm.isfinite())
    pace.update(21, 0.1)
    return steps, pace


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(one, marks=[] if Path(one).stem in DEFAULT else [pytest.mark.grid], id=Path(one).stem)
        for one in MODELS
    ],
)
def test_a_step_has_all_on_one_device_and_waits_for_nothing(model: str) -> None:
    network = network_at_its_size(model, "meta")
    batch = batch_for(network)
    with NothingFromTheProcessor():
        steps, pace = take_step(network, batch, batch.to(META))
    assert {steps.sums.device, steps.last.device, pace.sums.device} == {META}
    with pytest.raises(RuntimeError):
        steps.read()  # which is for the steps that log


def test_operations_that_synchronise_with_the_device_are_detected() -> None:
    x = torch.ones(3, device=META)
    with pytest.raises(RuntimeError):
        float(x.sum())
    with pytest.raises(RuntimeError):
        x + torch.ones(3)
    with pytest.raises(NotImplementedError):
        x.nonzero()
    for sends in (lambda: torch.tensor([1.0, 2.0], device=META), lambda: x[[0, 2]]):
        with NothingFromTheProcessor(), pytest.raises(RuntimeError, match="sends the device what Python has"):
            sends()
