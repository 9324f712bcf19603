"""SentencePiece models of published folders: ids and texts equal the output of their own libraries."""

import io
import json

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, MarianTokenizer, T5Tokenizer, pipeline

import tfm_blocks as tfm
from tests.exchange.published import publish
from tests.exchange.test_custom_code import saved
from tests.exchange.test_import import expect_restored
from tests.oracles.test_hugging_face import far_apart
from tfm_blocks.data.published_libraries import SentencePieceTokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer, read_tokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.exporting import export_run, write_files
from tfm_blocks.exchange.fast_tokenizer import to_fast
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.translation.settings import Search

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
    write_files(tmp_path, files)
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
    write_files(tmp_path, content)
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


@pytest.mark.grid
def test_a_marian_folder_is_imported_and_exported_with_its_tokenizer(files, tmp_path):
    pad = ids_of_pad(files)
    publish(
        "marian", tmp_path / "theirs", vocab_size=pad + 1, decoder_start_token_id=pad, eos_token_id=0, pad_token_id=pad
    )
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    write_files(tmp_path / "theirs", files)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    translator = tfm.load(tmp_path / "run")
    assert len(translator.translate(SOURCE, max_tokens=9)) == len(SOURCE)
    assert translator.tokenizer.encode(SOURCE[0]) == ours(files).encode(SOURCE[0])
    expect_restored(tmp_path)


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


ODD = [*SOURCE, " two  spaces ", "\ttab\nline", "</s>a <unk>boat", "zebra 🙂 ﬁ naïve", "", " "]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf"},
        {"byte_fallback": True, "vocab_size": 300},
        {"model_type": "char", "add_dummy_prefix": False},
        {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "control_symbols": ["<2de>"]},
    ],
)
def test_a_single_model_becomes_a_tokenizer_with_its_ids_and_texts(options):
    tokenizer = SentencePieceTokenizer(
        Vocabulary(400, 1, 2), {"tokenizer.model": learned(SOURCE, options.get("vocab_size", 60), **options)}
    )
    fast = to_fast(tokenizer)
    for text in ODD:
        ids = fast.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.published_ids([text])[0]
        assert fast.decode(ids) == tokenizer.text_of(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "word"},
        {"user_defined_symbols": ["boat", "re"]},
        {"control_symbols": ["x" * 501]},
    ],
)
def test_a_model_that_tokenizers_lacks_does_not_become_another_tokenizer(options):
    assert (
        to_fast(SentencePieceTokenizer(Vocabulary(400, 1, 2), {"tokenizer.model": learned(SOURCE, 60, **options)}))
        is None
    )


T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


def of_a_file(folder, files):
    (folder / "a.model").write_bytes(learned(SOURCE, 45, model_type="bpe"))
    return read_tokenizer(str(folder / "a.model"))


def of_an_import(name, **ids):
    def of_this_import(folder, files):
        publish(name, folder / "theirs", vocab_size=64, **ids)
        (folder / "theirs" / "tokenizer.json").unlink()
        write_files(folder / "theirs", files)
        import_folder(folder / "theirs", folder / "imported")
        return load_tokenizer(folder / "imported" / TOKENIZER)

    return of_this_import


def of_llama(folder, files):
    config = {"add_bos_token": True, "add_eos_token": False, "tokenizer_class": "LlamaTokenizer"}
    llama = {
        "tokenizer.model": learned(SOURCE, 45, model_type="bpe"),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return of_an_import("llama", bos_token_id=1, eos_token_id=2)(folder, llama)


def of_t5(folder, files):
    t5 = {"spiece.model": learned(SOURCE, 30, **T5_IDS), "tokenizer_config.json": b'{"extra_ids": 3}'}
    return of_an_import("t5", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)(folder, t5)


def of_marian(folder, files):
    write_files(folder, files)
    return read_tokenizer(str(folder))


def of_imported_marian(folder, files):
    pad = ids_of_pad(files)
    return of_an_import("marian", decoder_start_token_id=pad, eos_token_id=0, pad_token_id=pad)(folder, files)


@pytest.mark.grid
@pytest.mark.parametrize("model", ["rezero", "decoder_only"])
@pytest.mark.parametrize("make", [of_a_file, of_llama, of_t5, of_marian, of_imported_marian])
def test_an_export_with_its_own_code_has_a_tokenizer_that_autotokenizer_reads(make, model, files, tmp_path):
    if "marian" in make.__name__ and model == "decoder_only":
        pytest.skip("a pair of models splits sources and targets")
    translator = saved(model, tmp_path / "run", make(tmp_path, files), layers=1)
    _, certificate = export_run(tmp_path / "run", tmp_path / "new")
    assert (certificate.translations.equal, certificate.translations.sentences, certificate.not_compared) == (4, 4, "")
    theirs, vocabulary = AutoTokenizer.from_pretrained(tmp_path / "new"), translator.tokenizer.vocabulary
    read = translator.conventions.source if translator.inputs else translator.conventions.prompt
    for text in [*SOURCE, "no such zebra"]:
        assert theirs(text).input_ids == vocabulary.to_published(read(translator.tokenizer.encode(text)))
    assert theirs.eos_token_id == vocabulary.eos and theirs.pad_token_id is not None
    if model == "decoder_only":
        use = pipeline("text-generation", model=str(tmp_path / "new"), trust_remote_code=True)
        (output,) = use(SOURCE[0], max_new_tokens=5)
        ((best,),) = translator.generate([SOURCE[0]], 5, Search())
        ids = [*translator.tokenizer.encode(SOURCE[0]), *best.ids]
        assert output["generated_text"] == translator.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def separate(files):
    """Write the files of a Marian tokenizer with separate vocabularies of 33 and 35 subwords, whose padding is 2."""
    content = {"tokenizer_config.json": json.dumps({"separate_vocabs": True}).encode()}
    for model, name in (("source.spm", "vocab.json"), ("target.spm", "target_vocab.json")):
        pieces = sentencepiece.SentencePieceProcessor(model_proto=files[model])
        own = [piece for id in range(len(pieces)) if (piece := pieces.id_to_piece(id)) not in ("<s>", "</s>", "<unk>")]
        ids = {piece: id for id, piece in enumerate(["</s>", "<unk>", "<pad>", *sorted(own)])}
        content |= {model: files[model], name: json.dumps(ids).encode()}
    return content


def sizes_of_both(separate):
    return tuple(len(json.loads(separate[name])) for name in ("vocab.json", "target_vocab.json"))


def publish_separate(separate, folder):
    source, target = sizes_of_both(separate)
    theirs = publish(
        "marian", folder, vocab_size=source, decoder_vocab_size=target, share_encoder_decoder_embeddings=False,
        decoder_start_token_id=2, eos_token_id=0, pad_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    (folder / "tokenizer.json").unlink()
    write_files(folder, separate)
    return theirs


@pytest.mark.grid
@torch.no_grad()
def test_a_marian_folder_with_separate_vocabularies_is_imported_and_exported(separate, tmp_path):
    """Logits, 20 tokens of greedy search and texts equal transformers', and the export restores all bytes."""
    theirs = publish_separate(separate, tmp_path / "theirs")
    assert import_folder(tmp_path / "theirs", tmp_path / "run").family == "marian_separate"
    ours = tfm.load(tmp_path / "run")
    source, target = sizes_of_both(separate)
    assert source != target and ours.tokenizer.sizes == (target + 1, source + 1)
    of_target, of_source = ours.tokenizer.vocabulary, ours.tokenizer.source.vocabulary
    draws = torch.Generator().manual_seed(0)
    src_BS, tgt_BT = (torch.randint(3, size, (3, 9), generator=draws) for size in (source, target))
    here = [
        torch.tensor([own.to_here(row) for row in rows.tolist()])
        for own, rows in ((of_source, src_BS), (of_target, tgt_BT))
    ]
    logits_BTV = ours.network(src=here[0], tgt=here[1])[..., of_target.to_here(range(target))]
    assert far_apart(logits_BTV, theirs(src_BS, decoder_input_ids=tgt_BT).logits) < 1e-5
    read = MarianTokenizer.from_pretrained(tmp_path / "theirs")
    for text in SOURCE:
        ids = read(text, return_tensors="pt").input_ids
        assert of_source.to_published(ours.conventions.source(ours.tokenizer.of("src").encode(text))) == ids[0].tolist()
        (out,) = theirs.generate(ids, max_new_tokens=20, do_sample=False)
        ((best,),) = ours.search([text], Search(longest=(0.0, 20)))
        ended = [id for id in out[1:].tolist() if id != 0]
        assert of_target.to_published(best.ids) == ended and best.text == read.decode(out, skip_special_tokens=True)
    for text in TARGET:
        ids = read(text_target=text).input_ids
        assert of_target.to_published(ours.tokenizer.encode(text)) == ids[:-1]
    assert expect_restored(tmp_path).translations.equal == 4


def test_separate_vocabularies_that_do_not_fit_are_refused(separate, tmp_path):
    """A model with one vocabulary, and tokens around a text with other ids in the vocabulary of sources."""
    publish_separate(separate, tmp_path / "theirs")
    names = json.loads(separate["vocab.json"])
    moved = {name: {0: 3, 3: 0}.get(id, id) for name, id in names.items()}  # exchanges </s> and a subword
    (tmp_path / "theirs" / "vocab.json").write_text(json.dumps(moved))
    with pytest.raises(RunError, match="for the tokens around a text") as caught:
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert "help: give these tokens the same ids" in str(caught.value)
    size = sizes_of_both(separate)[0]
    publish("marian", tmp_path / "one", vocab_size=size, decoder_start_token_id=2, eos_token_id=0, pad_token_id=2)
    (tmp_path / "one" / "tokenizer.json").unlink()
    write_files(tmp_path / "one", separate)
    with pytest.raises(RunError, match=r"target_vocab\.json: is the vocabulary of the target alone"):
        import_folder(tmp_path / "one", tmp_path / "run")
    assert not (tmp_path / "run").exists()
