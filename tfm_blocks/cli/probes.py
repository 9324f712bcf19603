"""`tfm probes`, and the tests of the blocks and the tasks of a plug-in."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, Problem, config_error, expect_none, print_warnings, shown, suggest

if TYPE_CHECKING:
    from tfm_blocks.registry.blocks import BlockInfo


def add_commands(commands: options.Commands) -> None:
    """Add the parser of this command."""
    what = "list the probe tasks, or explain some of them with examples"
    command = options.add_command(commands, "probes", _probes, "list and explain the probe tasks", what)
    command.add("names", "explain these tasks: settings, sizes and examples", nargs="*", metavar="TASK")
    command.add("--test", "test the tasks that this plug-in registers", metavar="MODULE")
    command.add_shared("--plugins")


def _probes(arguments: Namespace) -> int:
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.probes import show_probe, show_probes

    load_plugins(())
    if arguments.test:
        return _test_tasks(arguments.test, arguments.names)
    for name in arguments.names:
        show_probe(name)
    if not arguments.names:
        show_probes()
    return 0


def _test_tasks(module: str, names: Sequence[str]) -> int:
    """Print for each task of a plug-in that it passes, or the rule that it breaks. Return 1 if a task breaks a rule.

    Raises ConfigError if the module cannot be imported, or registers none of the tasks.
    """
    from tfm_blocks.probes.catalogue import TASKS, broken_rules
    from tfm_blocks.probes.task import running_task
    from tfm_blocks.registry.plugins import load_plugins, plugins_in_use

    load_plugins([module])
    registered = [name for name in TASKS if plugins_in_use([module], (), [name])]
    unknown = [name for name in names if name not in registered]
    if unknown or not registered:
        rule = " ".join([f"the module {shown(module)} registers no task", *unknown[:1]])
        raise config_error("--test", rule, "put the decorator @task(NAME) on its classes")
    failed = False
    for name in names or registered:
        cls = TASKS[name]
        breaches = (f"{size}: {rule}" for size, preset in cls.presets.items() for rule in broken_rules(cls, preset))
        try:
            with running_task(cls):
                breach = next(breaches, "")
        except ConfigError as error:
            problem = error.problems[0]
            breach = f"{problem.rule} ({problem.place.file}:{problem.place.line})" if problem.place else problem.rule
        print(f"{name}: {breach or 'pass'}")
        failed |= bool(breach)
    return int(failed)


def test_blocks(arguments: Namespace) -> int:
    """Print for each block that it passes, or the rule that it breaks. Return 1 if a block breaks a rule.

    Raises ConfigError if the module cannot be imported or registers no block, and, after the other blocks, for the
    blocks that cannot be built.
    """
    from tfm_blocks.network.contract.case import cases_of
    from tfm_blocks.network.contract.rules import first_breach

    blocks = _registered_by(arguments.test)
    names, values = _split(arguments.names, blocks)
    failed, unbuilt = False, list[Problem]()
    for name in names:
        try:
            cases = list(cases_of(blocks[name], values.get(name)))
            notes = list(_role_notes(blocks[name], cases))
        except ConfigError as error:
            unbuilt += error.problems
            continue
        if breach := first_breach(cases):
            failed = True
            around = f"in {breach.case.info.name}" if breach.case.part else ""
            note = f"with {breach.case.note}" if breach.case.note else ""
            context = " ".join(filter(None, [around, note]))
            print(f"{name}: {f'{context}: ' if context else ''}{breach.measured}. Fix: {breach.fix}")
            continue
        print(f"{name}: {'pass' if cases else 'not tested: its output has no batch axis'}")
        print_warnings(notes)
    expect_none(unbuilt)
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
        raise config_error("--test", rule, "put the decorator @block(…) on its classes")
    return registered


def _split(words: Sequence[str], blocks: Mapping[str, BlockInfo]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the blocks to test (by default all), and the values of BLOCK.ARG=VALUE for each block."""
    named: list[str] = []
    values: dict[str, dict[str, Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        block, dot, argument = key.partition(".")
        if block not in blocks:
            raise config_error(word, f"the plug-in registers no block {shown(block)}", suggest(block, blocks))
        if bool(equals) != bool(dot):
            help = f"write {block} to test this block alone, or {block}.ARGUMENT=VALUE"
            raise config_error(word, "must be BLOCK or BLOCK.ARGUMENT=VALUE", help)
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
        raise config_error(word, "its value is not YAML", "quote it for the shell") from None


def _role_notes(info: BlockInfo, cases: Sequence[Any]) -> Iterator[Problem]:
    """Yield notes on weights whose roles follow from their shapes, and on declared roles that no case has a weight for.

    Raises ConfigError for a role that does not exist.
    """
    from tfm_blocks.network.weights import roles_by_shape, unused_roles

    if not cases:
        return
    modules = [case.network.calls[-1].block for case in cases]
    for owner, address in sorted(set.intersection(*map(unused_roles, modules))):
        rule = f"weight_roles of {owner} names {address}, which is not a weight of {owner}"
        names = [name for module in modules for name, _ in module.named_parameters()]
        yield Problem(info.name, rule, help=suggest(address, dict.fromkeys(names)), severity="note")
    for name, (role, owner) in roles_by_shape(modules[0]).items():
        rule = f"{name} has the role {role}, which follows from its shape and name"
        help = f'weight_roles = {{"{name.rpartition(".")[2]}": "{role}"}} in {owner} declares this or another role'
        yield Problem(info.name, rule, help=help, severity="note")
