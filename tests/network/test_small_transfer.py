"""Width and depth transfer of graphs with a few nodes."""

import math

import pytest
import torch

from tests.conftest import expect_problem
from tests.network.small import ARGS
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model, network_without_values, weight_rules


def transferred(graph, base, parametrisation="mup", add_norm="none", **args):
    """Return the checked spec of an embedding, the nodes of `graph` and an unembedding, relative to sizes of a base."""
    nodes = {"emb": {"block": "embedding", "in": "src"}, **graph, "logits": {"block": "unembed"}}
    model = {"inputs": {"src": "B S"}, "args": {**ARGS, **args}, "add_norm": add_norm, "graph": nodes}
    where = {f"args.{name}" if name in model["args"] else name: size for name, size in base.items()}
    return check_model({**model, "parametrisation": parametrisation, "base": {"where": where}})


@pytest.mark.parametrize(
    "heads, expected",
    [
        pytest.param(2, ("matrix", 1 / 4, 1 / 4), id="wider heads"),
        pytest.param(8, ("input", 1, 1 / 4), id="more heads"),
    ],
)
def test_a_map_of_each_head_sums_over_the_width_of_the_head(heads: int, expected: tuple[str, float, float]) -> None:
    spec = transferred({"r": {"block": "rg_lru"}}, {"d_model": 8, "heads": 2}, d_model=32, heads=heads)
    rule = weight_rules(spec)["r.block.decay_gate"]
    assert (rule.name, rule.rate, rule.eps) == expected
    assert rule.initial == (1.0,)  # normal with variance 1/K


@torch.no_grad()
def test_products_with_vectors_of_contextual_positions_do_not_grow_with_the_width_of_a_head() -> None:
    spec = transferred({"a": {"block": "contextual_attention"}}, {"d_model": 8}, d_model=32)
    block = build_network(spec, seed=1).get_submodule("a.block")
    block.of_positions.fill_(1.0)
    product_BHTS = block._of_positions(torch.ones(1, 2, 3, 16), torch.zeros(1, 2, 3, 3))
    assert torch.equal(product_BHTS, torch.full((1, 2, 3, 3), 4.0))  # the width of a head of the base


@pytest.mark.parametrize("sizes", [{"d_index": 8}, {"index_heads": 6}, {"d_index": 8, "index_heads": 6}], ids=str)
def test_the_scores_of_an_indexer_are_divided_by_the_growth_of_its_sum(sizes) -> None:
    widths = {"d_latent": 4, "d_query": 4, "d_head": 4, "d_turned": 2, "d_value": 4, "top_k": 2}
    base = {"d_index": 2, "index_heads": 2}
    graph = {"a": {"block": "sparse_latent_attention", "mask": "causal"}}
    indexer = network_without_values(transferred(graph, base, **widths, **{**base, **sizes})).get_submodule(
        "a.block.indexer"
    )
    growth = math.prod({**base, **sizes}.values()) / 4
    assert indexer.scale == pytest.approx(1 / math.sqrt(4) / growth)


@pytest.mark.parametrize(
    ("post", "operations"),
    [
        (["norm", "add"], [("norm", 0), ("depth", 1 / 4), ("add", 1)]),
        ([{"scale": 0.5}, "norm", "add"], [("scale", 0.5), ("norm", 0), ("depth", 1 / 4), ("add", 1)]),
        (["add", {"scale": 0.5}, "norm"], [("depth", 1 / 4), ("add", 1), ("scale", 0.5), ("norm", 0)]),
    ],
    ids=str,
)
def test_a_branch_is_divided_just_before_it_is_added(post, operations) -> None:
    stack = {"repeat": 8, "add_norm": {"post": post}, "layer": {"f": {"block": "ffn"}}}
    spec = transferred({"st": stack}, {"graph.st.repeat": 2}, "completep")
    assert [(step.kind, step.value) for step in spec.nodes[1].post] == operations
    branch = network_without_values(spec)["st"]["0"]["f"]
    assert list(branch.post) == [kind for kind, _ in operations]
    assert branch.post["depth"].factor == 1 / 4


@pytest.mark.parametrize("join", ["gru_gate", "write_streams"])
@pytest.mark.parametrize("others", [{}, {"a": {"block": "ffn", "add_norm": "pre"}}], ids=["alone", "with add"])
def test_a_join_in_place_of_the_residual_connection_has_no_rule_of_depth(join: str, others) -> None:
    stack = {"repeat": 8, "layer": {**others, "g": {"parallel": {"f": {"block": "ffn"}}, "join": join}}}
    with pytest.raises(ConfigError) as caught:
        transferred({"st": stack}, {"graph.st.repeat": 2}, "completep")
    (problem,) = caught.value.problems
    rule = f"no rule is known for {join} under completep with 4 times the layers of the base"
    assert (problem.address, problem.rule) == ("model.graph.st.layer.g", rule)


COSINE = {"block": "attention", "qk_norm": "l2norm"}
INNER = {"block": "ffn", "inner_norm": "scalenorm"}


@pytest.mark.parametrize(
    ("node", "base", "kind"),
    [
        pytest.param(INNER, {"d_ff": 6}, "ScaleNorm", id="a norm within a block"),
        pytest.param(COSINE, {"heads": 1}, "L2Norm", id="wider heads"),
        pytest.param({"parallel": {"a": INNER}, "join": "sum"}, {"d_ff": 6}, "ScaleNorm", id="in a parallel"),
        pytest.param({"block": "linear", "d_out": 8, "in": COSINE}, {"heads": 1}, "L2Norm", id="an inline node"),
        pytest.param({**INNER, "inner_norm": "rmsnorm"}, {"d_ff": 6}, "", id="another norm"),
        pytest.param(INNER, {"d_model": 4}, "", id="a norm of the same width"),
        pytest.param(COSINE, {"d_model": 4, "heads": 1}, "", id="more heads"),
    ],
)
def test_a_norm_without_a_rule_is_an_error_if_its_own_width_differs(node, base, kind: str) -> None:
    if not kind:
        assert weight_rules(transferred({"node": node}, base))
        return
    with pytest.raises(ConfigError) as caught:
        transferred({"node": node}, base)
    (problem,) = caught.value.problems
    assert problem.rule.startswith(f"no rule is known for {kind} with a width that differs from the base")


def test_a_depth_that_is_an_arg_is_an_error_with_a_fix() -> None:
    stack = {"repeat": "layers//2", "layer": {"f": {"block": "ffn"}}}
    with expect_problem(
        "model.base", "change the nodes of the model", "write a depth as repeat: ${layers}, not as an arg"
    ):
        transferred({"st": stack}, {"layers": 2}, layers=4)
