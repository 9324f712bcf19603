"""Memory that runs out for real: the process may not map more than it has and a little."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.test_module import feed_of, make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.errors import RunError
from tfm_blocks.training.trial import Trial, worst

ROOT = Path(__file__).parents[2]
ROOM = 60_000_000


def trial(composed: Composed) -> Trial:
    module, data = make(composed)
    return Trial(module.network, feed_of(data), 0.1, Ranks(), torch.device("cpu"), nullcontext())


def test_the_most_expensive_of_all_micro_batches_are_tried(small: Callable[..., Composed]) -> None:
    feed = trial(small("data.batch_tokens=200")).feed
    costs = []
    for step in feed.plan(seed=1, epoch=0):
        widths = [(len(rows_B), feed.layout.widths_NC(feed.corpus)[rows_B].max(0)) for rows_B in step.share(0, 1)]
        costs += [(rows * int(one.sum()), rows * int((one.astype(np.int64) ** 2).sum())) for rows, one in widths]
    most, longest = worst(feed, 1, Ranks())
    sizes = [[ids.shape for ids in batch.inputs.values()] for batch in (most, longest)]
    assert sum(rows * width for rows, width in sizes[0]) >= 0.9 * max(tokens for tokens, _ in costs)
    assert sum(rows * width**2 for rows, width in sizes[1]) >= 0.9 * max(products for _, products in costs)


def test_a_trial_tells_its_peak_and_leaves_the_network_as_it_was(small: Callable[..., Composed]) -> None:
    one = trial(small("dropout=0.3"))
    before = [parameter.detach().clone() for parameter in one.network.parameters()]
    state = torch.random.get_rng_state()
    assert one.run(1).startswith("memory: the process has taken ")
    assert torch.equal(state, torch.random.get_rng_state())
    for parameter, kept in zip(one.network.parameters(), before, strict=True):
        assert torch.equal(parameter, kept) and parameter.grad is None


def shrink() -> None:
    """In a process of its own: prints the error of a trial in little memory, and whether the cap that it names fits."""
    from tests.conftest import composed_small

    small = composed_small(Path(os.environ["FOLDER"]), pytest.MonkeyPatch())
    one = trial(small("data.train=3000", "data.step_tokens=20000", "data.batch_tokens=30000", "d_model=64", "d_ff=256"))
    one._try(next(iter(worst(one.feed, 1, Ranks(63, 64)))))  # what a first backward maps
    (mapped,) = [
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")
    ]
    limit = int(mapped) * 1024 + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        one.run(1)
    except RunError as error:
        print(error)
        cap = int(str(error).partition("data.batch_tokens=")[2].partition(" ")[0])
        print(one._fits(cap, 1), one._fits(2 * cap, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_too_little_memory_is_told_before_the_first_step_with_the_largest_cap_that_fits(tmp_path: Path) -> None:
    code = "from tests.training.test_trial import shrink; shrink()"
    environment = {**os.environ, "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()
    place = said.index("error: data.batch_tokens: is 30000: memory does not hold the largest micro-batch of the plan")
    assert said[place + 1].startswith("  help: data.batch_tokens=")
    assert said[place + 1].endswith(" fits; it changes no result")
    assert said[-1] == "True False"
