"""Imported models read and write the texts of transformers: equal ids of sources, targets and prompts, equal output."""

import json

import pytest
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    RobertaTokenizer,
    T5Tokenizer,
)

import tfm_blocks as tfm
from tests.conftest import published_words
from tests.exchange.published import FAMILIES, publish
from tests.exchange.test_sentencepiece import learned
from tests.oracles.references import ENCODERS
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import write_corpus, write_packed
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.published_libraries import published_tokenizer, stored_tokenizer
from tfm_blocks.data.vocabulary import Conventions
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.config import read_published
from tfm_blocks.exchange.conventions import read_conventions
from tfm_blocks.exchange.exporting import export_run, write_files
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.language.spec import names
from tfm_blocks.translation.settings import Search

WORDS = ["a", "the", "red", "blue", "old", "new", "house", "boat", "tree", "is", "was", "here", "near"]
LINES = [f"{WORDS[i % 13]} {WORDS[i * 6 % 13]} {WORDS[i * 7 % 11]}{' ' + WORDS[i % 7] * (i % 3)}" for i in range(40)]
PAIRS = ("bart", "marian", "t5", "t5_v1_1")
SIZES = {"t5": {}, "t5_v1_1": {}, "gemma2": {"final_logit_softcapping": 99.0}}
LIMITS = {"max_length": 12, "min_length": 4}


def byte_level(special):
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(LINES * 3, vocab_size=300, special_tokens=special, show_progress=False)
    content = json.loads(tokenizer._tokenizer.to_str())["model"]
    return content["vocab"], [tuple(pair) for pair in content["merges"]]


def fast(special, before=(), **named):
    """Return a byte-level tokenizer whose post-processor adds the tokens of `before`."""
    vocab, merges = byte_level(special)
    pieces = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pieces.add_special_tokens(list(special))
    template = " ".join([*before, "$A"])
    pieces.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[(name, vocab[name]) for name in before]
    )
    return PreTrainedTokenizerFast(tokenizer_object=pieces, padding_side="left", **named)


def marian(folder):
    models = {"source.spm": learned(LINES, 40), "target.spm": learned(LINES[::-1], 40)}
    write_files(folder, models)
    from sentencepiece import SentencePieceProcessor

    parts = [SentencePieceProcessor(model_proto=content) for content in models.values()]
    pieces = [part.id_to_piece(id) for part in parts for id in range(len(part))]
    ordered = dict.fromkeys(
        ["</s>", "<unk>", *(name for name in pieces if name not in ("<s>", "</s>", "<unk>")), "<pad>"]
    )
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(ordered)}))


def unigram():
    content = json.loads(learned_unigram())["model"]["vocab"]
    return T5Tokenizer(vocab=[tuple(item) for item in content], extra_ids=0)


def learned_unigram():
    from tokenizers import trainers

    pieces = Tokenizer(models.Unigram())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    pieces.train_from_iterator(LINES * 3, trainer)
    return pieces.to_str()


def llama():
    return fast(["<unk>", "<s>", "</s>"], ["<s>"], bos_token="<s>", eos_token="</s>", pad_token="</s>")


BART = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SAVED = {
    "bart": lambda: RobertaTokenizer(*byte_level(BART)),
    "t5": unigram,
    "t5_v1_1": unigram,
    "gpt2": lambda: fast(["<|endoftext|>"], eos_token="<|endoftext|>", pad_token="<|endoftext|>"),
    "qwen2": lambda: fast(["<|endoftext|>", "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|endoftext|>"),
    "qwen3": lambda: Qwen2Tokenizer(*byte_level(["<|endoftext|>", "<|im_end|>"]), padding_side="left"),
    "olmo2": lambda: fast(["<|endoftext|>", "<pad>"], eos_token="<|endoftext|>", pad_token="<pad>"),
    "gemma2": lambda: fast(
        ["<pad>", "<eos>", "<bos>"], ["<bos>"], bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ),
}


def published(name, folder, **config):
    """Write a random model and a tokenizer as the family has them; return the model and AutoTokenizer's tokenizer."""
    folder.mkdir(parents=True)
    if name == "marian":
        marian(folder)
        vocab = json.loads((folder / "vocab.json").read_text())
        ids = {"pad_token_id": vocab["<pad>"], "decoder_start_token_id": vocab["<pad>"], "eos_token_id": 0}
        ids |= {"bad_words_ids": [[vocab["<pad>"]]]}
        size = len(vocab)
    else:
        tokenizer = SAVED.get(name, llama)()
        size = len(tokenizer)
        ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        ids |= {"decoder_start_token_id": 2 if name == "bart" else 0} if name in PAIRS else {}
        tokenizer.save_pretrained(folder)
    saved = folder / "tokenizer.json"
    kept = saved.read_bytes() if saved.exists() else None
    theirs = publish(name, folder, vocab_size=size, **ids, **config)
    saved.unlink() if kept is None else saved.write_bytes(kept)
    return theirs, AutoTokenizer.from_pretrained(folder)


def limited(name, folder, **config):
    """Write a model and a tokenizer as `published`, and for pairs limits of the output."""
    theirs, tokenizer = published(name, folder, **config)
    if name in PAIRS:
        config = {"bart": {"forced_bos_token_id": 0, "forced_eos_token_id": 2}, "marian": {"forced_eos_token_id": 0}}
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | LIMITS | config.get(name, {})))
        theirs = type(theirs).from_pretrained(folder).eval()
    return theirs, tokenizer


def imported(name, folder, **config):
    theirs, tokenizer = limited(name, folder / "theirs", **config)
    import_folder(folder / "theirs", folder / "run")
    return theirs, tokenizer, tfm.load(folder / "run")


each = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("bart", "gpt2", "llama") else pytest.mark.grid) for name in FAMILIES],
)


@each
def test_ids_of_sources_targets_and_prompts_are_those_of_autotokenizer(name, tmp_path):
    theirs, tokenizer, translator = imported(name, tmp_path)
    published, expected = translator.tokenizer.vocabulary.to_published, tokenizer(LINES).input_ids
    if name in PAIRS:
        tasks = translator.translation_tasks(LINES, Search())
        assert [published(task.sources[0]) for task in tasks] == expected
    else:
        tasks = translator.generation_tasks(LINES, Search())
        assert [published(task.before) for task in tasks] == expected
    (tmp_path / "corpus").mkdir()
    inputs = names(translator.network.spec.inputs)
    if name in PAIRS:
        rows = list(zip(LINES, LINES[::-1], strict=True))
        write_corpus(tmp_path / "corpus", ["src", "tgt"], rows, translator.tokenizer, max_length=99)
        corpus = Corpus(tmp_path / "corpus", translator.tokenizer)
        batch = layout_of(corpus, inputs).batch(corpus, range(len(LINES)))
        assert [published(row) for row in batch.inputs["src"].tolist()] == expected
        assert [published(row) for row in batch.labels_BT.tolist()] == tokenizer(text_target=LINES[::-1]).input_ids
        start = theirs.config.decoder_start_token_id
        labels = [published(row) for row in batch.labels_BT.tolist()]
        assert [published(row) for row in batch.inputs["tgt"].tolist()] == [[start, *row[:-1]] for row in labels]
    else:
        for line, ids in zip(LINES[:3], expected, strict=False):
            write_packed(tmp_path / "corpus", "tgt", [line], translator.tokenizer, context=99)
            corpus = Corpus(tmp_path / "corpus", translator.tokenizer)
            batch = layout_of(corpus, inputs).batch(corpus, [0])
            eos = theirs.config.eos_token_id
            begin = [theirs.config.bos_token_id] if tokenizer("").input_ids else [eos]
            assert published(batch.inputs["tgt"][0].tolist()) == [*begin, *ids[len(tokenizer("").input_ids) :]]
            assert published(batch.labels_BT[0].tolist()) == [*ids[len(tokenizer("").input_ids) :], eos]


@each
@pytest.mark.parametrize("beam", [1, 4])
def test_forty_lines_have_the_output_of_generate(name, beam, tmp_path):
    theirs, tokenizer, translator = imported(name, tmp_path, **SIZES.get(name, {"max_position_embeddings": 64}))
    search = {"beam": beam, "penalty": "plain", "alpha": 1.0}
    options = {"num_beams": beam, "early_stopping": beam > 1, "do_sample": False}
    read = tokenizer(LINES, return_tensors="pt", padding=True)
    read.pop("token_type_ids", None)
    if name in PAIRS:
        out = theirs.generate(**read, **options)
        outputs = translator.translate(LINES, **search)
    else:
        out = theirs.generate(**read, **options, max_new_tokens=9)[:, read.input_ids.shape[1] :]
        outputs = [best.text for (best,) in translator.generate(LINES, 9, Search(**search))]
    assert outputs == tokenizer.batch_decode(out, skip_special_tokens=True)
    assert len(set(outputs)) > 5
    if name in PAIRS:
        assert max(len(row) for row in out.tolist()) == LIMITS["max_length"]


def bert():
    words = ["[PAD]", "x", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *(f"##{word}" for word in WORDS)]
    return BertTokenizer({word: id for id, word in enumerate(words)})


def modernbert():
    special = ["<|padding|>", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = fast(special, cls_token="[CLS]", sep_token="[SEP]", pad_token="<|padding|>", mask_token="[MASK]")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


NAMES = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "a",
    "eng_Latn",
    "fra_Latn",
    "en_XX",
    "ro_RO",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "[PAD]",
]


@pytest.mark.parametrize(
    ("family", "template", "settings"),
    [
        ("llama", "<s> $A", {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ("llama", "<s> $A", {"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}),
        ("llama", "$A", {"add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}),
        ("llama", "", {"add_eos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ("gpt_neox", "$A </s>", {"tokenizer_class": "GPTNeoXTokenizer"}),
        ("gpt_neox", "$A </s>", {}),
        ("distilbert", "", {"tokenizer_class": "DistilBertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}),
        ("m2m_100", "$A </s> eng_Latn", {"tokenizer_class": "NllbTokenizer", "src_lang": "fra_Latn"}),
        ("m2m_100", "$A </s> eng_Latn", {"tokenizer_class": "NllbTokenizer", "src_lang": None}),
        ("m2m_100", "$A", {"tokenizer_class": "NllbTokenizer", "src_lang": "fra_Latn", "legacy_behaviour": True}),
        ("mbart", "en_XX $A </s>", {"tokenizer_class": "MBart50Tokenizer", "src_lang": "ro_RO"}),
        ("mbart", "en_XX $A </s>", {"tokenizer_class": "MBart50TokenizerFast"}),
        ("mbart", "$A </s> en_XX", {"tokenizer_class": "MBartTokenizer", "src_lang": "ro_RO"}),
        ("m2m_100", "$A", {"tokenizer_class": "NllbTokenizer", "tgt_lang": "fra_Latn"}),
        ("m2m_100", "$A", {"tokenizer_class": "NllbTokenizer", "tgt_lang": "fra_Latn", "legacy_behaviour": True}),
        ("m2m_100", "$A", {"tokenizer_class": "NllbTokenizer", "src_lang": "fra_Latn", "tgt_lang": "xx"}),
        ("mbart", "$A", {"tokenizer_class": "MBart50Tokenizer", "src_lang": "ro_RO", "tgt_lang": "en_XX"}),
        ("mbart", "$A", {"tokenizer_class": "MBartTokenizer", "tgt_lang": "ro_RO"}),
    ],
)
def test_the_tokens_around_a_text_are_those_of_autotokenizer_beside_a_tokenizer_json(
    family, template, settings, tmp_path
):
    """Flags of BOS and EOS have no effect, some classes replace the post-processor, and targets have their language."""
    ids = {name: id for id, name in enumerate(NAMES)}
    is_unigram = family == "mbart"
    pieces = Tokenizer(
        models.Unigram([(name, 0.0) for name in NAMES], unk_id=3)
        if is_unigram
        else models.BPE(ids, [], unk_token="<unk>")
    )
    pieces.add_special_tokens([name for name in NAMES if name != "a"])
    if template:
        pair = [(name, ids[name]) for name in template.split() if name != "$A"]
        pieces.post_processor = processors.TemplateProcessing(template, f"{template} $B", special_tokens=pair)
    pieces.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    kind = getattr(transformers, families()[family].architecture).config_class
    config = json.loads(kind(vocab_size=len(NAMES), bos_token_id=0, eos_token_id=2).to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = theirs("a", add_special_tokens=False).input_ids  # some classes replace the pre-tokenizer
    expected = {"src": theirs("a").input_ids, "tgt": theirs(text_target="a").input_ids}
    read = read_published(families()[family], config, {}, 10**6, "config.json")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("tokenizer")}
    around = read_conventions(read, published_tokenizer(read.vocabulary, files, "tokenizer.json"), config, {})
    ours, ends = published_tokenizer(read.vocabulary, files, "tokenizer.json", around), [2] * around.adds_eos
    for column in ("src", "tgt") if around.of_targets else ("src",):
        framed = read.vocabulary.to_published(ours.of(column).encode("a")) + ends
        place = framed.index(ids["a"])
        assert [*framed[:place], *text, *framed[place + 1 :]] == expected[column]


READING = {
    "bert": (bert, {}),  # its config.json has no ids of [CLS] and [SEP]
    "electra": (bert, {}),
    "roberta": (SAVED["bart"], {"bos_token_id": 0, "eos_token_id": 2}),
    "modernbert": (modernbert, {"bos_token_id": 1, "eos_token_id": 2}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("bert", "modernbert") else pytest.mark.grid) for name in ENCODERS]
)
def test_encoders_read_the_ids_of_autotokenizer_and_predict_the_same_tokens(name, tmp_path):
    make, ids = READING[name]
    tokenizer, folder = make(), tmp_path / "theirs"
    tokenizer.save_pretrained(folder)
    content = (folder / "tokenizer.json").read_bytes()
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id, **ids}
    publish(name, folder, vocab_size=len(tokenizer), max_position_embeddings=66, **ids)
    (folder / "tokenizer.json").write_bytes(content)
    import_folder(folder, tmp_path / "run")
    encoder = tfm.load(tmp_path / "run")
    expected = AutoTokenizer.from_pretrained(folder)(LINES).input_ids
    lines = encoder.encode(LINES)
    assert [encoder.tokenizer.vocabulary.to_published(ids) for ids in lines] == expected
    assert all(ids[0] == 1 and ids[-1] == 2 for ids in lines)  # BOS and EOS
    certificate = export_run(tmp_path / "run", tmp_path / "back")[1]
    assert certificate.log_probabilities.largest < 1e-4
    assert certificate.translations.equal == certificate.translations.sentences == 4


def test_the_outputs_of_an_encoder_without_padding_are_compared_text_by_text(tmp_path):
    vocabulary = bert().get_vocab()
    del vocabulary["[PAD]"]
    tokenizer = BertTokenizer({word: id - 1 for word, id in vocabulary.items()})  # adds [PAD] behind the embeddings
    folder = tmp_path / "theirs"
    publish("bert", folder, vocab_size=len(vocabulary), max_position_embeddings=66, pad_token_id=None)
    tokenizer.save_pretrained(folder)
    import_folder(folder, tmp_path / "run")
    certificate = export_run(tmp_path / "run", tmp_path / "back")[1]
    assert not certificate.not_compared
    assert certificate.translations.equal == certificate.translations.sentences == 4


def test_a_tokenizer_that_was_stored_before_languages_keeps_its_text():
    content = json.loads(published_words(before=(10,)).text)
    assert content["conventions"].keys() == vars(Conventions()).keys() - {"languages"}
    text = json.dumps(content, ensure_ascii=False)
    assert stored_tokenizer(text, "tokenizer.json").text == text
    content["conventions"]["languages"] = [10]
    with pytest.raises(RunError, match=r"conventions\.languages is damaged"):
        stored_tokenizer(json.dumps(content), "tokenizer.json")
