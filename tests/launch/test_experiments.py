"""The shipped experiments can be trained unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import COMPOSER
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.folders import CONF, list_options
from tfm_blocks.compose.run import compose_job
from tfm_blocks.launch.check import check_run
from tfm_blocks.network.build import network_without_values


@pytest.mark.parametrize("name", list_options("experiment", [CONF]))
@pytest.mark.parametrize(
    "debug", ["null", *(pytest.param(name, marks=pytest.mark.grid) for name in ("fast", "overfit"))]
)
def test_every_experiment_is_valid_and_debug_shortens_it(name: str, debug: str) -> None:
    text = [] if name.startswith("probe/") else ["data.dir=x"]
    text += ["data.labels=[a,b]"] if name == "finetune" else []
    overrides = [f"experiment={name}", *text, f"debug={debug}", "trainer.accelerator=cpu"]
    settings = check_run(compose_job(parse_request(overrides).texts, COMPOSER)).settings
    assert {"fast": 5, "overfit": 200}.get(debug, settings.trainer.steps) == settings.trainer.steps
    assert settings.logger.wandb is None or debug == "null"


def test_large_is_the_recipe_of_the_paper() -> None:
    settings = check_run(
        compose_job(parse_request(["experiment=large", "data.dir=x", "trainer.accelerator=cpu"]).texts, COMPOSER)
    ).settings
    peak = max(settings.schedule.rate(step) for step in (3999, 4000, 4001))
    assert peak == settings.schedule.rate(4000) == pytest.approx(512**-0.5 * 4000**-0.5)
    assert settings.optimizer.betas == [0.9, 0.98] and settings.optimizer.eps == 1e-9


def test_lm_has_no_smoothing_and_the_optimizer_of_gpt_3() -> None:
    arguments = ["experiment=lm", "data.dir=x", "trainer.accelerator=cpu"]
    settings = check_run(compose_job(parse_request(arguments).texts, COMPOSER)).settings
    assert settings.label_smoothing == 0 and settings.data.kind == "lm"
    assert (settings.optimizer.name, settings.optimizer.betas) == ("adamw", [0.9, 0.95])
    rate = settings.schedule.rate
    assert rate(100) == 1e-3 and rate(50) == pytest.approx(5e-4)
    assert rate(5000) == pytest.approx(1e-4, rel=1e-3) and rate(2551) == pytest.approx(5.5e-4, rel=1e-3)


@pytest.mark.parametrize("data", [["data=lm", "data.dir=x"], ["experiment=lm", "data.dir=x"]])
def test_a_language_model_has_no_label_smoothing(data: list[str]) -> None:
    composed = compose_job(parse_request(["model=decoder_only", *data, "trainer.accelerator=cpu"]).texts, COMPOSER)
    assert composed.mapping["label_smoothing"] == 0


PROBES = [name for name in list_options("experiment", [CONF]) if name.startswith("probe/")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("probe/lite", "probe/mad_paper") else pytest.mark.grid)
        for name in PROBES
    ],
)
def test_a_probe_experiment_names_its_size_and_accepts_the_knobs_of_its_model(name: str) -> None:
    arguments = [f"experiment={name}", "mixer=attention", "trainer.accelerator=cpu"]
    settings = check_run(compose_job(parse_request(arguments).texts, COMPOSER)).settings
    assert settings.data.kind == "probe" and settings.label_smoothing == 0
    assert settings.data.size == ("paper" if name.endswith("_paper") else "lite")
    assert name.endswith("_paper") or f"{name}_paper" in PROBES or name == "probe/lite"


def test_a_classifier_has_the_encoder_of_mlm() -> None:
    """Every weight of the classifier whose address the encoder has has its shape, except those of the output."""

    def shapes(overrides: list[str]) -> dict[str, torch.Size]:
        spec = check_run(
            compose_job([*overrides, "data.dir=x", "vocab=8000", "trainer.accelerator=cpu"], COMPOSER)
        ).spec
        return {name: tensor.shape for name, tensor in network_without_values(spec).named_parameters()}

    encoder = shapes(["experiment=mlm"])
    classifier = shapes(["experiment=finetune", "data.labels=[a,b]"])
    ours = {name for name in classifier if not name.startswith(("pooler", "logits"))}
    assert {name: classifier[name] for name in ours} == {name: encoder[name] for name in ours}
    assert {name.partition(".")[0] for name in encoder.keys() - ours} == {"transform", "transform_norm", "logits"}
