"""Completions of keys below `model`, compared with the registry and the checker."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.compose.completion import complete_override, list_blocks
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.blocks import REGISTRY

ATTENTION = "model.graph.encoder.layer.attn"
SHIPPED = {name for name, info in REGISTRY.blocks.items() if info.cls.__module__.startswith("tfm_blocks.")}


def offered(prefix, *overrides, own=None):
    """Return the values that can follow the `=`, or the complete keys."""
    completions = complete_override(prefix, overrides, own)
    return [one.removeprefix(prefix.partition("=")[0] + "=") for one in completions] if "=" in prefix else completions


@pytest.mark.parametrize(
    ("key", "category"),
    [
        ("model.args.norm", "norm"), (f"{ATTENTION}.position", "position"), (f"{ATTENTION}.position.block", "position"),
        ("model.args.activation", "activation"), ("model.graph.encoder.join", "join"), (f"{ATTENTION}.args.norm", "norm"),
    ],
)  # fmt: skip
def test_an_argument_that_takes_a_block_offers_all_of_its_category(key, category):
    assert offered(f"{key}=") == [name for name in REGISTRY.members(category) if name in SHIPPED]


def test_a_block_is_any_block_and_so_is_one_of_an_inline_node():
    assert set(list_blocks()) == SHIPPED
    for key in (f"{ATTENTION}.block", "model.graph.new.block", "model.graph.decoder.layer.cross.kv.block"):
        assert set(offered(f"{key}=")) == SHIPPED
    assert offered(f"{ATTENTION}.block=restr") == [
        "restricted_attention",
        "restricted_shared_attention",
        "restricted_global_attention",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "model.args.norm",
        f"{ATTENTION}.mask",
        *(
            pytest.param(key, marks=pytest.mark.grid)
            for key in (f"{ATTENTION}.position", "model.add_norm", "model.args.activation")
        ),
    ],
)
def test_the_checker_accepts_every_offered_value(key):
    """Required arguments of a block are excepted, which an override of the block's name alone cannot give."""
    names = offered(f"{key}=")
    assert names
    for name in names:
        try:
            check_model(compose_model("tiny", [f"{key}={name}"]).model)
        except ConfigError as error:
            assert all(f"{name} needs the argument" in problem.rule for problem in error.problems)


def test_a_knob_offers_what_the_keys_that_read_it_take(tmp_path):
    (tmp_path / "model").mkdir()
    text = (
        "defaults: [tiny, _self_]\nkind: attention\nnorm: rmsnorm\nr: 3\nmodel:\n  args: {norm: '${norm}', r: '${r}'}\n"
    )
    graph = "  graph: {encoder: {layer: {attn: {block: '${kind}'}}}}\n"
    (tmp_path / "model" / "mine.yaml").write_text(f"# @package _global_\n{text}{graph}")
    assert offered("norm=", "model=mine", own=tmp_path) == [
        name for name in REGISTRY.members("norm") if name in SHIPPED
    ]
    assert set(offered("kind=", "model=mine", own=tmp_path)) == SHIPPED
    assert offered("r=", "model=mine", own=tmp_path) == offered("norm=", own=tmp_path) == []


def test_several_values_of_a_sweep_are_completed_one_after_the_other():
    assert offered(f"{ATTENTION}.position=rotary,al") == ["rotary,alibi"]


def test_keys_match_the_chosen_model_and_its_blocks():
    keys = ["adapt=", "add_norm=", "args.", "base=", "graph.", "inputs.", "parametrisation=", "quantize="]
    assert offered("model.") == [f"model.{key}" for key in keys]
    keys = offered(f"{ATTENTION}.")
    assert {f"{ATTENTION}.{name}=" for name in REGISTRY.blocks["attention"].arguments} <= set(keys)
    assert offered("model.args.experts") == [] and offered("model.args.experts", "model=moe") == ["model.args.experts="]
    assert offered(f"{ATTENTION}.", "model=parallel") == [], "which has removed the node"


def test_names_are_found_without_torch():
    code = "import sys\nfrom tfm_blocks.compose.completion import complete_override as complete\n"
    code += "print(len(complete('model.args.norm=', [], None)) > 1, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
