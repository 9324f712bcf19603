"""An exported folder, used with AutoTokenizer, generate and pipeline, gives the text of the run; certificates see all."""

import json

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import WORDS
from tests.exchange.published import GREEDY, publish
from tests.exchange.test_custom_code import SIZES, loaded, saved
from tests.oracles.references import scatter
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import read_tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.exchange import exporting
from tfm_blocks.exchange.certificate import certify
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.translation.save import save_network
from tfm_blocks.translation.settings import Search

TEXTS = ["a red boat", "the", "a blue house is here <eos>"]
GENERATING = {"decoder_only": {}, "llama": {"kv_heads": 1, "d_ff": 48}, "gpt2": {"max_length": 64}}
TRANSLATING = {
    "base": {},
    "marian": {"decoder_layers": 1},
    "bart": {"decoder_layers": 1, "max_length": 64},
    "decoder_only": {},
}


def each(models, *default):
    return pytest.mark.parametrize(
        "model", [pytest.param(name, marks=[] if name in default else pytest.mark.grid) for name in models]
    )


def trained(model, folder, columns=(), **knobs):
    """Save a run with random weights, its knobs, and a tokenizer that was learned here."""
    tokenizer = Tokenizer.train(WORDS * 3, 300)
    composed = compose_model(model).with_values({**SIZES, "layers": 1, "vocab": tokenizer.size, **knobs})
    network = build_network(check_model(composed.model), seed=0)
    scatter(network)
    values = composed.knobs
    save_network(network, folder, tokenizer, values)
    if columns:
        content = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps(content | {"columns": columns}))
    return tfm.load(folder)


def exported(model, folder, columns=(), **knobs):
    """Return the translator of a run, and the AutoTokenizer of its export."""
    transformers = pytest.importorskip("transformers")
    translator = trained(model, folder / "run", columns, **knobs)
    architecture, certificate = export_run(folder / "run", folder / "new")
    assert (architecture == "custom code") is (model not in families())
    assert (certificate.translations.sentences, certificate.translations.equal) == (4, 4)
    return translator, transformers.AutoTokenizer.from_pretrained(folder / "new", trust_remote_code=True)


@pytest.mark.grid
@each(GENERATING, "decoder_only")
def test_texts_are_continued_as_by_the_run(model, tmp_path):
    translator, theirs = exported(model, tmp_path, **GENERATING[model])
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token, theirs.unk_token) == (
        "<bos>",
        "<eos>",
        "<pad>",
        "<unk>",
    )
    assert theirs("a boat").input_ids == [1, *translator.tokenizer.encode("a boat")]
    expected = [text + best.text for text, (best,) in zip(TEXTS, translator.generate(TEXTS, 9, Search()), strict=True)]
    network = loaded("CausalLM", tmp_path / "new")
    for side in ("left", "right") if model == "decoder_only" else ("left",):
        theirs.padding_side = side
        out = network.generate(**theirs(TEXTS, return_tensors="pt", padding=True), **GREEDY)
        assert theirs.batch_decode(out, skip_special_tokens=True) == expected
    from transformers import pipeline

    use = pipeline("text-generation", model=str(tmp_path / "new"), trust_remote_code=True)
    whole = [text + best.text for text, (best,) in zip(TEXTS, translator.generate(TEXTS, 32, Search()), strict=True)]
    outputs = use(TEXTS, batch_size=3, max_new_tokens=32)
    assert [output["generated_text"] for (output,) in outputs] == whole


@each(TRANSLATING, "base")
def test_texts_are_translated_as_by_the_run(model, tmp_path):
    translator, theirs = exported(model, tmp_path, ("src", "tgt"), **TRANSLATING[model])
    expected = translator.translate(TEXTS, longest=(0.0, 9))
    kind = "Seq2SeqLM" if translator.inputs else "CausalLM"
    network = loaded(kind, tmp_path / "new")
    for side in ("right",) if model in families() else ("left", "right"):
        theirs.padding_side = side
        read = theirs(TEXTS, return_tensors="pt", padding=True)
        out = network.generate(**read, **GREEDY)[:, 0 if translator.inputs else read.input_ids.shape[1] :]
        assert theirs.batch_decode(out, skip_special_tokens=True) == expected
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text())["max_new_tokens"] == TRANSLATING[
        model
    ].get("max_length", 256)


def test_the_tokenizer_of_an_export_is_read_as_the_one_of_its_run(tmp_path):
    translator, _ = exported("decoder_only", tmp_path)
    read = read_tokenizer(str(tmp_path / "new"))
    assert type(read) is Tokenizer and read.text == translator.tokenizer.text
    assert read.encode("a boat") == translator.tokenizer.encode("a boat")


@pytest.mark.parametrize("model", ["decoder_only", pytest.param("rezero", marks=pytest.mark.grid)])
def test_one_id_for_bos_and_eos_is_bos_where_a_sequence_begins(model, tmp_path):
    publish("gpt2", tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "imported")
    translator = saved(model, tmp_path / "run", read_tokenizer(str(tmp_path / "imported")), layers=1)
    _, certificate = export_run(tmp_path / "run", tmp_path / "new")
    assert certificate.log_probabilities.largest < 1e-3
    if model == "decoder_only":
        rows = torch.tensor([[36, 4, 7, 36, 9]])  # two documents
        logits_BTV = loaded("CausalLM", tmp_path / "new")(rows).logits
        here = torch.tensor(
            [[1, *translator.tokenizer.vocabulary.to_here([4, 7]), 2, translator.tokenizer.encode("w9")[0]]]
        )
        expected = translator.network(tgt=here)[..., translator.tokenizer.vocabulary.to_here(range(37))]
        torch.testing.assert_close(logits_BTV, expected)


@pytest.mark.parametrize(
    ("tensor", "row"),
    [
        pytest.param("transformer.wpe.weight", 30, marks=pytest.mark.grid),
        ("transformer.wpe.weight", 63),
        pytest.param("transformer.wte.weight", -1, marks=pytest.mark.grid),
    ],
)
def test_a_changed_row_of_an_embedding_fails_the_certificate(tensor, row, tmp_path, monkeypatch):
    trained("gpt2", tmp_path / "run", max_length=64)
    write = exporting.write_tensors

    def with_change(path, tensors, metadata):
        tensors = {name: value.clone() for name, value in tensors.items()}
        tensors[tensor][row, ::2] += 5
        write(path, tensors, metadata)

    monkeypatch.setattr(exporting, "write_tensors", with_change)
    with pytest.raises(RunError, match="the export differs from the run: log probabilities by"):
        export_run(tmp_path / "run", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_certificate_of_a_large_model_has_a_part_of_the_ids_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tfm_blocks.exchange.random_sentences.MOST_PRODUCTS", 10**6)
    translator = saved("decoder_only", tmp_path / "run", layers=1)
    log_p = export_run(tmp_path / "run", tmp_path / "new")[1].log_probabilities
    assert log_p.positions == 512 and log_p.ids < translator.tokenizer.size


def test_a_folder_that_transformers_cannot_load_is_reported_with_a_way_out(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    ours = trained("base", tmp_path / "run")
    with pytest.raises(RunError, match=r"transformers cannot load the export: (.|\n)*help: .*tfm eject"):
        certify(ours, translates=True, run=tmp_path / "run", folder=tmp_path, own_code=False)
