"""Args that change norms together with branch blocks are reported, and norm nodes take the arguments of the arg `norm`."""

import json

import pytest

from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model

FALCON = """# @package _global_
defaults: [decoder_only, _self_]
layers: 2
model:
  args: {bias: false, norm: layernorm}
"""
FINAL = "model.graph.final={block: layernorm, after: src_pos%s}"


def spec_of(model, *overrides):
    composed = compose_model(str(model), list(overrides))
    return check_model(composed.model, composed.sources)


@pytest.fixture
def falcon(tmp_path):
    path = tmp_path / "falcon.yaml"
    path.write_text(FALCON)
    return path


def test_an_arg_that_removes_the_biases_of_maps_and_of_norms_is_reported_once_with_an_address_of_each(falcon):
    (warning,) = spec_of(falcon).warnings
    assert warning.address == "model.args.bias"
    assert "attention (at model.graph.decoder.layer.self)" in warning.rule
    assert "layernorm (at model.args.norm)" in warning.rule
    assert str(warning).startswith("warning: ") and f"{falcon}:5:10" in str(warning)
    assert "norm: {block: layernorm, bias: …}" in warning.help


@pytest.mark.parametrize(
    "override",
    [
        "model.args.norm={block: layernorm, bias: true}",
        "model.args.norm={block: layernorm, bias: false}",
        "model.args.norm=rmsnorm",
        "model.args.bias=true",
    ],
)
def test_an_arg_that_norms_set_apart_or_lack_or_that_changes_nothing_is_not_reported(falcon, override):
    assert spec_of(falcon, override).warnings == ()


def test_an_arg_of_a_stack_that_reaches_a_norm_node_or_a_norm_in_attention_is_reported():
    overrides = ["model.graph.encoder.args.bias=false", "model.graph.encoder.add_norm=none"]
    assert spec_of("tiny", *overrides).warnings == ()
    (warning,) = spec_of("tiny", *overrides, "model.graph.encoder.layer.final={block: layernorm}").warnings
    assert warning.address == "model.graph.encoder.args.bias"
    assert "layernorm (at model.graph.encoder.layer.final)" in warning.rule


def test_check_and_show_print_the_warning_beside_their_output(falcon, capsys):
    main(["check", str(falcon)])
    out, err = capsys.readouterr()
    assert "fine" in out and err.count("warning: model.args.bias: ") == 1
    main(["show", str(falcon), "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["parameters"] and err.count("warning: ") == 1


@pytest.mark.parametrize(
    ("norm", "own", "eps"),
    [
        ("{block: layernorm, eps: 0.5}", "", 0.5),
        ("{block: layernorm, eps: 0.5}", ", eps: 0.25", 0.25),
        ("{block: rmsnorm, eps: 0.5}", "", 1e-5),
        ("layernorm", "", 1e-5),
    ],
)
def test_a_norm_node_takes_the_arguments_of_the_same_norm_in_args_unless_it_sets_them(norm, own, eps):
    spec = spec_of("tiny", f"model.args.norm={norm}", FINAL % own)
    (node,) = [node for node in spec.nodes if node.address == "final"]
    assert node.arguments == {"eps": eps, "bias": True}
    assert all(step.arguments.get("eps") != 0.25 for node in spec.nodes for step in node.post)
