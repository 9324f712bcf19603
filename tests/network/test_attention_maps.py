"""Attention maps: nodes, axes and weights."""

import torch

import tfm_blocks as tfm
from tests.network.test_graph import small
from tfm_blocks.network.attention_maps import attention_nodes, attention_weights


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
