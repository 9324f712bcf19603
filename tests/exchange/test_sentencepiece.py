"""SentencePiece models of published folders: ids and texts equal the output of their own libraries."""

import io
import json

import pytest
import sentencepiece
from transformers import MarianTokenizer, T5Tokenizer

import tfm_blocks as tfm
from tests.exchange.published import publish
from tfm_blocks.data.published_libraries import SentencePieceTokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder

SOURCE = ["a red house", "a blue boat", "the red boat is blue", "no house is here"]
TARGET = ["ein rotes Haus", "ein blaues Boot", "das rote Boot ist blau", "kein Haus ist hier"]
FILES = ("source.spm", "target.spm", "vocab.json")


def learned(lines, size, **special):
    content = io.BytesIO()
    options = {"vocab_size": size, "model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2, **special}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines * 9), model_writer=content, **options)
    return content.getvalue()


@pytest.fixture(scope="module")
def files():
    """Write the files of a Marian tokenizer: two models and one vocabulary of their subwords, with padding last."""
    models = {"source.spm": learned(SOURCE, 30), "target.spm": learned(TARGET, 34)}
    pieces = [sentencepiece.SentencePieceProcessor(model_proto=content) for content in models.values()]
    names = [one.id_to_piece(id) for one in pieces for id in range(len(one))]
    ordered = dict.fromkeys(
        ["</s>", "<unk>", *(name for name in names if name not in ("<s>", "</s>", "<unk>")), ">>de<<", "<pad>"]
    )
    vocab = json.dumps({name: id for id, name in enumerate(ordered)})
    return {**models, "vocab.json": vocab.encode()}


def ids_of_pad(files):
    return json.loads(files["vocab.json"])["<pad>"]


def ours(files):
    pad = ids_of_pad(files)
    return SentencePieceTokenizer(Vocabulary(pad + 1, pad, 0), files)


def test_each_side_is_split_by_its_model_as_by_transformers(files, tmp_path):
    for name in FILES:
        (tmp_path / name).write_bytes(files[name])
    theirs = MarianTokenizer(*(str(tmp_path / name) for name in FILES))
    tokenizer = ours(files)
    special = ["a red</s> boat <unk>", "<pad> >>de<< a", ">>xx<< a red", ">> a < b", "a </s>>>de<< red"]
    for text in [*SOURCE, ">>de<< a red boat", "a green house?", *special]:
        expected = theirs(text).input_ids[:-1]
        assert tokenizer.vocabulary.to_published(tokenizer.of("src").encode(text)) == expected
    for text in TARGET:
        expected = theirs(text_target=text).input_ids[:-1]
        assert tokenizer.vocabulary.to_published(tokenizer.of("tgt").encode(text)) == expected
        assert tokenizer.decode(tokenizer.of("tgt").encode(text)) == text
    tagged = tokenizer.of("tgt").encode("ein </s> rotes <unk> Haus<pad>")
    decoded = theirs.decode(tokenizer.vocabulary.to_published(tagged), skip_special_tokens=True)
    assert tokenizer.decode(tagged) == decoded == "ein rotes Haus"


@pytest.mark.parametrize(("extra_ids", "size"), [(None, 192), (None, 40), (3, 64)])
def test_the_sentinels_of_t5_are_matched_as_by_transformers(files, extra_ids, size, tmp_path):
    """Without extra_ids there are 100, if the vocabulary of the model has room for them."""
    options = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    config = {} if extra_ids is None else {"extra_ids": extra_ids}
    content = {"spiece.model": learned(SOURCE, 30, **options), "tokenizer_config.json": json.dumps(config).encode()}
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    theirs = T5Tokenizer.from_pretrained(tmp_path)
    ours = SentencePieceTokenizer(Vocabulary(size, 0, 1), content)
    for text in ["<extra_id_0> a red<extra_id_2>house", "a</s> blue <pad>boat <unk> <extra_id_99>"]:
        expected = theirs(text, add_special_tokens=False).input_ids
        ids = ours.vocabulary.to_published(ours.encode(text))
        assert (ids == expected) == (size > 40)
        assert ours.encode(text).count(ours.unknown) == ids.count(2)
    added = {"added_tokens_decoder": {str(size - 1): {"content": "<2de>", "special": True}}}
    ours = SentencePieceTokenizer(
        Vocabulary(size, 0, 1), {**content, "tokenizer_config.json": json.dumps(added).encode()}
    )
    assert ours.vocabulary.to_published(ours.encode("<2de> a"))[0] == size - 1
    assert ours.decode(ours.encode("<2de> a red")) == "a red"


def test_a_marian_folder_is_imported_and_exported_with_its_tokenizer(files, tmp_path):
    pad = ids_of_pad(files)
    publish(
        "marian", tmp_path / "theirs", vocab_size=pad + 1, decoder_start_token_id=pad, eos_token_id=0, pad_token_id=pad
    )
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    for name in FILES:
        (tmp_path / "theirs" / name).write_bytes(files[name])
    import_folder(tmp_path / "theirs", tmp_path / "run")
    translator = tfm.load(tmp_path / "run")
    assert len(translator.translate(SOURCE, max_tokens=9)) == len(SOURCE)
    assert translator.tokenizer.encode(SOURCE[0]) == ours(files).encode(SOURCE[0])
    export_run(tmp_path / "run", tmp_path / "back")
    assert all(
        (tmp_path / "back" / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "theirs").iterdir()
    )


def test_a_single_model_has_its_own_ids(files):
    tokenizer = SentencePieceTokenizer(Vocabulary(40, 1, 2), {"spiece.model": files["source.spm"]})
    model = sentencepiece.SentencePieceProcessor(model_proto=files["source.spm"])
    for text in SOURCE:
        assert tokenizer.vocabulary.to_published(tokenizer.encode(text)) == model.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "damage",
    [{"source.spm": b"no model"}, {"vocab.json": b"[]"}, {"vocab.json": b"{}"}, {"vocab.json": b'{"<unk>": 99999}'}],
)
def test_damaged_files_are_refused(files, damage):
    with pytest.raises(RunError):
        ours({**files, **damage}) if "vocab.json" not in damage else SentencePieceTokenizer(
            Vocabulary(60, 1, 0), {**files, **damage}
        )
