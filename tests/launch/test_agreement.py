from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.layout import Sides
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import RunError
from tfm_blocks.launch.agreement import compare_ranks, fingerprint
from tfm_blocks.launch.processes import run_together
from tfm_blocks.training.data import Feed
from tfm_blocks.training.settings import read_run


def compare(ranks: Ranks, different: bool) -> None:
    torch.distributed.init_process_group("gloo")
    compare_ranks({"config": "same", "vocabulary": str(ranks.rank if different else 0)}, ranks.world)
    torch.distributed.destroy_process_group()


def test_ranks_that_would_train_different_models_stop_and_say_what_differs() -> None:
    run_together(compare, 2, False)
    with pytest.raises(RunError, match="process 1 has another vocabulary than process 0"):
        run_together(compare, 2, True)


def test_the_fingerprint_tells_what_differs_and_the_cap_on_a_batch_is_not_in_the_text(
    small: Callable[..., Composed],
) -> None:
    def made(*overrides: str) -> dict[str, str]:
        config = small(*overrides).mapping
        settings = read_run(config)
        prepared = prepare(settings.data, config["vocab"], tell=lambda text: None)
        return dict(fingerprint(config, prepared, Feed(prepared.train, Sides(["src"]), settings.data)))

    first = made()
    assert first == made()
    for overrides, same in (
        (["data.batch_tokens=150"], {"vocabulary", "training text"}),
        (["seed=2"], {"vocabulary"}),
        (["data.max_length=20"], {"vocabulary"}),
        (["vocab=290"], set()),
    ):
        other = made(*overrides)
        assert {name for name in first if first[name] == other[name]} == same
