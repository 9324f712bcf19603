"""Addition, against Python's integers."""

import pytest

from tests.probes.printed import printed
from tfm_blocks.probes.addition import Addition


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_the_answer_is_the_sum(length):
    for one in printed(Addition(), [length]):
        left, right = "".join(one.question).split("+")
        assert len(left) == len(right) == length and str(int(left)) == left and str(int(right)) == right
        assert "".join(one.answer) == str(int(left) + int(right)) and one.positions is None


def test_every_pair_of_digits_occurs():
    texts = {"".join(one.question): "".join(one.answer) for one in printed(Addition(), [1], count=2000)}
    assert len(texts) == 100 and texts["0+0"] == "0" and texts["9+9"] == "18"
