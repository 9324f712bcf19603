"""Upgrade models of older formats of model.json without changing their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.layers.multi_head import MultiHead
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.class_parameters import Argument

NEW_ARGUMENTS = ("d_value", "qk_norm", "qk_norm_kind", "gate", "clip_qkv")  # of attention in format 2


def upgrade_model(model: Mapping[str, Any], format: int) -> Any:
    """Return a model of `format` in the current format.

    In format 1, norm nodes did not take the arguments of the arg `norm`. Attention had fewer arguments, so args with
    the new names were meant for other blocks. Upgrading is idempotent.
    """
    return _without_new_args(_with_own_arguments(model, {})) if format == 1 else model


def _with_own_arguments(value: Any, args: Mapping[str, Any]) -> Any:
    """Set on every norm the arguments that it took in format 1, where the arg `norm` has them too."""
    if isinstance(value, list):
        return [_with_own_arguments(item, args) for item in value]
    if not isinstance(value, Mapping):
        return value
    own = value.get("args")
    args = {**args, **own} if isinstance(own, Mapping) else args
    inner = {key: item if key == "args" else _with_own_arguments(item, args) for key, item in value.items()}
    return _norm_arguments(value.get("block"), args) | inner


def _without_new_args(value: Any) -> Any:
    """Move args that attention did not take in format 1 to the nodes that took them."""
    if isinstance(value, list):
        return [_without_new_args(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    args = value.get("args")
    if isinstance(args, Mapping) and (moved := {name: args[name] for name in NEW_ARGUMENTS if name in args}):
        kept = {name: text for name, text in args.items() if name not in moved}
        value = {key: kept if key == "args" else _with_arguments(item, moved) for key, item in value.items()}
    return {key: _without_new_args(item) for key, item in value.items()}


def _with_arguments(value: Any, moved: Mapping[str, Any]) -> Any:
    """Set the arguments on every node whose block took them in format 1 and does not set them itself."""
    if isinstance(value, list):
        return [_with_arguments(item, moved) for item in value]
    if not isinstance(value, Mapping):
        return value
    inner = {key: _with_arguments(item, moved) for key, item in value.items()}
    block = value.get("block")
    info = REGISTRY.blocks.get(block) if isinstance(block, str) else None
    if info is None or (issubclass(info.cls, MultiHead) and not info.alias_of):
        return inner
    return {name: text for name, text in moved.items() if name in info.arguments} | inner


def _norm_arguments(block: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    info = REGISTRY.blocks.get(block) if isinstance(block, str) else None
    norm = args.get("norm")
    if info is None or info.category != "norm" or not isinstance(norm, Mapping):
        return {}
    return {name: _value(argument, args) for name, argument in info.arguments.items() if name in norm}


def _value(argument: Argument, args: Mapping[str, Any]) -> Any:
    value = args.get(argument.name)
    return argument.default if value is None else value
