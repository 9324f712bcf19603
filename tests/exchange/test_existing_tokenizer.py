"""A run trained with an existing tokenizer keeps it: it resumes, generates and is exported without the original files."""

import json
import shutil
import sys

import httpx
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, models, pre_tokenizers
from tokenizers import Tokenizer as Pieces
from transformers import AutoModelForCausalLM, AutoTokenizer

import tfm_blocks as tfm
from tests.conftest import COMPOSER
from tests.data.test_tokenizer_files import FILES, LINES, files, words_with_tags  # noqa: F401 (a fixture)
from tests.launch.test_resume import go_on
from tests.serving.clients import serving
from tfm_blocks.cli import main
from tfm_blocks.data.tokenizer_files import read_tokenizer
from tfm_blocks.errors import ConfigError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.launch.check import check_run
from tfm_blocks.sweep.checks import JobChecker

SIZES = ["layers=1", "d_model=16", "d_ff=16", "heads=2", "trainer.precision=fp32", "logger=csv", "schedule.warmup=1"]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES * 9))
    splits = ["data.train=train*.jsonl", "data.val=val.jsonl", "data.test=null", "data.documents=jsonl"]
    return ["data=lm", f"data.dir={tmp_path}", f"data.cache={tmp_path / 'cache'}", "data.context=8", *splits]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "saved" else pytest.mark.grid) for name in FILES]
)
def test_a_run_resumes_and_is_exported_without_the_files_that_it_read(name, files, data, tmp_path):  # noqa: F811
    original = tmp_path / name
    (shutil.copytree if (files / name).is_dir() else shutil.copy)(files / name, original)
    settings = [*data, f"data.tokenizer={original}", *SIZES, "trainer.steps=2"]
    run = tfm.train("decoder_only", overrides=settings, name="run").folder
    shutil.rmtree(original) if original.is_dir() else original.unlink()
    go_on(run, "trainer.steps=3")
    translator = tfm.load(run)
    vocabulary = translator.tokenizer.vocabulary
    assert translator.network.spec.sink.shape[-1] == translator.tokenizer.size == vocabulary.size + 1
    export_run(run, tmp_path / "out")
    (written,) = [file for file in translator.tokenizer.files if file != "tokenizer_config.json"]
    source = files / name / written if (files / name).is_dir() else files / name
    assert translator.tokenizer.files[written] == source.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert (model.config.bos_token_id, model.config.eos_token_id) == (vocabulary.start, vocabulary.eos)
    ids = [1, *translator.tokenizer.encode(LINES[0])]
    published = torch.tensor([vocabulary.to_published(ids)])
    logits_BTV = translator.network(tgt=torch.tensor([ids]))[..., vocabulary.to_here(range(vocabulary.size))]
    torch.testing.assert_close(model(published).logits, logits_BTV, rtol=1e-5, atol=1e-5)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert theirs(LINES[0]).input_ids == published[0].tolist()
    assert (theirs.bos_token_id, theirs.eos_token_id) == (vocabulary.start, vocabulary.eos)
    if written == "tokenizer.json":
        changed = [json.loads(file.read_bytes()) for file in (source, tmp_path / "out" / written)]
        assert changed[0]["model"] == changed[1]["model"]
    else:
        assert (tmp_path / "out" / written).read_bytes() == source.read_bytes()


def test_another_vocab_on_the_command_line_is_an_error_before_the_text_is_read(files, data, tmp_path):  # noqa: F811
    settings = [*data, f"data.tokenizer={files / 'saved'}", *SIZES, "vocab=300"]
    with pytest.raises(
        ConfigError, match=r"vocab: is 300, but the tokenizer .*saved has \d+ ids(.|\n)*leave vocab out"
    ):
        tfm.train("decoder_only", overrides=settings)
    assert not (tmp_path / "cache").exists()


def test_a_sweep_with_another_vocab_does_not_start(files, data):  # noqa: F811
    settings = ["model=decoder_only", *data, *SIZES, "vocab=300"]
    jobs = [[*settings, f"data.tokenizer={path}"] for path in (files / "saved", "null")]
    wrong, right = map(JobChecker(COMPOSER, check_run).check_job, jobs)
    assert "leave vocab out" in str(wrong.problems) and not right.problems


def test_a_probe_task_refuses_a_tokenizer_with_the_reason():
    with pytest.raises(ConfigError, match=r"data\.tokenizer: no such key(.|\n)*a probe task has a fixed alphabet"):
        tfm.train("probe_decoder", overrides=["data=parity", "data.tokenizer=tokenizer.json"])


def write_pairs(folder, sources, targets):
    for split in ("train", "val", "test"):
        for side, lines in (("src", sources), ("tgt", targets)):
            (folder / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines * 60))
    return ["data=text", f"data.dir={folder}", f"data.cache={folder / 'cache'}", "data.step_tokens=500"]


@pytest.fixture
def tagged(tmp_path):
    """Return a saved, untrained network of words and tags, half of whose words are unknown in the files src and tgt."""
    words_with_tags().save(str(tmp_path / "tags.json"))
    tokenizer = read_tokenizer(str(tmp_path / "tags.json"))
    network = tfm.build("tiny", layers=1, d_model=16, d_ff=16, heads=2, vocab=tokenizer.size, seed=1)
    (tmp_path / "src").write_text("<2de> a red zebra okapi quagga\n")
    (tmp_path / "tgt").write_text("das rote Haus\n")
    (tmp_path / "known").write_text("<2de> a red house\n")
    return tfm.save(network, tmp_path / "run", tokenizer=tokenizer)


@pytest.mark.parametrize(
    "command",
    [
        "translate {run} --max-tokens 9",
        "evaluate {run} --src {src} --ref {tgt} --max-tokens 9",
        "attention {run} TEXT -o {run}/attention.html",
    ],
)
@pytest.mark.parametrize("source", ["src", "known"])
def test_commands_report_a_text_with_unknown_words(command, source, tagged, monkeypatch, capsys):
    path = tagged.parent / source
    names = {"run": tagged, "src": path, "tgt": tagged.parent / "tgt"}
    arguments = [part.format(**names).replace("TEXT", path.read_text().strip()) for part in command.split()]
    monkeypatch.setattr(sys, "stdin", path.open())
    main(arguments)
    warning = "warning: 50.0 % of the tokens of the text are <unk>: the tokenizer lacks their words"
    assert capsys.readouterr().err.count(warning) == (source == "src")


def test_generation_and_perplexity_report_unknown_words(tmp_path, monkeypatch, capsys):
    words_with_tags().save(str(tmp_path / "tags.json"))
    tokenizer = read_tokenizer(str(tmp_path / "tags.json"))
    sizes = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocab": tokenizer.size}
    run = tfm.save(tfm.build("decoder_only", **sizes, seed=1), tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "text").write_text("<2de> a\n" * 30 + "a zebra\n")
    for arguments in (["generate", run, "--tokens", "2"], ["evaluate", run, "--text", tmp_path / "text"]):
        monkeypatch.setattr(sys, "stdin", (tmp_path / "text").open())
        main([str(argument) for argument in arguments])
        assert "warning: 1.6 % of the tokens of the text are <unk>" in capsys.readouterr().err


def test_the_answer_of_the_server_reports_unknown_words(tagged):
    with serving(tfm.load(tagged)) as (port, _):
        for text, share in (("<2de> a red zebra", "25.0"), ("<2de> a red house", "")):
            body = {"texts": [text], "max_tokens": 5}
            reply = httpx.post(f"http://127.0.0.1:{port}/translate", json=body, timeout=60).json()
            assert reply.get("warning", "").partition(" %")[0] == share and len(reply["outputs"]) == 1


@pytest.mark.grid
def test_the_preparation_reports_unknown_words_of_each_column(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words_with_tags().save(str(tmp_path / "tags.json"))
    data = write_pairs(tmp_path, ["<2de> a red house", "a zebra"], ["das rote Haus", "das"])
    settings = [*data, f"data.tokenizer={tmp_path / 'tags.json'}", *SIZES, "trainer.steps=1", "data.test=null"]
    for _ in range(2):  # the second run reads the cache
        run = tfm.train("tiny", overrides=settings, name="run").folder
        warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        rule = "16.7 % of the tokens of the src text of {} are <unk>: the tokenizer lacks their words or characters"
        expected = [f"warning: {rule.format(split)}" for split in ("val", "train")]
        assert [line.partition(", so")[0] for line in warnings] == expected
        shutil.rmtree(run)


LEARNING = ["layers=1", "d_model=64", "d_ff=64", "heads=4", "trainer.precision=fp32", "logger=csv"]
LEARNING += ["trainer.steps=400", "trainer.validate_every=400", "schedule.warmup=20", "schedule.scale=1"]


@pytest.mark.grid
def test_tags_choose_the_language_of_a_translation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    special = ["<s>", "</s>", "<pad>", "<unk>", "<2de>", "<2fr>"]
    words = [*special, *["a", "red", "house", "ein", "rotes", "Haus", "une", "maison", "rouge"]]
    pieces = Pieces(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.add_special_tokens(special)
    pieces.save("tags.json")
    data = write_pairs(tmp_path, ["<2de> a red house", "<2fr> a red house"], ["ein rotes Haus", "une maison rouge"])
    run = tfm.train("tiny", overrides=[*data, "data.tokenizer=tags.json", *LEARNING])
    translations = run.load().translate(["<2de> a red house", "<2fr> a red house"])
    assert translations == ["ein rotes Haus", "une maison rouge"] and run.scores["test/exact_match"] == 1


@pytest.mark.grid
def test_outputs_do_not_begin_with_the_space_that_a_tokenizer_adds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_pairs(tmp_path, ["a red house", "the blue boat"], ["ein rotes Haus", "das blaue Boot"])
    pieces = ByteLevelBPETokenizer(add_prefix_space=True)
    pieces.train(["train.src", "train.tgt"], vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    pieces.save("space.json")
    run = tfm.train("tiny", overrides=[*data, "data.tokenizer=space.json", *LEARNING])
    assert run.load().translate(["a red house"]) == ["ein rotes Haus"] and run.scores["test/exact_match"] == 1
