"""Rows of the table of x-transformers in docs/coming-from.md compute what its own code computes with the same weights."""

import re

import pytest
import torch
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper

from tests.test_x_transformers import overrides_of
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model

WIDTH, HEADS, VOCAB = 32, 4, 30
LAYER = "model.graph.decoder.layer"
BASE = [
    *(f"d_model={WIDTH}", "d_ff=48", f"heads={HEADS}", f"vocab={VOCAB}", "layers=2"),
    *("model.graph.emb.scale=1", "model.graph.pos=null", "model.graph.logits.tie=null"),
    f"{LAYER}.ffn={{activation: gelu}}",
]
# a weight of theirs, and its name here; `self` and `ffn` are their layers 2 i and 2 i + 1
NAMES = {
    r"token_emb\.emb\.weight": "emb.block.weight",
    r"post_emb_norm\.gamma": "emb_norm.block.weight",
    r"to_logits\.weight": "logits.block.weight",
    r"attn_layers\.final_norm\.(?:gamma|g)": "decoder.last.norm.weight",
    r"(.*)\.0\.0\.(?:gamma|g)": r"\1.pre.norm.weight",
    r"(.*)\.0\.1\.gamma": r"\1.post.norm.weight",
    r"(.*)\.1\.to_(q|k|v|out)\.weight": r"\1.block.\2.weight",
    r"(.*)\.1\.mem_([kv])": r"\1.block.memory_\2",
    r"(.*)\.1\.to_v_gate\.(weight|bias)": r"\1.block.gate.\2",
    r"(.*)\.1\.head_scale_params": r"\1.block.gate.weight",
    r"(.*)\.1\.attend\.pre_softmax_talking_heads\.weight": r"\1.block.mix_scores",
    r"(.*)\.1\.attend\.post_softmax_talking_heads\.weight": r"\1.block.mix_weights",
    r"(.*)\.1\.ff\.0\.(?:0|proj)\.(weight|bias)": r"\1.block.inner.\2",
    r"(.*)\.1\.ff\.1\.gamma": r"\1.block.norm.weight",
    r"(.*)\.1\.ff\.[23]\.(weight|bias)": r"\1.block.out.\2",
    r"(.*)\.2\.residual_scale": r"\1.post.add.weight",
    r"(.*)\.2\.gru\.(weight|bias)_ih": r"\1.block.of_y.\2",
    r"(.*)\.2\.gru\.(weight|bias)_hh": r"\1.block.of_x.\2",
    r"attn_layers\.rel_pos\.relative_attention_bias\.weight": "decoder.*.self.block.position.weight",
    r"attn_layers\.rel_pos\.mlp\.(\d)(?:\.0)?\.(weight|bias)": r"decoder.*.self.block.position.maps.\1.\2",
}
# names of nodes that do the work of a part of `self`: the part
PLAIN = {
    r"normed\.block": "self.pre.norm",
    r"(query|key|value)\.block": lambda match: f"self.block.{match[1][0]}",
    r"self\.in_v\.block": "self.block.v",
    r"(self|ffn)\.a\.": r"\1.",
    r"gain$": "weight",
}
CASES = {
    "persistent memory": ([f"{LAYER}.self.memory=3"], {"attn_num_mem_kv": 3}),
    "ScaleNorm": ([], {"use_scalenorm": True}),
    "fixnorm, normalised embeddings": ([], {"l2norm_embed": True}),
    "norm after the embedding": (["model.graph.emb_norm.after=emb"], {"post_emb_norm": True}),
    "RMSNorm": (["model.args.norm={block: rmsnorm, eps: 1e-12}"], {"use_rmsnorm": True}),
    "RMSNorm without gains": (["model.args.norm={block: plain_rmsnorm, eps: 1e-12}"], {"use_simple_rmsnorm": True}),
    "GLU variants": ([], {"ff_glu": True}),
    "SwiGLU": ([f"{LAYER}.ffn.activation=silu"], {"ff_glu": True, "ff_swish": True}),
    "no bias in the feed-forward network": ([], {"ff_no_bias": True}),
    "ReLU²": ([], {"ff_relu_squared": True}),
    "explicit sparse transformer": ([f"{LAYER}.self.scores.k=3"], {"attn_sparse_topk": 3}),
    "talking heads": ([], {"attn_pre_talking_heads": True, "attn_post_talking_heads": True}),
    "one write-head": ([], {"attn_kv_heads": 1}),
    "gating of values": ([f"{LAYER}.self.gate={{block: sigmoid_gate, bias: true}}"], {"attn_gate_values": True}),
    "T5's relative bias": ([], {"rel_pos_bias": True}),
    "gated residual": (
        [
            "model.args.dropout=null",
            f"{LAYER}.ffn={{block: null, add_norm: none, join: gru_gate, parallel: "
            "{a: {block: ffn, activation: gelu, add_norm: {pre: [norm], post: []}}}}",
        ],
        {"gate_residual": True},
    ),
    "residual attention scores": ([], {"residual_attn": True}),
    "rotary embeddings": (
        [f"{LAYER}.self.position={{block: rotary, layout: pairs}}"],
        {"rotary_pos_emb": True, "rotary_emb_dim": WIDTH // HEADS},
    ),
    "xPos": (
        [f"{LAYER}.self.position={{block: xpos, layout: pairs}}"],
        {"rotary_xpos": True, "rotary_emb_dim": WIDTH // HEADS},
    ),
    "dynamic position bias": (
        [f"{LAYER}.self.position={{block: dynamic_bias, d_bias: 8, depth: 2}}"],
        {"dynamic_pos_bias": True},
    ),
    "ALiBi": ([], {"alibi_pos_bias": True}),
    "sandwich norm": ([], {"sandwich_norm": True}),
    "NormFormer: head scale": ([], {"attn_head_scale": True}),
    "NormFormer: scaled residual": ([], {"scale_residual": True}),
    "NormFormer: norm after the activation": ([], {"ff_post_act_ln": True}),
    "cosine similarity": ([], {"attn_qk_norm": True}),
    "grouped QK norm": (
        [f"{LAYER}.self.qk_norm.groups=2", f"{LAYER}.self.scores={{block: softmax, beta: 10}}"],
        {"attn_qk_norm": True, "attn_qk_norm_groups": 2},
    ),
    "value residual": ([], {"add_value_residual": True, "learned_value_residual_mix": False}),
}
WRAPPER = ("l2norm_embed", "post_emb_norm")


def ours_of(row, more):
    overrides = {text.partition("=")[0]: text for text in (*BASE, *overrides_of(row), *more)}
    config = compose_model("decoder_only", [*overrides.values()])
    return build_network(check_model(config.model, config.sources), seed=1).eval()


def theirs_of(options):
    layers = {name: value for name, value in options.items() if name not in WRAPPER}
    sizes = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": WIDTH // HEADS, "ff_mult": 1.5}
    wrapper = {name: value for name, value in options.items() if name in WRAPPER}
    network = TransformerWrapper(
        num_tokens=VOCAB,
        max_seq_len=64,
        use_abs_pos_emb=False,
        attn_layers=Decoder(**sizes, **layers),
        **wrapper,
    )
    for parameter in network.parameters():
        parameter.data.normal_(0, 0.3)
    return network.eval()


def converted(name: str, weight: Tensor) -> Tensor:
    """Return a weight of theirs in our form."""
    if name.endswith(("norm.gamma", "0.gamma", "0.1.gamma")) and name.startswith("attn_layers"):
        return weight + 1
    if name.endswith((".0.g", "norm.g")):
        return (weight + 1) * (WIDTH**0.5 if weight.numel() == 1 else 1)
    if "talking_heads" in name:  # they add the mixed scores
        return weight[:, :, 0, 0] + torch.eye(HEADS) * ("pre_softmax" in name)
    if "relative_attention_bias" in name:
        return weight * (WIDTH // HEADS) ** 0.5
    if name.endswith("gru.bias_hh"):  # our gate adds a `carry` of 2
        return weight - 2 * (torch.arange(len(weight)) // WIDTH == 1)
    if ".proj." in name:
        return torch.cat(weight.chunk(2)[::-1])
    return weight


def renamed(name: str) -> str:
    """Return our name of a weight of theirs."""
    name = re.sub(
        r"attn_layers\.layers\.(\d)", lambda m: f"decoder.{int(m[1]) // 2}.{('self', 'ffn')[int(m[1]) % 2]}", name
    )
    return next(re.sub(pattern, ours, name) for pattern, ours in NAMES.items() if re.fullmatch(pattern, name))


def copy_weights(network, reference):
    """Copy each weight of theirs. Of ours, only biases may have no counterpart; they become 0."""
    weights = {}
    for name, weight in reference.named_parameters():
        ours = renamed(name)
        for layer in "01" if "*" in ours else " ":
            weights[ours.replace("*", layer)] = converted(name, weight.detach())
    used = set()
    for name, parameter in network.named_parameters():
        plain = next((re.sub(of, to, name) for of, to in PLAIN.items() if re.search(of, name)), name)
        parts = [plain.replace("qkv", part) for part in "qkv"] if "qkv.weight" in plain else [plain]
        used.update(parts)
        if plain in weights or not plain.endswith("bias"):
            parameter.copy_(torch.cat([weights[part] for part in parts]).reshape(parameter.shape))
        else:
            parameter.zero_()
    assert weights.keys() <= used


@pytest.mark.grid
@pytest.mark.parametrize("row", CASES)
@torch.no_grad()
def test_a_row_computes_what_x_transformers_computes(row):
    torch.manual_seed(0)
    more, options = CASES[row]
    ours, reference = ours_of(row, more), theirs_of(options)
    copy_weights(ours, reference)
    ids = torch.stack([torch.randperm(VOCAB - 1)[:11] + 1 for _ in range(2)])  # without ties in top-k scores
    logits, expected = ours(tgt=ids), reference(ids)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
