"""Tiny, random models of every family that has a table, by the sizes of their config classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from tests.exchange.published import VOCAB, without_ends, write_tokenizer
from tests.oracles.references import scatter
from tfm_blocks.exchange.family import families

SIZES = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 16, "intermediate_size": 28,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
HALF = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LOCAL = {"head_dim": 6, "sliding_window": 3, "num_hidden_layers": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
SIGMOID = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 2, "n_group": 3,
    "topk_group": 2, "routed_scaling_factor": 2.5, "num_hidden_layers": 3,
}  # fmt: skip
PAIRS = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28, "decoder_ffn_dim": 28, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
ROBERTA = {"max_position_embeddings": 50, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0}
GEMMA = {
    **SIZES,
    **LOCAL,
    "num_hidden_layers": 2,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 1.5,
}
# keys of config.json by family, in addition to SIZES
DOORS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": ROPE},
    "arcee": {},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2, "num_hidden_layers": 3},
    "bitnet": {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}},
    "blenderbot": PAIRS,
    "bloom": {},
    "camembert": ROBERTA,
    "cohere": {"logit_scale": 0.5, "rope_parameters": {**ROPE, "rope_theta": 5e5}},
    "cohere_plus": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"sliding_window": 3, "num_hidden_layers": 5, "logit_scale": 0.5},
    "dbrx": {
        "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 48, "attn_config": {"clip_qkv": 0.8, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 28, "moe_num_experts": 5, "moe_top_k": 2},
    },
    "deberta_v3": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 4,
        "position_biased_input": False, "max_relative_positions": -1, "max_position_embeddings": 9, "legacy": False,
    },
    "deepseek_v3": {
        **SIGMOID, "kv_lora_rank": 8, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 3,
        "num_key_value_heads": 4, "first_k_dense_replace": 2, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4},
    },
    "deepseek_v32": {
        **SIGMOID, "kv_lora_rank": 8, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 3,
        "num_key_value_heads": 4, "first_k_dense_replace": 2, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4},
        "index_topk": 3, "index_head_dim": 8, "index_n_heads": 24,  # with few heads, scores of 0 tie, and transformers drops one
    },
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 28},
    "electra_discriminator": {"embedding_size": 12},
    "electra_wide": {"embedding_size": 16},
    "electra_wide_discriminator": {"embedding_size": 16},
    "ernie4_5": {"head_dim": 6},
    "exaone4": LOCAL,
    "falcon": {"ffn_hidden_size": 28},
    "falcon_grouped": {"ffn_hidden_size": 28, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
    "gemma": {"head_dim": 6},
    "gemma3": {**LOCAL, "num_hidden_layers": 7, "query_pre_attn_scalar": 9},
    "gemma3n": {
        **LOCAL, "hidden_size": 32, "num_hidden_layers": 10, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 7, "laurel_rank": 5,
        "vocab_size_per_layer_input": 31, "altup_num_inputs": 3, "final_logit_softcapping": 5.0, "intermediate_size": [28, 20] + [28] * 8,
        "activation_sparsity_pattern": [0.8, 0.3] + [0.0] * 8,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 100.0}},
    },
    "glm": {"head_dim": 8, **HALF},
    "glm4": {"head_dim": 8, **HALF, "attention_bias": True},
    "glm4_moe": {**SIGMOID, "head_dim": 8, **HALF, "first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True},
    "gpt_bigcode": {"n_inner": 28},
    "gpt_neo": {"num_hidden_layers": 3, "attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 3},
    "gpt_neox": HALF,
    "gpt_oss": {
        **LOCAL, "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 1.0,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, "max_position_embeddings": 256,
    },
    "gptj": {"rotary_dim": 2, "n_inner": 28},
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 4.0},
    "hunyuan": {"head_dim": 6},
    "kimi_linear": {
        "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 8, "num_shared_experts": 2, "num_expert_group": 3, "topk_group": 2,
        "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 3, "num_hidden_layers": 6,
        "linear_num_heads": 3, "linear_head_dim": 5, "linear_conv_kernel_dim": 3,
    },
    "lfm2": {"num_hidden_layers": 3, "full_attn_idxs": [1]},
    "m2m_100": {**PAIRS, "pad_token_id": 1, "bos_token_id": 0},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 2, "conv_kernel": 3},
    "marian_separate": {
        **PAIRS, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB, "activation_function": "swish",
        "scale_embedding": True,
    },
    "mbart": PAIRS,
    "minimax": {
        "head_dim": 6, "num_local_experts": 5, "num_hidden_layers": 4, "block_size": 5, "linear_attn_alpha_factor": 1.5, "full_attn_alpha_factor": 1.7,
        "mlp_alpha_factor": 1.3, "linear_attn_beta_factor": 0.8, "full_attn_beta_factor": 1.1, "mlp_beta_factor": 0.9, "rms_norm_eps": 1e-3,
    },
    "mistral": {"sliding_window": None, "head_dim": 6},
    "mistral_window": {"sliding_window": 3},
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "attn_config": {"clip_qkv": 0.8}},
    "olmo": {"clip_qkv": 0.8},
    "olmo3": {"sliding_window": 3, "num_hidden_layers": 5},
    "openai_gpt": {"n_positions": 48},
    "opt": {"ffn_dim": 28, "word_embed_proj_dim": 16},
    "pegasus": {**PAIRS, "scale_embedding": True, "activation_function": "relu"},
    "phi": HALF,
    "phi3": HALF,
    "phi3_window": {**HALF, "sliding_window": 3},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 6},
    "qwen3_next": {
        **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 24, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-5,
    },
    "smollm3": {"num_hidden_layers": 5},
    "starcoder2": {"sliding_window": 3},
    "stablelm": {**HALF, "use_qkv_bias": True},
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA, "decoder_start_token_id": 1},
    "whisper": {**PAIRS, "max_target_positions": 48, "forced_eos_token_id": None, "begin_suppress_tokens": None},
    "xlm_roberta": ROBERTA,
    "xlstm": {  # transformers needs queries of 64n elements: its caches have them
        "hidden_size": 32, "num_heads": 4, "qk_dim_factor": 2.0, "v_dim_factor": 4.0, "ffn_proj_factor": 1.3, "ffn_round_up_to_multiple_of": 12,
        "gate_soft_cap": 5.0, "output_logit_soft_cap": 3.0, "norm_eps": 1e-3, "eps": 1e-2, "chunk_size": 4,
    },
}  # fmt: skip


def config_of(name: str) -> PretrainedConfig:
    """Return the config of a tiny model of a family."""
    kind = getattr(transformers, families()[name].architecture).config_class
    default = kind()
    known = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    return kind(**{**known, **DOORS[name]})


def sizes_of(name: str) -> dict[str, Any]:
    """Return config.json of a tiny model of a family."""
    model = families()[name]
    whole = json.loads(config_of(name).to_json_string(use_diff=False))
    return whole | {"architectures": [model.architecture]}


def door(name: str, folder: Path) -> nn.Module:
    """Write a random model of a family to a folder, and return it in evaluation mode."""
    torch.manual_seed(1)
    theirs: nn.Module = getattr(transformers, families()[name].architecture)(config_of(name)).eval()
    scatter(theirs)
    theirs.save_pretrained(folder)
    if not families()[name].encoder:
        without_ends(theirs, folder)
    write_tokenizer(folder)
    if name == "bitnet":  # only loading gives it the layers that round
        theirs = type(theirs).from_pretrained(folder).eval()
    return theirs
