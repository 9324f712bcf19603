from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.training.test_module import feed_of, make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.launch.rank import _data


@pytest.mark.parametrize(
    ("asked", "workers", "pinned"),
    [
        (["trainer.accelerator=cuda"], 2, True),
        (["trainer.accelerator=cuda", "trainer.workers=0"], 0, True),
        (["trainer.accelerator=cpu"], 0, False),
    ],
)
def test_an_accelerator_gets_pinned_batches_that_workers_make(
    small: Callable[..., Composed], asked: list[str], workers: int, pinned: bool
) -> None:
    module, made = make(small(*asked))
    data = _data(Ranks(), feed_of(made), made.prepared, module.settings)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert (loader.num_workers, loader.pin_memory) == (workers, pinned)
