from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from tests.conftest import composed_small
from tests.training.test_memory_check import Peak, print_within
from tests.training.test_module import feed_of, make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.launch.rank import _data, build_memory_check
from tfm_blocks.launch.run_spec import choose_precision
from tfm_blocks.training.fsdp2 import units_of
from tfm_blocks.training.memory_check import MemoryCheck

ROOT = Path(__file__).parents[2]
DEEP = ["layers=4", "d_model=32", "d_ff=512", "data.train=600", "data.step_tokens=2000", "data.batch_tokens=2000"]
HEAVY = ["layers=3", "d_model=256", "d_ff=1024", "trainer.devices=4", "data.train=600", "data.step_tokens=3200"]
RECOMPUTED = "trainer.activation_checkpointing=true"
SHARDED = "trainer.strategy=fsdp2"


@pytest.mark.parametrize(
    ("overrides", "workers", "pinned"),
    [
        (["trainer.accelerator=cuda"], 2, True),
        (["trainer.accelerator=cuda", "trainer.workers=0"], 0, True),
        (["trainer.accelerator=cpu"], 0, False),
    ],
)
def test_batches_for_an_accelerator_are_pinned_and_made_by_workers(
    small: Callable[..., Composed], overrides: list[str], workers: int, pinned: bool
) -> None:
    module, made = make(small(*overrides))
    data = _data(Ranks(), feed_of(made), made.prepared, module.settings)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert (loader.num_workers, loader.pin_memory) == (workers, pinned)


def trial_of(composed: Composed) -> MemoryCheck:
    """Return the memory check of the first rank of this run."""
    module, data = make(composed)
    devices = module.settings.trainer.devices
    return build_memory_check(
        RankInfo(world=devices, devices=devices), module, feed_of(data), choose_precision("fp32", "cpu")
    )


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def peak_of(tried: MemoryCheck) -> int:
    with Peak("cpu") as peak:
        assert tried._fits(tried.planned_corpus.settings.batch_tokens, 1)
    return peak.most


@pytest.mark.grid
def test_the_memory_check_recomputes_layers_as_training_does(small: Callable[..., Composed]) -> None:
    assert peak_of(trial_of(small(*DEEP, RECOMPUTED))) < peak_of(trial_of(small(*DEEP))) / 2


@pytest.mark.grid
def test_the_memory_check_of_fsdp2_counts_the_shard_of_a_rank(small: Callable[..., Composed]) -> None:
    """DDP holds two moments, a buffer and the gradients; one of four FSDP2 ranks holds a quarter of four copies, and
    the gradients of a layer with their buffer.
    """
    plain, sharded = trial_of(small(*HEAVY)), trial_of(small(*HEAVY, SHARDED))
    weights, layers = bytes_of(plain.network), [bytes_of(unit) for unit in units_of(plain.network)]
    less = 2 * weights + sum(layers) - 2 * max(layers)
    assert peak_of(plain) - peak_of(sharded) == pytest.approx(less, rel=0.05)


def test_fsdp2_reduces_gradients_outside_layers_after_the_backward_pass(
    small: Callable[..., Composed],
) -> None:
    """With most weights in no layer the peak is the exchange: the run's weights, the trial's, a layer's gradients and
    their buffer, and the other gradients and theirs.
    """
    positions = "++model.graph.src_pos={block: learned_position, max_length: 40000}"
    tried = trial_of(small(*HEAVY, SHARDED, "layers=1", positions, "data.step_tokens=240"))
    layers = [bytes_of(unit) for unit in units_of(tried.network)]
    weights = bytes_of(tried.network)
    expected = 2 * weights + 2 * max(layers) + 2 * (weights - sum(layers))
    assert expected <= peak_of(tried) < 1.05 * expected


def check_within(room: int, overrides: list[str]) -> None:
    """Entry point of a process: print the result of the memory check when `room` more bytes can be mapped."""
    print_within(room, trial_of(composed_small(Path(os.environ["FOLDER"]), pytest.MonkeyPatch())(*overrides)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("sizes", "option"), [(DEEP, RECOMPUTED), (HEAVY, SHARDED)])
def test_a_limit_between_both_figures_accepts_the_run_with_the_option_alone(
    small: Callable[..., Composed], tmp_path: Path, sizes: list[str], option: str
) -> None:
    def printed(overrides: list[str]) -> str:
        code = f"from tests.launch.test_rank import check_within as c; c({room}, {overrides})"
        freed_is_returned = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        environment = {**os.environ, "FOLDER": str(tmp_path), **freed_is_returned}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    trials = [trial_of(small(*sizes)), trial_of(small(*sizes, option))]
    weights = sum(parameter.nbytes for parameter in trials[0].network.parameters())
    room = sum(map(peak_of, trials)) // 2 - weights  # the run's weights are in memory before the check
    assert "the largest micro-batch of the plan does not fit in memory" in printed(sizes)
    assert printed([*sizes, option]).startswith("memory: ")
