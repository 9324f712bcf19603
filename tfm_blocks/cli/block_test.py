"""`tfm blocks --test MODULE`: test the contract of blocks on the blocks that a plug-in registers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfm_blocks.errors import ConfigError, Problem, print_warnings, shown, suggest

if TYPE_CHECKING:
    from tfm_blocks.network.contract.rules import Breach
    from tfm_blocks.registry.blocks import BlockInfo


def test_blocks(arguments: argparse.Namespace) -> int:
    """Print for each block that it passes, or the rule that it breaks. Return 1 if a block breaks a rule.

    Raises ConfigError if the module cannot be imported, if it registers no block, or if a block cannot be built.
    """
    from tfm_blocks.network.contract.case import cases_of
    from tfm_blocks.network.contract.rules import first_breach

    blocks = _registered_by(arguments.test)
    names, values = _split(arguments.names, blocks)
    cases = {name: list(cases_of(blocks[name], values.get(name))) for name in names}
    failed = False
    for name in names:
        if breach := first_breach(cases[name]):
            failed = True
            print(f"{name}: {_context(breach)}{breach.measured}. Fix: {breach.fix}")
            continue
        print(f"{name}: {'pass' if cases[name] else 'not tested: its output has no batch axis'}")
        if cases[name]:
            print_warnings(_role_notes(blocks[name], cases[name][0]))
    return int(failed)


def _registered_by(module: str) -> dict[str, BlockInfo]:
    """Return the blocks that the module or its submodules register. Raises ConfigError if there are none."""
    from tfm_blocks.registry.blocks import REGISTRY
    from tfm_blocks.registry.plugins import load_plugins

    before = set(REGISTRY.blocks)
    load_plugins([module])
    registered = {
        name: info
        for name, info in REGISTRY.blocks.items()
        if name not in before or f"{info.cls.__module__}.".startswith(f"{module}.")
    }
    if not registered:
        rule = f"the module {shown(module)} registers no block"
        raise ConfigError(Problem("--test", rule, help="put the decorator @block(…) on its classes"))
    return registered


def _split(words: Sequence[str], blocks: Mapping[str, BlockInfo]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the blocks to test (by default all), and the values of BLOCK.ARG=VALUE for each block."""
    named: list[str] = []
    values: dict[str, dict[str, Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        block, dot, argument = key.partition(".")
        if block not in blocks:
            rule = f"the plug-in registers no block {shown(block)}"
            raise ConfigError(Problem(word, rule, help=suggest(block, blocks)))
        if bool(equals) != bool(dot):
            help = f"write {block} to test this block alone, or {block}.ARGUMENT=VALUE"
            raise ConfigError(Problem(word, "must be BLOCK or BLOCK.ARGUMENT=VALUE", help=help))
        if equals:
            values.setdefault(block, {})[argument] = _read(word, text)
        else:
            named.append(block)
    return named or list(blocks), values


def _read(word: str, text: str) -> Any:
    import yaml

    from tfm_blocks.language.files import expect_unambiguous, nested_events

    try:
        for event, _ in nested_events(text):
            expect_unambiguous(event, word, "the command line")
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(Problem(word, "its value is not YAML", help="quote it for the shell")) from None


def _role_notes(info: BlockInfo, case: Any) -> Iterator[Problem]:
    """Yield a note for each weight of the block that has the role of its shape, because no class declares its role."""
    from tfm_blocks.network.weights import roles_by_shape

    for name, (role, owner) in roles_by_shape(case.network.calls[-1].block).items():
        rule = f"{name} has the role {role}, which follows from its shape and name"
        help = f'weight_roles = {{"{name.rpartition(".")[2]}": "{role}"}} in {owner} declares this or another role'
        yield Problem(info.name, rule, help=help, severity="note")


def _context(breach: Breach) -> str:
    """Return the block that contains the tested part, and the note that distinguishes the case."""
    around = f"in {breach.case.info.name}" if breach.case.part else ""
    note = f"with {breach.case.note}" if breach.case.note else ""
    return " ".join(filter(None, [around, note])) + ": " if around or note else ""
