"""Plans of objectives with a teacher, a generator or branches equal what torch counts in a real step on the CPU."""

import json
from collections import OrderedDict

import pytest
from pydantic import TypeAdapter
from torch.utils.hooks import RemovableHandle

from tests.conftest import refused
from tests.scaling.real_step import RealStep, batching_of, spec_of
from tfm_blocks.cli import main
from tfm_blocks.data.objectives import ObjectiveSettings
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import attach_generator
from tfm_blocks.scaling.step_plan import StepPlan, StepSettings, plan_steps, read_card
from tfm_blocks.scaling.step_trace import PLAIN_OBJECTIVE, PlannedObjective
from tfm_blocks.training.objective import (
    DistilObjective,
    Objective,
    ReplacedTokenObjective,
    SeveralTokensObjective,
)

SMALL = ("d_ff=80", "heads=4", "layers=2", "vocab=300")
WITHIN = 0.1  # the largest relative difference of the peak memory
MASKING = {"rate": 0.15, "eval_rate": 0.15, "mask": 0.85, "random": 0.0, "static": False, "whole_words": False}
LAYER = {"self": {"block": "attention", "mask": "causal"}, "ffn": {"block": "ffn"}}


def planned(spec: Spec, training: PlannedObjective = PLAIN_OBJECTIVE, card: str = "cpu") -> StepPlan:
    settings = StepSettings("fp32", "ddp", activation_checkpointing=False)
    (plan,) = plan_steps(spec, batching_of(spec, 8), settings, read_card(card), [1], None, training)
    return plan


def count(network: Network) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.grid
def test_a_teacher_is_held_and_run_but_not_trained() -> None:
    spec, large = spec_of("base", "d_model=48", *SMALL), spec_of("base", "d_model=96", *SMALL)
    objective = TypeAdapter(ObjectiveSettings).validate_python({"name": "distil", "teacher": "x", "temperature": 2.0})
    teacher = build_network(large, seed=2)

    def make(network: Network) -> Objective:
        return DistilObjective(network, 0.1, teacher=teacher, temperature=2.0)

    plan, alone = planned(spec, PlannedObjective(objective, companion=large)), planned(spec)
    real = RealStep(spec, batching_of(spec, 8), make=make)
    assert plan.weights == 4 * (count(real.network) + count(teacher))
    assert (plan.gradients, plan.optimizer) == (alone.gradients, alone.optimizer) == (alone.weights, 2 * alone.weights)
    assert plan.multiply_adds == real.multiply_adds() > alone.multiply_adds
    held = sum(parameter.nbytes for parameter in teacher.parameters())
    assert plan.peak == pytest.approx(real.peak() + held, rel=WITHIN)


@pytest.mark.grid
def test_a_generator_is_trained_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler runs modules without gradients, for which torch's counter of a module's operations has no hooks."""
    monkeypatch.setattr(
        "torch.utils.module_tracker.register_multi_grad_hook", lambda *_: RemovableHandle(OrderedDict())
    )
    sizes = "d_embedding=24", *SMALL
    spec, small = spec_of("electra_discriminator", "d_model=48", *sizes), spec_of("electra", "d_model=16", *sizes)
    settings = {"name": "replaced_token", "generator": {"model": "electra"}, **MASKING}
    objective = TypeAdapter(ObjectiveSettings).validate_python(settings)

    def make(network: Network) -> Objective:
        attach_generator(network, build_network(small, seed=2))
        return ReplacedTokenObjective(network, 0.1)

    plan, real = (
        planned(spec, PlannedObjective(objective, companion=small)),
        RealStep(spec, batching_of(spec, 8), make=make, rate=0.15),
    )
    assert plan.weights == plan.gradients == 4 * count(real.network) > planned(spec).weights
    assert plan.multiply_adds == real.multiply_adds()
    assert plan.peak == pytest.approx(real.peak(), rel=WITHIN)


def test_branches_of_later_tokens_are_trained() -> None:
    graph = {
        "emb": {"block": "embedding", "in": "tgt"},
        "main": {"repeat": 1, "layer": LAYER},
        "second": {"in": "emb", "repeat": 1, "layer": LAYER},
        "out": {"block": "predict_ahead", "in": "main", "ahead": ["second"]},
        "logits": {"block": "unembed"},
    }
    args = {"d_model": 48, "vocab": 300, "heads": 4, "d_ff": 80}
    spec = check_model({"add_norm": "pre", "inputs": {"tgt": "B T"}, "args": args, "graph": graph})
    plan, real = (
        planned(spec),
        RealStep(spec, batching_of(spec, 8), make=lambda network: SeveralTokensObjective(network, 0.1)),
    )
    assert plan.weights == 4 * count(real.network)
    assert plan.multiply_adds == real.multiply_adds()
    assert plan.peak == pytest.approx(real.peak(), rel=WITHIN)


@pytest.mark.grid
def test_the_command_reads_the_objective_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    def weights(*arguments: str) -> int:
        main(["show", *arguments, "--plan", "--json"])
        return int(json.loads(capsys.readouterr().out)["plans"][0]["weights"])

    sizes = ["d_embedding=24", "d_model=48", *SMALL]
    generator = "objective.generator={model: electra, d_model: 16, d_embedding: 24, d_ff: 80, heads: 4, layers: 2}"
    model = ["electra_discriminator", *sizes]
    small = build_network(spec_of("electra", "d_model=16", "d_embedding=24", *SMALL), seed=1)
    network = build_network(spec_of(*model), seed=1)
    alone = count(network)
    attach_generator(network, small)
    assert weights(*model) == 4 * alone
    assert weights(*model, "objective=replaced_token", generator) == 4 * count(network)
    group = "+optimizer.groups.own={where: {node: generator}, rate: 2}"
    for view in ("--weights", "--schedule"):
        main(["show", *model, "objective=replaced_token", generator, "optimizer=adamw", group, view, "--json"])
        assert ("own" if view == "--schedule" else "src_emb") in capsys.readouterr().out
    assert "write --strategy ddp" in refused(
        "show", *model, "objective=replaced_token", generator, "--plan", "--strategy", "fsdp2"
    )
