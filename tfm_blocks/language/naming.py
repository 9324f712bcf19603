"""Check the names of inputs, args and nodes: each check returns a rule and a fix, or None if the name is valid."""

from __future__ import annotations

from collections.abc import Collection

from tfm_blocks.errors import shown
from tfm_blocks.language.references import ENTRY
from tfm_blocks.registry.blocks import GRAMMAR

INDEX = {"i": "index", "n": "number"}
Refusal = tuple[str, str]


def check_node_name(name: str, inputs: Collection[str], reserved: Collection[str]) -> Refusal | None:
    """Check that a node's name is not an input, a reserved word, or an attribute of the modules that hold nodes."""
    other = f"call the node something else, such as {name.strip('_') or 'my'}_block"
    if name in inputs:
        return f"{name} is already an input", "call the node something else"
    if name in GRAMMAR or name == ENTRY:
        return f"{name!r} is a reserved word", other
    if name in reserved or name.startswith(("_", "in_")):
        return f"{shown(name)} is an attribute name of modules", other
    return _no_identifier(name)


def check_input_name(name: str) -> Refusal | None:
    """Check an input's name: it becomes a keyword argument of the network, next to `keep`."""
    if name in (ENTRY, "keep", "self"):
        return f"{name!r} is a reserved word", "call the input something else"
    return _no_identifier(name)


def check_arg_name(name: str) -> Refusal | None:
    """Check an arg's name: in arithmetic, `i` and `n` are the index and the number of layers."""
    if name in INDEX:
        rule = f"{name} is the {INDEX[name]} of layers in arithmetic"
        return rule, "call the arg something else, or write it on its nodes"
    return _no_identifier(name)


def _no_identifier(name: str) -> Refusal | None:
    if name.isidentifier():
        return None
    return f"a name consists of letters, digits and _, but is {shown(name)}", "call it something else"
