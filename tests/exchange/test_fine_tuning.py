"""Runs that start from imported weights: the first loss is that of transformers, and the result can be exported."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import tfm_blocks as tfm
from tests.exchange import test_conventions as family_texts
from tests.exchange.layouts import LAYOUTS
from tests.exchange.published import FAMILIES, publish
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.translation.settings import Search

LINES = [f"w{a} w{b} w{a + b}" for a in range(3, 9) for b in range(3, 27)]
SHORT = [
    "trainer.steps=3",
    "trainer.log_every=1",
    "trainer.validate_sentences=2",
    "trainer.precision=fp32",
    "schedule.warmup=1",
    "logger=csv",
    "dropout=0",
    "label_smoothing=0",
]


@pytest.fixture
def text(tmp_path):
    for split in ("train", "val", "test"):
        for column in ("src", "tgt", "txt"):
            (tmp_path / f"{split}.{column}").write_text("\n".join(LINES) + "\n")
    return tmp_path


def first_loss(run):
    return next(row["train/loss"] for row in read_rows(run / "metrics.csv") if "train/loss" in row)


def fine_tune(name, folder, *overrides, write=publish, **config):
    """Train a run that starts from an imported model, with the command that the import prints."""
    theirs = write(name, folder / "theirs", **config)
    command = str(import_folder(folder / "theirs", folder / "imported")).partition("tfm train ")[2]
    model, *knobs = command.removesuffix(" data=…").split()
    knobs = [knob for knob in knobs if not knob.startswith("dropout=")]  # SHORT sets it
    settings = [f"data.dir={folder}", f"data.cache={folder / 'cache'}", *SHORT, *overrides, *knobs]
    return theirs, tfm.train(model.removeprefix("model="), overrides=settings, name="tuned").folder


def ids_of(line):
    return [int(word[1:]) for word in line.split()]


@pytest.mark.grid
def test_gpt2_starts_with_the_loss_of_transformers_and_is_exported_to_it(text, monkeypatch):
    monkeypatch.chdir(text)
    files = {split: f"data.{split}={split}.txt" for split in ("train", "val", "test")}
    theirs, run = fine_tune("gpt2", text, "data=lm", "data.context=16", *files.values(), n_positions=64)
    eos = theirs.config.eos_token_id
    stream = torch.tensor([id for line in LINES for id in (*ids_of(line), eos)])
    rows_BT = stream.view(-1, 16)
    read_BT = torch.cat((torch.full((len(rows_BT), 1), eos), rows_BT[:, :-1]), 1)
    expected = torch.nn.functional.cross_entropy(theirs(read_BT).logits.flatten(0, 1), rows_BT.flatten())
    assert first_loss(run) == pytest.approx(expected.item(), rel=1e-5)
    export_run(run, text / "back")
    back, ours = AutoModelForCausalLM.from_pretrained(text / "back").eval(), tfm.load(run)
    vocabulary = ours.tokenizer.vocabulary
    ids_BT = torch.tensor([vocabulary.to_here(row) for row in read_BT.tolist()])
    logits_BTV = ours.network(tgt=ids_BT)[..., vocabulary.to_here(range(vocabulary.size))]
    torch.testing.assert_close(back(read_BT).logits, logits_BTV, rtol=1e-5, atol=1e-5)
    assert (back(read_BT).logits - theirs(read_BT).logits).abs().max() > 1e-3


@pytest.mark.grid
@pytest.mark.parametrize("name", ["t5", "t5_v1_1"])
def test_t5_starts_with_the_loss_of_transformers_and_is_exported_to_it(name, text, monkeypatch):
    monkeypatch.chdir(text)
    theirs, run = fine_tune(name, text, "data=text")
    pairs = torch.tensor([[*ids_of(line), 1] for line in LINES])
    assert first_loss(run) == pytest.approx(theirs(input_ids=pairs, labels=pairs).loss.item(), rel=1e-5)
    export_run(run, text / "back")
    back, ours = AutoModelForSeq2SeqLM.from_pretrained(text / "back").eval(), tfm.load(run)
    read_BS = torch.tensor([[*ids_of(LINES[7]), 1]])
    (out,) = back.generate(read_BS, max_new_tokens=9, do_sample=False)[:, 1:].tolist()
    words = [f"w{id}" for id in out[: out.index(1) if 1 in out else len(out)]]
    assert ours.translate([LINES[7]], longest=(0.0, 9)) == [" ".join(words)]


CODE_KEYS = {"_attn_implementation", "attn_implementation"}  # they may name code
TYPES = {"in_halves": ("dtype",), "of_tools": ("torch_dtype",)}  # trained weights are float32
FINE_TUNED = [
    pytest.param(
        name,
        layout,
        marks=pytest.mark.grid if number % len(LAYOUTS) == place and layout != "of_tools" else pytest.mark.slow,
    )
    for number, name in enumerate(FAMILIES)
    for place, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout"), FINE_TUNED)
def test_fine_tuned_families_are_exported_with_their_text_and_every_key(name, layout, tmp_path, monkeypatch):
    def write(name, folder, **config):
        LAYOUTS[layout](folder, family_texts.limited(name, folder, **config)[0])

    monkeypatch.chdir(tmp_path)
    lines, pairs = family_texts.LINES, name in family_texts.PAIRS
    for split in ("train", "val", "test"):
        for column in ("src", "tgt", "txt"):
            (tmp_path / f"{split}.{column}").write_text("\n".join(lines) + "\n")
    files = [f"data.{split}={split}.txt" for split in ("train", "val", "test")]
    data = ["data=text"] if pairs else ["data=lm", "data.context=16", *files]
    config = family_texts.SIZES.get(name, {"max_position_embeddings": 64})
    config = {**config, "task_specific_params": {"summary": {"limits": {"max_length": 9}}}}
    _, run = fine_tune(name, tmp_path, *data, write=write, **config)
    certificate = export_run(run, tmp_path / "back")[1]
    assert certificate.log_probabilities.largest < 1e-3
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back"))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed - CODE_KEYS <= {"dropout", "dropout_rate", "resid_pdrop", *TYPES.get(layout, ())}
    assert not CODE_KEYS & after.keys()
    for file in ("generation_config.json", "tokenizer_config.json"):
        contents = [(tmp_path / folder / file) for folder in ("theirs", "back")]
        assert not contents[0].is_file() or contents[0].read_bytes() == contents[1].read_bytes()
    load = AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM
    back, tokenizer = load.from_pretrained(tmp_path / "back").eval(), AutoTokenizer.from_pretrained(tmp_path / "back")
    read = tokenizer(lines, return_tensors="pt", padding=True)
    read.pop("token_type_ids", None)
    if pairs:
        out, outputs = back.generate(**read, do_sample=False), tfm.load(run).translate(lines)
    else:
        out = back.generate(**read, do_sample=False, max_new_tokens=9)[:, read.input_ids.shape[1] :]
        outputs = [best.text for (best,) in tfm.load(run).generate(lines, 9, Search())]
    assert outputs == tokenizer.batch_decode(out, skip_special_tokens=True)
    assert len(set(outputs)) > 5
