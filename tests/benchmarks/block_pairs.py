"""Pair each block with the layer of torch or of Hugging Face it was tested with, for tests/benchmarks/blocks.py.

A maker takes the width, the number of heads and the length. It returns a layer x_BND -> y_BND. Every step includes the
library's computations outside its layer, such as rotary angles. Every step of our blocks includes them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DebertaV2Config,
    DeepseekV2Config,
    DeepseekV32Config,
    DiffLlamaConfig,
    Gemma2Config,
    GptOssConfig,
    KimiLinearConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    RecurrentGemmaConfig,
    T5Config,
    xLSTMConfig,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.blocks import loops

Layer = Callable[[Tensor], Tensor]
Maker = Callable[[int, int, int], Layer]
ROTARY = {"position": "rotary"}
CAUSAL = {"mask": "causal"}
PLAIN = {**CAUSAL, **ROTARY, "bias": False}
RADIUS = 128  # set r of restricted attention
SEGMENTS = {"segment": RADIUS // 2, "memory": RADIUS // 2}
SPARSE = {"d_query": 192, "top_k": RADIUS, "index_heads": 4, "d_index": 32}
BLOCKS = {**CAUSAL, "selection": "top_blocks"}
FORGETTING = {**CAUSAL, "forget_gate": True}
CHANNELS = {"decay": "channel"}
STEPS = {"steps": 2, "beta_max": 2.0}
LIGHTNING = {
    "slope": 1.0,
    "rotate": False,
    "qkv_activation": "silu",
    "out_norm": "rmsnorm",
    "gate_activation": "sigmoid",
}


def ours(block: str, **arguments: Any) -> Maker:
    """Return a maker of `block`, the only node of a model in training mode without dropout.

    The first call at a length computes its keep mask; later calls reuse it.
    """

    def make(width: int, heads: int, n: int) -> Layer:
        network = network_of(block, width, heads, arguments)
        call = network.all_calls[-1]
        keep_masks = cache(lambda length: network.begin({"x": torch.zeros(1, length, width)})[1])
        return lambda x_BND: call({"x": x_BND}, keep_masks(x_BND.shape[1]))

    return make


def network_of(block: str, width: int, heads: int, arguments: Mapping[str, Any]) -> Network:
    """Return a model of one block, with the address `node`."""
    args = {"heads": heads, "d_ff": 4 * width, "r": RADIUS, "d_model": width, "d_inner": 2 * width}
    graph = {"node": {"block": block, "in": "x", **arguments}}
    return build_network(check_model({"inputs": {"x": f"B N {width}"}, "args": args, "graph": graph}), seed=1)


def named(name: str) -> Callable[[Maker], Maker]:
    """Return a decorator that stores the name of a maker for the table."""

    def set_name(maker: Maker) -> Maker:
        maker.__doc__ = name
        return maker

    return set_name


def rotary_attention(kind: type, config_kind: type, implementation: str = "sdpa", **options: Any) -> Maker:
    """Return a maker of a causal attention layer of the Llama family, with its rotary angles."""

    @named(f"transformers {kind.__name__} ({implementation})")
    def make(width: int, heads: int, n: int) -> Layer:
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads}
        config = config_kind(**{**sizes, "head_dim": width // heads, "attn_implementation": implementation, **options})
        layer = kind(config, 0).train()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=width**-0.5)  # initialise all: the library leaves some uninitialised
        half = kind is GptOssAttention
        angles = GptOssRotaryEmbedding(config) if half else LlamaRotaryEmbedding(LlamaConfig(**sizes))
        positions_1N = torch.arange(n)[None]
        mask_11NN = None
        if implementation != "sdpa":
            mask_11NN = torch.zeros(1, 1, n, n).masked_fill(future(n), -torch.inf)
        return lambda x: layer(x, position_embeddings=angles(x, positions_1N), attention_mask=mask_11NN)[0]

    return make


def future(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@named("torch MultiheadAttention")
def multihead(width: int, heads: int, n: int) -> Layer:
    layer = nn.MultiheadAttention(width, heads, batch_first=True)
    return lambda x: layer(x, x, x, need_weights=False)[0]


@named("torch MultiheadAttention, causal")
def causal_multihead(width: int, heads: int, n: int) -> Layer:
    layer, mask = nn.MultiheadAttention(width, heads, batch_first=True), future(n)
    return lambda x: layer(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]


@named("transformers DeepseekV2Attention (sdpa)")
def deepseek(width: int, heads: int, n: int) -> Layer:
    d = width // heads
    config = DeepseekV2Config(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None, kv_lora_rank=4 * d,
        qk_nope_head_dim=d, qk_rope_head_dim=d // 2, v_head_dim=d, attn_implementation="sdpa",
    )  # fmt: skip
    layer, angles = DeepseekV2Attention(config, 0).train(), DeepseekV2RotaryEmbedding(config)
    return lambda x: layer(x, attention_mask=None, position_embeddings=angles(x, torch.arange(n)[None]))[0]


@named("transformers T5Attention")
def t5(width: int, heads: int, n: int) -> Layer:
    config = T5Config(
        d_model=width, num_heads=heads, d_kv=width // heads, dropout_rate=0.0, attn_implementation="eager"
    )
    layer = T5Attention(config, has_relative_attention_bias=True).train()
    return lambda x: layer(x)[0]


@named("transformers MixtralSparseMoeBlock")
def mixtral(width: int, heads: int, n: int) -> Layer:
    config = MixtralConfig(
        hidden_size=width, intermediate_size=4 * width, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=heads, router_jitter_noise=0.0,
    )  # fmt: skip
    layer = MixtralSparseMoeBlock(config).train()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return lambda x: layer(x)[0].view_as(x)


@named("transformers Qwen3NextGatedDeltaNet")
def delta_net(width: int, heads: int, n: int) -> Layer:
    K = width // heads
    config = Qwen3NextConfig(
        hidden_size=width, num_hidden_layers=1, linear_num_value_heads=heads, linear_num_key_heads=heads,
        linear_key_head_dim=K, linear_value_head_dim=K, linear_conv_kernel_dim=4, layer_types=["linear_attention"],
    )  # fmt: skip
    return Qwen3NextGatedDeltaNet(config, 0).train()


@named("transformers KimiLinearDeltaAttention")
def kimi_delta(width: int, heads: int, n: int) -> Layer:
    config = KimiLinearConfig(
        hidden_size=width, num_hidden_layers=1, linear_num_heads=heads, linear_head_dim=width // heads,
        linear_conv_kernel_dim=4, layer_types=["linear_attention"],
    )  # fmt: skip
    return KimiLinearDeltaAttention(config, 0).train()


@named("transformers MiniMaxLightningAttention")
def lightning(width: int, heads: int, n: int) -> Layer:
    config = MiniMaxConfig(hidden_size=width, num_attention_heads=heads, head_dim=width // heads, num_hidden_layers=1)
    layer = MiniMaxLightningAttention(config, 0).train()
    return lambda x: layer(x, None, None)[0]


@named("transformers DisentangledSelfAttention")
def deberta(width: int, heads: int, n: int) -> Layer:
    rows = 512
    config = DebertaV2Config(
        hidden_size=width, num_attention_heads=heads, relative_attention=True, pos_att_type=["p2c", "c2p"],
        share_att_key=True, max_relative_positions=rows // 2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    layer, table_RD = DisentangledSelfAttention(config).train(), nn.Parameter(torch.randn(rows, width))
    mask_11NN = torch.ones(1, 1, n, n, dtype=torch.bool)
    return lambda x: layer(x, mask_11NN, rel_embeddings=table_RD)[0]


@named("transformers DeepseekV32Attention (sdpa); its indexer is not trained")
def sparse_deepseek(width: int, heads: int, n: int) -> Layer:
    d = width // heads
    config = DeepseekV32Config(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=SPARSE["d_query"],
        kv_lora_rank=4 * d, qk_nope_head_dim=d, qk_rope_head_dim=d // 2, v_head_dim=d, index_topk=SPARSE["top_k"],
        index_n_heads=SPARSE["index_heads"], index_head_dim=SPARSE["d_index"], attn_implementation="sdpa",
        num_hidden_layers=1,
    )  # fmt: skip
    layer, angles = DeepseekV32Attention(config, 0).train(), DeepseekV32RotaryEmbedding(config)
    positions_1N, mask_11NN = torch.arange(n)[None], torch.zeros(1, 1, n, n).masked_fill(future(n), -torch.inf)
    return lambda x: layer(x, angles(x, positions_1N), mask_11NN, position_ids=positions_1N)[0]


@named("transformers xLSTMLayer")
def matrix_lstm(width: int, heads: int, n: int) -> Layer:
    layer = xLSTMLayer(xLSTMConfig(hidden_size=width, num_heads=heads, num_hidden_layers=1, qk_dim_factor=1.0)).train()
    return lambda x: layer(x)[0]


@named("transformers MambaMixer, a loop over positions")
def mamba(width: int, heads: int, n: int) -> Layer:
    return MambaMixer(MambaConfig(hidden_size=width, expand=2, state_size=16, num_hidden_layers=1), 0).train()


@named("transformers Mamba2Mixer")
def mamba2(width: int, heads: int, n: int) -> Layer:
    config = Mamba2Config(
        hidden_size=width, expand=2, num_heads=heads, head_dim=2 * width // heads, state_size=128, n_groups=1,
        num_hidden_layers=1,
    )  # fmt: skip
    return Mamba2Mixer(config, 0).train()


@named("transformers RecurrentGemmaRglru, a loop over positions")
def gated_recurrence(width: int, heads: int, n: int) -> Layer:
    layer = RecurrentGemmaRglru(RecurrentGemmaConfig(hidden_size=width, lru_width=width, num_attention_heads=heads))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    positions_1N = torch.arange(n)[None]

    def run(x_BND: Tensor) -> Tensor:
        layer.recurrent_states = None  # it keeps the states of the previous call
        y_BND: Tensor = layer(x_BND, positions_1N)
        return y_BND

    return run


def recurrent(kind: type[nn.RNNBase]) -> Maker:
    @named(f"torch {kind.__name__}")
    def make(width: int, heads: int, n: int) -> Layer:
        layer = kind(width, width, batch_first=True)
        return lambda x: layer(x)[0]

    return make


def convolution(groups_of: int) -> Maker:
    @named("masked_fill, torch Conv1d")
    def make(width: int, heads: int, n: int) -> Layer:
        layer = nn.Conv1d(width, width, 3, padding=1, groups=width if groups_of else 1)
        padding_BND = torch.zeros(1, n, 1, dtype=torch.bool)
        return lambda x: layer(x.masked_fill(padding_BND, 0).mT).mT

    return make


@named("torch Linear, ReLU, Linear")
def feed_forward(width: int, heads: int, n: int) -> Layer:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


@named("transformers LlamaMLP")
def llama_mlp(width: int, heads: int, n: int) -> Layer:
    return LlamaMLP(LlamaConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width))


def norm(kind: type) -> Maker:
    @named(f"{kind.__module__.split('.')[0]} {kind.__name__}")
    def make(width: int, heads: int, n: int) -> Layer:
        layer: Layer = kind(width)
        return layer

    return make


LATENT = {
    "d_latent": "4*(d_model//heads)",
    "d_head": "d_model//heads",
    "d_turned": "d_model//heads//2",
    "d_value": "d_model//heads",
}
CAP = {"scores": {"block": "softcap", "cap": 50.0}}

PAIRS: dict[str, tuple[Maker, Maker]] = {
    "attention": (ours("attention"), multihead),
    "attention, causal": (ours("attention", **CAUSAL), causal_multihead),
    "attention, rotary": (ours("attention", **PLAIN), rotary_attention(LlamaAttention, LlamaConfig)),
    "attention, grouped": (
        ours("attention", **PLAIN, kv_heads=2),
        rotary_attention(LlamaAttention, LlamaConfig, num_key_value_heads=2),
    ),
    "attention, softcap": (ours("attention", **PLAIN, **CAP), rotary_attention(Gemma2Attention, Gemma2Config, "eager")),
    "attention, sink": (
        ours("attention", **PLAIN, scores="sink"),
        rotary_attention(GptOssAttention, GptOssConfig, "eager"),
    ),
    "attention, relative_bias": (ours("attention", bias=False, position="relative_bias"), t5),
    "attention, norms": (ours("attention", qk_norm="rmsnorm", **PLAIN), rotary_attention(Qwen3Attention, Qwen3Config)),
    "attention, joint norms": (
        ours("attention", qk_norm="rmsnorm", qk_norm_kind="joint", **PLAIN),
        rotary_attention(Olmo2Attention, Olmo2Config),
    ),
    "attention, bias qkv": (
        ours("attention", bias="qkv", **CAUSAL, **ROTARY),
        rotary_attention(Qwen2Attention, Qwen2Config),
    ),
    "differential_attention": (
        ours("differential_attention", **PLAIN, heads="heads//2"),
        rotary_attention(DiffLlamaAttention, DiffLlamaConfig, "eager"),
    ),
    "latent_attention": (ours("latent_attention", **CAUSAL, **LATENT), deepseek),
    "sparse_latent_attention": (ours("sparse_latent_attention", **CAUSAL, **LATENT, **SPARSE), sparse_deepseek),
    "disentangled_attention": (ours("disentangled_attention"), deberta),
    "ffn": (ours("ffn"), feed_forward),
    "gated_ffn": (ours("gated_ffn", bias=False), llama_mlp),
    "moe, gated": (ours("moe", gated=True, activation="silu", experts=4), mixtral),
    "layernorm": (ours("layernorm"), norm(nn.LayerNorm)),
    "rmsnorm": (ours("rmsnorm"), norm(nn.RMSNorm)),
    "unit_offset_rmsnorm": (ours("unit_offset_rmsnorm"), norm(Gemma2RMSNorm)),
    "rnn": (ours("rnn", **CAUSAL), recurrent(nn.RNN)),
    "gru": (ours("gru", **CAUSAL), recurrent(nn.GRU)),
    "lstm": (ours("lstm", **CAUSAL), recurrent(nn.LSTM)),
    "convolution": (ours("convolution", kernel_size=3), convolution(0)),
    "depthwise_conv": (ours("depthwise_conv", kernel_size=3), convolution(1)),
    "gated_delta_rule": (ours("gated_delta_rule"), delta_net),
    "gated_delta_rule, channel": (ours("gated_delta_rule", decay="channel"), kimi_delta),
    "retention, lightning": (ours("retention", **LIGHTNING), lightning),
    "mlstm": (ours("mlstm"), matrix_lstm),
    "mamba": (ours("mamba"), mamba),
    "mamba2": (ours("mamba2"), mamba2),
    "rg_lru": (ours("rg_lru"), gated_recurrence),
}

Loop = Callable[[Any, Tensor], Tensor]
Looped = tuple[str, Mapping[str, Any], Loop, int]  # the block, its arguments, the loop, the largest practical length


def rows(loop: Callable[[Any, Tensor], Tensor]) -> Loop:
    """Return a loop over the rows of a batch, from a loop over the positions of a row."""
    return lambda own, x_BND: torch.stack([loop(own, x_ND) for x_ND in x_BND])


LOOPED: dict[str, Looped] = {
    "retention": ("retention", {}, rows(loops.retention), 8192),
    "retention, lightning": (
        "retention",
        LIGHTNING,
        rows(partial(loops.retention, **{**LIGHTNING, "out_norm": Part("rmsnorm")})),
        8192,
    ),
    "gated_delta_rule": ("gated_delta_rule", {}, loops.delta_rule, 8192),
    "gated_delta_rule, channel": ("gated_delta_rule", CHANNELS, loops.delta_rule, 8192),
    "gated_delta_rule, steps": ("gated_delta_rule", STEPS, loops.delta_rule, 8192),
    "mlstm": ("mlstm", {}, loops.matrix_lstm, 8192),
    "rwkv7": ("rwkv7", {}, loops.time_mixing, 8192),
    "segment_attention": ("segment_attention", {**CAUSAL, **SEGMENTS}, loops.segments, 8192),
    "memory_attention": ("memory_attention", CAUSAL, rows(loops.with_memory), 2048),
    "attention, forget_gate": ("attention", FORGETTING, rows(loops.forgetting), 2048),
    "contextual_attention": ("contextual_attention", CAUSAL, rows(loops.contextual), 2048),
    "attention, top_blocks": (
        "attention",
        BLOCKS,
        rows(lambda own, x: loops.chosen_blocks(own, x, True, range(len(x)))),
        512,
    ),
    "native_sparse_attention": (
        "native_sparse_attention",
        CAUSAL,
        rows(lambda own, x: loops.native_sparse(own, x, range(len(x)))),
        512,
    ),
}


def looped(block: str, arguments: Mapping[str, Any], loop: Loop) -> Maker:
    """Return a maker of the loop of a block that the tests use, with the weights of a new block."""

    @named("a loop")
    def make(width: int, heads: int, n: int) -> Layer:
        own = network_of(block, width, heads, arguments).get_submodule("node.block")
        return lambda x_BND: loop(own, x_BND)

    return make


for name, (block, arguments, loop, _) in LOOPED.items():
    PAIRS[f"{name}, loop"] = ours(block, **arguments), looped(block, arguments, loop)
LONGEST = {f"{name}, loop": longest for name, (*_, longest) in LOOPED.items()} | {"mamba": 8192, "rg_lru": 8192}

LINEAR: dict[str, Maker] = {
    "rotary": ours("rotary"),
    "restricted_attention": ours("restricted_attention"),
    "restricted_global_attention": ours("restricted_global_attention"),
    "restricted_shared_attention": ours("restricted_shared_attention", k="x", v="x"),
    "dilated_attention": ours("dilated_attention"),
    "segment_attention": ours("segment_attention", **SEGMENTS),
    "retention": ours("retention"),
    "retention, lightning": ours("retention", **LIGHTNING),
    "gated_delta_rule": ours("gated_delta_rule"),
    "gated_delta_rule, channel": ours("gated_delta_rule", **CHANNELS),
    "gated_delta_rule, steps": ours("gated_delta_rule", **STEPS),
    "mlstm": ours("mlstm"),
    "rwkv7": ours("rwkv7"),
    "mamba": ours("mamba"),
    "mamba2": ours("mamba2"),
    "mamba3": ours("mamba3"),
    "rg_lru": ours("rg_lru"),
    "rnn": ours("rnn", **CAUSAL),
    "gru": ours("gru", **CAUSAL),
    "lstm": ours("lstm", **CAUSAL),
    "convolution": ours("convolution", kernel_size=3),
    "depthwise_conv": ours("depthwise_conv", kernel_size=3),
}


def mixers() -> dict[str, Maker]:
    """Return a maker of each registered branch block that reads other positions, causal where it can be, and of variants.

    The variants are MoBA, forgetting attention, lightning attention, Kimi Delta Attention and Gated DeltaProduct.

    Ports that a block needs besides its first read the same input.
    """
    sizes = {"kernel_size": 4, **LATENT, **SPARSE, "segment": RADIUS, "memory": RADIUS}
    makers = {name: ours(block, **arguments) for name, (block, arguments, *_) in LOOPED.items() if ", " in name}
    for name, info in REGISTRY.blocks.items():
        ports = [port for port in info.signature.ports[1:] if not port.optional]
        if info.branch and info.sees and all(port.axes[1] == info.signature.ports[0].axes[1] for port in ports):
            arguments = {key: value for key, value in {**sizes, **CAUSAL}.items() if key in info.arguments}
            makers[name] = ours(name, **arguments, **{port.name: "x" for port in ports})
    return {**makers, "segment_attention": ours("segment_attention", **CAUSAL, **SEGMENTS)}
