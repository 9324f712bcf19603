"""What inputs, args and nodes cannot be called: a sentence and a way out, or None where a name is right."""

from __future__ import annotations

from collections.abc import Collection

from tfm_blocks.errors import shown
from tfm_blocks.language.references import ENTRY
from tfm_blocks.registry.blocks import GRAMMAR

INDEX = {"i": "index", "n": "number"}
Refusal = tuple[str, str]


def wrong_node(name: str, inputs: Collection[str], reserved: Collection[str]) -> Refusal | None:
    """A node's name is no input's, no word of the language, and no attribute of the modules that hold the nodes."""
    other = f"call the node something else, such as {name.strip('_') or 'my'}_block"
    if name in inputs:
        return f"{name} is an input already", "call the node something else"
    if name in GRAMMAR or name == ENTRY:
        return f"{name!r} is a word of the language", other
    if name in reserved or name.startswith(("_", "in_")):
        return f"{shown(name)} is a name that modules use themselves", other
    return _no_identifier(name)


def wrong_input(name: str) -> Refusal | None:
    """An input is given to the network by its name, beside `keep`, and read by it in every layer."""
    if name in (ENTRY, "keep", "self"):
        return f"{name!r} is a word of the language", "call the input something else"
    return _no_identifier(name)


def wrong_arg(name: str) -> Refusal | None:
    """Arithmetic knows `i` and `n` as the numbers of layers."""
    if name in INDEX:
        rule = f"{name} is the {INDEX[name]} of the layers in arithmetic"
        return rule, "call the arg something else, or write it on its nodes"
    return _no_identifier(name)


def _no_identifier(name: str) -> Refusal | None:
    if name.isidentifier():
        return None
    return f"a name is made of letters, digits and _, and {shown(name)} is not", "call it something else"
