"""SentencePiece models of published folders: ids and texts equal the output of their own libraries."""

import io
import json

import pytest
import sentencepiece
from transformers import MarianTokenizer

import tfm_blocks as tfm
from tests.exchange.published import publish
from tfm_blocks.data.sentencepiece_tokenizer import SentencePieceTokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder

SOURCE = ["a red house", "a blue boat", "the red boat is blue", "no house is here"]
TARGET = ["ein rotes Haus", "ein blaues Boot", "das rote Boot ist blau", "kein Haus ist hier"]
FILES = ("source.spm", "target.spm", "vocab.json")


def learned(lines, size):
    content = io.BytesIO()
    options = {"vocab_size": size, "model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2}
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
    for text in [*SOURCE, ">>de<< a red boat", "a green house?"]:
        expected = theirs(text).input_ids[:-1]
        assert tokenizer.vocabulary.to_published(tokenizer.of("src").encode(text)) == expected
    for text in TARGET:
        expected = theirs(text_target=text).input_ids[:-1]
        assert tokenizer.vocabulary.to_published(tokenizer.of("tgt").encode(text)) == expected
        assert tokenizer.decode(tokenizer.of("tgt").encode(text)) == text


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
