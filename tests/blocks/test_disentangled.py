"""Disentangled attention, against the class of transformers with the same weights."""

import itertools

import pytest
import torch
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, build_relative_position

from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tests.network.small import network
from tfm_blocks.blocks.disentangled import DisentangledAttention, DistanceTable
from tfm_blocks.errors import ConfigError
from tfm_blocks.registry.values import Part

B, T, D, H, ROWS = 3, 23, 12, 3, 16
CASES = list(itertools.product([True, False], [None, 14]))


def both(shared, largest, **options):
    """Return our attention with random weights, and the class of transformers with the same weights."""
    sizes = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": shared}
    ranges = {"position_buckets": ROWS // 2 if largest else -1, "max_relative_positions": largest or ROWS // 2}
    theirs = DisentangledSelfAttention(DebertaV2Config(hidden_size=D, num_attention_heads=H, **sizes, **ranges)).eval()
    own = filled(
        DisentangledAttention(D, None, heads=H, rows=ROWS, max_distance=largest, share_projections=shared, **options)
    )
    torch.nn.init.normal_(own.table.weight)
    named = {"query_proj": (own.qkv, 0, 3), "key_proj": (own.qkv, 1, 3), "value_proj": (own.qkv, 2, 3)}
    if not shared:
        named |= {"pos_query_proj": (own.of_distances, 0, 2), "pos_key_proj": (own.of_distances, 1, 2)}
    for name, (linear, part, parts) in named.items():
        theirs.get_submodule(name).weight.data = linear.weight.chunk(parts)[part]
        theirs.get_submodule(name).bias.data = linear.bias.chunk(parts)[part]
    assert {name for name, _ in theirs.named_children()} - {"dropout", "pos_dropout"} == named.keys()
    return own.eval(), theirs


@pytest.mark.parametrize(("shared", "largest"), CASES)
@torch.no_grad()
def test_it_equals_the_attention_of_transformers(shared, largest):
    own, theirs = both(shared, largest)
    x_BTD, keep_BT = torch.randn(B, T, D), keep([T, T - 4, 5], T)
    mask = keep_BT[:, None, None] & keep_BT[:, None, :, None]
    expected_BTD, weights_BHTS = theirs(x_BTD, mask, output_attentions=True, rel_embeddings=own.table.weight)
    outputs = own(x_BTD, keep_BT=keep_BT)[keep_BT]
    torch.testing.assert_close(outputs, own.out(expected_BTD)[keep_BT])
    kept = keep_BT[:, None, :].expand(B, H, T)
    torch.testing.assert_close(own.weights(x_BTD, keep_BT=keep_BT)[kept], weights_BHTS[kept])


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_keys_of_distances_have_no_bias_if_keys_have_none(shared):
    own = DisentangledAttention(D, None, heads=H, rows=ROWS, share_projections=shared, bias="except_keys")
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter)
    query_HRK, key_HRK = own._of_distances(torch.zeros(ROWS, D))
    assert query_HRK.all() and not key_HRK.any()


@pytest.mark.parametrize(("rows", "largest"), [(8, 12), (12, 9), (16, 14), (64, 100), (512, 512)])
def test_the_ranges_of_distances_are_those_of_transformers(rows, largest):
    own = DisentangledAttention(D, None, heads=H, rows=rows, max_distance=largest)
    length = torch.empty(1, 600, 1)
    theirs = build_relative_position(length, length, bucket_size=rows // 2, max_position=largest)[0]
    place = torch.arange(600)
    assert torch.equal(own.row(place[:, None] - place), (theirs + rows // 2).clamp(0, rows - 1))


@torch.no_grad()
def test_a_table_of_the_node_replaces_the_table_of_the_attention():
    own, _ = both(True, 14)
    table = filled(DistanceTable(D, rows=ROWS, norm=Part("layernorm")))
    torch.nn.init.normal_(table.weight)
    reads = DisentangledAttention(D, D, heads=H, rows=ROWS, max_distance=14)
    reads.load_state_dict({name: value for name, value in own.state_dict().items() if not name.startswith("table")})
    own.table = table
    x_BTD, keep_BT = torch.randn(B, T, D), keep([T, T, 5], T)
    torch.testing.assert_close(reads(x_BTD, table(x_BTD), keep_BT=keep_BT), own(x_BTD, keep_BT=keep_BT))


def test_a_table_of_another_width_needs_its_own_projections():
    graph = {
        "emb": {"block": "embedding", "in": "src", "vocab": 9, "d_model": D},
        "narrow": {"block": "linear", "in": "emb", "d_out": 8},
        "table": {"block": "distance_table", "in": "narrow", "rows": ROWS},
        "read": {"block": "disentangled_attention", "in": "emb", "distances": "table", "rows": ROWS, "heads": H},
    }
    with pytest.raises(ConfigError, match="share_projections maps distances of width 12, but their width is 8"):
        network({"src": "B S"}, graph)
    graph["read"]["share_projections"] = False
    assert network({"src": "B S"}, graph)(src=torch.ones(2, 5, dtype=torch.int64)).shape == (2, 5, D)
