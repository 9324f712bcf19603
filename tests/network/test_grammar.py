"""Models of the grammar run: losses, concatenated sequences, masks of the caller, heads, several inputs on one axis."""

import re

import pytest
import torch
from torch.nn import functional as F

from tests.network.small import network
from tfm_blocks.errors import ConfigError
from tfm_blocks.network import incremental
from tfm_blocks.training.loss import smoothed_loss

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
EMBED, CAUSAL = {"block": "embedding"}, {"block": "attention", "mask": "causal"}
pytestmark = pytest.mark.usefixtures("plugged")


def ids(rows, length, seed=0):
    return torch.randint(4, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_losses_are_given_by_address_and_the_network_still_decodes():
    layer = {"counted": {"block": "counted"}, "norm": {"block": "layernorm"}}
    graph = {"emb": {**EMBED, "in": "tgt"}, "stack": {"repeat": 2, "layer": layer}, "logits": {"block": "unembed"}}
    net, tgt_BT = network({"tgt": "B T"}, graph), ids(3, 5)
    x_BTD, losses = net.trunk_with_losses({"tgt": tgt_BT})
    assert set(losses) == {"stack.0.counted", "stack.1.counted"}
    first = net["stack"]["0"]["counted"].block(net["emb"].block(tgt_BT))[1]
    torch.testing.assert_close(losses["stack.0.counted"], first)
    assert all(loss.shape == () for loss in losses.values())
    torch.testing.assert_close(net.trunk(tgt=tgt_BT), x_BTD)
    decoding = incremental.start(net, {}, 5, sentences=3)
    for position in range(5):
        x_BD, decoding = incremental.step(net, tgt_BT[:, position], decoding)
        torch.testing.assert_close(x_BD, x_BTD[:, position], **CLOSE)


@pytest.mark.parametrize(
    "reader",
    [
        {"block": "attention", "mask": "causal"},
        {"block": "attention", "position": "rotary"},
        {"block": "attention", "position": "relative_bias"},
        {"block": "restricted_attention", "r": 3},
        {"block": "restricted_attention", "r": 3, "mask": "causal"},
        {"block": "dilated_attention", "r": 2, "dilation": 2},
        {"block": "depthwise_conv", "kernel_size": 3},
        {"block": "sinusoidal"},
        {"block": "lstm"},
    ],
    ids=str,
)
@torch.no_grad()
def test_concatenated_sequences_have_their_padding_last(reader):
    """Blocks that read positions give the output that they give without padding."""
    graph = {
        "one": {**EMBED, "in": "src"},
        "two": {**EMBED, "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["one", "two"]},
        "reader": reader,
        "out": {"block": "unembed"},
    }
    net = network({"src": "B S", "doc": "B P"}, graph)
    assert str(net.spec.sink.shape[1]) == "S+P"
    src_BS, doc_BP = ids(2, 4), ids(2, 3, 1)
    alone = net(src=src_BS, doc=doc_BP)
    padded = net(src=F.pad(src_BS, (0, 5)), doc=F.pad(doc_BP, (0, 2)))
    torch.testing.assert_close(padded[:, :7], alone, **CLOSE)


@torch.no_grad()
def test_a_sequence_is_concatenated_with_concatenated_sequences():
    graph = {
        "one": {**EMBED, "in": "src"},
        "two": {**EMBED, "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["one", "two"]},
        "twice": {"block": "concat_sequence", "in": ["both", "one"]},
        "attn": {"block": "attention", "position": "rotary"},
        "out": {"block": "unembed"},
    }
    net = network({"src": "B S", "doc": "B P"}, graph)
    src_BS, doc_BP = ids(2, 4), ids(2, 3, 1)
    padded = net(src=F.pad(src_BS, (0, 5)), doc=F.pad(doc_BP, (0, 2)))
    torch.testing.assert_close(padded[:, :11], net(src=src_BS, doc=doc_BP), **CLOSE)


@torch.no_grad()
def test_a_decoder_reads_sources_laid_end_to_end():
    graph = {
        "one": {**EMBED, "in": "src"},
        "two": {**EMBED, "in": "doc"},
        "both": {"block": "concat_sequence", "in": ["one", "two"]},
        "emb": {**EMBED, "in": "tgt"},
        "cross": {"block": "attention", "kv": "both"},
        "logits": {"block": "unembed"},
    }
    net = network({"src": "B S", "doc": "B P", "tgt": "B T"}, graph)
    sources, tgt_BT = {"src": F.pad(ids(2, 4), (0, 3)), "doc": ids(2, 3, 1)}, ids(2, 5, 2)
    whole_BTV = net(**sources, tgt=tgt_BT)
    decoding = incremental.spread(incremental.start(net, sources, 5), 2)
    for position in range(5):
        x_RD, decoding = incremental.step(net, tgt_BT[:, position].repeat_interleave(2), decoding)
        torch.testing.assert_close(net.head(x_RD), whole_BTV[:, position].repeat_interleave(2, 0), **CLOSE)


ENCODER_DECODER = {
    "src_emb": {**EMBED, "in": "src"},
    "attn": {"block": "attention"},
    "tgt_emb": {**EMBED, "in": "tgt"},
    "self": CAUSAL,
    "cross": {"block": "attention", "kv": "attn"},
    "pooled": {"block": "pool", "kv": "attn"},
    "logits": {"block": "unembed"},
}


@torch.no_grad()
def test_keep_masks_of_the_caller_replace_id_0_as_padding():
    net = network({"src": "B S", "tgt": "B T"}, ENCODER_DECODER)
    src_BS, tgt_BT = ids(3, 7), ids(3, 5, 1)
    padded_BS = torch.cat([src_BS, ids(3, 4, 2)], 1)
    keep_BS = torch.arange(11).expand(3, -1) < 7
    whole_BTV = net(src=src_BS, tgt=tgt_BT)
    torch.testing.assert_close(net(src=padded_BS, tgt=tgt_BT, keep={"src": keep_BS}), whole_BTV, **CLOSE)
    decoding = incremental.start(net, {"src": padded_BS}, 5, keep={"src": keep_BS})
    for position in range(5):
        x_BD, decoding = incremental.step(net, tgt_BT[:, position], decoding)
        torch.testing.assert_close(net.head(x_BD), whole_BTV[:, position], **CLOSE)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"src": torch.ones(3, 7)}, "keep['src'] must be torch.bool with the shape [3, 7], but is torch.float32"),
        ({"src": torch.ones(3, 5, dtype=torch.bool)}, "but is torch.bool with the shape [3, 5]"),
        ({"seg": torch.ones(3, 7, dtype=torch.bool)}, "src sets the padding of S: pass keep={'src': …}"),
        ({"doc": torch.ones(3, 7, dtype=torch.bool)}, "the inputs are src, seg"),
    ],
)
def test_a_wrong_mask_of_the_caller_is_refused(keep, message):
    graph = {
        "emb": {**EMBED, "in": "src"},
        "seg_emb": {**EMBED, "in": "seg"},
        "both": {"block": "sum", "in": ["emb", "seg_emb"]},
        "attn": {"block": "attention"},
        "out": {"block": "unembed"},
    }
    net, src_BS = network({"src": "B S", "seg": "B S"}, graph), ids(3, 7)
    with pytest.raises(TypeError, match=re.escape(message)):
        net(src=src_BS, seg=src_BS, keep=keep)


@torch.no_grad()
def test_padding_that_the_caller_names_may_come_first():
    """Causal attention cannot assume that padding comes last."""
    graph = {"emb": {**EMBED, "in": "tgt"}, "self": CAUSAL, "logits": {"block": "unembed"}}
    net, tgt_BT = network({"tgt": "B T"}, graph), ids(3, 5)
    left_BT = F.pad(tgt_BT, (3, 0), value=5)
    keep_BT = torch.arange(8).expand(3, -1) >= 3
    torch.testing.assert_close(net(tgt=left_BT, keep={"tgt": keep_BT})[:, 3:], net(tgt=tgt_BT), **CLOSE)


def test_stochastic_depth_is_not_part_of_the_head():
    """It drops a branch for a whole sequence, and the head has no sequences."""
    graph = {
        "emb": {**EMBED, "in": "tgt"},
        "gelu": {"block": "gelu", "add_norm": {"post": [{"droppath": 0.5}]}},
        "logits": {"block": "unembed"},
    }
    assert [call.address for call in network({"tgt": "B T"}, graph).head_calls] == ["logits"]


@torch.no_grad()
def test_the_head_is_every_position_wise_node_at_the_end():
    graph = {
        "emb": {**EMBED, "in": "tgt"},
        "self": CAUSAL,
        "wide": {"block": "linear", "d_out": 20},
        "gelu": {"block": "gelu"},
        "logits": {"block": "unembed"},
    }
    net, tgt_BT = network({"tgt": "B T"}, graph), ids(3, 5)
    assert [call.address for call in net.head_calls] == ["wide", "gelu", "logits"] and net.spec.head == 3
    x_BTD = net.trunk(tgt=tgt_BT)
    torch.testing.assert_close(net.head(x_BTD), net(tgt=tgt_BT))
    torch.testing.assert_close(net.head(x_BTD[:, 2]), net(tgt=tgt_BT)[:, 2])
    assert {id(one) for one in net.head_parameters()} == {
        id(one) for name in ("wide", "logits") for one in net[name].parameters()
    }


def test_the_parameters_of_the_head_are_without_those_of_a_node_that_it_contains():
    inner = {"block": "gru", "in": {**EMBED, "in": "tgt"}, "mask": "causal"}
    net = network({"tgt": "B T"}, {"logits": {"block": "unembed", "in": inner}})
    assert net.head_parameters() == [net["logits"].block.weight]


@torch.no_grad()
def test_a_head_whose_inner_node_is_read_elsewhere_begins_after_it():
    graph = {
        "emb": {**EMBED, "in": "tgt"},
        "wide": {"block": "linear", "d_out": 8},
        "more": {"block": "gelu"},
        "both": {"block": "sum", "in": ["wide", "more"]},
        "logits": {"block": "unembed"},
    }
    net = network({"tgt": "B T"}, graph)
    assert [call.address for call in net.head_calls] == ["logits"]


@torch.no_grad()
def test_a_model_of_an_embedding_and_a_head_decodes():
    """The head takes vectors, so it excludes an embedding, although that is position-wise."""
    net, tgt_BT = network({"tgt": "B T"}, {"emb": {**EMBED, "in": "tgt"}, "logits": {"block": "unembed"}}), ids(3, 5)
    decoding = incremental.start(net, {}, 5, sentences=3)
    for position in range(5):
        x_BD, decoding = incremental.step(net, tgt_BT[:, position], decoding)
        torch.testing.assert_close(net.head(x_BD), net(tgt=tgt_BT)[:, position])


@torch.no_grad()
def test_a_sum_of_one_tensor_at_the_end_is_that_tensor():
    """A port of several tensors gets a list, also in the head."""
    for block in ("sum", "mean", "product", "weighted_sum"):
        net, src_BS = (
            network({"src": "B S"}, {"emb": {**EMBED, "in": "src"}, "out": {"block": block, "in": ["emb"]}}),
            ids(3, 5),
        )
        torch.testing.assert_close(net(src=src_BS), net["emb"].block(src_BS))


@torch.no_grad()
def test_branches_that_are_joined_by_a_product_gate_each_other():
    branches = {name: {"block": "linear", "d_out": 6} for name in ("value", "gate", "third")}
    graph = {"emb": {**EMBED, "in": "src"}, "gated": {"join": "product", "parallel": branches}}
    net, src_BS = network({"src": "B S"}, graph), ids(3, 5)
    x_BSD = net["emb"].block(src_BS)
    value_BSD, gate_BSD, third_BSD = (net.get_submodule(f"gated.{name}").block(x_BSD) for name in branches)
    torch.testing.assert_close(net(src=src_BS), value_BSD * gate_BSD * third_BSD)


@torch.no_grad()
def test_two_inputs_on_one_axis_are_summed_and_the_first_defines_padding():
    graph = {
        "words": {**EMBED, "in": "src"},
        "segments": {**EMBED, "in": "seg", "vocab": 3},
        "both": {"block": "sum", "in": ["words", "segments"]},
        "attn": {"block": "attention"},
        "out": {"block": "unembed"},
    }
    net = network({"src": "B S", "seg": "B S"}, graph)
    src_BS, seg_BS = ids(3, 5), torch.tensor([[0, 0, 1, 1, 1]]).expand(3, -1)
    torch.testing.assert_close(
        net["both"].block([net["words"].block(src_BS), net["segments"].block(seg_BS)]),
        net["words"].block(src_BS) + net["segments"].block(seg_BS),
    )
    alone = net(src=src_BS, seg=seg_BS)
    padded = net(src=F.pad(src_BS, (0, 2)), seg=F.pad(seg_BS, (0, 2), value=2))
    torch.testing.assert_close(padded[:, :5], alone, **CLOSE)


def test_a_sequence_is_not_read_as_a_width():
    """Read as a width, the whole sequence would be visible at every position, and no pass would notice."""
    with pytest.raises(ConfigError, match=r"D of relu is a width, but has Q in img \(B P Q\)"):
        network({"img": "B P Q"}, {"relu": {"block": "relu", "in": "img"}})


def test_a_sequence_of_a_fixed_length_has_no_mask_so_attention_refuses_it():
    with pytest.raises(ConfigError, match=r"T of attention is a sequence, but has 49 in img \(B 49 8\)"):
        network({"img": "B 49 8"}, {"attn": {"block": "attention", "in": "img"}})


LINEAR = {"map": {"block": "linear", "d_out": "d_model"}}
SKIPS = [{"parallel": LINEAR}, {"repeat": 1, "layer": LINEAR}]


@pytest.mark.parametrize("add_norm", ["pre", "post", "none"])
@pytest.mark.parametrize("skip", SKIPS, ids=["parallel", "copy"])
def test_a_node_whose_residual_is_not_its_entry_is_outside_the_head(skip, add_norm):
    graph = {
        "emb": {**EMBED, "in": "tgt"},
        "stack": {"repeat": 1, "layer": {"self": CAUSAL}},
        "skip": {"join": "sum", **skip},
        "logits": {"block": "unembed"},
    }
    net, tgt_BT = network({"tgt": "B T"}, graph, add_norm=add_norm), ids(3, 5)
    assert [call.address for call in net.head_calls] == ["logits"]
    net(tgt=tgt_BT).square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    decodes(net, tgt_BT)


def test_a_sink_that_joins_one_branch_leaves_an_empty_head_and_trains():
    logits = {"join": "sum", "parallel": {"map": {"block": "unembed"}}}
    net, tgt_BT = network({"tgt": "B T"}, {"emb": {**EMBED, "in": "tgt"}, "self": CAUSAL, "logits": logits}), ids(3, 5)
    assert net.spec.head == 0
    decodes(net, tgt_BT)
    logits_NV, labels_N = net(tgt=tgt_BT).flatten(0, 1), tgt_BT.flatten()
    loss, *_ = smoothed_loss(net.head, net.head_parameters(), logits_NV, labels_N, smoothing=0.1, chunk=4)
    torch.testing.assert_close(loss, F.cross_entropy(logits_NV, labels_N, label_smoothing=0.1, reduction="sum"))
    loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@torch.no_grad()
def decodes(net, tgt_BT):
    whole_BTV, decoding = net(tgt=tgt_BT), incremental.start(net, {}, 5, sentences=3)
    for position in range(5):
        x_BD, decoding = incremental.step(net, tgt_BT[:, position], decoding)
        torch.testing.assert_close(net.head(x_BD), whole_BTV[:, position], **CLOSE)
