from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed
from torch.distributed import HashStore

from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.distributed.rendezvous import Meeting, _greet
from tfm_blocks.errors import Problem, RunError


def test_processes_that_are_started_anew_do_not_believe_what_others_have_said_before() -> None:
    store, places = HashStore(), [RankInfo(cluster="torchrun", rank=rank, world=3, devices=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        names = []
        for _ in range(3):  # what the last three have said is still there
            told = set(pool.map(lambda place: _greet(store, place), places))
            assert len(told) == 1
            names += told
    assert len(set(names)) == 3


def test_what_a_process_has_joined_it_leaves() -> None:
    meeting = Meeting(RankInfo())
    meeting.store = HashStore()
    for leave in (meeting.part, meeting.leave):
        meeting.join("cpu")
        assert torch.distributed.is_initialized()
        leave()
        assert not torch.distributed.is_initialized()


def test_what_the_first_process_finds_wrong_it_tells_alone_and_the_others_end_with_its_status() -> None:
    store, meetings = HashStore(), [Meeting(RankInfo()) for _ in range(2)]
    for rank, meeting in enumerate(meetings):
        meeting.place, meeting.store = RankInfo(cluster="torchrun", rank=rank, world=2, devices=2), store

    def fail() -> None:
        raise RunError(Problem("x", "is wrong"))

    assert [meeting.decide("number", lambda rank=rank: rank) for rank, meeting in enumerate(meetings)] == [0, 0]
    with pytest.raises(RunError):
        meetings[0].decide("folder", fail)
    with pytest.raises(SystemExit) as left:
        meetings[1].decide("folder", fail)
    assert left.value.code == 1
