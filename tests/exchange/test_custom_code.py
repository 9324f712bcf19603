"""A graph of no family is exported with its own code: transformers loads it, generates with it and trains it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import WORDS
from tests.exchange.published import GREEDY, VOCAB, publish
from tfm_blocks.cli import main
from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.translation.settings import Search

SIZES = {"d_model": 32, "heads": 2}
TERNARY = Path(__file__).parents[1] / "models" / "ternary.yaml"
ALONE = """
import sys, torch, transformers
sys.modules["tfm_blocks"] = None
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(*model.generate(torch.tensor([[40, 50, 2]]), do_sample=False, max_new_tokens=6)[0].tolist())
"""


def loaded(kind, folder):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, trust_remote_code=True)


def saved(model, folder, tokenizer=None, **knobs):
    """Save a run with random weights whose outputs differ from token to token; return its translator."""
    tokenizer = tokenizer or Tokenizer.train(WORDS * 3, 300)
    network = tfm.build(model, **SIZES, vocab=tokenizer.size, **knobs)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.2)
    tfm.save(network, folder, tokenizer=tokenizer)
    return tfm.load(folder)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["rezero", "retention", str(TERNARY)], ids=lambda name: Path(name).stem)
def test_transformers_translates_as_the_run_does(name, tmp_path, capsys):
    translator = saved(name, tmp_path / "run", layers=2)
    main(["export", str(tmp_path / "run"), "--to", "huggingface", "-o", str(tmp_path / "new")])
    printed = capsys.readouterr().out
    assert re.search(r"new: custom code\nlog probabilities of \d+ tokens differ by at most", printed)
    assert "4 of 4 outputs of AutoTokenizer and generate are equal" in printed
    largest = json.loads((tmp_path / "new" / "certificate.json").read_text())["log_probabilities"]["largest"]
    assert largest < 2e-3  # without norms, the logits of rezero reach 70, and float32 rounds them by up to 6e-4
    source = translator.tokenizer.encode("a red boat")
    command = [sys.executable, "-c", ALONE.replace("40, 50", str(list(source))[1:-1]), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ids = [int(word) for word in done.stdout.split()[1:]]
    ids = ids[: ids.index(2)] if 2 in ids else ids
    assert translator.tokenizer.decode(ids) == translator.translate(["a red boat"], longest=(0.0, 6))[0]


@pytest.mark.grid
def test_beam_search_and_the_loss_of_labels_are_those_of_transformers(tmp_path):
    translator = saved("base", tmp_path / "run", layers=1)
    export_run(tmp_path / "run", tmp_path / "new")
    model = loaded("Seq2SeqLM", tmp_path / "new")
    source = torch.tensor([[40, 50, 2, 0], [60, 70, 80, 2]])
    beams = model.generate(source, attention_mask=(source != 0).long(), num_beams=3, **GREEDY)
    assert beams.shape[0] == 2
    labels = torch.tensor([[41, 51, 2], [61, 2, -100]])
    loss = model(source, attention_mask=(source != 0).long(), labels=labels).loss
    logits = translator.network(src=source, tgt=torch.tensor([[1, 41, 51], [1, 61, 0]]))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.model.logits.block.weight is model.model.src_emb.block.weight


@pytest.mark.grid
def test_a_changed_gpt2_keeps_the_ids_of_its_published_vocabulary(tmp_path):
    publish("gpt2", tmp_path / "theirs")
    main(["import", str(tmp_path / "theirs"), "-o", str(tmp_path / "imported")])
    tokenizer = load_tokenizer(tmp_path / "imported" / TOKENIZER)
    assert isinstance(tokenizer, PublishedTokenizer) and tokenizer.vocabulary == Vocabulary(VOCAB, 36, 36)
    translator = saved("llama", tmp_path / "run", tokenizer, first_id=2, layers=1, kv_heads=1, d_ff=48)
    export_run(tmp_path / "run", tmp_path / "new")
    model = loaded("CausalLM", tmp_path / "new")
    prompt = torch.tensor([[3, 4, 7]])
    new_ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=36, **GREEDY)[0, 3:].tolist()
    ((best,),) = translator.generate(["w3 w4 w7"], 9, Search())
    end = new_ids.index(36) if 36 in new_ids else len(new_ids)
    assert best.text == "".join(f" w{id}" for id in new_ids[:end])


@pytest.mark.grid
def test_inputs_that_transformers_cannot_pass_are_refused(tmp_path, capsys):
    saved("two_sources", tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), "--to", "huggingface", "-o", str(tmp_path / "new")])
    assert "but the custom code for transformers covers only models that predict tgt" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_without_transformers_the_command_says_that_nothing_was_compared(tmp_path, capsys, monkeypatch):
    saved("decoder_only", tmp_path / "run", layers=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    main(["export", str(tmp_path / "run"), "--to", "huggingface", "-o", str(tmp_path / "new")])
    assert "not compared with the run" in capsys.readouterr().out
    assert not (tmp_path / "new" / "certificate.json").exists()


@pytest.mark.grid
def test_the_code_beside_the_weights_is_formatted(tmp_path):
    saved("decoder_only", tmp_path / "run", layers=1)
    export_run(tmp_path / "run", tmp_path / "new")
    options = ["--isolated", "--line-length", "120", *map(str, (tmp_path / "new").glob("*.py"))]
    for command in (["check", "--select", "F,E7,E9,I"], ["format", "--check"]):
        done = subprocess.run(["ruff", *command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
