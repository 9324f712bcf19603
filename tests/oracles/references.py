"""Models of other libraries, tiny and random; the file of the same name next to this one describes each in our language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
import yaml
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    ElectraConfig,
    ElectraForMaskedLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MptConfig,
    MptForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

import tfm_blocks as tfm
from tfm_blocks.data.layout import BOS, EOS, PAD
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.weights import Conversion, Row, read_weight_table
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import expect_weights, fill, weights_of

HERE = Path(__file__).parent
SIZES = {"d_model": 16, "d_ff": 28, "heads": 4, "layers": 2, "vocab": 37}
IDS = {"vocab_size": SIZES["vocab"], "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
PAIRS = {
    **IDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28, "decoder_ffn_dim": 28, "decoder_start_token_id": BOS, "forced_eos_token_id": None,
    "max_position_embeddings": 20,
}  # fmt: skip
OTHER_SIZES = {"mpt": {"d_ff": 64}}  # its code has 4 times the width
T5 = {
    **IDS, "d_model": 16, "d_kv": 6, "d_ff": 28, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": BOS,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
PLAIN = {
    **IDS, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 20, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 3, "n_routed_experts": 5, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
GROUPED = {
    **LATENT, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
SHARED = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24,
    "norm_topk_prob": False, "mlp_only_layers": [0],
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CLAMPED = {
    "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 3, "rms_norm_eps": 1e-5,
    "swiglu_limit": 1.0, "max_position_embeddings": 256,
    "rope_parameters": {**YARN, "rope_theta": 15e4, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}  # fmt: skip
LONG = {"max_position_embeddings": 256, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}}
DELTA = {
    "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
}  # fmt: skip
CAPS = {
    "head_dim": 6, "tie_word_embeddings": True, "query_pre_attn_scalar": 9, "sliding_window": 3, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
}  # fmt: skip
GEMMA = {**PLAIN, **CAPS, "attn_logit_softcapping": 5.0}
WINDOWED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip

SIGMOID = {
    **GROUPED, "head_dim": 8, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
LONGROPE = {
    "rms_norm_eps": 1e-5, "original_max_position_embeddings": 5,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [1.25, 3.5]},
}  # fmt: skip
MOSAIC = {**IDS, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 20}

REFERENCES = {
    "marian": (MarianMTModel, MarianConfig, {**PAIRS, "activation_function": "swish", "scale_embedding": True}),
    "bart": (BartForConditionalGeneration, BartConfig, PAIRS),
    "m2m_100": (M2M100ForConditionalGeneration, M2M100Config, {**PAIRS, "scale_embedding": True, "tie_word_embeddings": True}),
    "t5": (T5ForConditionalGeneration, T5Config, T5),
    "t5_v1_1": (
        T5ForConditionalGeneration,
        T5Config,
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5gemma": (
        T5GemmaForConditionalGeneration,
        T5GemmaConfig,
        {**IDS, "encoder": GEMMA, "decoder": GEMMA, "decoder_start_token_id": BOS},
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {**IDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 28, "n_positions": 20}),
    "llama": (LlamaForCausalLM, LlamaConfig, {**PLAIN, "rms_norm_eps": 1e-5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, PLAIN),
    "olmo": (OlmoForCausalLM, OlmoConfig, {**PLAIN, "clip_qkv": 0.8}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {**PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config, {**PLAIN, **WINDOWED}),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config, {**PLAIN, **WINDOWED, "head_dim": 6, "sliding_window_pattern": None}),
    "cohere": (CohereForCausalLM, CohereConfig, {**PLAIN, "use_qk_norm": True, "logit_scale": 1.0, "tie_word_embeddings": True}),
    "hunyuan": (HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, {**PLAIN, "head_dim": 6}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**PLAIN, "head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**PLAIN, "rms_norm_eps": 1e-5, "num_local_experts": 4}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**PLAIN, **CAPS}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {**PLAIN, **WINDOWED, "head_dim": 6, "tie_word_embeddings": True, "query_pre_attn_scalar": 9, "rope_parameters": TWO_BASES},
    ),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {**PLAIN, **LATENT}),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**PLAIN, **GROUPED, **LONG}),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, {**PLAIN, **SIGMOID}),
    "glm4_moe_normed": (Glm4MoeForCausalLM, Glm4MoeConfig, {**PLAIN, **SIGMOID, "use_qk_norm": True}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {**PLAIN, **LONGROPE}),
    "mpt": (MptForCausalLM, MptConfig, {**MOSAIC, "attn_config": {"clip_qkv": 0.8}}),
    "dbrx": (DbrxForCausalLM, DbrxConfig, {
        **MOSAIC, "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 5e5},
        "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 28, "moe_num_experts": 5, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, {**PLAIN, **CLAMPED}),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {**PLAIN, **SHARED}),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {**PLAIN, **DELTA}),
}  # fmt: skip
READING = {
    **IDS, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 20,
}  # fmt: skip
ENCODERS = {
    "bert": (BertForMaskedLM, BertConfig, READING),
    "roberta": (RobertaForMaskedLM, RobertaConfig, {
        **READING, "max_position_embeddings": 22, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0,
    }),
    "electra": (ElectraForMaskedLM, ElectraConfig, {**READING, "embedding_size": 12}),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, {
        **READING, "num_hidden_layers": 7, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2,
    }),
}  # fmt: skip


@torch.no_grad()
def scatter(model: nn.Module) -> None:
    """Randomise all parameters, so that every weight has an effect.

    Maps are larger than embeddings, so that models with a shared matrix do not repeat their input.
    """
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights_of(model).items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "embed_positions" in name and not model.get_parameter(name).requires_grad:
            continue  # Marian's sines
        if name.endswith(("slope_rate", "_decay")):
            continue  # constants of lightning attention
        if not tensor.ndim:
            continue  # the constants of xIELU
        if tensor.ndim > 1 and len(tensor) > 1:
            # larger coefficients of alternating updates multiply rounding errors from layer to layer
            wide = 1 if len(tensor) == SIZES["vocab"] or name.endswith("_coefs.weight") else 4
            tensor.copy_(wide * noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.add_(0.1 * noise)


def put(network: Network, weights: Mapping[str, torch.Tensor]) -> None:
    """Load the weights, which must match the network's exactly. Raises RunError."""
    expect_weights(network, weights, "the table")
    fill(network, weights)


def rows_of(name: str) -> Sequence[Row]:
    """Return the table of a published family, or the file of this name next to this one."""
    path = HERE / "weights" / f"{name}.yaml"
    family = {"t5": "t5_v1"}.get(name, name)
    return read_weight_table(yaml.safe_load(path.read_text("utf-8"))) if path.is_file() else families()[family].weights


@cache
def both(name: str) -> tuple[Network, nn.Module]:
    """Return our network and their model of this name, with the same weights by the table of this name."""
    model, config, sizes = REFERENCES[name]
    torch.manual_seed(1)
    theirs = model(config(**sizes)).eval()
    if name == "t5_v1_1":  # transformers ties its two matrices, the published weights have both
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    scatter(theirs)
    knobs = SIZES | OTHER_SIZES.get(name, {})
    ours = tfm.build(str(HERE / f"{name}.yaml"), **knobs)
    weights = weights_of(theirs)
    put(ours, Conversion(rows_of(name), knobs).to_ours(weights)[0])
    return ours.eval(), theirs
