"""From arrays to examples."""

import numpy as np

from tfm_blocks.probes.example import Example, at_blanks, at_positions, generated


def test_a_label_is_due_where_it_is_not_minus_one():
    questions, labels = np.array([[5, 6, 7], [8, 9, 4]]), np.array([[-1, 0, 3], [2, -1, -1]])
    assert at_positions(questions, labels) == [Example((5, 6, 7), (0, 3), (1, 2)), Example((8, 9, 4), (2,), (0,))]


def test_blanks_follow_the_string_and_may_be_more_than_the_answer():
    assert at_blanks(np.array([[1, 2]]), np.array([[3, 4, -1]]), blank=9) == [Example((1, 2, 9, 9, 9), (3, 4), (2, 3))]


def test_a_generated_answer_has_no_positions():
    assert generated(np.array([[1, 2]]), np.array([[-1, 4]])) == [Example((1, 2), (4,), None)]
