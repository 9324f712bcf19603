"""The contract is checked on the nodes of a model that use a plug-in, with their arguments and widths."""

import pytest
import torch

from tests.network.examples import TESTS, each
from tests.network.small import ARGS
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model
from tfm_blocks.network.contract.plugins import plugin_problems
from tfm_blocks.registry.blocks import BlockInfo

SMALL = ["d_model=16", "d_ff=24", "heads=2", "layers=4", "vocab=30"]
SELF = "++model.graph.decoder.layer.self"


def problems(*overrides):
    composed = compose_model("tiny", ["vocab=300", *overrides])
    return plugin_problems(check_model(composed.model, composed.sources), composed.sources)


def test_a_model_without_plug_ins_is_not_computed_with(wrong_blocks):
    before = torch.get_rng_state()
    assert problems() == [] and torch.equal(torch.get_rng_state(), before)


def test_a_plug_in_that_keeps_the_contract_has_no_problem(wrong_blocks):
    assert problems("++model.graph.encoder.layer.attn.block=right", f"{SELF}.block=right") == []


def test_a_problem_has_the_address_the_line_the_block_what_was_measured_and_a_fix(wrong_blocks):
    (problem,) = problems(f"{SELF}.block=leaks")
    assert problem.address == "model.graph.decoder.layer.self"
    assert str(problem.place).startswith("conf/model/base.yaml:27:9")
    assert problem.rule.startswith("leaks (plug-in wrong_blocks): changing x at position 1 changes the output at")
    assert problem.help == "mask later positions in forward; tfm blocks --test wrong_blocks checks every rule"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("position=centres_time", "attention with the position centres_time (plug-in wrong_blocks): "),
        ("scores=other_axis", "attention with the scores other_axis (plug-in wrong_blocks): "),
        ("activation=running_maximum", "ffn with the activation running_maximum (plug-in wrong_blocks): "),
        ("norm=time_norm", "time_norm (plug-in wrong_blocks): changing x at position 0 changes"),
    ],
)
def test_a_wrong_part_is_named_with_the_block_that_uses_it(wrong_blocks, override, parts):
    reported = problems(f"++model.args.{override}")
    assert reported and all(problem.rule.startswith(parts) for problem in reported)


def test_nodes_that_are_alike_are_tried_once_and_others_each(wrong_blocks):
    alike = "++model.graph.encoder.layer.bad={block: forgets_sees, after: attn}"
    assert [one.address for one in problems("layers=3", alike)] == ["model.graph.encoder.layer.bad"]
    wider = "++model.graph.encoder.layer.attn={block: ignores_padding}"
    assert len(problems(alike, wider)) == 2


def test_a_block_that_fails_only_with_padding_before_the_sequences_may_be_trained(wrong_blocks):
    """In training, padding comes last, also after sequences are concatenated."""
    assert problems(f"{SELF}.block=divides_by_0") == []
    joined = {
        "one": {"block": "embedding", "in": "src"},
        "two": {"block": "embedding", "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["one", "two"]},
        "bad": {"block": "divides_by_0", "mask": "causal"},
        "out": {"block": "unembed"},
    }
    model = {"inputs": {"src": "B S", "doc": "B P"}, "args": ARGS, "graph": joined}
    assert plugin_problems(check_model(model), compose_model("tiny").sources) == []


@pytest.mark.grid
@each(TESTS, {"latent", "switch"})
def test_no_node_of_any_model_has_a_problem_as_if_all_blocks_were_of_plug_ins(path, monkeypatch):
    monkeypatch.setattr(BlockInfo, "shipped", False)
    composed = compose_model(str(path), SMALL)
    assert plugin_problems(check_model(composed.model, composed.sources), composed.sources) == []
