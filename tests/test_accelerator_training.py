"""Training on a pretended accelerator in this process: what a step reads, what a device may lack, and bf16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests import pretend
from tests.network.examples import ALL, build, inputs_of, sources_of
from tests.test_accelerator import exact
from tests.training.test_module import feed_of, make, trainer
from tests.translation.test_any_graph import sharper
from tests.translation.test_search import bounds
from tfm_blocks import devices
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.accelerator import TorchAccelerator
from tfm_blocks.errors import RunError
from tfm_blocks.launch.run_spec import choose_precision
from tfm_blocks.registry.optimizers import OPTIMIZERS
from tfm_blocks.training.callbacks import MovingAverage
from tfm_blocks.training.data_module import RunData
from tfm_blocks.training.memory_check import Copies, MemoryCheck
from tfm_blocks.training.optimizers import orthogonal_factors
from tfm_blocks.translation.search import Bounds, chooser, one_by_one
from tfm_blocks.translation.settings import Sampling


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Return the pretended device, as the accelerator of this process."""
    monkeypatch.setattr(pretend, "available", True)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield pretend.register()
    torch.__future__.set_swap_module_params_on_conversion(before)


without_accelerator = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py tests CUDA")
READS_OF_A_ROW = 3  # the sums of the steps, the throughput, and the flags of skipped steps
TENSORS_OF_A_BATCH = 4  # src, tgt, the labels, and the predicted positions


def fit(module: LightningModule, data: RunData, callbacks: list[Callback], strategy: SingleDeviceStrategy) -> None:
    there = {"accelerator": TorchAccelerator(), "devices": 1, "strategy": strategy}
    trainer(6, callbacks=callbacks, **there).fit(module, datamodule=data)


class Steps(Callback):
    """Record the traffic of each training step, from its batch to the next, with all that Lightning does between."""

    def __init__(self) -> None:
        self.traffic: list[pretend.Traffic] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.traffic.append(pretend.Traffic())
        pretend.watching[:] = self.traffic[-1:]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pretend.watching.clear()


def table_of_optimizers() -> list[Any]:
    """Return the rows of docs/accelerators.md: the options of a run, and its reads per step and per weight."""
    row = re.compile(r"\| `(optimizer=[^`]*)` \| (\d+)(?: \+ (\d+) per weight)? \|")
    rows = row.findall((Path(__file__).parent.parent / "docs" / "accelerators.md").read_text())
    default = ("optimizer=adam", "optimizer=lion")
    marks = {True: [], False: [pytest.mark.grid]}
    return [
        pytest.param(
            options, int(reads), int(per_weight or 0), id=options.replace(" ", ","), marks=marks[options in default]
        )
        for options, reads, per_weight in rows
    ]


def test_the_table_has_each_optimizer() -> None:
    listed = {str(row.values[0]).partition("=")[2].split()[0] for row in table_of_optimizers()}
    assert listed == set(OPTIMIZERS)


@pytest.mark.grid
@without_accelerator
@pytest.mark.parametrize(("options", "reads", "per_weight"), table_of_optimizers())
def test_a_training_step_reads_what_its_optimizer_needs_and_sends_its_batch(
    options: str, reads: int, per_weight: int, small: Callable[..., Composed], here: torch.device
) -> None:
    """The steps that log a row of metrics, here the fourth and the last, read more."""
    changes = re.findall(r"[^ =]+=(?:{.*?}(?= |$)|[^ ]+)", options)
    module, data = make(
        small("trainer.log_every=4", "data.batch_tokens=130", "trainer.clip=0.5", "dropout=0.2", *changes)
    )
    weights = sum(one.requires_grad for one in module.network.parameters())
    steps = Steps()
    fit(module, data, [steps, MovingAverage(0.9)], SingleDeviceStrategy(here))
    expected = reads + per_weight * weights
    rows = [0, 0, READS_OF_A_ROW, 0, READS_OF_A_ROW]
    assert [len(step.reads) for step in steps.traffic[1:]] == [
        expected + row for row in rows
    ]  # the first may read more
    for step in steps.traffic:
        batches = step.sends.count("aten::copy_")
        assert batches == len(step.sends) and batches % TENSORS_OF_A_BATCH == 0


def some_models(names: tuple[str, ...]) -> Any:
    rows = [pytest.param(path, id=path.stem, marks=[pytest.mark.grid] * (path.stem not in names)) for path in ALL]
    return pytest.mark.parametrize("path", rows)


@pytest.mark.grid
@some_models(("tiny", "t5", "mla"))
def test_autocast_on_the_device_is_near_float32(path: Path) -> None:
    """bf16 keeps 8 bits: logits differ by 0.1 to 10 % of their norm, and gradients by up to 20 %.

    The largest measured differences are 2.7 % and 7 %, and those of the CPU's autocast are the same.
    """
    network = build(path).eval()
    inputs, found = inputs_of(network), []
    for to, bf16 in ((lambda value: value, False), (pretend.there, True)):
        copy = to(deepcopy(network))
        read = {name: to(value) for name, value in inputs.items()}
        with torch.autocast(next(copy.parameters()).device.type, torch.bfloat16, enabled=bf16):
            logits = copy(**read)[..., copy.first_predicted :]
        assert logits.dtype == (torch.bfloat16 if bf16 else torch.float32)
        logits.float().square().mean().backward()
        gradients = [one.grad.to("cpu").flatten() for one in copy.parameters() if one.grad is not None]
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        found.append((logits.detach().to("cpu").float(), torch.cat(gradients)))
    (logits, gradient), (near, near_gradient) = found
    assert 0.001 < (near - logits).norm() / logits.norm() < 0.1
    assert (near_gradient - gradient).norm() / gradient.norm() < 0.2


@without_accelerator
@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_chosen_if_the_device_computes_it(
    native: bool, here: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and the iteration of muon ask the device; without bf16 muon has the values of the CPU."""
    dtypes = [torch.float16, *[torch.bfloat16] * native]
    monkeypatch.setattr(pretend._Backend, "get_amp_supported_dtype", lambda self: dtypes)
    assert choose_precision("auto", pretend.NAME).name == ("bf16" if native else "fp32")
    x_MOI = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    expected, found = (orthogonal_factors(x, 5, [3.4445, -4.775, 2.0315]) for x in (x_MOI, pretend.there(x_MOI)))
    difference = float((found.to("cpu") - expected).abs().max())
    assert 1e-4 < difference < 0.1 if native else difference < 1e-5


@without_accelerator
def test_an_operation_that_the_device_lacks_is_an_error_with_its_node_before_step_1(
    small: Callable[..., Composed], here: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretend, "LACKS", frozenset({"aten::relu"}))
    module, data = make(small())
    check = MemoryCheck(module.network, feed_of(data), module.objective, Ranks(), here, nullcontext(), Copies(2))
    message = r"encoder\.0\.ffn: pretend lacks an operation of this node: The operator 'aten::relu' is not"
    with pytest.raises(RunError, match=message):
        check.run(1)


@pytest.mark.grid
@without_accelerator
def test_a_device_without_float64_trains_and_samples(
    small: Callable[..., Composed], here: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitate mps, which has no float64."""
    losses = []
    for lacks in ("", "float64"):
        monkeypatch.setattr(pretend, "LACKS", frozenset({lacks}))
        devices._has_float64.cache_clear()
        module, data = make(small("trainer.log_every=6", "trainer.clip=0.5"))
        fit(module, data, [], SingleDeviceStrategy(here))
        losses.append(module.latest["train/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    network, inputs = exact(next(path for path in ALL if path.stem == "base"), sharper)
    sources = {name: pretend.there(value) for name, value in sources_of(inputs).items()}
    limits = Bounds(*(pretend.there(one) for one in bounds([9, 12, 7])[:3]))
    choose = chooser(Sampling(seed=4), range(3), 12, here)
    assert len(one_by_one(pretend.there(network.float()), sources, limits, choose)) == 3
    devices._has_float64.cache_clear()
