"""Warnings about args that change norms together with branch blocks, as `bias: false` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tfm_blocks.errors import Problem
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Path
from tfm_blocks.registry.blocks import Registry


def find_mixed_reach(
    changed: Mapping[Path, Mapping[str, Path]], registry: Registry, sources: Sources
) -> Iterator[Problem]:
    """Yield a warning for each arg that replaces a default of a branch block and one of a norm.

    `changed` maps the path of a value to the blocks whose default it replaces, each with the path of its first use.
    """
    for path, users in changed.items():
        blocks = [registry.blocks[name] for name in users]
        branch = next((info for info in blocks if info.branch), None)
        norm = next((info for info in blocks if info.category == "norm"), None)
        if branch and norm:
            uses = [f"{info.name} (at {'.'.join(users[info.name])})" for info in (branch, norm)]
            rule = f"{path[-1]} changes the branch block {uses[0]} and also the norm {uses[1]}"
            yield replace(sources.problem(path, rule, help=_help(path[-1], norm.name)), severity="warning")


def _help(argument: str, norm: str) -> str:
    return (
        f"set it for each: args: {{norm: {{block: {norm}, {argument}: …}}}} for the norms of add & norm, "
        f"{argument}: … on a norm node"
    )
