"""Runs of adapters: what they save, how they resume, and what they refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tfm_blocks as tfm
from tests.conftest import expect_problem
from tests.stopping import train_part
from tfm_blocks.compose.resolve import Composed, recorded_config
from tfm_blocks.errors import RunError
from tfm_blocks.language.sources import Sources
from tfm_blocks.launch.check import check_resumed_run, check_run
from tfm_blocks.launch.job import resume, train
from tfm_blocks.launch.run_spec import read_saved_run
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.records import Status

ADAPT = "model.adapt.a={where: {role: matrix}, rank: 2, alpha: 4, dropout: 0.2}"


def from_base(small: Callable[..., Composed], base: Path, *overrides: str) -> Composed:
    return small(f"init_from={base}", f"data.tokenizer={base}", "dropout=0.1", *overrides)


@pytest.mark.grid
def test_a_resumed_run_of_adapters_is_bit_equal_and_saves_them_alone(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    base = train(check_run(small("trainer.steps=2")), tmp_path / "base")
    settings = ADAPT, "trainer.ema=0.9", "trainer.keep_last=2", "trainer.validate_every=2"
    whole = train(check_run(from_base(small, base, *settings)), tmp_path / "whole")
    halved = from_base(small, base, *settings)
    train_part(3, check_run(halved), tmp_path / "halved")
    left = read_saved_run(tmp_path / "halved" / "run")
    started = train(check_run(from_base(small, left.folder, "trainer.steps=1")), tmp_path / "started")
    assert load_file(started / "weights.safetensors").keys() == load_file(base / "weights.safetensors").keys()
    resume(check_resumed_run(recorded_config(left.config, Sources())), left)
    expected, actual = (load_file(tmp_path / name / "run" / "weights.safetensors") for name in ("whole", "halved"))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(".adapter." in name for name in expected) and len(expected) == 2 * (4 + 7)
    saved = [path for path in (whole / "checkpoints").iterdir() if path.suffix in (".ckpt", ".safetensors")]
    base_size = (base / "weights.safetensors").stat().st_size
    assert len(saved) > 2 and all(path.stat().st_size < base_size for path in saved if path.suffix != ".ckpt")
    states = [torch.load(path, weights_only=True)["state_dict"] for path in saved if path.suffix == ".ckpt"]
    assert all({name.removeprefix("network.") for name in state} == expected.keys() for state in states)
    loaded = tfm.load(whole).network
    frozen = load_file(base / "weights.safetensors")
    assert not loaded.spec.adapted and weights_of(loaded).keys() == frozen.keys()
    changed = {name for name, weight in weights_of(loaded).items() if not torch.equal(weight, frozen[name])}
    assert changed == {name.replace(".adapter.a", ".weight") for name in expected if name.endswith(".a")}
    assert read_spec(whole).adapted


@pytest.mark.grid
def test_a_run_without_adapters_can_start_from_the_merged_weights(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    base = train(check_run(small("trainer.steps=2")), tmp_path / "base")
    adapters = train(check_run(from_base(small, base, ADAPT, "trainer.steps=2")), tmp_path / "adapters")
    again = from_base(small, adapters, "trainer.steps=1", "schedule=linear", "schedule.peak=1e-12", "schedule.warmup=1")
    run = train(check_run(again), tmp_path / "again")
    merged = weights_of(tfm.load(adapters).network)
    torch.testing.assert_close(load_file(run / "weights.safetensors"), merged)
    with pytest.raises(RunError, match="adapters itself") as error:
        train(check_run(from_base(small, adapters, ADAPT)), tmp_path / "third")
    assert "tfm merge" in error.value.problems[0].help
    with pytest.raises(RunError, match=r"tokenizer has other ids|has the shape"):
        train(check_run(small(f"init_from={base}", ADAPT, "vocab=280")), tmp_path / "other")
    for other, change in (("d_ff=48", "d_ff of .*: 24 → 48"), ("heads=4", "heads of .*: 2 → 4")):
        with pytest.raises(RunError, match=f"init_from: is .*whose model is different .{change}"):
            train(check_run(from_base(small, base, ADAPT, other)), tmp_path / "wider")
    with pytest.raises(RunError, match="scales of parametrisation=standard, but this model has") as error:
        sizes = "model.parametrisation=mup", "++model.base.d_model=8", "++model.base.d_ff=16"
        train(check_run(small(f"init_from={base}", *sizes)), tmp_path / "scaled")
    assert (
        error.value.problems[0].address == "init_from" and "model.base as in that run" in error.value.problems[0].help
    )
    (base / "weights.safetensors").unlink()
    with pytest.raises(RunError, match="which do not exist"):
        train(check_run(small(f"init_from={adapters}", f"data.tokenizer={adapters}")), tmp_path / "lost")
    assert not [path.name for path in tmp_path.iterdir() if path.name in ("third", "other", "wider", "scaled", "lost")]


@pytest.mark.grid
def test_a_run_of_adapters_resumes_with_fsdp2(small: Callable[..., Composed], tmp_path: Path) -> None:
    base = train(check_run(small("trainer.steps=2")), tmp_path / "base")
    sharded = from_base(small, base, ADAPT, "trainer.devices=2", "trainer.strategy=fsdp2")
    train_part(3, check_run(sharded), tmp_path)
    stopped = read_saved_run(tmp_path / "run")
    resume(check_resumed_run(recorded_config(stopped.config, Sources())), stopped)
    assert Status.read(tmp_path / "run").state == "done"
    assert all(".adapter." in name for name in load_file(tmp_path / "run" / "weights.safetensors"))


def test_adapters_need_a_base(small: Callable[..., Composed]) -> None:
    with expect_problem("model.adapt", "init_from names no run", "write init_from=RUN"):
        check_run(small(ADAPT))
