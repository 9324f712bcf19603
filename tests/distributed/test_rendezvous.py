from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed import HashStore

from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.distributed.rendezvous import Rendezvous, _agree_on_start_id
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.launch.run_spec import Precision, RunSpec
from tfm_blocks.runs.records import RunFile


def test_restarted_processes_ignore_messages_of_the_previous_start() -> None:
    store, rank_infos = HashStore(), [RankInfo(cluster="torchrun", rank=rank, world=3, devices=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        names = []
        for _ in range(3):  # the messages of the previous three ranks are still in the store
            start_ids = set(pool.map(lambda rank_info: _agree_on_start_id(store, rank_info), rank_infos))
            assert len(start_ids) == 1
            names += start_ids
    assert len(set(names)) == 3


def test_a_process_leaves_the_rendezvous_it_joined() -> None:
    rendezvous = Rendezvous(RankInfo())
    rendezvous.store = HashStore()
    for leave in (rendezvous.leave_together, rendezvous.leave):
        rendezvous.join("cpu")
        assert torch.distributed.is_initialized()
        leave()
        assert not torch.distributed.is_initialized()


def two_ranks(store: HashStore) -> list[Rendezvous]:
    ranks = [Rendezvous(RankInfo()) for _ in range(2)]
    for rank, rendezvous in enumerate(ranks):
        rendezvous.rank_info, rendezvous.store = RankInfo(cluster="torchrun", rank=rank, world=2, devices=2), store
    return ranks


START, PRECISION = RunFile(300, "x", ("tfm train",), prolonged=5, facts={"seed": 1}), Precision("fp32", "an A100")
JOB = RunSpec({"model": {"graph": None}}, Path("runs/ü"), START, "tfm train", PRECISION, Path("a.ckpt"), 7, True)


@pytest.mark.parametrize("sent", [JOB, RunSpec({}, Path("runs/run"), RunFile(), "tfm train", PRECISION)])
def test_what_rank_0_sends_is_json_in_the_store_and_the_same_on_another_rank(sent: RunSpec) -> None:
    store = HashStore()
    first, second = two_ranks(store)
    first.decide("run", sent.to_json)
    assert json.loads(store.get("run")) == {"value": json.loads(json.dumps(sent.to_json()))}
    assert type(sent).from_json(second.decide("run", sent.to_json)) == sent


def test_what_ranks_gather_is_json_in_the_store() -> None:
    store, threads = HashStore(), ThreadPoolExecutor(2)
    ranks = two_ranks(store)
    with threads:
        gathered = threads.map(
            lambda rendezvous: rendezvous.gather("asked", {"rank": rendezvous.rank_info.rank}), ranks
        )
        assert list(gathered) == [[{"rank": 0}, {"rank": 1}]] * 2
    assert [json.loads(store.get(f"asked {rank}")) for rank in range(2)] == [
        {"value": {"rank": 0}},
        {"value": {"rank": 1}},
    ]


def test_ranks_combine_the_launches_and_restarts_of_their_nodes() -> None:
    """Only the second node counted a restart, and each has its own name of the start."""
    ranks = two_ranks(HashStore())
    for rank, rendezvous in enumerate(ranks):
        rendezvous.rank_info = replace(rendezvous.rank_info, launch=f"torchrun none_{rank}", restarts=rank)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Rendezvous.combine_starts, ranks))
    starts = {(rendezvous.rank_info.launch, rendezvous.rank_info.restarts) for rendezvous in ranks}
    assert starts == {("torchrun none_0\ntorchrun none_1", 1)}


def test_an_error_of_rank_0_is_printed_once_and_all_ranks_end_with_its_status() -> None:
    ranks = two_ranks(HashStore())

    def fail() -> None:
        raise RunError(Problem("x", "is wrong"))

    assert [rendezvous.decide("number", lambda rank=rank: rank) for rank, rendezvous in enumerate(ranks)] == [0, 0]
    with pytest.raises(RunError):
        ranks[0].decide("folder", fail)
    with pytest.raises(SystemExit) as left:
        ranks[1].decide("folder", fail)
    assert left.value.code == 1
