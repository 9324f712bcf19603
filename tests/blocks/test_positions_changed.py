"""Blocks that add, remove or merge positions: learned tokens, and convolutions with a stride."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tests.network.small import network
from tfm_blocks.blocks.mixing import Pool
from tfm_blocks.errors import ConfigError
from tfm_blocks.network import incremental

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
EMBED = {"block": "embedding", "in": "src"}
TOKENS = {"block": "learned_tokens", "tokens": 3}
DROP = {"block": "drop_tokens", "tokens": 3}
ALONE = {"block": "concat_sequence"}  # of one sequence, so without effect
OUT = {"block": "unembed"}
READERS = [
    {"block": "attention", "position": "rotary"},
    {"block": "restricted_attention", "r": 3},
    {"block": "depthwise_conv", "kernel_size": 3},
    {"block": "sinusoidal"},
    {"block": "learned_position", "max_length": 12},
    {"block": "lstm"},
]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def strided(kernel_size, stride, d_out=8):
    return {"block": "strided_convolution", "kernel_size": kernel_size, "stride": stride, "d_out": d_out}


def ids(rows, length, seed=0):
    return torch.randint(4, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


def axis_of(net, node):
    return str(next(each for each in net.spec.nodes if each.address == node).shape[1])


@torch.no_grad()
def test_learned_tokens_come_first_and_are_never_padding():
    net = network({"src": "B S"}, {"emb": EMBED, "mem": TOKENS, "attn": {"block": "attention"}, "out": OUT})
    src_BS = F.pad(ids(2, 4), (0, 2))
    assert axis_of(net, "out") == "3+S"
    masks = net.keep_masks({"src": src_BS})
    assert masks.masks["3+S"].tolist() == [[True] * 7 + [False] * 2] * 2 and "3+S" in masks.right_padded
    values, keeps = net.begin({"src": src_BS})
    x_BSD = values["emb"] = net.calls[0](values, keeps)
    own_BMD = torch.cat([net["mem"].block.weight.expand(2, -1, -1), x_BSD], 1)
    torch.testing.assert_close(net.calls[1](values, keeps), own_BMD)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader["block"])
@pytest.mark.parametrize("changed", [TOKENS, strided(3, 2), strided(2, 2), strided(4, 3)], ids=str)
@torch.no_grad()
def test_padding_after_or_before_a_sequence_changes_nothing(changed, reader):
    net = network({"src": "B S"}, {"emb": EMBED, "changed": changed, "reader": reader, "out": OUT})
    src_BS = ids(2, 5)
    alone = net(src=src_BS)
    torch.testing.assert_close(net(src=F.pad(src_BS, (0, 3)))[:, : alone.shape[1]], alone, **CLOSE)
    before_BS = F.pad(src_BS, (3, 0), value=7)
    keep = {"src": (torch.arange(8) >= 3).expand(2, -1)}
    kept = net.keep_masks({"src": before_BS}, keep).masks[axis_of(net, "out")]
    torch.testing.assert_close(net(src=before_BS, keep=keep)[kept].view_as(alone), alone, **CLOSE)


@pytest.mark.parametrize("changed", [strided(3, 1), ALONE], ids=["stride 1", "one sequence"])
@torch.no_grad()
def test_a_block_that_keeps_the_axis_keeps_the_place_of_the_padding(changed):
    net = network({"src": "B S"}, {"emb": EMBED, "changed": changed, "attn": {"block": "attention"}, "out": OUT})
    assert net.spec.sink.shape[1] == net.spec.input("src").shape[1]
    src_BS, keep_BS = ids(1, 6), torch.tensor([[False, True, True, False, True, True]])
    torch.testing.assert_close(net(src=src_BS, keep={"src": keep_BS})[keep_BS], net(src=src_BS[keep_BS][None])[0])


@torch.no_grad()
def test_dropped_tokens_leave_the_axis_and_padding_of_the_input():
    attn = {"block": "attention", "position": "rotary"}
    net = network({"src": "B S"}, {"emb": EMBED, "mem": TOKENS, "attn": attn, "drop": DROP, "out": OUT})
    assert net.spec.sink.shape[1] == net.spec.input("src").shape[1]
    src_BS, keep_BS = ids(2, 6), torch.tensor([[False, True, True, False, True, True], [True] * 6])
    first_1NV = net(src=src_BS[:1, keep_BS[0]])
    logits_BSV = net(src=src_BS, keep={"src": keep_BS})
    torch.testing.assert_close(logits_BSV[:1, keep_BS[0]], first_1NV, **CLOSE)
    torch.testing.assert_close(logits_BSV[1:], net(src=src_BS[1:]), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("changed", [{"mem": TOKENS}, {"down": strided(3, 2)}, {"mem": TOKENS, "down": strided(4, 4)}])
def test_a_decoder_reads_changed_positions_in_steps_as_at_once(changed):
    graph = {
        "src_emb": EMBED,
        **changed,
        "attn": {"block": "attention"},
        "emb": {"block": "embedding", "in": "tgt"},
        "self": {"block": "attention", "mask": "causal"},
        "cross": {"block": "attention", "kv": "attn"},
        "logits": OUT,
    }
    net = network({"src": "B S", "tgt": "B T"}, graph)
    sources, tgt_BT = {"src": F.pad(ids(2, 5), (0, 3))}, ids(2, 5, 2)
    whole_BTV = net(**sources, tgt=tgt_BT)
    decoding = incremental.spread(incremental.start(net, sources, 5), 2)
    for position in range(5):
        x_RD, decoding = incremental.step(net, tgt_BT[:, position].repeat_interleave(2), decoding)
        torch.testing.assert_close(net.head(x_RD), whole_BTV[:, position].repeat_interleave(2, 0), **CLOSE)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (7, 2), (4, 4), (2, 5)])
@torch.no_grad()
def test_a_strided_convolution_equals_torchs_on_each_sequence(kernel, stride):
    net = network({"src": "B S 6"}, {"down": {**strided(kernel, stride), "in": "src"}, "id": {"block": "layernorm"}})
    block, x_BSD = net["down"].block, torch.randn(2, 9, 6)
    reference = nn.Conv1d(6, 8, kernel, stride, padding=max(0, (kernel - stride + 1) // 2))
    reference.weight.copy_(block.map.weight.view(8, 6, kernel))
    reference.bias.copy_(block.map.bias)
    for length in (9, 6, 1):
        keep_BS = (torch.arange(9) < length).expand(2, -1)
        own = block(x_BSD, keep_BN=keep_BS)[:, : -(-length // stride)]
        room = F.pad(x_BSD[:, :length], (0, 0, 0, kernel))  # as many zeros after the end as the kernel can read
        torch.testing.assert_close(own, reference(room.mT).mT[:, : own.shape[1]])


@torch.no_grad()
def test_the_maximum_length_counts_positions_of_the_input():
    bounded = {"block": "learned_position", "max_length": 10}
    longest = {
        name: network({"src": "B S"}, {"emb": EMBED, **changed, "pos": bounded, "out": OUT}).longest("src").tokens
        for name, changed in {"tokens": {"mem": TOKENS}, "stride": {"down": strided(3, 4)}}.items()
    }
    assert longest == {"tokens": 7, "stride": 40}


@pytest.mark.parametrize(
    ("inputs", "graph", "rule"),
    [
        ("src", {"mem": TOKENS, "drop": {**DROP, "tokens": 2}}, "cannot remove 2 positions from 3+S, which does not"),
        ("src", {"drop": DROP}, "cannot remove 3 positions from S, which does not begin with 3 added ones"),
        ("src", {"down": {**strided(3, 0)}}, "the kernel moves on by at least one position"),
        ("tgt", {"mem": TOKENS}, "changes the positions of tgt, which is decoded token by token"),
        ("tgt", {"down": strided(3, 2)}, "changes the positions of tgt, which is decoded token by token"),
    ],
)
def test_wrong_uses_are_refused(inputs, graph, rule):
    model = {"emb": {"block": "embedding", "in": inputs}, **graph, "out": OUT}
    with pytest.raises(ConfigError) as error:
        network({inputs: "B S"}, model)
    assert any(rule in problem.rule for problem in error.value.problems), error.value


@torch.no_grad()
def test_the_stem_of_whispers_encoder():
    """Whisper's two convolutions read 80 mel bands and halve the number of frames."""
    config = WhisperConfig(d_model=16, encoder_layers=0, encoder_attention_heads=2, num_mel_bins=80)
    theirs = WhisperEncoder(config).eval()
    gelu = {"block": "gelu"}
    graph = {
        "one": {**strided(3, 1, 16), "in": "audio"},
        "gelu": gelu,
        "two": strided(3, 2, 16),
        "gelu2": gelu,
        "pos": {"block": "learned_position", "max_length": 1500},
        "norm": {"block": "layernorm"},
    }
    ours = network({"audio": "B S 80"}, graph)
    for node, conv in (("one", theirs.conv1), ("two", theirs.conv2)):
        ours[node].block.map.weight.copy_(conv.weight.flatten(1))
        ours[node].block.map.bias.copy_(conv.bias)
    ours["pos"].block.weight.copy_(theirs.embed_positions.weight)
    mel_BCN = torch.randn(2, 80, 3000)
    torch.testing.assert_close(ours(audio=mel_BCN.mT), theirs(mel_BCN).last_hidden_state, **CLOSE)


@torch.no_grad()
def test_a_vision_transformer_reads_patches_and_a_class_token():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    theirs = ViTModel(
        ViTConfig(**sizes, image_size=32, patch_size=8, layer_norm_eps=1e-5), add_pooling_layer=False
    ).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    layer = {"attn": {"block": "attention", "bias": True}, "ffn": {"block": "ffn", "activation": "gelu"}}
    graph = {
        "patches": {"block": "linear", "d_out": 16, "in": "image"},
        "class": {"block": "learned_tokens", "tokens": 1},
        "pos": {"block": "learned_position", "max_length": 17},
        "encoder": {"repeat": 2, "layer": layer},
    }
    ours = network({"image": "B S 192"}, graph, add_norm="pre", d_model=16, d_ff=32)
    patches, last = ours["patches"].block, ours["encoder"]["last"].norm
    pairs = [(patches, "embeddings.patch_embeddings.projection"), (last, "layernorm")]
    for number, own in ((number, ours["encoder"][str(number)]) for number in range(2)):
        attn, ffn = own["attn"], own["ffn"]
        names = {"layernorm_before": attn.pre.norm, "attention.o_proj": attn.block.out, "layernorm_after": ffn.pre.norm}
        names |= {"mlp.fc1": ffn.block.inner, "mlp.fc2": ffn.block.out}
        pairs += [(module, f"layers.{number}.{name}") for name, module in names.items()]
        qkv = [theirs.get_submodule(f"layers.{number}.attention.{letter}_proj") for letter in "qkv"]
        attn.block.qkv.weight.copy_(torch.cat([linear.weight for linear in qkv]))
        attn.block.qkv.bias.copy_(torch.cat([linear.bias for linear in qkv]))
    for module, name in pairs:
        module.weight.copy_(theirs.get_parameter(f"{name}.weight").view_as(module.weight))
        module.bias.copy_(theirs.get_parameter(f"{name}.bias"))
    ours["class"].block.weight.copy_(theirs.embeddings.cls_token[0])
    ours["pos"].block.weight.copy_(theirs.embeddings.position_embeddings[0])
    pixels_BCHW = torch.randn(2, 3, 32, 32)
    patches_BSD = F.unfold(pixels_BCHW, 8, stride=8).mT
    torch.testing.assert_close(ours(image=patches_BSD), theirs(pixels_BCHW).last_hidden_state, **CLOSE)


POOLED = {
    "mean": lambda rows: [sum(column) / len(column) for column in zip(*rows, strict=True)],
    "max": lambda rows: [max(column) for column in zip(*rows, strict=True)],
    "first": lambda rows: rows[0],
}


@pytest.mark.parametrize("kind", [*POOLED, "none"])
def test_pooling_gives_every_position_a_value_of_the_kept_ones(kind):
    """Padding comes after, before and between the kept positions, whose values are negative; the last row has no other."""
    keep_BN = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    x_BND = torch.where(keep_BN[..., None], -1 - torch.rand(5, 5, 3), 9.0)
    y_BND = Pool(kind=kind)(x_BND, keep_BN=keep_BN)
    for x_ND, y_ND, keep_N in zip(x_BND, y_BND, keep_BN, strict=True):
        kept = x_ND[keep_N].tolist()
        pooled_D = torch.tensor(POOLED[kind](kept) if kind != "none" and kept else [0.0] * 3)
        torch.testing.assert_close(y_ND, x_ND if kind == "none" else pooled_D.expand(5, 3))
