"""Attention maps: nodes, axes and weights."""

import torch

import tfm_blocks as tfm
from tests.network.small import network
from tests.network.test_graph import small
from tfm_blocks.network.attention_maps import attention_nodes, attention_weights, label_positions


def test_each_attention_node_is_listed_with_the_inputs_it_connects():
    nodes = attention_nodes(small())
    assert nodes["encoder.0.attn"] == ("src", "src")
    assert nodes["decoder.1.self"] == ("tgt", "tgt")
    assert nodes["decoder.1.cross"] == ("tgt", "src")
    assert len(nodes) == 6


@torch.no_grad()
def test_rows_add_up_to_one_and_leave_out_padding_and_later_positions():
    network = small()
    src_BS, tgt_BT = torch.randint(4, 30, (2, 7)), torch.randint(4, 30, (2, 5))
    src_BS[1, 4:] = 0
    weights = attention_weights(network, attention_nodes(network), src=src_BS, tgt=tgt_BT)
    for w_BHTS in weights.values():
        torch.testing.assert_close(w_BHTS.sum(3), torch.ones(w_BHTS.shape[:3]))
    assert not weights["encoder.1.attn"][1, :, :, 4:].any()
    assert not weights["decoder.0.cross"][1, :, :, 4:].any()
    assert not weights["decoder.0.self"].triu(1).any()


@torch.no_grad()
def test_weights_match_the_model_with_add_and_norm_before_the_block():
    """In the first layer of a pre-norm encoder, the block reads the normed embedding."""
    network = tfm.build("prenorm", layers=1, d_model=16, d_ff=16, heads=2, vocab=30).eval()
    src_BS = torch.randint(4, 30, (2, 6))
    weights = attention_weights(network, ["encoder.0.attn"], src=src_BS, tgt=src_BS)["encoder.0.attn"]
    seen = []
    attention = network["encoder"]["0"]["attn"].block
    attention.register_forward_hook(lambda module, args, kwargs, _: seen.append((args, kwargs)), with_kwargs=True)
    network(src=src_BS, tgt=src_BS)
    torch.testing.assert_close(weights, attention.weights(*seen[0][0], **seen[0][1]))


@torch.no_grad()
def test_maps_of_positions_that_a_block_added_dropped_or_merged_have_labels():
    graph = {
        "emb": {"block": "embedding", "in": "src"},
        "mem": {"block": "learned_tokens", "tokens": 2},
        "wide": {"block": "attention"},
        "short": {"block": "strided_convolution", "kernel_size": 3, "stride": 2, "d_out": 8},
        "narrow": {"block": "attention"},
        "out": {"block": "unembed"},
    }
    net = network({"src": "B S"}, graph)
    nodes = attention_nodes(net)
    assert nodes == {"wide": ("2+S", "2+S"), "narrow": ("(2+S)/2", "(2+S)/2")}
    labels = label_positions(net, {"src": list("abcde")})
    assert labels == {"src": list("abcde"), "2+S": ["[1]", "[2]", *"abcde"], "(2+S)/2": ["[1]", "a", "c", "e"]}
    for address, w_BHTS in attention_weights(net, nodes, src=torch.randint(4, 11, (1, 5))).items():
        assert w_BHTS.shape[2:] == tuple(len(labels[name]) for name in nodes[address])
