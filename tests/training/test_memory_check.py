"""Real out-of-memory errors: the process may map only little more than it has."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.test_module import feed_of, make, trainer
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.errors import RunError
from tfm_blocks.training.callbacks import MovingAverage
from tfm_blocks.training.memory_check import Copies, MemoryCheck, copies_of, is_out_of_memory, worst

ROOT = Path(__file__).parents[2]
ROOM = 90_000_000  # bytes


def trial(composed: Composed) -> MemoryCheck:
    module, data = make(composed)
    return MemoryCheck(
        module.network, feed_of(data), module.objective, Ranks(), torch.device("cpu"), nullcontext(), Copies(2)
    )


class Peak(TorchDispatchMode):
    """Record the peak bytes of tensors of a device that are created inside."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.bytes, self.most = device, 0, 0
        self.live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.device.type == self.device:
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.live:
            return

        def gone(_: object) -> None:
            self.bytes -= size
            del self.live[key]

        self.live[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.most = max(self.most, self.bytes)


HEAVY = ["d_model=256", "d_ff=1024", "data.train=60", "data.batch_tokens=150", "dropout=0.1"]  # steps of many parts


FROZEN = "optimizer.groups={top: {where: {node: encoder}, train: false}}"
UPDATES = {
    "adam": [],
    "recomputed layers": ["trainer.activation_checkpointing=true"],
    "moving average": ["trainer.ema=0.999"],
    "sgd": ["optimizer=sgd"],
    "sgd without momentum": ["optimizer=sgd", "optimizer.momentum=0"],
    "cautious": ["optimizer=adamw", "optimizer.cautious=true", "optimizer.weight_decay=0.1"],
    "frozen": [FROZEN],
    "frozen and average": [FROZEN, "trainer.ema=0.999"],
}


@pytest.mark.grid
@pytest.mark.parametrize("options", UPDATES.values(), ids=UPDATES)
def test_a_trial_takes_what_training_takes_and_little_more(small: Callable[..., Composed], options: list[str]) -> None:
    composed = small(*HEAVY, *options)
    module, data = make(composed)
    copies = copies_of(module.settings, module.network, 1)
    tried = replace(trial(composed), network=module.network, copies=copies)
    with Peak("cpu") as trial_peak:
        assert tried._fits(150, 1)
    del tried, module
    module, data = make(composed)
    run = trainer(3)
    run.callbacks += [MovingAverage(0.999)] if module.settings.trainer.ema else []  # type: ignore[attr-defined]
    with Peak("cpu") as run_peak:
        run.fit(module, datamodule=data)
    assert run_peak.most <= trial_peak.most <= 1.05 * run_peak.most


def test_where_the_weights_of_the_run_are_still_elsewhere_a_trial_holds_as_many(small: Callable[..., Composed]) -> None:
    """On the meta device as on an accelerator, the memory holds the weights, gradients, copies and activations."""
    one = replace(trial(small(*HEAVY)), device=torch.device("meta"), copies=Copies(3))
    weights = sum(parameter.nbytes for parameter in one.network.parameters())
    with Peak("meta") as peak:
        assert one._fits(150, 1)
    assert 5 * weights < peak.most < 6 * weights


def test_the_most_expensive_of_all_micro_batches_are_tried(small: Callable[..., Composed]) -> None:
    feed = trial(small("data.batch_tokens=200")).planned_corpus
    costs = []
    for step in feed.plan(seed=1, epoch=0):
        widths = [
            (len(rows_B), feed.layout.widths_NC(feed.corpus)[rows_B].max(0)) for rows_B in step.share(Ranks(0, 1))
        ]
        costs += [(rows * int(one.sum()), rows * int((one.astype(np.int64) ** 2).sum())) for rows, one in widths]
    most, longest = worst(feed, 1, Ranks())
    sizes = [[ids.shape for ids in batch.inputs.values()] for batch in (most, longest)]
    assert sum(rows * width for rows, width in sizes[0]) >= 0.9 * max(tokens for tokens, _ in costs)
    assert sum(rows * width**2 for rows, width in sizes[1]) >= 0.9 * max(products for _, products in costs)


def test_a_batch_that_is_the_largest_in_both_ways_is_tried_once(small: Callable[..., Composed]) -> None:
    feed = trial(small("data.train=60", "data.step_tokens=5000", "data.batch_tokens=5000")).planned_corpus
    assert len(feed.plan(seed=1, epoch=0)) == 1
    assert len(list(worst(feed, 1, Ranks()))) == 1


def test_the_memory_check_returns_its_peak_and_does_not_change_the_network(small: Callable[..., Composed]) -> None:
    one = trial(small("dropout=0.3"))
    before = [parameter.detach().clone() for parameter in one.network.parameters()]
    state = torch.random.get_rng_state()
    assert one.run(1).startswith("memory: peak ")
    assert torch.equal(state, torch.random.get_rng_state())
    for parameter, kept in zip(one.network.parameters(), before, strict=True):
        assert torch.equal(parameter, kept) and parameter.grad is None


@pytest.mark.grid
def test_the_memory_check_computes_gradients_outside_autocast(small: Callable[..., Composed]) -> None:
    one, autocast = replace(trial(small()), precision=torch.autocast("cpu", torch.bfloat16)), []
    block = one.network.calls[-1].block
    block.register_forward_hook(lambda *_: autocast.append(torch.is_autocast_enabled("cpu")))
    block.register_full_backward_hook(lambda *_: autocast.append(torch.is_autocast_enabled("cpu")))
    assert one._fits(400, 1)
    assert autocast[:2] == [True, False]


def print_within(room: int, one: MemoryCheck) -> None:
    """Print the result of a memory check when this process can map `room` more bytes."""
    one._try([next(worst(one.planned_corpus, 1, Ranks(63, 64)))])  # mapped by a first backward pass
    (mapped,) = [
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")
    ]
    limit = int(mapped) * 1024 + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        print(one.run(1))
    except RunError as error:
        print(error)


def try_in_little_memory(cap: int) -> None:
    """Entry point of a process: print the result of a memory check that may map little more than the smallest micro-batch needs."""
    from tests.conftest import composed_small

    small = composed_small(Path(os.environ["FOLDER"]), pytest.MonkeyPatch())
    sizes = ("data.train=3000", "data.step_tokens=20000", "d_model=64", "d_ff=256")
    print_within(ROOM, trial(small(*sizes, f"data.batch_tokens={cap}")))


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_too_little_memory_is_an_error_before_the_first_step_with_a_cap_that_fits(tmp_path: Path) -> None:
    def run_with_cap(cap: int) -> str:
        code = f"from tests.training.test_memory_check import try_in_little_memory as t; t({cap})"
        every_time_alike = {
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }  # freed memory is returned to the system
        environment = {**os.environ, "FOLDER": str(tmp_path), **every_time_alike}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    refusal = "error: data.batch_tokens: is {}: the largest micro-batch of the plan does not fit in memory"
    _, refused, said = run_with_cap(30000).partition(refusal.format(30000))
    assert refused
    match = re.fullmatch(
        r"\s*help: data\.batch_tokens=(\d+) fits; it changes results only through random draws such as dropout\n", said
    )
    assert match
    cap = int(match[1])
    fitting = run_with_cap(3 * cap // 4)  # processes differ a little in mapped memory
    assert "memory: peak " in fitting
    assert refusal.format(2 * cap) in run_with_cap(2 * cap)


@pytest.mark.parametrize(
    ("message", "of_memory"),
    [("could not create a primitive", True), ("could not create a primitive descriptor for a matmul", False)],
)
def test_an_error_of_onednn_without_memory_is_recognised(message: str, of_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) == of_memory
