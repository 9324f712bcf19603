"""The roles, symbolic shapes and initial values of weights."""

from __future__ import annotations

import json
import math
import re
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration, Trainer

from tests.network.examples import ALL, SHIPPED, build, each, evaluated
from tests.network.random_graphs import models
from tests.network.small import network
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.config.settings import Where
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.sources import Sources
from tfm_blocks.network.build import build_network, check_model, network_without_values, read_model
from tfm_blocks.network.weights import Role, initial_distributions, list_weights, matches
from tfm_blocks.registry.blocks import block
from tfm_blocks.report.weights import group_weights

# The weights of ten models that are neither matrices with two axes nor biases nor gains, with layers=1.
SPECIAL = {
    "base": {"src_emb.block.weight": "embedding head"},
    "gpt2": {"emb.block.weight": "embedding head", "pos.block.weight": "position"},
    "llama": {"emb.block.weight": "embedding", "logits.block.weight": "head"},
    "mixtral": {
        "emb.block.weight": "embedding",
        "logits.block.weight": "head",
        "decoder.0.ffn.block.router.map.weight": "router",
        "decoder.0.ffn.block.experts.inner.weight": "experts",
        "decoder.0.ffn.block.experts.out.weight": "experts",
    },
    "t5": {
        "src_emb.block.weight": "embedding head",
        "src_order.block.weight": "bias",
        "tgt_order.block.weight": "bias",
    },
    "relative": {
        "src_emb.block.weight": "embedding head",
        **{
            f"{stack}.block.{table}": "position"
            for stack in ("encoder.0.attn", "decoder.0.self")
            for table in ("of_keys", "of_values")
        },
    },
    "conv": {
        "src_emb.block.weight": "embedding head",
        "encoder.0.attn.block.map.weight": "convolution",
        "decoder.0.self.block.map.weight": "convolution",
    },
    "recurrent": {
        "src_emb.block.weight": "embedding head",
        "encoder.0.attn.block.forwards.hidden.weight": "recurrent",
        "encoder.0.attn.block.backwards.hidden.weight": "recurrent",
        "decoder.0.self.block.forwards.hidden.weight": "recurrent",
    },
    "rezero": {
        "src_emb.block.weight": "embedding head",
        **{
            f"{node}.post.gain.weight": "scalar"
            for node in ("encoder.0.attn", "encoder.0.ffn", "decoder.0.self", "decoder.0.cross", "decoder.0.ffn")
        },
    },
    "olmo2": {"emb.block.weight": "embedding", "logits.block.weight": "head"},
}


def weights_of_model(model: str, *overrides: str):
    composed = compose_model(model, list(overrides))
    return list_weights(network_without_values(check_model(composed.model, composed.sources)))


@pytest.mark.parametrize("model", SPECIAL)
def test_the_roles_of_ten_models_are_those_of_a_table_made_by_hand(model: str) -> None:
    expected = dict(SPECIAL[model])
    for weight in weights_of_model(model, "layers=1"):
        usual = "bias" if weight.name.endswith("bias") else "gain" if len(weight.shape) == 1 else "matrix"
        assert " ".join(weight.roles) == expected.pop(weight.name, usual), weight.name
    assert not expected


# The maps of models with layers=1 that are stacked in one weight.
STACKED = {
    "tiny": {
        "encoder.0.attn.block.qkv": [128] * 3,
        "decoder.0.self.block.qkv": [128] * 3,
        "decoder.0.cross.block.kv": [128] * 2,
    },
    "gqa": {
        "encoder.0.attn.block.qkv": [512, 128, 128],
        "decoder.0.self.block.qkv": [512, 128, 128],
        "decoder.0.cross.block.kv": [128] * 2,
    },
    "mixtral": {"decoder.0.self.block.qkv": [4096] * 3, "decoder.0.ffn.block.experts.inner": [14336] * 2},
    "recurrent": {
        "encoder.0.attn.block.forwards.input": [256] * 4,
        "encoder.0.attn.block.forwards.hidden": [256] * 4,
        "encoder.0.attn.block.backwards.input": [256] * 4,
        "encoder.0.attn.block.backwards.hidden": [256] * 4,
        "decoder.0.self.block.forwards.input": [512] * 4,
        "decoder.0.self.block.forwards.hidden": [512] * 4,
        "decoder.0.cross.block.kv": [512] * 2,
    },
}


@pytest.mark.parametrize("model", STACKED)
def test_the_stacked_maps_of_a_weight_are_those_of_a_table_made_by_hand(model: str) -> None:
    expected = {f"{module}.weight": widths for module, widths in STACKED[model].items()}
    matrices = [weight for weight in weights_of_model(model, "layers=1") if len(weight.shape) > 1]
    assert {weight.name: list(weight.parts) for weight in matrices if len(weight.parts) > 1} == expected
    for weight in matrices:
        assert sum(weight.parts) == weight.shape["experts" in weight.roles]
        assert len(weight.heads) == len(weight.parts)
    if model == "gqa":
        heads = {weight.name: weight.heads for weight in matrices if max(weight.heads) > 1}
        cross = {"decoder.0.cross.block.q.weight": (8,), "decoder.0.cross.block.kv.weight": (2, 2)}
        assert (
            heads
            == dict.fromkeys(("encoder.0.attn.block.qkv.weight", "decoder.0.self.block.qkv.weight"), (8, 2, 2)) | cross
        )


@each(ALL)
def test_each_weight_has_a_role_is_listed_once_and_has_the_distribution_that_is_shown(path) -> None:
    network = evaluated(path)
    weights = list_weights(network)
    assert [id(network.get_parameter(weight.name)) for weight in weights] == list(map(id, network.parameters()))
    for weight in weights:
        assert weight.roles and set(weight.roles) <= set(get_args(Role)) and weight.uses >= len(weight.names)
        assert {network.get_parameter(other) for other in weight.names} == {network.get_parameter(weight.name)}
        assert 0 <= weight.depth[0] < weight.depth[1]
    shown = initial_distributions(network_without_values(network.spec), {})
    for name, parameter in network.named_parameters():
        expect_distribution(shown[name], parameter.detach(), name)


EMBED, FFN = {"block": "embedding", "in": "src"}, {"block": "ffn", "d_ff": 6}


@pytest.mark.parametrize(
    ("stack", "depths"),
    [
        pytest.param({"repeat": 3, "layer": {"group": {"layer": {"f": FFN}}}}, [(0, 3), (1, 3), (2, 3)], id="a group"),
        pytest.param({"layer": {"group": {"repeat": 2, "layer": {"f": FFN}}}}, [(0, 2), (1, 2)], id="an inner stack"),
        pytest.param({"layer": {"f": FFN}}, [(0, 1)], id="one layer"),
    ],
)
def test_the_depth_of_a_weight_counts_the_layers_of_the_innermost_stack_with_several(stack, depths) -> None:
    weights = list_weights(network({"src": "B S"}, {"emb": EMBED, "stack": stack, "out": {"block": "unembed"}}))
    assert [weight.depth for weight in weights if weight.name.endswith("inner.weight")] == depths
    assert {weight.depth for weight in weights if "stack" not in weight.name} == {(0, 1)}


def test_each_weight_of_a_branch_or_of_an_inline_node_is_used_once() -> None:
    graph = {
        "emb": EMBED,
        "both": {"parallel": {"a": FFN, "b": FFN}, "join": "gate"},
        "out": {"block": "unembed", "in": {"block": "linear", "d_out": 8}},
    }
    assert {weight.uses for weight in list_weights(network({"src": "B S"}, graph))} == {1}


def test_initial_values_that_a_plug_in_multiplies_by_a_tensor_have_no_known_distribution(registry) -> None:
    class Masked(torch.nn.Module):
        """A test."""

        def __init__(self, D: int) -> None:
            super().__init__()
            self.weight, self.mask = torch.nn.Parameter(torch.empty(D)), torch.ones(D)

        def initialise(self, name: str, generator: torch.Generator) -> None:
            self.weight.normal_(generator=generator).mul_(self.mask)

        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return x_BTD * self.weight

    block("masked", "x: B T D -> B T D", source="a test")(Masked)
    spec = network({"src": "B S"}, {"emb": EMBED, "masked": {"block": "masked"}, "out": {"block": "unembed"}}).spec
    assert initial_distributions(network_without_values(spec), {})["masked.block.weight"] == "set"


@torch.no_grad()
def test_an_embedding_in_a_layer_keeps_its_name_and_initial_values_when_it_is_tied() -> None:
    layer = {"emb": {**EMBED, "vocab": 500}, "f": FFN}
    logits = {"block": "unembed", "vocab": 500, "in": {"block": "linear", "d_out": 8}}
    tied, alone = (
        network({"src": "B S"}, {"e": {"in": "src", "layer": layer}, "out": {**logits, **tie}})
        for tie in ({"tie": "e.0.emb"}, {})
    )
    first, *_ = list_weights(tied)
    assert first.names == ("e.0.emb.block.weight", "out.block.weight") and first.uses == 2
    assert torch.equal(tied.get_parameter(first.name), alone.get_parameter(first.name))
    assert all(
        torch.equal(weight, alone.get_parameter(name)) for name, weight in tied.named_parameters() if name != first.name
    )


@pytest.mark.grid
@pytest.mark.usefixtures("plugged")
@settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_each_weight_of_random_models_has_a_role(model) -> None:
    _expect_roles(model)


@pytest.mark.grid
@pytest.mark.usefixtures("plugged")
@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_each_weight_of_a_hundred_random_models_has_a_role(model) -> None:
    _expect_roles(model)


def _expect_roles(model) -> None:
    try:
        spec = check_model(model, Sources())
    except ConfigError:
        reject()
    network = network_without_values(spec)
    weights = list_weights(network)
    assert len(weights) == len(list(network.parameters())) and all(weight.roles for weight in weights)


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("gpt2", GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_inner=24, vocab_size=30))),
        (
            "t5_v1",
            T5ForConditionalGeneration(
                T5Config(num_layers=4, d_model=16, d_kv=8, num_heads=2, d_ff=24, vocab_size=30, num_decoder_layers=4)
            ),
        ),
    ],
    ids=["gpt2", "t5"],
)
def test_the_weights_without_decay_are_those_of_transformers(model: str, reference: torch.nn.Module) -> None:
    decayed = set(Trainer.get_decay_parameter_names(None, reference))  # type: ignore[arg-type]
    theirs = sorted(sorted(one.shape) for name, one in reference.named_parameters() if name not in decayed)
    network = build(next(path for path in SHIPPED if path.stem == model))
    ours = sorted(sorted(weight.shape) for weight in list_weights(network) if not weight.decays)
    assert sum(map(math.prod, ours)) == sum(map(math.prod, theirs)) and [o for o in ours if len(o) > 1] == [
        o for o in theirs if len(o) > 1
    ]


def test_a_knob_that_a_block_refuses_when_doubled_is_in_no_symbolic_shape() -> None:
    rotary = "model.graph.encoder.layer.attn.position={block: rotary, share: 0.5}"
    composed = compose_model("tiny", ["d_model=16", "heads=4", "vocab=20", rotary])  # half of 2 floats is an odd number
    symbols = {one for group in group_weights(check_model(composed.model), composed) for one in group.symbols}
    assert "d_model" in symbols and not any("heads" in one for one in symbols)


@each(SHIPPED)
def test_a_symbolic_shape_gives_the_sizes_of_a_model_with_a_width_of_three_times(path) -> None:
    composed = compose_model(path.stem)
    groups = group_weights(check_model(composed.model, composed.sources), composed)
    tripled = composed.with_values({"d_model": 3 * composed.mapping["d_model"]})
    larger = list_weights(network_without_values(read_model(tripled.model, tripled.sources)))
    sizes = {weight.name: weight.shape for weight in larger}
    for group in groups:
        for weight in group.weights:
            axes = []
            for symbol in group.symbols:
                product, _, divisor = symbol.partition("/")
                factors = [int(tripled.mapping.get(factor, factor)) for factor in product.split("·")]
                axes.append(math.prod(factors) // int(divisor or 1))
            assert tuple(axes) == sizes[weight.name], (weight.name, group.symbols)


def test_all_experts_have_the_distribution_that_is_shown_with_deepnorm() -> None:
    sizes = ["layers=2", "d_model=32", "d_ff=64", "heads=4", "vocab=50"]
    composed = compose_model("moe", ["model.add_norm=deepnorm", *sizes])
    spec = check_model(composed.model, composed.sources)
    shown = initial_distributions(network_without_values(spec), {})
    for name, values in build_network(spec, seed=1).named_parameters():
        if "experts" in name:
            assert ", " not in shown[name]
            expect_distribution(shown[name], values.detach(), name)


def expect_distribution(shown: str, values: torch.Tensor, weight: str) -> None:
    if ", " in shown or shown == "set":
        return
    numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e[+-]\d+)?", shown.replace("inf", "1e9"))]
    slack = 4 / math.sqrt(max(values.numel(), 1))  # four standard errors of a standard deviation, about
    if shown.startswith("uniform ±"):
        assert values.abs().max() <= numbers[0] * 1.01, weight
        if values.numel() > 1:
            assert values.std() == pytest.approx(numbers[0] / math.sqrt(3), rel=slack + 0.02), weight
    elif shown.startswith("normal"):
        if values.numel() > 1:
            assert values.std() == pytest.approx(numbers[1], rel=slack + 0.02), weight
    elif not shown.startswith("uniform"):
        assert torch.all((values - numbers[0]).abs() <= 1e-3 * max(abs(numbers[0]), 1e-9)), weight


@pytest.mark.parametrize("node", ["enc.self", "enc.*.self", "enc.0.self"])
def test_a_star_is_the_index_of_a_layer_and_no_name_of_a_node(node: str) -> None:
    branches = {"self": {"block": "linear", "d_out": 4}, "other": {"block": "linear", "d_out": 4}}
    layer = {"self": {"block": "linear", "d_out": 4}, "both": {"join": "sum", "parallel": branches}}
    graph = {"emb": {"block": "embedding", "in": "src"}, "enc": {"layer": layer}}
    args = {"d_model": 4, "vocab": 5}
    spec = check_model({"inputs": {"src": "B S"}, "args": args, "add_norm": "none", "graph": graph})
    weights = list_weights(network_without_values(spec))
    selected = {weight.node.owner for weight in weights if matches(weight, Where(node=[node]))}
    assert selected == {"enc.0.self"}


def test_show_weights_prints_what_its_json_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["show", "tiny", "layers=2", "--weights", "--json"])
    record = json.loads(capsys.readouterr().out)
    first = record["weights"][0]
    assert first["names"] == ["src_emb.block.weight", "logits.block.weight"]
    assert (first["roles"], first["shape"], first["size"]) == (
        ["embedding", "head"],
        ["vocab", "d_model"],
        [10000, 128],
    )
    inner = [one for one in record["weights"] if one["names"] == ["encoder.1.ffn.block.inner.weight"]]
    assert [(one["depth"], one["shape"]) for one in inner] == [([1, 2], ["d_ff", "d_model"])]
    monkeypatch.setenv("COLUMNS", "200")
    main(["show", "tiny", "layers=2", "--weights"])
    table = capsys.readouterr().out
    assert "src_emb.block.weight = logits.block.weight" in table
    assert "32,768 × 2" in table and "parameters: embedding, head 1,280,000" in table
