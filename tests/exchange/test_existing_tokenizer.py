"""A run trained with an existing tokenizer keeps it: it resumes, generates and is exported without the original files."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tfm_blocks as tfm
from tests.conftest import COMPOSER
from tests.data.test_tokenizer_files import FILES, LINES, files  # noqa: F401 (a fixture)
from tests.launch.test_resume import go_on
from tfm_blocks.errors import ConfigError
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.launch.check import check_run
from tfm_blocks.sweep.check import check_jobs

SIZES = ["layers=1", "d_model=16", "d_ff=16", "heads=2", "trainer.precision=fp32", "logger=csv", "schedule.warmup=1"]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES * 9))
    splits = ["data.train=train*.jsonl", "data.val=val.jsonl", "data.test=null", "data.documents=jsonl"]
    return ["data=lm", f"data.dir={tmp_path}", f"data.cache={tmp_path / 'cache'}", "data.context=8", *splits]


@pytest.mark.parametrize("name", FILES)
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
    for file in (files / name).iterdir() if (files / name).is_dir() else [files / name]:
        target = file.name if (files / name).is_dir() else written
        assert (tmp_path / "out" / target).read_bytes() == file.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert (model.config.bos_token_id, model.config.eos_token_id) == (vocabulary.start, vocabulary.eos)
    ids = [1, *translator.tokenizer.encode(LINES[0])]
    published = torch.tensor([vocabulary.to_published(ids)])
    logits_BTV = translator.network(tgt=torch.tensor([ids]))[..., vocabulary.to_here(range(vocabulary.size))]
    torch.testing.assert_close(model(published).logits, logits_BTV, rtol=1e-5, atol=1e-5)
    if name == "saved":
        theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert theirs(LINES[0]).input_ids == published[0, 1:].tolist()


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
    wrong, right = check_jobs(jobs, COMPOSER.compose, check_run)
    assert "leave vocab out" in str(wrong.problems) and not right.problems


def test_a_probe_task_refuses_a_tokenizer_with_the_reason():
    with pytest.raises(ConfigError, match=r"data\.tokenizer: no such key(.|\n)*a probe task has a fixed alphabet"):
        tfm.train("probe_decoder", overrides=["data=parity", "data.tokenizer=tokenizer.json"])
