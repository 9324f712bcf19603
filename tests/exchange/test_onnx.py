"""ONNX Runtime computes what the run computes, by the loop of docs/exporting.md, and nodes that cannot be exported are refused."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tfm_blocks as tfm
from tests.conftest import WORDS, sentences
from tests.network.examples import SHIPPED
from tests.network.small import network as small_network
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.exchange.onnx.comparison import Engine, compare_log_p
from tfm_blocks.exchange.onnx.export import write_network
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.translation.search import BOS, Bounds, one_by_one

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

PAGE = Path(__file__).parents[2] / "docs" / "exporting.md"
SIZES = {"d_model": 16, "d_ff": 24, "heads": 4, "layers": 2, "vocab": 300}
SMALL = {"r": 4, "kv_heads": 2, "experts": 4, "max_length": 60}  # knobs of some models
REFUSED = {"recurrent": "encoder.*.attn"}


def scattered(model, **knobs):
    """A random network in evaluation mode, in which no weight, bias or gain has its first value."""
    composed = compose_model(model, [f"{key}={value}" for key, value in {**SIZES, **knobs}.items()])
    network = build_network(check_model(composed.model, composed.sources), seed=1).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return network


def loop_of_the_page():
    """The functions of translate_onnx.py, as the page shows it."""
    code = re.search(r"```python\n(# translate_onnx\.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1]
    names = {"__name__": "translate_onnx"}
    exec(code, names)
    return SimpleNamespace(**names)


def exported(network, folder):
    folder.mkdir()
    write_network(network, folder, "run")
    return folder


@pytest.mark.parametrize(
    "model", ["base", *(pytest.param(name, marks=pytest.mark.grid) for name in ("gqa", "rotary", "t5", "restricted"))]
)
def test_the_loop_of_the_page_gives_200_translations_of_the_run(model, tmp_path, capsys):
    tokenizer = Tokenizer.train(WORDS * 3, 300)
    knobs = {key: value for key, value in SMALL.items() if f"\n{key}:" in f"\n{model_text(model)}"}
    run = tfm.save(scattered(model, vocab=tokenizer.size, **knobs), tmp_path / "run", tokenizer=tokenizer) or tmp_path / "run"
    main(["export", str(run), "--to", "onnx", "-o", str(tmp_path / "new")])
    assert "new: encoder.onnx, first.onnx, step.onnx\nlog probabilities of" in capsys.readouterr().out
    certificate = json.loads((tmp_path / "new" / "certificate.json").read_text())
    print(model, certificate["log_probabilities"])
    assert certificate["log_probabilities"]["largest"] < 1e-4
    assert certificate["versions"].keys() >= {"opset", "onnx", "onnxruntime", "torch"}
    text = [*sentences(199, seed=5), ""]
    assert len(set(expected := tfm.load(run).translate(text))) > 100
    assert loop_of_the_page().translate(tmp_path / "new", text) == expected
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["export", str(run), "--to", "onnx", "-o", str(tmp_path / "new")])
    assert "exists already" in capsys.readouterr().err


@pytest.mark.grid
def test_the_loop_of_the_page_continues_200_prompts_as_the_run_does(tmp_path):
    network, page = scattered("decoder_only"), loop_of_the_page()
    folder = exported(network, tmp_path / "new")
    prompts = torch.randint(4, 300, (200, 5), generator=torch.Generator().manual_seed(1))
    prompts[:, -1] = BOS
    bounds = Bounds(torch.zeros(200), torch.full((200,), 20), torch.zeros(200, 0, dtype=torch.int64))
    expected = [hypothesis.ids for hypothesis in one_by_one(network, {}, bounds, before_BN=prompts)]
    ids = page.decode(*page.load(folder, "first", "step"), {"tgt": prompts.numpy()}, 20).tolist()
    assert [row[: row.index(page.EOS)] if page.EOS in row else row for row in ids] == expected


@pytest.mark.grid
def test_a_model_without_target_is_one_graph(tmp_path):
    network = scattered("encoder_only")
    folder = exported(network, tmp_path / "new")
    assert [path.name for path in folder.glob("*.onnx")] == ["model.onnx"]
    assert compare_log_p(Engine(folder, onnxruntime), network).largest < 1e-4


@pytest.mark.grid
def test_batch_and_lengths_are_free(tmp_path):
    network = scattered("restricted", r=4)
    engine = Engine(exported(network, tmp_path / "new"), onnxruntime)
    for batch, source, target in ((1, 1, 1), (5, 90, 70)):
        inputs = {"src": torch.randint(4, 300, (batch, source)), "tgt": torch.randint(4, 300, (batch, target))}
        values = {name: ids.numpy() for name, ids in inputs.items()}
        engine.run("encoder", values)
        logits = engine.run("first", values)
        np.testing.assert_allclose(logits, network(**inputs).detach().numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_model_is_exported_or_refused_by_node(path, tmp_path):
    knobs = {key: value for key, value in SMALL.items() if f"\n{key}:" in f"\n{path.read_text()}"}
    network = scattered(path.stem, layers=4 if "at:" in path.read_text() else 1, **knobs)
    if path.stem in REFUSED:
        with pytest.raises(RunError, match=re.escape(f"run: {REFUSED[path.stem]}: the export to ONNX")):
            exported(network, tmp_path / "new")
        return
    difference = compare_log_p(Engine(exported(network, tmp_path / "new"), onnxruntime), network)
    print(path.stem, difference)
    assert difference.largest < 1e-4


