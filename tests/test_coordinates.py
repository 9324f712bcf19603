"""`tfm coordinates`: slopes, verdicts and errors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from tests.conftest import refused
from tfm_blocks.cli import main
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model
from tfm_blocks.report.coordinates import NodeSizes
from tfm_blocks.training.coordinates import OPTIMIZERS_BY_NAME, Training
from tfm_blocks.training.optimizer_settings import read_optimizer

SIZES = {"d_model": "64,128,256", "d_ff": "128,256,512", "heads": "2,4,8"}
ALL_WIDTHS = {**SIZES, "kv_heads": "1,2,4", **dict.fromkeys(("d_latent", "d_query", "d_embedding"), "32,64,128")}
ALL_WIDTHS["d_expert"] = SIZES["d_model"]
SMALL = ["d_model=16", "d_ff=16", "heads=2", "layers=1"]
FEW = {"layers": 2, "decoder_layers": 2}


def coordinates(capsys, *arguments: str) -> tuple[int, dict]:
    """Return the status and the JSON of the command."""
    try:
        main(["coordinates", "--json", *arguments])
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    return status, json.loads(capsys.readouterr().out)


def nodes_of(slopes: list[float], head: bool = False) -> NodeSizes:
    """Return sizes that are exact powers of the width with these exponents, one for each step."""
    widths = [32, 64, 128]
    return NodeSizes("node", widths, np.array([[3.0 * width**slope for slope in slopes] for width in widths]), head)


@pytest.mark.parametrize(
    "slopes, head, verdict",
    [
        ([0.5, 0.5, 0.05, -0.05], False, "flat"),
        ([0.0, 0.0, 0.2, 0.2], False, "grows"),
        ([0.0, 0.0, -0.2, -0.2], False, "vanishes"),
        ([-0.5, -0.5, -0.5, -0.5], True, "falls"),
        ([-0.5, -0.5, -0.7, -0.7], True, "vanishes"),
        ([0.0, 0.0, 0.3, 0.3], True, "grows"),
    ],
)
def test_the_verdict_judges_the_mean_slope_from_step_2_on(slopes, head: bool, verdict: str) -> None:
    node = nodes_of(slopes, head)
    assert node.slopes == pytest.approx(slopes) and node.slope == pytest.approx(sum(slopes[2:]) / 2)
    assert node.verdict == verdict and node.passes == (verdict in ("flat", "falls"))


def test_outputs_that_overflow_or_are_zero_have_a_verdict() -> None:
    sizes_WT = np.array([[1.0, 1, 1], [1, 1, math.inf], [1, 1, 1]])
    assert NodeSizes("node", [1, 2, 3], sizes_WT).verdict == "not finite"
    assert NodeSizes("node", [1, 2, 3], np.zeros((3, 3))).verdict == "flat"


@pytest.mark.grid
def test_a_model_is_flat_under_mup_and_not_under_standard(capsys) -> None:
    sizes = [f"{knob}={values}" for knob, values in {**SIZES, "layers": 1}.items()]
    effort = ["--seeds", "2", "--steps", "4", "--length", "16", "max_length=32", "vocab=1000"]
    status, found = coordinates(capsys, "gpt2", *sizes, *effort, "model.parametrisation=mup")
    verdicts = {node["node"]: node["verdict"] for node in found["nodes"]}
    assert status == 0 and verdicts.pop("logits") == "falls" and set(verdicts.values()) == {"flat"}
    status, found = coordinates(capsys, "gpt2", *sizes, *effort)
    slopes = {node["node"]: node["slope"] for node in found["nodes"]}
    assert status == 1 and slopes["emb"] == pytest.approx(-0.5, abs=0.05)  # N(0, 1/d_model), not scaled


def test_the_sizes_of_a_model_with_dropout_depend_on_the_seed_alone() -> None:
    spec = check_model(compose_model("gpt2", [*SMALL, "max_length=32", "vocab=50", "dropout=0.5"]).model)
    state = torch.random.get_rng_state()
    first, second = (Training(1, 2, 8, 0.01).measure(spec, 1) for _ in range(2))
    assert first == second
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.grid
def test_a_model_is_flat_with_muon_by_the_spectral_rule_and_not_under_standard(capsys) -> None:
    sizes = [f"{knob}={values}" for knob, values in {**SIZES, "layers": 1}.items()]
    effort = ["--seeds", "2", "--steps", "4", "--length", "16", "max_length=32", "--optimizer", "muon"]
    status, found = coordinates(capsys, "gpt2", *sizes, *effort, "model.parametrisation=mup")
    assert status == 0, [node for node in found["nodes"] if node["verdict"] not in ("flat", "falls")]
    assert coordinates(capsys, "gpt2", *sizes, *effort)[0] == 1


@pytest.mark.grid
def test_the_end_of_a_stack_is_flat_over_depths_under_completep(capsys) -> None:
    """Means over the layers are not flat: a deeper stack has more layers that lie close to its input."""
    sizes = ["d_model=64", "d_ff=128", "heads=4", "layers=2,4,8", "max_length=32"]
    _, found = coordinates(capsys, "gpt2", *sizes, "model.parametrisation=completep")
    slopes = {node["node"]: node["slope"] for node in found["nodes"]}
    assert max(abs(slopes[node]) for node in ("decoder.last", "logits", "decoder.i.ffn branch")) < 0.1, slopes


@pytest.mark.slow
@pytest.mark.parametrize("parametrisation", ["mup", "standard"])
@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_outputs_of_shipped_models_depend_far_less_on_the_width_than_under_standard(
    model, parametrisation, capsys
) -> None:
    knobs = compose_model(model, []).mapping
    sizes = [f"{knob}={values}" for knob, values in {**ALL_WIDTHS, **FEW}.items() if knob in knobs]
    _, found = coordinates(capsys, model, *sizes, f"model.parametrisation={parametrisation}")
    slopes = [abs(node["slope"]) for node in found["nodes"] if node["verdict"] != "falls"]
    assert max(slopes) > 0.25 if parametrisation == "standard" else max(slopes) < 0.25


def test_a_figure_has_a_panel_for_three_steps(tmp_path, capsys) -> None:
    path = tmp_path / "figure.svg"
    with pytest.raises(SystemExit):
        main(["coordinates", "tiny", "d_model=16,32", "layers=1", "--seeds", "1", "--steps", "3", "-o", str(path)])
    text = path.read_text()
    assert text.startswith("<?xml") and "mean |x|" not in capsys.readouterr().err
    assert text.count('id="axes_') == 3


WRONG = [
    (["tiny"], "no knob has several values"),
    (["tiny", "d_model=16,32", "d_ff=16,32,64"], "must have 2 different values, as many as d_model"),
    (["tiny", "d_model=16,16"], "must have 2 different values"),
    (["tiny", "d_model=16,32", "-o", "x.gif"], "must be a file .svg, .pdf, .png, but is 'x.gif'"),
    (["tiny", "d_model=16,32", "--steps", "1"], "must be at least 2"),
    (["tiny", "d_model=16,33"], "sines and cosines come in pairs"),
    (["tiny", "d_model=16,32", "--rate", "2"], "must be a learning rate above 0 and below 1, but is '2'"),
]


@pytest.mark.parametrize("arguments, rule", WRONG, ids=[rule for _, rule in WRONG])
def test_wrong_arguments_are_errors(arguments, rule: str) -> None:
    assert rule in refused("coordinates", *arguments)


def test_the_ids_of_each_input_are_below_its_own_vocabulary() -> None:
    spec = check_model(compose_model("two_vocabularies", ["vocab=300", "source_vocab=20", *SMALL]).model)
    training = Training(steps=2, batch=8, length=16, rate=0.01)
    assert training.measure(spec, seed=1)["logits"]
    assert training.seconds(spec, read_optimizer(OPTIMIZERS_BY_NAME["muon"])) > 0
