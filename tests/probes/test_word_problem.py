"""The word problem, against products of permutation matrices."""

import numpy as np
import pytest

from tests.probes.printed import printed
from tfm_blocks.errors import ConfigError
from tfm_blocks.probes.word_problem import WordProblem

ORDERS = {"S3": 6, "A5": 60, "S5": 120}


def matrix(word):
    return np.eye(len(word), dtype=int)[[int(digit) for digit in word]]


@pytest.mark.parametrize("group", ORDERS)
@pytest.mark.parametrize("length", [1, 2, 30])
def test_each_label_is_the_product_up_to_its_token(group, length):
    for one in printed(WordProblem(group=group), [length], count=100):
        product = matrix(one.question[0])
        for place, (word, label) in enumerate(zip(one.question, one.answer, strict=True)):
            product = product if place == 0 else product @ matrix(word)
            assert (product == matrix(label)).all()
        assert one.positions == tuple(range(length))


@pytest.mark.parametrize("group", ORDERS)
def test_a_group_has_its_order_and_only_even_permutations_if_alternating(group):
    matrices = [matrix(word) for word in WordProblem(group=group).alphabet]
    assert len({each.tobytes() for each in matrices}) == ORDERS[group]
    signs = {round(np.linalg.det(each)) for each in matrices}
    assert signs == ({1} if group == "A5" else {1, -1})


def test_the_earlier_permutation_is_applied_first():
    rows = printed(WordProblem(group="S3"), [2], count=500)
    (answer,) = {tuple(one.answer) for one in rows if one.question == ["120", "102"]}
    assert answer == ("120", "021"), "0 goes to 1 and then to 0, 1 to 2, 2 to 0 and then to 1"


def test_an_unknown_group_is_refused():
    with pytest.raises(ConfigError, match=r"data\.group: must be one of S3, A5, S5, but is Z60"):
        WordProblem(group="Z60")
