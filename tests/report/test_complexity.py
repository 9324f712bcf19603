"""Table 1 of the paper, measured: every declared formula against the block's own multiply-adds, chains and reach."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.cli import main
from tfm_blocks.language.check import check
from tfm_blocks.network.build import build_network, network_without_values
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.network.cost import multiply_adds
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.expression import evaluate, names_in
from tfm_blocks.report.blocks import facts
from tfm_blocks.report.show import COMPLEXITY, complexity

ARGUMENTS = {"heads": 2, "r": 9, "kernel_size": 5, "dilation": 1, "d_inner": 8, "d_state": 4}
ARGUMENTS |= {"rows": 8, "positions": 8, "memory": 12, "segment": 2, "first": 2, "radius": 3, "steps": 2}
ARGUMENTS |= {"d_key": 4, "d_value": 4, "d_head": 4, "d_turned": 2, "d_latent": 8, "d_query": 8, "d_index": 2}
ARGUMENTS |= {"top_k": 99, "index_heads": 2}
MODELS = Path(__file__).parents[1] / "models"
MAPS_MIX = ("rnn", "gru", "lstm", "convolution")  # their maps mix the positions
blocks = pytest.mark.parametrize(  # gru and lstm have the rows of rnn, and take seconds
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name in ("gru", "lstm"))) for name in COMPLEXITY]
)


def mapping(name, d, *, causal=False, **changed):
    """Return a model of one such block over vectors."""
    known = REGISTRY.blocks[name].arguments
    sizes = [argument.name for argument in known.values() if argument.required or argument.name in names(name)]
    arguments = {key: value for key, value in {**ARGUMENTS, **changed}.items() if key in sizes}
    arguments |= {port.name: "x" for port in REGISTRY.blocks[name].signature.ports[1:] if not port.optional}
    masked = {"mask": "causal"} if causal and "mask" in known else {}
    return {"inputs": {"x": f"B S {d}"}, "graph": {"mix": {"block": name, "in": "x", **arguments, **masked}}}


def names(name):
    """Return the names in the formulas of a block."""
    return {one for text in COMPLEXITY.get(name, ()) for one in names_in(text)}


def spec(*args, **options):
    return check(mapping(*args, **options), REGISTRY)


def formula(name, which, n, d=4, **changed):
    """Return the declared value at these sizes."""
    sizes = {"E": d, **ARGUMENTS, **changed, "n": n, "d": d}
    return evaluate(getattr(COMPLEXITY[name], which), sizes.__getitem__)


def counted(name, n, d, **changed):
    """Return the multiply-adds of the block without position-wise maps such as the projections to q, k and v."""
    network = network_without_values(spec(name, d, **changed))
    maps = [one for one in network.modules() if isinstance(one, Linear)]
    outside = 0 if name in MAPS_MIX else sum(one.weight.numel() for one in maps)
    return multiply_adds(network, {"S": n})["mix"] - n * outside


@blocks
def test_multiply_adds_grow_with_the_length_as_declared(name):
    short, long = (counted(name, n, 8) for n in (64, 256))
    exponent = math.log(long / short, 4)
    declared = math.log(formula(name, "layer", 256) / formula(name, "layer", 64), 4)
    assert exponent == pytest.approx(declared, abs=0.05)


@blocks
def test_multiply_adds_grow_with_the_width_as_declared(name):
    narrow, wide = (counted(name, 64, d) for d in (512, 1024))
    declared = formula(name, "layer", 64, d=1024) / formula(name, "layer", 64, d=512)
    assert wide / narrow == pytest.approx(declared, rel=0.1)


@pytest.mark.parametrize(("name", "argument", "values"), [
    ("restricted_attention", "r", (64, 256)), ("convolution", "kernel_size", (3, 12)), ("retention", "heads", (1, 4)),
    ("retention", "d_head", (16, 128)), ("gated_delta_rule", "heads", (1, 4)), ("segment_attention", "memory", (6, 30)),
    ("segment_attention", "segment", (16, 64)), ("restricted_global_attention", "first", (40, 160)),
    ("relative_attention", "radius", (4, 100)), ("latent_attention", "d_head", (2, 64)),
    ("latent_query_attention", "d_value", (2, 64)), ("sparse_latent_attention", "d_index", (2, 64)),
    ("sparse_latent_attention", "index_heads", (1, 9)), ("memory_attention", "memory", (1, 300)),
])  # fmt: skip
def test_multiply_adds_grow_with_an_argument_as_declared(name, argument, values):
    few, many = (counted(name, 8192 if argument == "r" else 256, 256, **{argument: value}) for value in values)
    declared = [formula(name, "layer", 256, d=256, **{argument: value}) for value in values]
    assert many / few == pytest.approx(declared[1] / declared[0], rel=0.25)


def longest_chain(name, n):
    """Return the largest number of sequential operations between input and output, counted in the gradient graph."""
    network = network_without_values(spec(name, 4))
    x_BSD = torch.zeros(1, n, 4, device="meta", requires_grad=True)
    return depth(network(x=x_BSD).grad_fn)


def depth(last):
    """Return the length of the longest chain of gradient functions that ends in `last`."""
    lengths, waiting = {}, [last]
    while waiting:
        one = waiting[-1]
        before = [node for node, _ in one.next_functions if node is not None]
        missing = [node for node in before if node not in lengths]
        if missing:
            waiting += missing
        else:
            lengths[waiting.pop()] = 1 + max((lengths[node] for node in before), default=0)
    return lengths[last]


@blocks
def test_as_many_operations_wait_for_each_other_as_declared(name):
    chains = [longest_chain(name, n) for n in (64, 128, 192)]
    steps = [formula(name, "sequential", n) for n in (64, 128, 192)]
    if steps[0] == steps[-1]:
        assert chains[0] == chains[-1] < 50
    else:
        each = (chains[1] - chains[0]) / (steps[1] - steps[0])
        assert 1 <= each <= 20 and chains[2] - chains[1] == pytest.approx(each * (steps[2] - steps[1]), rel=0.05)


@pytest.mark.parametrize("heads", [1, 4])
def test_multiply_adds_of_rwkv7_grow_with_the_width_of_its_values(heads):
    counts = []
    for E in (64, 512):
        graph = {"mix": {"block": "rwkv7", "in": "x", "v": "y", "heads": heads}}
        network = network_without_values(check({"inputs": {"x": "B S 64", "y": f"B S {E}"}, "graph": graph}, REGISTRY))
        maps = sum(one.weight.numel() for one in network.modules() if isinstance(one, Linear))
        counts.append(multiply_adds(network, {"S": 256})["mix"] - 256 * maps)
    declared = [formula("rwkv7", "layer", 256, d=64, E=E, heads=heads) for E in (64, 512)]
    assert counts[1] / counts[0] == pytest.approx(declared[1] / declared[0], rel=0.25)


def layers_until_seen(name, n):
    """Return the number of causal layers after which the last of n positions sees the first.

    A position is seen if it has a gradient, which rounding cannot hide. The gradients that `segment_attention` cuts
    are restored.
    """
    block = build_network(spec(name, 4, causal=True), seed=1).double()
    x_BSD = torch.randn(1, n, 4, dtype=torch.float64, requires_grad=True)
    y_BSD = x_BSD
    for layer in range(1, n + 1):
        y_BSD = y_BSD + block(x=F.layer_norm(y_BSD, (4,)))
        (seen_BSD,) = torch.autograd.grad(y_BSD[0, -1].sum(), x_BSD, retain_graph=True)
        if seen_BSD[0, 0].any():
            return layer
    return math.inf


@blocks
def test_the_path_from_the_first_position_to_the_last_is_as_long_as_declared(name, monkeypatch):
    """The path is the number of layers times the sequential operations in a layer."""
    monkeypatch.setattr(torch.Tensor, "detach", lambda x: x)
    paths = [layers_until_seen(name, n) * formula(name, "sequential", n) for n in (33, 65)]
    declared = [formula(name, "path", n) for n in (33, 65)]
    assert paths[1] / paths[0] == pytest.approx(declared[1] / declared[0], rel=0.05)
    assert paths[1] == pytest.approx(declared[1], rel=0.3)


def test_attention_to_another_sequence_is_no_row_of_the_table():
    graph = {"cross": {"block": "attention", "in": "x", "kv": "y", "heads": 2}}
    (node,) = check({"inputs": {"x": "B S 4", "y": "B P 4"}, "graph": graph}, REGISTRY).nodes
    assert complexity(node) is None


def test_show_has_a_line_for_each_block_that_mixes_positions(capsys):
    main(["show", str(MODELS / "convolution.yaml")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "encoder.0.attn │ convolution │ n · kernel_size · d² │ 1 │ n / (kernel_size · dilation)" in shown
    main(["show", "retention", "--json"])
    nodes = {node["address"]: node for node in json.loads(capsys.readouterr().out)["nodes"]}
    assert nodes["decoder.2.self"]["complexity"]["path"] == "n / 32" and nodes["decoder.2.ffn"]["complexity"] is None


def test_every_row_is_of_a_block_and_reads_its_arguments():
    for name in COMPLEXITY:
        info = REGISTRY.blocks[name]
        assert names(name) <= {"n", "d", *info.arguments, *info.signature.letters}


EACH_POSITION = {  # of the costs in docstrings, for x of width 8, another port of width 12, and 2 of each other size
    "gate": 8 * 2, "gru_gate": 6 * 8 * 8, "interpolate": 8 * 12, "sigmoid_gate": 8 * 12, "headwise_gate": 8 * 2,
    "glu_gate": 2 * (8 + 12) * 12, "linear": 8 * 2, "ffn": 2 * 8 * 2, "gated_ffn": 3 * 8 * 2, "unembed": 8 * 11,
    "adaptive_norm": 2 * 8 * 12, "depth_attention": 2 * 2 * 8,
}  # fmt: skip


def counted_alone(info, **arguments):
    """Return the multiply-adds of a block for 32 positions, or of its bias or table that an attention reads."""
    case = next(cases_of(info, arguments), None)
    if case is not None and not case.part:
        return multiply_adds(network_without_values(case.spec), {"N": 32, "T": 32})["node"]
    node = {"block": info.name, "in": "x", **{key: 2 for key in ["heads"] if key in info.arguments}}
    reader = {"block": "disentangled_attention", "distances": "node"}
    if info.name != "distance_table":
        reader = {"block": "attention", "score_bias": "node"}
    graph = {"node": {**node, **arguments}, "read": {**reader, "in": "x", "heads": 2}}
    network = network_without_values(check({"inputs": {"x": "B N 8"}, "graph": graph}, REGISTRY))
    return multiply_adds(network, {"N": 32})["node"]


@pytest.mark.parametrize("name", [name for name, info in REGISTRY.blocks.items() if info.shipped])
def test_every_block_states_its_cost(name):
    info = REGISTRY.blocks[name]
    stated = dict(facts(info))
    assert stated.keys() & {"cost", "cost of n positions"}
    if stated.get("cost") == "no matrix products":
        assert counted_alone(info) == 0


@pytest.mark.parametrize(("name", "each"), EACH_POSITION.items())
def test_costs_of_a_position_are_those_of_the_docstring(name, each):
    assert counted_alone(REGISTRY.blocks[name]) == 32 * each


def test_costs_of_pairs_are_those_of_the_docstring():
    assert counted_alone(REGISTRY.blocks["dynamic_bias"], d_bias=4, depth=3) == 63 * 4 * (1 + 2 * 4 + 2)
    assert counted_alone(REGISTRY.blocks["top_blocks"]) == 2 * 32**2 * 8
