"""The network: parameter counts, masks, trunk and head, compilation."""

import pytest
import torch
from torch import nn

import tfm_blocks as tfm
from tests.conftest import expect_problem
from tfm_blocks.blocks.embedding import Embedding
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.cost import axis_lengths, multiply_adds
from tfm_blocks.registry.blocks import REGISTRY, block


def small(model="tiny", **knobs):
    return tfm.build(model, **{"d_model": 16, "d_ff": 24, "heads": 2, "layers": 2, "vocab": 30, **knobs}).eval()


@pytest.mark.parametrize(
    ("model", "vocab", "count"), [("base", 37000, 63_082_496), ("big", 37000, 214_245_376), ("tiny", 9720, 2_569_216)]
)
def test_parameter_counts_are_exact(model, vocab, count):
    network = network_without_values(check_model(compose_model(model, [f"vocab={vocab}"]).model))
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_positionwise_blocks_compute_no_padding():
    network, rows = small(), []
    network["encoder"]["0"]["ffn"].block.register_forward_hook(lambda block, read, out: rows.append(out.shape[:-1]))
    src_BS, tgt_BT = torch.randint(4, 30, (3, 7)), torch.randint(4, 30, (3, 6))
    network(src=src_BS, tgt=tgt_BT)
    src_BS[0, 5:] = src_BS[2, 3:] = 0
    network(src=src_BS, tgt=tgt_BT)
    assert rows == [(3, 7), (1, 15)]


def test_a_positionwise_block_of_two_inputs_gets_both_whatever_is_padding(registry):
    @block("gated_here", "x: B T D, gate: B T D -> B T D", branch=True, source="a test")
    class Gated(nn.Module):
        """x times its gate."""

        def __init__(self) -> None:
            super().__init__()

        def forward(self, x_BTD: torch.Tensor, gate_BTD: torch.Tensor) -> torch.Tensor:
            return x_BTD * gate_BTD

    gated = "{block: gated_here, gate: src_pos, after: encoder}"
    network = small(**{"model.graph.gated": gated, "model.graph.decoder.layer.cross.kv": "gated"})
    src_BS, tgt_BT = torch.randint(4, 30, (2, 7)), torch.randint(4, 30, (2, 6))
    alone = network(src=src_BS, tgt=tgt_BT)
    padded = network(src=nn.functional.pad(src_BS, (0, 2)), tgt=tgt_BT)
    torch.testing.assert_close(alone, padded, rtol=1e-4, atol=1e-5)


def test_a_misspelt_tieable_parameter_is_an_error(registry):
    @block("table", "x: ids B N -> B N d_model", tieable="wieght", source="a test")
    class Table(Embedding):
        def __init__(self, *, vocab: int, d_model: int) -> None:
            super().__init__(vocab=vocab, d_model=d_model)

    graph = {"emb": {"block": "table", "in": "src"}, "logits": {"block": "unembed", "tie": "emb"}}
    with expect_problem("model.graph.emb", "the block table has no parameter wieght", "did you mean weight?"):
        check_model({"inputs": {"src": "B S"}, "args": {"d_model": 8, "vocab": 11}, "add_norm": "none", "graph": graph})


def concatenated(max_length, more=()):
    """Return the network of three learned tokens and two sources, `more` of them twice, with learned positions."""
    graph = {
        "src_emb": {"block": "embedding", "in": "src"},
        "doc_emb": {"block": "embedding", "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["src_emb", "doc_emb", *more]},
        "mem": {"block": "learned_tokens", "tokens": 3},
        "pos": {"block": "learned_position", "max_length": max_length},
        "logits": {"block": "unembed"},
    }
    args = {"d_model": 8, "vocab": 11}
    model = {"inputs": {"src": "B S", "doc": "B P"}, "args": args, "add_norm": "none", "graph": graph}
    return network_without_values(check_model(model))


@pytest.mark.parametrize(
    ("more", "lengths", "expected"),
    [
        ((), {}, {"src": 14, "doc": 14}),
        ((), {"src": 20, "doc": 0}, {"src": 29, "doc": 9}),
        (("src_emb",), {}, {"src": 9, "doc": 9}),
        (("src_emb",), {"src": 5, "doc": 9}, {"src": 10, "doc": 19}),
        (("src_emb",), {"src": 20, "doc": 0}, {"src": 14, "doc": 0}),
    ],
)
def test_the_maximum_length_holds_for_the_sum_of_concatenated_inputs(more, lengths, expected):
    network = concatenated(32, more)
    assert {name: network.longest(name, lengths).tokens for name in ("src", "doc")} == expected
    assert (
        network.longest("src", {"src": 9, "doc": 9}).positions("src", {"src": 9, "doc": 9}).endswith("to the 9 of doc")
    )


@pytest.mark.parametrize("max_length", [8, 20, 70])
def test_a_model_is_checked_and_measured_within_the_sum_of_its_inputs(max_length):
    network = concatenated(max_length)
    sizes = axis_lengths(network, {})
    assert sizes == dict.fromkeys("SP", min(32, (max_length - 3) // 2)) and multiply_adds(network, sizes)
    with expect_problem(
        "pos", f"has {max_length - 5} positions next to the 2 of doc, but src has 90", "measure at most"
    ):
        axis_lengths(network, {"src": 90, "doc": 2})


def test_trunk_and_head_make_the_whole():
    model, src_BS, tgt_BT = small(), torch.randint(4, 30, (2, 4)), torch.randint(4, 30, (2, 5))
    whole_BTV = model(src=src_BS, tgt=tgt_BT)
    kept_ND = model.trunk(src=src_BS, tgt=tgt_BT)[torch.tensor([0, 1]), torch.tensor([3, 1])]
    torch.testing.assert_close(model.head(kept_ND), torch.stack([whole_BTV[0, 3], whole_BTV[1, 1]]))


def test_embeddings_and_head_share_one_matrix_three_ways():
    model = small()
    assert [name for name, _ in model.named_parameters() if "emb" in name or "logits" in name] == [
        "src_emb.block.weight"
    ]
    assert model.head_parameters()[0] is model.get_parameter("src_emb.block.weight")


@pytest.mark.grid
def test_the_graph_compiles_without_a_break_and_exports():
    network = small("tiny")
    inputs = {"src": torch.randint(4, 30, (3, 7)), "tgt": torch.randint(4, 30, (3, 5))}
    expected = network(**inputs)
    torch.testing.assert_close(torch.compile(network, fullgraph=True, backend="eager")(**inputs), expected)
    torch.testing.assert_close(torch.export.export(network, (), inputs).module()(**inputs), expected)


def test_missing_and_unknown_inputs_are_errors():
    with pytest.raises(TypeError, match="reads src, tgt, but received source, tgt"):
        small()(source=torch.ones(1, 1).long(), tgt=torch.ones(1, 1).long())


def test_no_node_can_have_the_name_of_an_attribute_of_the_network():
    attributes = vars(small()).keys() - vars(nn.ModuleDict()).keys()
    public = {name for name in attributes if not name.startswith("_")}  # all names with _ are refused
    assert public <= REGISTRY.reserved
