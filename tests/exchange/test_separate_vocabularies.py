"""Models with separate vocabularies of sources and targets are exported with both tokenizers."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import tfm_blocks as tfm
from tests.exchange.test_eject import eject_alone
from tests.exchange.test_sentencepiece import SOURCE, TARGET, files, separate  # noqa: F401
from tests.translation.test_any_graph import sharper
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer, read_tokenizer
from tfm_blocks.data.tokenizer_format import LARGEST_FILE
from tfm_blocks.exchange.ctranslate2.export import export_to_ctranslate2
from tfm_blocks.exchange.exporting import export_run, write_files
from tfm_blocks.exchange.onnx.export import export_to_onnx
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.translation.save import save_network
from tfm_blocks.translation.settings import Search

SIZES = {"d_model": 16, "d_ff": 16, "heads": 2, "layers": 1}


def saved(name, folder, tokenizer):
    """Write a run of a model with the tokenizers of both sides, and return its translator."""
    sizes = SIZES | {"vocab": tokenizer.size, "source_vocab": tokenizer.source.size}
    composed = compose_model(name, [f"{key}={value}" for key, value in sizes.items()])
    network = sharper(build_network(check_model(composed.model, composed.sources), seed=1))
    save_network(network, folder, tokenizer, {key: value for key, value in composed.mapping.items() if key != "model"})
    return tfm.load(folder)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TARGET * 3, 300).with_source(Tokenizer.train(SOURCE * 3, 280))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("two_vocabularies", "custom code"),
        pytest.param("marian_separate", "MarianMTModel", marks=pytest.mark.grid),
    ],
)
def test_transformers_reads_and_writes_with_the_tokenizers_of_both_sides(name, architecture, tokenizer, tmp_path):
    ours = saved(name, tmp_path / "run", tokenizer)
    kind, certificate = export_run(tmp_path / "run", tmp_path / "new")
    assert kind == architecture and certificate.translations.equal == certificate.translations.sentences == 4
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new", trust_remote_code=True).eval()
    folders = (tmp_path / "new", tmp_path / "new" / "target")
    source, target = (AutoTokenizer.from_pretrained(folder, trust_remote_code=True) for folder in folders)
    read = source(SOURCE, return_tensors="pt", padding=True)
    assert read.input_ids[0][read.attention_mask[0] == 1].tolist() == [*tokenizer.source.encode(SOURCE[0]), 2]
    assert target(TARGET[0]).input_ids == [*tokenizer.encode(TARGET[0]), 2]
    rows = theirs.generate(**read, max_new_tokens=20, num_beams=1, do_sample=False)
    expected = [best.text for (best,) in ours.search(SOURCE, Search(longest=(0.0, 20)))]
    assert target.batch_decode(rows, skip_special_tokens=True) == expected


@pytest.mark.grid
def test_a_pair_of_marian_keeps_its_files_in_an_export_with_code(separate, tmp_path):  # noqa: F811
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_files(folder, separate)
    pair = read_tokenizer(str(folder))
    saved("two_vocabularies", tmp_path / "run", pair)
    _, certificate = export_run(tmp_path / "run", tmp_path / "new")
    assert (certificate.translations.equal, certificate.not_compared) == (4, "")
    kept = {name: content for name, content in separate.items() if name != "tokenizer_config.json"}
    assert {name: (tmp_path / "new" / name).read_bytes() for name in kept} == kept


@pytest.mark.grid
def test_engines_read_the_subwords_of_each_side(tokenizer, tmp_path):
    saved("two_vocabularies", tmp_path / "run", tokenizer)
    certificate = export_to_ctranslate2(tmp_path / "run", tmp_path / "ct2", "float32", SOURCE)
    assert certificate.translations.equal == len(SOURCE) and certificate.log_probabilities.largest < 1e-4
    graphs, certificate = export_to_onnx(tmp_path / "run", tmp_path / "onnx")
    assert graphs == ["encoder", "first", "step"] and certificate.log_probabilities.largest < 1e-4
    for folder in ("ct2", "onnx"):
        for place, own in (("", tokenizer.source), ("target", tokenizer)):
            assert load_tokenizer(tmp_path / folder / place / "tokenizer.json").text == own.text


@pytest.mark.grid
def test_the_ejected_file_reads_both_vocabularies(tokenizer, tmp_path):
    ours = saved("two_vocabularies", tmp_path / "run", tokenizer)
    draws = torch.Generator().manual_seed(1)
    inputs = {
        "src": torch.randint(3, tokenizer.source.size, (3, 6), generator=draws),
        "tgt": torch.randint(3, tokenizer.size, (3, 5), generator=draws),
    }
    (tmp_path / "cases").mkdir()
    ejected = eject_alone({"two": (ours.network.spec, ours.network, inputs)}, tmp_path / "cases")["two"]
    with torch.no_grad():
        torch.testing.assert_close(ejected["logits"], ours.network(**inputs), rtol=1e-4, atol=1e-5)


def test_the_limit_of_a_tokenizer_file_is_larger_for_a_run(tokenizer, tmp_path):
    saved("two_vocabularies", tmp_path / "run", tokenizer)
    with (tmp_path / "run" / "tokenizer.json").open("a") as file:
        file.write(" " * LARGEST_FILE)
    assert read_tokenizer(str(tmp_path / "run")).text == tokenizer.text
