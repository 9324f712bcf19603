"""Failures are classified."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweep.test_held import sweep_of_one
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.sweep.job import result_of

CASES = [
    (0, "done", "", "done", ""),
    (2, None, "error: data.train: is missing\n  help: x\n", "wrong config", "data.train: is missing"),
    (3, "diverged", "", "diverged", "told"),
    (75, "preempted", "", "stopped", "told"),
    (137, "running", "step 1\n", "killed", "SIGKILL, which often means too little memory"),
    (139, "running", "", "killed", "SIGSEGV"),
    (1, "failed", "", "error", "told"),
    (1, None, "hello\nTraceback\nKeyError: 'x'\n", "error", "KeyError: 'x'"),
    (1, None, "error: data.batch_tokens: is 8: the largest micro-batch of the plan does not fit in memory\n", "out of memory", "data.batch_tokens"),
    (1, None, "torch.OutOfMemoryError: CUDA out of memory\n", "out of memory", "torch.OutOfMemoryError"),
    (1, None, "RuntimeError: could not create a primitive\n", "out of memory", "RuntimeError: could not create"),
    (1, None, "RuntimeError: could not create a primitive descriptor for a matmul\n", "error", "RuntimeError"),
    (1, None, "error: trainer.devices: process 1 of 2 ended with SIGKILL\n", "killed", "SIGKILL: trainer.devices"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "state", "said", "kind", "reason"), CASES)
def test_a_failure_has_its_state_and_its_reason(tmp_path, status, state, said, kind, reason):
    run, log = tmp_path / "run", tmp_path / "run.log"
    before = "error: of an attempt before\n"
    log.write_text(before + said)
    run.mkdir()
    if state:
        (run / "status.json").write_text(json.dumps({"state": state, "reason": "told"}))
    result = result_of(status, run, log, len(before))
    assert result[0] == kind and result[1].startswith(reason)
    assert "of an attempt before" not in result[1]


@pytest.mark.parametrize(
    ("ends", "state", "reason"),
    [
        ("print('error: no checkpoint can be read'); sys.exit(1)", "error", "no checkpoint can be read"),
        ("sys.exit(1)", "error", ""),
        (
            "open('x/seed-1/status.json', 'w').write(old.replace('SIGKILL', 'SIGSEGV')); sys.exit(1)",
            "killed",
            "SIGSEGV",
        ),
    ],
)
def test_the_reason_of_an_earlier_start_is_not_reported_again(
    small: Callable[..., Composed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, state: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = sweep_of_one(small, Path(), None)
    old = json.dumps({"state": "failed", "reason": "process 1 of 2 ended with SIGKILL"})
    Path("x/seed-1").mkdir()
    Path("x/seed-1/run.json").write_text("{}")
    Path("x/seed-1/status.json").write_text(old)
    sweep.command = [sys.executable, "-c", f"import sys; old = {old!r}; {ends}"]
    sweep.run()
    (job,) = sweep.source.jobs
    assert job.state == state and job.reason.startswith(reason) and "SIGKILL" not in job.reason
