"""Existing tokenizers: ids and texts equal the output of transformers and SentencePiece, and wrong files are refused."""

import io
import json
import pickle

import numpy as np
import pytest
import sentencepiece
from tokenizers import ByteLevelBPETokenizer, Regex, decoders, models
from tokenizers import Tokenizer as Pieces
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split, Whitespace, WhitespaceSplit
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordLevelTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tfm_blocks.data.noise import Flat, first_of_units
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.subwords import sentence_ends, words
from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer
from tfm_blocks.data.tokenizer_files import expect_usable, read_tokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import ConfigError, RunError

LINES = ["a red house", "a blue boat", "das rote Haus", "naïve 🙂  café"]
FILES = ["bare.json", "saved", "subwords.model"]


def learn_fast(special):
    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(LINES * 9, vocab_size=290, special_tokens=special)
    return pieces


def learn_sentencepiece(**options):
    content = io.BytesIO()
    options = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES * 9), model_writer=content, **options)
    return content.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return paths of a tokenizer.json without a config, a transformers folder and a SentencePiece model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    learn_fast(["<pad>", "<s>", "</s>"]).save(str(folder / "bare.json"))
    fast = Pieces.from_str(learn_fast(["<start>", "<stop>"]).to_str())
    saved = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<start>", eos_token="<stop>")
    saved.save_pretrained(folder / "saved")
    (folder / "subwords.model").write_bytes(learn_sentencepiece())
    return folder


def published_ids(path, text):
    if path.is_dir():
        return AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False).input_ids
    if path.suffix == ".model":
        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes()).encode(text)
    return Pieces.from_file(str(path)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", FILES)
def test_ids_are_those_of_the_library_that_wrote_the_tokenizer(files, name):
    tokenizer = read_tokenizer(str(files / name))
    for text in [*LINES, "no such words"]:
        ids = tokenizer.encode(text)
        assert tokenizer.vocabulary.to_published(ids) == published_ids(files / name, text)
        assert max(ids) < tokenizer.size
    assert tokenizer.decode(tokenizer.encode(LINES[1])) == LINES[1]
    assert [len(tokenizer.piece(id)) > 0 for id in range(tokenizer.size)] == [True] * tokenizer.size
    assert pickle.loads(pickle.dumps(tokenizer)).encode(LINES[0]) == tokenizer.encode(LINES[0])


@pytest.mark.parametrize(("name", "begin", "end"), [("bare.json", 1, 2), ("saved", 0, 1), ("subwords.model", 1, 2)])
def test_begin_and_end_are_those_of_the_tokenizer(files, name, begin, end):
    vocabulary = read_tokenizer(str(files / name)).vocabulary
    assert (vocabulary.start, vocabulary.eos) == (begin, end)


@pytest.mark.parametrize("special", [[], ["</s>"], ["<|endoftext|>", "[X]"]])
def test_a_missing_begin_or_end_gets_a_new_id_after_the_others(tmp_path, special):
    pieces = learn_fast(special)
    pieces.save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(str(tmp_path / "t.json"))
    size = pieces.get_vocab_size()
    expected = (size, 0) if special else (size + 1, size)
    assert (tokenizer.vocabulary.start, tokenizer.vocabulary.eos) == expected
    assert tokenizer.vocabulary.size == expected[0] + 1 == tokenizer.size - 1
    assert tokenizer.decode([1, *tokenizer.encode(LINES[0]), 2]) == LINES[0]


def test_a_config_with_one_token_for_begin_and_end_has_a_separate_begin(tmp_path):
    fast = PreTrainedTokenizerFast(tokenizer_object=Pieces.from_str(learn_fast(["<x>"]).to_str()))
    fast.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"bos_token": {"content": "<x>"}, "eos_token": {"content": "<x>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = read_tokenizer(str(tmp_path)).vocabulary
    assert (vocabulary.start, vocabulary.eos) == (vocabulary.size - 1, 0)


WRITTEN = ["the house is red.", "a blue boat…", "海。", "a\nb!"]


def bpe_with(**marks):
    pieces = Pieces(models.BPE(unk_token="<unk>", **marks))
    pieces.pre_tokenizer = WhitespaceSplit()
    pieces.train_from_iterator(
        WRITTEN, BpeTrainer(special_tokens=["<unk>"], vocab_size=45, show_progress=False, **marks)
    )
    return pieces.to_str()


def word_level():
    pieces = Pieces(models.WordLevel(unk_token="<unk>"))
    pieces.pre_tokenizer = WhitespaceSplit()
    pieces.train_from_iterator(WRITTEN, WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return pieces.to_str()


def byte_level():
    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(WRITTEN * 3, vocab_size=300)
    return pieces.to_str()


KINDS = {
    "words": word_level,
    "suffix": lambda: bpe_with(end_of_word_suffix="</w>"),
    "prefix": lambda: bpe_with(continuing_subword_prefix="##"),
    "bytes": byte_level,
    "SentencePiece": lambda: learn_sentencepiece(
        byte_fallback=True, vocab_size=300, normalization_rule_name="identity"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_sentences_end_where_they_do_in_the_text(kind, tmp_path):
    content = KINDS[kind]()
    path = tmp_path / ("t.json" if isinstance(content, str) else "t.model")
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    tokenizer = read_tokenizer(str(path))
    words_V2, ends_V = words(tokenizer), sentence_ends(tokenizer)
    for text in WRITTEN:
        ids = np.array(tokenizer.encode(text))
        first_L = first_of_units(Flat.of([ids], np.zeros(1, int)), np.ones(len(ids), bool), words_V2)
        breaks = text.count("\n") if kind in ("bytes", "SentencePiece") else 0
        assert first_L.sum() == len(text.split()) + breaks, (text, [tokenizer.piece(id) for id in ids])
        if kind != "SentencePiece":  # it splits … into bytes
            assert ends_V[ids[-1]] and ends_V.sum() < 50


def test_subwords_without_marks_have_no_words(tmp_path):
    (tmp_path / "t.json").write_text(bpe_with())
    with pytest.raises(ConfigError, match=r"objective\.whole_words: needs subwords that mark"):
        words(read_tokenizer(str(tmp_path / "t.json")))


@pytest.mark.parametrize("name", FILES)
def test_a_run_keeps_the_tokenizer_and_its_files(files, name, tmp_path):
    tokenizer = read_tokenizer(str(files / name))
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = read_tokenizer(str(path))
        assert again.text == tokenizer.text and again.files == tokenizer.files
    if name == "saved":
        assert again.files == {path.name: path.read_bytes() for path in (files / name).iterdir()}


def test_the_tokenizer_of_a_run_is_read_from_its_folder_and_its_file(tmp_path):
    learned = Tokenizer.train(LINES * 9, 300)
    learned.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert read_tokenizer(str(path)).text == learned.text


TAGS = ["<s>", "</s>", "<pad>", "<unk>", "<2de>", "<2fr>", "<|im_start|>"]
TAGGED = ["<2de> a red house", "a<2fr>blue </s> boat", "<|im_start|>a red <2de>house<pad>", "<2xx> zebra <s>"]


def words_with_tags():
    pieces = Pieces(models.WordLevel(unk_token="<unk>"))
    pieces.pre_tokenizer = Whitespace()
    pieces.train_from_iterator(LINES, WordLevelTrainer(special_tokens=TAGS, show_progress=False))
    return pieces


def unigram_with_tags():
    pieces = Pieces(models.Unigram())
    pieces.pre_tokenizer, pieces.decoder = Metaspace(), decoders.Metaspace()
    trainer = UnigramTrainer(vocab_size=60, special_tokens=TAGS, unk_token="<unk>", show_progress=False)
    pieces.train_from_iterator(LINES * 9, trainer)
    return pieces


@pytest.mark.parametrize("learn", [words_with_tags, unigram_with_tags, lambda: learn_fast(TAGS)])
@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_in_a_text_are_matched_as_by_transformers(learn, split, tmp_path):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Pieces.from_str(learn().to_str()), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"split_special_tokens": split}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(str(tmp_path))
    for again in (ours, pickle.loads(pickle.dumps(ours))):
        ids = again.encode_batch(TAGGED)
        assert [again.vocabulary.to_published(row) for row in ids] == [
            theirs(text, add_special_tokens=False).input_ids for text in TAGGED
        ]
        assert split or [again.piece(id) for id in ids[0]].count("<2de>") == 1
        decoded = [theirs.decode(again.vocabulary.to_published(row), skip_special_tokens=True) for row in ids]
        assert [again.decode(row) for row in ids] == decoded


def test_a_learned_tokenizer_with_further_special_tokens_matches_them(tmp_path):
    """Its settings and first ids are those of a run, but a run learns no further special tokens."""
    pieces = Pieces(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = BpeTrainer(special_tokens=[*SPECIAL, "<2de>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    pieces.train_from_iterator(LINES, trainer)
    pieces.save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(str(tmp_path / "t.json"))
    assert [tokenizer.piece(id) for id in tokenizer.encode("<2de>a")] == ["<2de>", "a"]


@pytest.mark.parametrize("learn", [words_with_tags, unigram_with_tags, lambda: learn_fast(TAGS)])
def test_unknown_tokens_are_counted(learn, tmp_path):
    learn().save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(str(tmp_path / "t.json"))
    ids = tokenizer.encode_batch(["a red Ω", "a blue"])
    names = [tokenizer.piece(id) for row in ids for id in row]
    assert tokenizer.count_unknown(ids) == {"tokens": len(names), "unknown": names.count("<unk>")}
    assert ("<unk>" in names) == (tokenizer._pieces.model.__class__.__name__ != "BPE")


@pytest.mark.parametrize("texts", [["a red house", "das rote"], ["naïve 🙂  café"]])
def test_a_text_begins_without_the_space_that_its_tokenizer_adds(texts, tmp_path):
    pieces = ByteLevelBPETokenizer(add_prefix_space=True)
    pieces.train_from_iterator(LINES * 9, vocab_size=290, special_tokens=["<s>", "</s>"], show_progress=False)
    pieces.save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(str(tmp_path / "t.json"))
    for text in texts:
        assert pieces.decode(pieces.encode(text).ids) == f" {text}"
        assert tokenizer.decode([1, *tokenizer.encode(text), 2]) == text


@pytest.mark.parametrize("name", [*FILES, "space.json", "learned.json"])
def test_a_continuation_keeps_the_space_between_two_words(files, name, tmp_path):
    """Decoded alone, it would lose the space where the decoder removes the first one."""
    Tokenizer.train(LINES * 9, 300, add_prefix_space=True).save(tmp_path / "learned.json")
    pieces = ByteLevelBPETokenizer(add_prefix_space=True)
    pieces.train_from_iterator(LINES * 9, vocab_size=290, special_tokens=["<s>", "</s>"], show_progress=False)
    pieces.save(str(tmp_path / "space.json"))
    tokenizer = read_tokenizer(str((files if name in FILES else tmp_path) / name))
    prompt, whole = tokenizer.encode("a red"), tokenizer.encode("a red house")
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :], prompt) == " house"


def test_a_file_whose_decoder_keeps_the_added_space_stores_the_original_text(text, sentences, tmp_path):
    """decode(encode(text)) lacks a space with which a text begins, so that scores need the original text."""
    pieces = Pieces(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    pieces.train_from_iterator(LINES, BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=ByteLevel.alphabet()))
    pieces.save(str(tmp_path / "t.json"))
    data = prepare(text(tokenizer=str(tmp_path / "t.json")), 999, lambda line: None)
    assert data.tokenizer.decode(data.tokenizer.encode(" " + sentences["tgt"][0])) == sentences["tgt"][0]
    assert data.val.rows(slice(0, 1))[0]["tgt"] == sentences["tgt"][0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["text", "dates"])
def test_text_and_dates_are_encoded_with_it(files, name, kind, text, dates, sentences, tmp_path):
    changes = {"tokenizer": str(files / name), "cache": str(tmp_path / "c")}
    settings = text(**changes) if kind == "text" else dates(**changes, max_length=200, step_tokens=600, train=200)
    lines = []
    data = prepare(settings, 999, lines.append)
    assert data.tokenizer.size < 400
    assert f"data: vocabulary of {data.tokenizer.size:,} subwords" in lines
    if kind == "text":
        assert data.val.ids("src", 0).tolist() == data.tokenizer.encode(sentences["src"][0])


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("t.json", b'{"a": 1}', "cannot be read as a tokenizer"),
        ("t.json", b"[", "cannot be read as a tokenizer"),
        ("t.json", b"\xff", "cannot be read as a tokenizer"),
        ("t.model", b"no model", "cannot be read as a tokenizer"),
        ("t.txt", b"a red house", "cannot be read as a tokenizer"),
        ("t.json", Pieces(models.BPE()).to_str().encode(), "has no subwords"),
    ],
)
def test_wrong_files_are_errors_with_path_and_fix(name, content, rule, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError) as error:
        read_tokenizer(str(tmp_path / name))
    (problem,) = error.value.problems
    assert problem.address == str(tmp_path / name) and rule in problem.rule and problem.help


def test_a_damaged_config_beside_a_tokenizer_is_an_error(files, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((files / "bare.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(RunError, match=r"tokenizer_config\.json: cannot be read"):
        read_tokenizer(str(tmp_path))


def test_a_missing_path_and_a_folder_without_a_tokenizer_are_errors(tmp_path):
    (tmp_path / "tokenizer.py").write_text("raise SystemExit('executed')")
    for path, rule in ((tmp_path / "none", "there is no file or folder"), (tmp_path, "has no tokenizer.json and no")):
        with pytest.raises(ConfigError, match=rule) as error:
            read_tokenizer(str(path))
        assert error.value.problems[0].address == "data.tokenizer"
        assert "name a run folder, a tokenizer.json" in error.value.problems[0].help


def fast(model=None, **parts):
    """Return the files of a tokenizer.json with these parts."""
    pieces = Pieces(model or models.WordLevel({"a": 0, "u": 1}, unk_token="u"))
    for name, part in parts.items():
        setattr(pieces, name, part)
    return {"tokenizer.json": pieces.to_str().encode()}


def split(pattern):
    return fast(pre_tokenizer=Split(Regex(pattern), "isolated"))


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UNUSABLE = {
    "nested repetition": split("(a+)+$"),
    "repeated choice": split("(x|xx)+y"),
    "overlapping choice": split("(p|q|pq)*c"),
    "nested words": split(r"(\w+\s?)+$"),
    "polynomial": split("(.*a){25}b"),
    "letter that is not ASCII": split("(é+)+$"),
    "normalizer": fast(normalizer=Replace(Regex("(a+)+$"), "")),
    "no unknown token": fast(models.Unigram([("a", -1.0)])),
    "unknown token that is missing": fast(models.WordLevel({"a": 0}, unk_token="u")),
    "empty": {"tokenizer.model": b""},
    "zeros": {"tokenizer.model": b"\0" * 1000},
    "Latin-1": {"tokenizer.json": b'{"\xe9": 1}'},
    "settings in Latin-1": {**split("b"), "tokenizer_config.json": b'{"a": "\xe9"}'},
    "settings that are no JSON": {**split("b"), "tokenizer_config.json": b"["},
}


ENDLESS = (
    "nested repetition",
    "repeated choice",
    "overlapping choice",
    "nested words",
    "polynomial",
    "letter that is not ASCII",
    "normalizer",
)


@pytest.mark.parametrize(  # an endless one takes the time limit, 5 seconds of the CPU
    "name", [pytest.param(name, marks=pytest.mark.grid if name in ENDLESS else []) for name in UNUSABLE]
)
def test_a_tokenizer_that_fails_or_does_not_return_when_it_is_used_is_refused(name, tmp_path, capsys):
    for file, content in UNUSABLE[name].items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(RunError) as error:
        read_tokenizer(str(tmp_path))
    assert len(error.value.problems) == 1 and str(tmp_path) in str(error.value)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3])
def test_patterns_of_published_models_are_accepted(pattern):
    expect_usable(split(pattern), "here")


def test_an_endless_or_crashing_library_ends_in_one_sentence(tmp_path, monkeypatch):
    """The process of the trial loads this package from another folder, whose tokenizers library misbehaves."""
    for body, message in (
        ("def __getattr__(name):\n    import os; os.kill(os.getpid(), 11)", r"the library crashes \(SIGSEGV\)"),
        ("import resource, os\nresource.setrlimit(resource.RLIMIT_CPU, (1, 9))\nwhile True: pass", "CPU time"),
    ):
        (tmp_path / "tokenizers.py").write_text(body)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(RunError, match=message):
            expect_usable(split(message), "here")


def test_the_trial_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("tokenizers", "json", "tfm_blocks", "resource"):
        (tmp_path / f"{name}.py").write_text("open('harmed', 'w')")
    expect_usable(split(str(tmp_path)), "here")
    assert not (tmp_path / "harmed").exists()


def test_a_text_that_a_tokenizer_cannot_encode_is_one_sentence():
    tokenizer = published_tokenizer(Vocabulary(9, 1, 2), UNUSABLE["no unknown token"], "here")
    with pytest.raises(RunError, match="tokenizer: cannot encode this text: Encountered an unknown token"):
        tokenizer.encode("b")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_sparse_file_of_a_terabyte_is_refused_before_it_is_read(name, tmp_path):
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").write_bytes(split("b")["tokenizer.json"])
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RunError, match=f"{name}: has 1,099,511,627,776 bytes, but at most"):
        read_tokenizer(str(tmp_path))
