"""The ids of published vocabularies: padding, begin and end first."""

import pytest

from tfm_blocks.data.vocabulary import OwnVocabulary, Vocabulary


@pytest.mark.parametrize(("start", "eos"), [(1, 2), (0, 1), (36, 0), (36, 36), (0, 0), (5, 3)])
def test_every_id_has_one_place_after_padding_begin_and_end(start, eos):
    vocabulary = Vocabulary(37, start, eos)
    own_ids = vocabulary.to_here(range(37))
    assert sorted(own_ids) == list(range(vocabulary.first, vocabulary.size_here))
    assert vocabulary.to_published(own_ids) == list(range(37))
    assert own_ids[eos] == 2 and vocabulary.to_published([0, 1, 2]) == [start, eos]
    others = [id for id in own_ids if id > 2]
    assert others == sorted(others)


def test_the_begin_has_a_row_unless_it_is_the_end():
    assert (Vocabulary(37, 1, 2).first, Vocabulary(37, 2, 2).first) == (1, 2)
    assert (OwnVocabulary(37, 1, 2).first, OwnVocabulary(37, 1, 2).size_here) == (0, 37)
