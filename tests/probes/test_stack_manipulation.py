"""Stack manipulation, against a list."""

from collections import Counter

import pytest
from scipy.stats import chisquare

from tests.probes.printed import printed
from tfm_blocks.probes.stack_manipulation import StackManipulation


def split_string(words):
    """Return the initial stack, given by the leading bits, and the operations."""
    size = next((place for place, word in enumerate(words) if word not in "01"), len(words))
    assert all(word in ("pop", "push0", "push1") for word in words[size:])
    return words[:size], words[size:]


@pytest.mark.parametrize("length", [1, 2, 3, 40, 101])
def test_the_answer_lists_the_final_stack_from_the_top(length):
    for one in printed(StackManipulation(), [length]):
        stack, operations = split_string(one.question[:length])
        for operation in operations:
            stack = [*stack, operation[-1]] if operation != "pop" else stack[:-1]
        assert one.answer == [*stack[::-1], "end"]
        assert one.positions == tuple(range(length, length + len(one.answer)))
        assert one.question[length:] == ["_"] * (length + 1), "the number of blanks does not reveal the stack's size"


def test_sizes_of_the_initial_stack_and_operations_are_uniform():
    rows = [split_string(one.question[:20]) for one in printed(StackManipulation(), [20], count=4000)]
    sizes = Counter(len(stack) for stack, _ in rows)
    assert set(sizes) == set(range(1, 20)) and chisquare(list(sizes.values())).pvalue > 0.001
    operations = Counter(word for _, words in rows for word in words)
    assert chisquare(list(operations.values())).pvalue > 0.001
