from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.launch.test_resume import begin, go_on, handlers, stopping  # noqa: F401  a fixture
from tests.training.test_module import feed_of, make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.launch.precision import (
    BF16_PROCESSORS,
    PRECISIONS,
    TOKENS,
    Product,
    choose_precision,
    products_of,
    time_products,
)
from tfm_blocks.network.build import network_without_values
from tfm_blocks.runs.files import read_json, write_json
from tfm_blocks.training.checkpoints import PreemptedError

Small = Callable[..., Composed]


@pytest.mark.parametrize(("fp32", "bf16", "faster"), [(30.0, 10.0, "bf16"), (10.0, 30.0, "fp32"), (10.0, 10.0, "fp32")])
def test_auto_on_a_cpu_is_the_faster_precision_of_the_measurement(fp32: float, bf16: float, faster: str) -> None:
    precision = choose_precision("auto", "cpu", {"fp32": fp32, "bf16": bf16})
    assert str(precision) == f"precision: {faster} (measured on this CPU: fp32 {fp32} ms, bf16 {bf16} ms)"
    assert precision.lightning == {"fp32": "32-true", "bf16": "bf16-mixed"}[faster]


def test_auto_without_bf16_instructions_is_fp32() -> None:
    assert choose_precision("auto", "cpu").lightning == "32-true"


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bf16_on_cuda_devices_that_support_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA device is simulated."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native and not including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an H200")
    precision = choose_precision("auto", "cuda")
    assert str(precision) == f"precision: {'bf16' if native else 'fp32'} (an H200)"


def test_a_requested_precision_is_used_and_logged() -> None:
    assert choose_precision("fp32", "cpu", {"fp32": 30.0, "bf16": 10.0}).lightning == "32-true"
    assert choose_precision("bf16", "cpu").lightning == "bf16-mixed"
    assert str(choose_precision("fp32", "cpu")) == "precision: fp32 (trainer.precision=fp32)"


def multiply_adds(product: Product) -> float:
    """Return the multiply-adds of the linear layers that a measured product represents."""
    x, weight = product.arguments[0][:2]
    return product.count * x.shape[0] * x.shape[1] * weight.numel()


def test_the_measured_products_are_all_linear_layers_of_a_micro_batch(small: Small) -> None:
    """torch's own counter is the oracle; a feed-forward of 1,300 is measured as parts of 512."""
    module, data = make(small("layers=3", "d_ff=1300"))
    network, feed = network_without_values(module.network.spec), feed_of(data)
    plan = feed.plan(seed=1, epoch=0)
    batch = feed.batch(plan[0], plan[0].share(0, 1)[0], Ranks())
    inputs = {name: ids.to("meta") for name, ids in batch.inputs.items()}
    assert sum(ids.numel() for ids in inputs.values()) < TOKENS, "one that is measured whole"
    with FlopCounterMode(display=False) as counter:
        network(**inputs)
    linear = sum(counter.get_flop_counts()["Global"].get(one, 0) for one in (torch.ops.aten.mm, torch.ops.aten.addmm))
    products = products_of(network, feed, 1)
    assert sum(multiply_adds(one) for one in products if one.function is F.linear) == pytest.approx(linear / 2)
    assert {one.function for one in products} == {F.linear, F.scaled_dot_product_attention}


def test_more_layers_take_more_time_and_the_random_state_stays(small: Small) -> None:
    module, data = make(small("layers=1", "d_model=64", "d_ff=64"))
    deep, _ = make(small("layers=12", "d_model=64", "d_ff=64"))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    shallow_ms, deep_ms = (
        time_products(network_without_values(one.network.spec), feed_of(data), 1) for one in (module, deep)
    )
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert all(deep_ms[name] > shallow_ms[name] > 0 for name in PRECISIONS)


@pytest.mark.parametrize(
    ("fp32", "bf16", "name"), [(90.0, 30.0, "bf16"), pytest.param(30.0, 90.0, "fp32", marks=pytest.mark.grid)]
)
def test_run_json_has_the_measurement_and_a_resume_takes_it(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], fp32: float, bf16: float, name: str
) -> None:
    """Replace the figures before the resume, as if another machine had started the run."""
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), "trainer.precision=auto"), tmp_path)
    file = tmp_path / "run" / "run.json"
    record = read_json(file)
    fact = record["facts"]["precision"]
    assert f"precision: {fact['name']} ({fact['reason']})" in capsys.readouterr().out
    reason = f"measured on this CPU: fp32 {fp32} ms, bf16 {bf16} ms"
    fact |= {"name": name, "reason": reason, "milliseconds": {"fp32": fp32, "bf16": bf16}}
    write_json(file, record)
    go_on(tmp_path / "run", "plugins=[faulty]")
    assert f"precision: {name} ({reason})" in capsys.readouterr().out
    assert all("precision" not in change for change in read_json(file)["changes"])


@pytest.mark.skipif(
    not any(torch.cpu.get_capabilities().get(name) for name in BF16_PROCESSORS), reason="fp32 is the only choice"
)
def test_all_runs_of_a_model_on_a_machine_have_the_timings_of_the_first(small: Small, tmp_path: Path) -> None:
    milliseconds = []
    for seed in (1, 2):
        composed = small("trainer.precision=auto", "trainer.steps=2", f"seed={seed}")
        run = train(check_run(composed), tmp_path)
        milliseconds.append(read_json(run / "run.json")["facts"]["precision"]["milliseconds"])
    assert milliseconds[0] == milliseconds[1] and set(milliseconds[0]) == set(PRECISIONS)
