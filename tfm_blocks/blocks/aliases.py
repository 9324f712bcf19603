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


def _normed(name: str, norm: Part, **fixed: Any) -> None:
    """Register attention with a norm of queries and keys, by default `norm`, and with the arguments `fixed`."""

    @alias(name, of="attention", takes=WITH_BIAS)
    def translate(*, qk_norm: Norm = norm) -> dict[str, Any]:
        return {"qk_norm": qk_norm, **fixed}


_normed("normed_attention", RMSNORM)
_normed("wide_normed_attention", RMSNORM, qk_norm_kind="joint")
_normed("head_normed_attention", PLAIN_LAYERNORM, qk_norm_kind="head_gains")
_normed("late_normed_attention", RMSNORM, qk_norm_kind="post_position")
_normed("gated_normed_attention", RMSNORM, gate=GATE)


@alias("gated_attention", of="attention", takes=WITH_SCORES)
def _gated() -> dict[str, Any]:
    return {"gate": GATE}


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
