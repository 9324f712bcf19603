from __future__ import annotations

from collections.abc import Callable

import pytest

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import RunError
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.verify import verify_resume
from tfm_blocks.training.module import TrainingModule


def test_an_exact_resume_is_reported(small: Callable[..., Composed], capsys: pytest.CaptureFixture[str]) -> None:
    composed = small("dropout=0.3", "trainer.steps=100", "logger=wandb")
    assert verify_resume(check_run(composed)) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("W&B") for line in said)
    assert last.endswith("bit-equal after 8 steps, with a stop after 4")


def test_dropout_that_depends_on_earlier_draws_is_reported(
    small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingModule, "_seed_dropout", lambda self: None)
    composed = small("dropout=0.3")
    with pytest.raises(RunError, match=r"tensors differ from a run without a stop, after 6 steps, with a stop after 3"):
        verify_resume(check_run(composed))
