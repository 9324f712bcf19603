"""Former names of blocks, which older models and runs use. New models write the block and its arguments."""

from __future__ import annotations

from typing import Any

import tfm_blocks.blocks.attention  # noqa: F401  registers the block
from tfm_blocks.registry.blocks import alias
from tfm_blocks.registry.values import Norm, Part

HEADS = ("heads", "kv_heads", "d_head", "mask", "position", "attention_dropout")
WITH_BIAS = (*HEADS, "bias")
WITH_SCORES = (*WITH_BIAS, "scores")
RMSNORM = Part("rmsnorm")
PLAIN_LAYERNORM = Part("plain_layernorm")
GATE = Part("sigmoid_gate")


@alias("naive_attention", of="attention", takes=("heads", "mask", "bias"))
def _naive() -> dict[str, Any]:
    return {}


@alias("normed_attention", of="attention", takes=WITH_BIAS)
def _normed(*, qk_norm: Norm = RMSNORM) -> dict[str, Any]:
    return {"qk_norm": qk_norm}


@alias("wide_normed_attention", of="attention", takes=WITH_BIAS)
def _wide_normed(*, qk_norm: Norm = RMSNORM) -> dict[str, Any]:
    return {"qk_norm": qk_norm, "qk_norm_kind": "joint"}


@alias("head_normed_attention", of="attention", takes=WITH_BIAS)
def _head_normed(*, qk_norm: Norm = PLAIN_LAYERNORM) -> dict[str, Any]:
    return {"qk_norm": qk_norm, "qk_norm_kind": "head_gains"}


@alias("late_normed_attention", of="attention", takes=WITH_BIAS)
def _late_normed(*, qk_norm: Norm = RMSNORM) -> dict[str, Any]:
    return {"qk_norm": qk_norm, "qk_norm_kind": "post_position"}


@alias("gated_attention", of="attention", takes=WITH_SCORES)
def _gated() -> dict[str, Any]:
    return {"gate": GATE}


@alias("gated_normed_attention", of="attention", takes=WITH_BIAS)
def _gated_normed(*, qk_norm: Norm = RMSNORM) -> dict[str, Any]:
    return {"qk_norm": qk_norm, "gate": GATE}


@alias("clamped_attention", of="attention", takes=WITH_SCORES)
def _clamped(*, clip_qkv: float = 8.0) -> dict[str, Any]:
    return {"clip_qkv": clip_qkv}


@alias("biased_attention", of="attention", takes=HEADS)
def _biased(*, qkv_bias: bool = True, out_bias: bool = False) -> dict[str, Any]:
    return {"bias": "qkv" if qkv_bias and not out_bias else "out" if out_bias and not qkv_bias else qkv_bias}


@alias(
    "two_width_attention", of="attention", takes=("heads", "mask", "position", "scores", "bias", "attention_dropout")
)
def _two_width(*, d_head: int, d_value: int) -> dict[str, Any]:
    return {"d_head": d_head, "d_value": d_value}
