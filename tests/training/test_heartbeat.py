"""A run without other output prints its current activity."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.distributed.workers import fork_server_restored
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.training import heartbeat as silence
from tfm_blocks.training.heartbeat import Heartbeat


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Return a function that reads what was written to a pipe instead of stdout; it raises BlockingIOError for nothing."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr(silence, "OUTPUT", write)
    yield lambda: os.read(read, 1 << 16).decode()
    os.close(read)
    os.close(write)


def test_the_current_activity_is_printed_until_it_ends_and_only_by_rank_0(
    heard: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "LONGEST", 0.01)
    with Heartbeat("reading", enabled=False):
        time.sleep(0.1)
    with pytest.raises(BlockingIOError):
        heard()
    with Heartbeat("reading", enabled=True) as heartbeat:
        wait_for(heard, "reading, for ")
        heartbeat.doing("writing")
        wait_for(heard, "writing, for ")
    with suppress(BlockingIOError):
        heard()
    time.sleep(0.1)
    with pytest.raises(BlockingIOError):
        heard()


def wait_for(heard: Callable[[], str], text: str) -> None:
    shown = ""
    while text not in shown:
        time.sleep(0.01)
        with suppress(BlockingIOError):
            shown += heard()


def test_other_output_postpones_the_heartbeat(heard: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LONGEST", 1.0)
    with Heartbeat("reading", enabled=True) as heartbeat:
        heartbeat.printed = time.monotonic() + 3600
        time.sleep(1.2)
    with pytest.raises(BlockingIOError):
        heard()


@pytest.mark.grid
def test_no_part_of_a_run_is_silent_and_its_lines_stay_whole_and_in_order(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """This includes the time in which loader workers are forked."""
    monkeypatch.setattr(silence, "LONGEST", 0.002)
    composed = small("trainer.steps=2", "trainer.validate_every=1", "trainer.log_every=1", "trainer.workers=2")
    with fork_server_restored():
        train(check_run(composed), tmp_path)
    lines = capfd.readouterr().out.splitlines()
    activities = [line.rpartition(", for ")[0] for line in lines if re.fullmatch(r"[\w/ ]+, for \d+ s", line)]
    order = list(dict.fromkeys(activities))
    parts = [
        "preparing the text", "building the model", "opening the loggers", "checking the memory",
        "step 1/2  validating", "step 2/2  validating", "testing", "scoring the translations",
        "closing the loggers",
    ]  # fmt: skip
    assert order == [part for part in parts if part in order]
    # These may end before a line is due.
    short = {"building the model", "opening the loggers", "scoring the translations", "closing the loggers"}
    assert set(parts) - short <= set(order)
    steps = [line for line in lines if re.fullmatch(r"step 1/2  loss .* s left", line)]
    assert steps, "while it trains, its pace"
    whole = [line for line in lines if line.startswith(("data: ", "memory: ", "done: "))]
    assert [line.partition(" ")[0] for line in whole] == ["data:"] * 4 + ["memory:", "done:"]
    checking = next(place for place, line in enumerate(lines) if line.startswith("checking the memory, for"))
    preparing = next(place for place, line in enumerate(lines) if line.startswith("preparing the text, for"))
    assert preparing < lines.index(whole[0]) < checking
