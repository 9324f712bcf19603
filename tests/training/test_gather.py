from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed import distributed_c10d

from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.training.gather import gather_json

SENT = [["ü\ud800", None, 0.1], {"rank": [1] * 1000}]


def gather(ranks: Ranks, folder: Path) -> None:
    """Gather on a rank that cannot unpickle, and write down the result."""
    distributed_c10d._unpickler = None
    torch.distributed.init_process_group("gloo")
    (folder / str(ranks.rank)).write_text(json.dumps(gather_json(SENT[ranks.rank])))


@pytest.mark.grid
def test_each_rank_gets_the_values_of_all_without_unpickling(tmp_path: Path) -> None:
    spawn_ranks(gather, 2, tmp_path)
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [SENT, SENT]
