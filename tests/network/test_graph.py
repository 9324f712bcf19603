"""The network: parameter counts, masks, trunk and head, compilation."""

import pytest
import torch
from torch import nn

import tfm_blocks as tfm
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model, network_without_values
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


@pytest.mark.parametrize("model", ["tiny", "prenorm", "restricted"])
def test_the_graph_compiles_without_a_break_and_exports(model):
    network = small(model)
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
