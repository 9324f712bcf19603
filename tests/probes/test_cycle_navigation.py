"""Cycle navigation, against an agent that walks."""

import pytest

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.cycle_navigation import CycleNavigation


@pytest.mark.parametrize("modulus", [2, 5, 12])
@pytest.mark.parametrize("length", [1, 40, 500])
def test_the_answer_is_the_place_where_a_walk_ends(modulus, length):
    ring = list(map(str, range(modulus)))
    for one in printed(CycleNavigation(modulus=modulus), [length], count=100):
        place = list(ring)  # the agent stays at the front, and the ring rotates
        for move in one.string:
            if move == "+1":
                place.append(place.pop(0))
            elif move == "-1":
                place.insert(0, place.pop())
            else:
                assert move == "stay"
        assert one.answer == [place[0]] and one.positions == (length,)


def test_a_cycle_needs_two_places():
    with pytest.raises(ConfigError, match=r"data\.modulus: must be at least 2, but is 1"):
        CycleNavigation(modulus=1)
