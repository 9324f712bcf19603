"""Batches from the rows of a corpus, as each kind of model reads them."""

import numpy as np
import pytest
import torch

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_corpus, write_examples, write_packed
from tfm_blocks.data.layout import Appended, AtPositions, OneSequence, PlainText, Sides
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.probes.task import Example

PAD, BOS, EOS = 0, 1, 2
ROWS = [("a red house", "a page", "ein rotes Haus"), ("dogs", "two pages", "hunde"), ("a", "b", "c d e")]
COLUMNS = ("src", "doc", "tgt")
tokenizer = Tokenizer.train([text for row in ROWS for text in row], 280)


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path, COLUMNS, ROWS, tokenizer, max_length=None)
    return Corpus(tmp_path, tokenizer)


def ids(row, column):
    return tokenizer.encode(ROWS[row][COLUMNS.index(column)])


def padded(rows):
    width = max(map(len, rows))
    return [row + [PAD] * (width - len(row)) for row in rows]


def test_sources_end_in_eos_and_the_target_is_shifted_by_one(corpus):
    batch = Sides(["src", "doc"]).batch(corpus, [2, 0])
    assert list(batch.inputs) == ["src", "doc", "tgt"]
    for name in ("src", "doc"):
        assert batch.inputs[name].tolist() == padded([[*ids(row, name), EOS] for row in (2, 0)])
    assert batch.inputs["tgt"].tolist() == padded([[BOS, *ids(row, "tgt")] for row in (2, 0)])
    assert batch.labels_BT.tolist() == padded([[*ids(row, "tgt"), EOS] for row in (2, 0)])
    assert all(tensor.dtype == torch.int64 for tensor in (*batch.inputs.values(), batch.labels_BT))


def test_without_sources_all_columns_are_one_sequence_of_which_the_target_counts(corpus):
    batch = OneSequence().batch(corpus, [0, 1])
    rows, labels = [], []
    for row in (0, 1):
        before = [*ids(row, "src"), EOS, *ids(row, "doc"), EOS]
        rows.append([*before, BOS, *ids(row, "tgt")])
        labels.append([PAD] * len(before) + [*ids(row, "tgt"), EOS])
    assert batch.inputs["tgt"].tolist() == padded(rows)
    assert batch.labels_BT.tolist() == padded(labels)


def test_packed_text_is_predicted_whole(tmp_path):
    write_packed(tmp_path, "tgt", [row[2] for row in ROWS], tokenizer, context=4)
    corpus = Corpus(tmp_path, tokenizer)
    batch = PlainText().batch(corpus, [0, len(corpus) - 1])
    rows = [corpus.ids("tgt", row).tolist() for row in (0, len(corpus) - 1)]
    assert batch.labels_BT.tolist() == padded(rows)
    assert batch.inputs["tgt"].tolist() == padded([[BOS, *row[:-1]] for row in rows])


@pytest.mark.parametrize(
    "layout", [Sides(["src", "doc"]), Sides(["doc"]), OneSequence()], ids=["two sources", "one source", "one sequence"]
)
def test_widths_and_labels_match_the_batches(corpus, layout):
    for row in range(len(ROWS)):
        batch = layout.batch(corpus, [row])
        assert [batch.inputs[name].shape[1] for name in layout.inputs] == layout.widths_NC(corpus)[row].tolist()
        assert (batch.labels_BT != 0).sum() == layout.labels_N(corpus)[row]


@pytest.mark.parametrize("layout", [Sides(["src"]), OneSequence()], ids=["one source", "one sequence"])
def test_an_empty_batch_has_labels_of_padding_alone(corpus, layout):
    batch, empty = layout.batch(corpus, [0]), layout.batch(corpus, [0], empty=True)
    assert batch.labels_BT.any() and not empty.labels_BT.any()
    assert all(torch.equal(batch.inputs[name], empty.inputs[name]) for name in batch.inputs)


EXAMPLES = {
    True: [Example((3, 1, 2, 0), (2, 1), (1, 3)), Example((5, 4), (0,), (0,))],
    False: [Example((3, 1, 2, 0), (2, 1), None), Example((5, 4), (0,), None)],
}  # keys: True if the answers are expected at positions


@pytest.fixture
def answers(tmp_path):
    """Return a function that writes a corpus of examples."""

    def corpus_of(positional):
        folder = tmp_path / str(positional)
        folder.mkdir(exist_ok=True)
        tokenizer = Tokenizer.of_words("abcdef")
        write_examples(folder, EXAMPLES[positional], tokenizer)
        return Corpus(folder, tokenizer)

    return corpus_of


@pytest.mark.parametrize("input", ["src", "tgt"])
def test_answers_at_positions_are_labels_there(answers, input):
    layout, corpus = AtPositions(input), answers(True)
    batch = layout.batch(corpus, [0, 1])
    assert batch.inputs[input].tolist() == [[7, 5, 6, 4], [9, 8, 0, 0]]
    assert batch.labels_BT.tolist() == [[0, 6, 0, 5], [4, 0, 0, 0]]
    assert batch.kept_N.tolist() == [1, 3, 4]
    assert layout.widths_NC(corpus).tolist() == [[4], [2]] and layout.labels_N(corpus).tolist() == [2, 1]


def test_an_encoder_answers_at_empty_positions_after_the_question(answers):
    layout, corpus = Appended("src"), answers(False)
    batch = layout.batch(corpus, [0, 1])
    assert batch.inputs["src"].tolist() == [[7, 5, 6, 4, EOS, BOS, BOS], [9, 8, EOS, BOS, 0, 0, 0]]
    assert batch.labels_BT.tolist() == [[0, 0, 0, 0, 0, 6, 5], [0, 0, 0, 4, 0, 0, 0]]
    assert layout.widths_NC(corpus).tolist() == [[7], [4]] and layout.labels_N(corpus).tolist() == [2, 1]


def test_some_positions_among_examples_without_are_refused(tmp_path):
    with pytest.raises(ValueError, match="all examples of a task have positions, or none"):
        write_examples(tmp_path, [EXAMPLES[True][0], EXAMPLES[False][1]], Tokenizer.of_words("abcdef"))


def test_the_model_and_the_corpus_decide_how_a_corpus_is_read(corpus, answers, tmp_path):
    assert isinstance(layout_of(corpus, ["src", "tgt"]), Sides)
    assert isinstance(layout_of(corpus, ["tgt"]), OneSequence)
    assert np.array_equal(layout_of(corpus, ["doc", "tgt"]).inputs, ("doc", "tgt"))
    for positional, kinds in ((True, (Sides, AtPositions, AtPositions)), (False, (Sides, OneSequence, Appended))):
        shapes = (["src", "tgt"], ["tgt"], ["src"])
        assert [type(layout_of(answers(positional), inputs)) for inputs in shapes] == list(kinds)
    (tmp_path / "packed").mkdir()
    write_packed(tmp_path / "packed", "tgt", ["a b"], tokenizer, context=4)
    assert isinstance(layout_of(Corpus(tmp_path / "packed", tokenizer), ["tgt"]), PlainText)
