"""Separate vocabularies of sources and targets: each side is encoded, trained and decoded with its own tokenizer."""

import json
import os
import pickle
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import COMPOSER, expect_problem
from tests.data.conftest import read_data
from tests.launch.test_resume import begin, expect_same, handlers, stopping, to_the_end  # noqa: F401
from tests.preloaded import run_python
from tests.serving.clients import serving
from tests.translation.test_any_graph import naive_greedy, sharper
from tfm_blocks.cli import main
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.pair_settings import TokenizerPaths
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.subword_dropout import SubwordDropout
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer, read_tokenizer
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.init_from import load_matching_weights
from tfm_blocks.launch.suitability import find_vocabulary_problems
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.model import write_weights
from tfm_blocks.training.checkpoints import PreemptedError
from tfm_blocks.translation.sentence_attention import attention_of
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

SOURCES = ["the house is big", "a small dog runs home", "the dog sees the big house", "houses and dogs"] * 3
TARGETS = ["das Haus ist groß", "ein kleiner Hund rennt heim", "der Hund sieht das große Haus", "Häuser und Hunde"] * 3
ROOT = Path(__file__).parents[2]
TWO = ["model=two_vocabularies", "vocab=300", "source_vocab=280", "data.max_length=60"]
SIZES = {"d_model": 16, "d_ff": 16, "heads": 2, "layers": 1}


def settings_of(folder, **changes):
    for split in ("train", "val"):
        (folder / f"{split}.src").write_text("".join(f"{line}\n" for line in SOURCES))
        (folder / f"{split}.tgt").write_text("".join(f"{line}\n" for line in TARGETS))
    files = {split: {"src": f"{split}.src", "tgt": f"{split}.tgt"} for split in ("train", "val")}
    sizes = {"step_tokens": 200, "batch_tokens": 200, "max_length": 60, "cache": str(folder / "cache")}
    return read_data({"kind": "text", "dir": str(folder), "test": None} | files | sizes | changes)


def quiet(settings, vocab=300, source_vocab=None):
    return prepare(settings, vocab, lambda text: None, source_vocab=source_vocab)


@pytest.fixture(scope="module")
def sides():
    """Return a tokenizer of sources and one of targets, of different sizes."""
    return Tokenizer.train(SOURCES, 280), Tokenizer.train(TARGETS, 300)


@pytest.fixture(scope="module")
def translator(sides):
    source, target = sides
    network = tfm.build("two_vocabularies", vocab=target.size, source_vocab=source.size, **SIZES)
    return Translator(sharper(network), target.with_source(source))


def test_each_column_has_the_ids_of_a_tokenizer_of_its_text(tmp_path, sides):
    lines = []
    data = prepare(settings_of(tmp_path), 300, lines.append, source_vocab=280)
    for column, texts, tokenizer in zip(("src", "tgt"), (SOURCES, TARGETS), sides, strict=True):
        for corpus in (data.train, data.val):
            rows = [corpus.ids(column, row).tolist() for row in range(len(corpus))]
            assert rows == [tokenizer.encode(text) for text in texts]
            assert list(corpus.text[column]) == texts
    assert data.tokenizer.sizes == (sides[1].size, sides[0].size)
    assert f"data: vocabulary of {sides[0].size} subwords for sources" in "".join(lines)
    assert data.tokenizer.source.ids.keys() != data.tokenizer.ids.keys()


def test_two_named_tokenizers_are_those_of_the_sides_and_change_the_cache(tmp_path, sides):
    for name, tokenizer in zip(("a", "b"), sides, strict=True):
        tokenizer.save(tmp_path / f"{name}.json")
    paths = {name: str(tmp_path / f"{name}.json") for name in ("a", "b")}

    def rows(**named):
        data = quiet(settings_of(tmp_path, **named))
        return data.train.sha256, data.train.lengths_NC.tolist()

    learned = quiet(settings_of(tmp_path), source_vocab=280).train.sha256
    assert rows(tokenizer={"source": paths["a"], "target": paths["b"]})[0] == learned
    assert rows(tokenizer={"source": paths["b"], "target": paths["b"]}) == rows(tokenizer=paths["b"])
    swapped = rows(tokenizer={"source": paths["b"], "target": paths["a"]})
    assert swapped != rows(tokenizer=paths["b"]) and swapped[0] != learned


def test_a_saved_pair_is_restored_with_published_tokenizers_too(tmp_path, sides):
    source, target = sides
    pair = target.with_source(source)
    pair.save(tmp_path / "tokenizer.json")
    (tmp_path / "theirs").mkdir()
    content = json.loads(source.text)
    content["normalizer"] = {"type": "Lowercase"}  # so that it is read as a tokenizer of others
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(content))
    paths = TokenizerPaths(source=str(tmp_path / "theirs"), target=str(tmp_path))
    mixed = read_tokenizer(paths)
    mixed.save(tmp_path / "mixed.json")
    for one, again in (
        (pair, load_tokenizer(tmp_path / "tokenizer.json")),
        (mixed, load_tokenizer(tmp_path / "mixed.json")),
    ):
        for copy in (again, pickle.loads(pickle.dumps(again))):
            assert copy.stored == one.stored and copy.sizes == one.sizes
            for column, text in (("src", "The house"), ("tgt", "das Haus")):
                assert copy.of(column).encode(text) == one.of(column).encode(text)
    assert read_tokenizer(str(tmp_path)).stored == pair.stored
    assert mixed.of("src").encode("THE HOUSE") == mixed.of("src").encode("the house")
    (tmp_path / "cut.json").write_text(pair.stored[:-9])
    with pytest.raises(RunError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path / "cut.json")


def test_dropout_divides_each_side_into_its_own_subwords(sides):
    """With rate 0, the subwords are the usual ones."""
    source, target = sides
    dropout = SubwordDropout(tokenizer=target.with_source(source), rate=0.0, max_length=60)
    for column, tokenizer, texts in (("src", source, SOURCES), ("tgt", target, TARGETS)):
        ids = [np.array(tokenizer.encode(text)) for text in texts]
        begins = [np.diff(words, prepend=-2) != 0 for words in tokenizer.words_of(texts)]
        divided = dropout.divide(column, ids, begins, np.arange(len(texts)), 1, 0, 0)
        assert [row.tolist() for row in divided] == [row.tolist() for row in ids]


@pytest.mark.grid
def test_a_translation_reads_and_writes_with_different_tokenizers(translator, sides):
    source, target = sides
    for text, (best, *_) in zip(SOURCES[:4], translator.search(SOURCES[:4], Search()), strict=True):
        src = torch.tensor([[*source.encode(text), EOS]])
        ids = naive_greedy(translator.network, [BOS], 2 * src.shape[1] + 20, src=src)
        assert list(best.ids) == ids and best.text == target.decode(ids)
    attention = attention_of(translator, SOURCES[0], TARGETS[0])
    assert attention.tokens["src"][:-1] == [source.piece(id) for id in source.encode(SOURCES[0])]
    assert attention.tokens["tgt"][1:] == [target.piece(id) for id in target.encode(TARGETS[0])]
    with serving(translator) as (port, _):
        response = httpx.post(f"http://127.0.0.1:{port}/translate", json={"texts": SOURCES[:4]}, timeout=60)
        served = [output["text"] for (output,) in response.json()["outputs"]]
    assert served == translator.translate(SOURCES[:4])


@pytest.mark.grid
def test_a_tokenizer_with_more_ids_than_a_table_is_refused(translator, sides, tmp_path):
    source, target = sides
    small = tfm.build("two_vocabularies", vocab=target.size, source_vocab=source.size - 1, **SIZES)
    with pytest.raises(RunError, match=f"has {source.size} subwords for src, but the model has {source.size - 1}"):
        Translator(small, target.with_source(source))
    run = tfm.save(translator.network, tmp_path / "run", tokenizer=translator.tokenizer)
    assert tfm.load(run).translate(SOURCES[:2]) == translator.translate(SOURCES[:2])


def test_rows_of_each_table_follow_the_subwords_of_its_side(translator, sides, tmp_path):
    weights = weights_of(translator.network)
    write_weights(tmp_path, weights)
    translator.tokenizer.save(tmp_path / "tokenizer.json")
    new = Tokenizer.train(TARGETS + SOURCES, 310).with_source(Tokenizer.train(SOURCES + ["other words"] * 9, 290))
    network = tfm.build("two_vocabularies", vocab=new.size, source_vocab=new.source.size, **SIZES, seed=5)
    start = load_matching_weights(network, new, tmp_path)
    assert start.new == [] and start.tables == {"src_emb.block.weight": "src", "tgt_emb.block.weight": "tgt"}
    tables = weights_of(network)
    for name, column in start.tables.items():
        ids, before = new.of(column).ids, translator.tokenizer.of(column).ids
        common = ids.keys() & before.keys()
        assert len(common) > 250 and ids != before
        assert all(torch.equal(tables[name][ids[word]], weights[name][before[word]]) for word in common)


@pytest.mark.grid
def test_a_run_resumes_bit_equal_and_records_both_sizes(small, tmp_path):
    with_two = lambda every: small(*stopping(every), *TWO)  # noqa: E731
    begin(with_two(1000), tmp_path)
    with pytest.raises(PreemptedError):
        begin(with_two(5), tmp_path)
    assert to_the_end(tmp_path / "run-2") == [5]
    expect_same(tmp_path / "run", tmp_path / "run-2")
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert tokenizer.source.size == 280 and tokenizer.size == 300
    assert weights_of(Translator.load(tmp_path / "run").network)["src_emb.block.weight"].shape[0] == 280
    again = small(*TWO, f"data.tokenizer={tmp_path / 'run'}", "trainer.steps=1", f"init_from={tmp_path / 'run'}")
    assert (begin(again, tmp_path / "again") / "weights.safetensors").is_file()


COMMON = [
    "model=two_vocabularies", "data=text", "data.dir=.", "data.test=null", "vocab=300", "layers=1", "d_model=16", "d_ff=16",
    "heads=2", "data.max_length=60", "data.step_tokens=200", "trainer.steps=4", "trainer.validate_every=2",
    "trainer.validate_sentences=2", "trainer.accelerator=cpu", "trainer.precision=fp32", "logger=csv", "dropout=0",
]  # fmt: skip


@pytest.mark.grid
def test_two_devices_a_sweep_and_a_comparison_have_both_vocabularies(tmp_path, capsys):
    """Runs that differ in the vocabulary of sources alone have comparable losses per token."""
    settings_of(tmp_path)

    def command(*words):
        environment = {**os.environ, "TFM_BLOCKS_CACHE": "cache", "OMP_NUM_THREADS": "1"}
        done = run_python(words, tmp_path, environment, timeout=500, share_server=True)
        assert done.returncode == 0, done.stderr

    two = ["source_vocab=280", "trainer.devices=2", "name=two"]
    command(ROOT / "train.py", *COMMON, *two)
    command(ROOT / "train.py", "-m", *COMMON, "source_vocab=270,280", "sweep.name=sizes")
    runs = {path.name: path for path in (tmp_path / "runs" / "sizes").iterdir() if (path / "status.json").is_file()}
    losses = [
        read_rows(run / "metrics.csv")[-1]["val/loss"] for run in (tmp_path / "runs" / "two", runs["source_vocab-280"])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    sizes = [load_tokenizer(run / "tokenizer.json").sizes for run in runs.values()]
    assert len(runs) == 2 and len({target for target, _ in sizes}) == 1 and len({source for _, source in sizes}) == 2
    main(["compare", *map(str, runs.values())])
    printed = capsys.readouterr().out
    assert "source_vocab" in printed and "different tokenizer" not in printed and "training text" not in printed


TIED = "model.graph.logits.tie=src_emb"
SAME = "model.graph.tgt_emb={same: src_emb, block: null}"
HASHED = "model.graph.encoder.layer.ffn={block: hash_moe, ids: src, experts: 4}"


@pytest.mark.parametrize(
    ("overrides", "address", "rule", "help"),
    [
        ([TIED], "model.graph.logits.tie", "has the weights of src_emb", "tie=null"),
        ([SAME, TIED], "model.graph.tgt_emb", "rows are ids of src, not of tgt", "{same: null, block: embedding}"),
        (
            ["model.graph.src_emb.vocab=270"],
            "model.graph.src_emb.vocab",
            "has 270 ids, but src has 300",
            "${source_vocab}",
        ),
        (
            ["source_vocab=280", HASHED],
            "model.graph.encoder.layer.ffn.vocab",
            "has 300 ids, but src has 280",
            "${source_vocab}",
        ),
        (["objective=span_corruption"], "source_vocab", "makes them from the target", "objective=next_token"),
        (["source_vocab=100"], "source_vocab", "room for 4 special tokens and 256 bytes", "source_vocab=260"),
    ],
)
def test_a_model_or_data_that_cannot_have_two_vocabularies_is_refused(small, tmp_path, overrides, address, rule, help):
    with expect_problem(address, rule, help, among=True):
        begin(small("model=two_vocabularies", "vocab=300", *overrides), tmp_path)


def test_a_probe_task_has_one_vocabulary():
    with pytest.raises(ConfigError, match="the probe task parity has one alphabet") as caught:
        check_run(compose_job(["model=two_vocabularies", "data=parity", "trainer.accelerator=cpu"], COMPOSER))
    assert any(problem.address == "source_vocab" for problem in caught.value.problems)


def test_a_model_without_sources_has_one_vocabulary():
    spec = tfm.build("decoder_only", vocab=300, **SIZES).spec
    (problem,) = find_vocabulary_problems(spec, None, None, 300, 280)
    assert problem.address == "source_vocab" and problem.rule.endswith("but the model reads tgt")


def test_a_pair_needs_a_model_with_two_vocabularies_and_sets_both_sizes(small, tmp_path, sides):
    source, target = sides
    target.with_source(source).save(tmp_path / "pair.json")
    named = f"data.tokenizer={tmp_path / 'pair.json'}"
    with pytest.raises(ConfigError, match="the model has no knob source_vocab"):
        begin(small(named), tmp_path)
    with pytest.raises(ConfigError, match=f"the tokenizer .* has {source.size} ids"):
        check_run(small("model=two_vocabularies", "source_vocab=77", named))
