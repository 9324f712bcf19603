"""The tokenizer restores the text that it encoded."""

import json
import random
import string
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.errors import ConfigError, RunError

LINES = ["le 3 mars 1987, à l'aube", "Dienstag, 3. März 1987", "two dogs run in the snow"] * 5
ODD = [
    "",
    " ",
    "  two  spaces and a tab\t ",
    "🙂👩‍👩‍👧 naïve café",
    "日本語 и русский עברית",
    "\x00\x01\x7f\u2028\u0085\ufeff",
    "a<pad>b <eos> </s> <bos><unk>",
    "Ġ Ċ é e\u0301",
]


@pytest.fixture(scope="module", params=[False, True], ids=["", "add_prefix_space"])
def tokenizer(request):
    return Tokenizer.train(LINES, 300, add_prefix_space=request.param)


@pytest.mark.parametrize("text", ODD)
def test_unusual_text_is_restored_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_any_text_is_restored_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", SPECIAL)
def test_the_name_of_a_special_in_the_text_is_text(tokenizer, name, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    for one in (tokenizer, load_tokenizer(tmp_path / "t.json")):
        assert min(one.encode(f"a {name} b")) >= len(SPECIAL)


def test_special_tokens_have_their_ids_and_decode_to_nothing(tokenizer):
    assert (Tokenizer.PAD, Tokenizer.BOS, Tokenizer.EOS, Tokenizer.UNK) == (0, 1, 2, 3)
    assert tokenizer.decode([1, *tokenizer.encode("two dogs"), 2, 0, 0, 3]) == "two dogs"


def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    assert tokenizer.encode_batch(ODD) == [tokenizer.encode(text) for text in ODD]


def test_the_vocabulary_has_at_most_the_requested_size_and_every_id(tokenizer):
    assert tokenizer.size <= 300
    assert Tokenizer.train(LINES, 10_000).size < 400
    assert max(max(ids, default=0) for ids in tokenizer.encode_batch(ODD + LINES)) < tokenizer.size


def test_pieces_are_learned_from_the_text(tokenizer):
    assert len(tokenizer.encode("Dienstag")) < len("Dienstag")


def test_with_a_prefix_space_the_first_word_has_the_subwords_that_it_has_elsewhere():
    with_space, without = (Tokenizer.train(LINES, 300, add_prefix_space=add) for add in (True, False))
    for tokenizer, equal in ((with_space, True), (without, False)):
        first, twice = tokenizer.encode("dogs"), tokenizer.encode("dogs dogs")
        assert (twice == first * 2) == equal
    assert with_space.piece(with_space.encode("two in")[0]).startswith("▁")
    assert with_space.encode("two") != with_space.encode(" two")


@pytest.mark.grid
def test_the_cost_of_a_word_grows_with_its_letters_and_not_with_their_square():
    """Ten times the letters take at most 30 times the CPU time; quadratic cost would be 100 times."""

    def cpu_time(letters):
        word = "".join(random.Random(1).choices(string.ascii_lowercase, k=letters))
        begin = time.process_time()
        tokenizer = Tokenizer.train([*LINES, word], 2000)
        assert tokenizer.decode(tokenizer.encode(word)) == word
        return time.process_time() - begin

    assert cpu_time(1_000_000) < 30 * cpu_time(100_000)


def test_words_of_a_thousand_letters_are_learned_whole():
    word = "ab" * 512
    assert len(Tokenizer.train([word] * 2, 300).encode(word)) == 1


def test_the_bound_on_words_is_not_in_the_file(tokenizer):
    assert json.loads(tokenizer.text)["pre_tokenizer"]["type"] == "ByteLevel"


def test_the_same_lines_give_the_same_tokenizer_in_another_process(tokenizer):
    options = {"add_prefix_space": json.loads(tokenizer.text)["normalizer"] is not None}
    code = f"from tfm_blocks.data.tokenizer import Tokenizer; print(Tokenizer.train({LINES!r}, 300, **{options}).text)"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    assert again.stdout.strip() == tokenizer.text


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab: must have room for 4 special tokens and 256 bytes, but is 259"):
        Tokenizer.train(LINES, 259)
    assert Tokenizer.train(LINES, 260).size == 260


def test_a_saved_tokenizer_encodes_as_before(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    loaded = load_tokenizer(tmp_path / "t.json")
    assert loaded.text == tokenizer.text
    assert loaded.encode_batch(ODD) == tokenizer.encode_batch(ODD)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\xff\xfe", b"null", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_file_is_an_error_that_names_it(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(RunError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_missing_file_and_a_cut_file_are_errors(tokenizer, tmp_path):
    with pytest.raises(RunError, match="missing"):
        load_tokenizer(tmp_path / "none.json")
    for share in (0.1, 0.5, 0.99):
        (tmp_path / "cut.json").write_text(tokenizer.text[: int(len(tokenizer.text) * share)])
        with pytest.raises(RunError, match="damaged"):
            load_tokenizer(tmp_path / "cut.json")


def test_ids_with_a_gap_are_refused(tmp_path):
    record = json.loads(Tokenizer.train(["ein Haus"], 300).text)
    record["model"]["vocab"]["a"] = 9999
    (tmp_path / "gap.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="its ids are not 0, 1, 2"):
        load_tokenizer(tmp_path / "gap.json")


def test_another_kind_of_tokenizer_is_refused(tmp_path):
    from tokenizers import Tokenizer as Pieces
    from tokenizers.models import BPE, WordLevel

    for model in (WordLevel({"<unk>": 0}, unk_token="<unk>"), BPE()):
        Pieces(model).save(str(tmp_path / "other.json"))
        with pytest.raises(RunError, match="another kind"):
            load_tokenizer(tmp_path / "other.json")


def test_a_fixed_alphabet_has_a_token_for_each_word_and_comes_back_from_its_file(tmp_path):
    words = ["k1", "v1", "+", "_", "jump"]
    Tokenizer.of_words(words).save(tmp_path / "t.json")
    for tokenizer in (Tokenizer.of_words(words), load_tokenizer(tmp_path / "t.json")):
        assert tokenizer.size == len(SPECIAL) + len(words)
        assert tokenizer.encode("jump + k1 unheard") == [8, 6, 4, Tokenizer.UNK]
        assert tokenizer.encode_batch(["v1 _", ""]) == [[5, 7], []]
        assert tokenizer.decode([1, 8, 6, 4, 2, 0]) == "jump + k1"
        assert tokenizer.piece(8) == "jump"
