"""What can be told of an accelerator without one: a step of training on torch's meta device, whose tensors have no values.

An operation on tensors of two devices raises, and so does one whose result the processor would have to wait for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.layout import batch_of
from tfm_blocks.language.spec import names
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.modules import losses_of
from tfm_blocks.training.data import StepBatches
from tfm_blocks.training.metrics import Pace, StepSums
from tfm_blocks.training.objective import Objective, backward_scale

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
OWN = sorted(str(path) for path in (Path(__file__).parents[1] / "models").glob("*.yaml"))
META = torch.device("meta")


@pytest.mark.parametrize("model", [*SHIPPED, *OWN], ids=lambda model: Path(model).stem)
def test_a_step_has_all_on_one_device_and_waits_for_nothing(model: str) -> None:
    network = network_without_values(check_model(compose_model(model, []).model)).train()
    if any(not one.tokens for one in network.spec.inputs):
        pytest.skip("reads vectors, and training reads text")
    ids_BN = torch.randint(4, 40, (3, 8))
    ids_BN[1, 5:] = 0
    batch = batch_of(dict.fromkeys(names(network.spec.inputs), ids_BN), ids_BN)
    loss, sums = Objective(network, 0.1).loss(batch.to(META))
    (loss * backward_scale(loss, 0.1)).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    steps, pace = StepSums(losses_of(network.spec)).to(META), Pace().to(META)
    steps.update(sums, StepBatches(21, [batch]), norm, ~norm.isfinite())
    pace.update(21, 0.1)
    assert {steps.sums.device, steps.last.device, pace.sums.device} == {META}
    with pytest.raises(RuntimeError):
        steps.read()  # which is for the steps that log


def test_what_would_wait_for_the_device_is_found() -> None:
    x = torch.ones(3, device=META)
    with pytest.raises(RuntimeError):
        float(x.sum())
    with pytest.raises(RuntimeError):
        x + torch.ones(3)
    with pytest.raises(NotImplementedError):
        x.nonzero()
