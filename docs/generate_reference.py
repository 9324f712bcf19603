"""The reference pages of docs/: the commands with their arguments, and the keys of a run's config."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from tfm_blocks.cli import command_parser
from tfm_blocks.compose.comments import Comment, read_comments
from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.help import TEXT, flow
from tfm_blocks.config.settings import implementation, names_of
from tfm_blocks.errors import cut
from tfm_blocks.language.files import read_yaml_file
from tfm_blocks.sweep.launcher import PACKAGE
from tfm_blocks.sweep.settings import SweepSettings
from tfm_blocks.training.settings import run_settings

PAGE = re.compile(r"docs/([\w/-]+\.md(?:#[\w-]+)?)")  # in comments of conf/
COMMANDS = """\
# Commands

This page lists every command with its arguments. It is made by `python docs/generate.py`.
The pages under How-to show the commands at work.

## tfm train

`tfm train [GROUP=NAME]... [KEY=VALUE]...` trains a run. `python train.py` is the same command in a checkout.
`--help` also lists all [config keys](config.md) with their values under the other arguments.

"""
CONFIG = """\
# Config keys

This page lists the keys of a run's config with types, defaults and meanings. It is made by `python docs/generate.py`.
`GROUP=NAME` chooses a file of a group, such as `data=text`. `KEY=VALUE` sets a key, such as `trainer.steps=2000`.
`python train.py --help` lists the keys with their values under the other arguments.
There is no key `lr`: the [schedule](#schedule) sets the learning rate, by `schedule.peak`, or by `schedule.scale` of
`schedule=noam`.
The keys below `model` are in [language.md](../language.md) and [blocks.md](../blocks.md).

"""
GROUPS = ("data", "objective", "optimizer", "schedule", "trainer", "logger", "sweep", "launcher")
PRESETS = ("experiment", "debug")  # their files set keys of other groups
Schema = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *([text.replace("|", "\\|") for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def linked(text: str) -> str:
    """Return a text whose paths of pages are links from docs/reference/."""
    return PAGE.sub(r"[\1](../\1)", text)


def commands() -> Iterator[str]:
    """Yield the table of the arguments of `tfm train`, and the sections of the other commands."""
    options = TEXT.partition("\nOptions\n")[2].partition("\n\n")[0].replace("{{", "{").replace("}}", "}")
    pairs = (line.strip().partition("  ") for line in options.splitlines())
    yield table(["argument", "meaning"], [(f"`{names}`", text.strip()) for names, _, text in pairs])
    yield from _subcommands(command_parser(), "tfm")


def _subcommands(parser: argparse.ArgumentParser, prefix: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if command.description:  # not train, whose options are Hydra's
                    yield f"## {prefix} {name}"
                    yield f"{command.description[0].upper()}{command.description[1:]}."
                    yield from [text] if (text := _arguments(command)) else []
                    yield from _subcommands(command, f"{prefix} {name}")


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and not isinstance(
            action, argparse._HelpAction | argparse._SubParsersAction
        ):
            value = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
            value = " ".join(value) if isinstance(value, tuple) else value
            names = " ".join([", ".join(action.option_strings), "" if action.nargs == 0 else value]).strip()
            rows.append((f"`{names}`", (action.help or "") % vars(action)))
    return table(["argument", "meaning"], rows) if rows else ""


def config() -> Iterator[str]:
    """Yield the sections of the keys of a config, and the sections of the presets."""
    yield "## Top level"
    yield _keys(CONF / "train.yaml", SCHEMA)
    for group in GROUPS:
        yield f"## {group}"
        for path in _files(group):
            yield f"### {_title(group, path.stem)}"
            yield from _about(path)
            yield from _inherited(path, group)
            yield _keys(path, SCHEMA["properties"][group])
    yield "## Presets"
    yield "These files set keys of other groups. Each file lists its values with reasons."
    for path in [path for group in PRESETS for path in _files(group)]:
        name = path.relative_to(CONF)
        yield f"### {name.parent}={path.stem}"
        yield from _about(path)
        yield f"File: [conf/{name}](../../conf/{name})"


def _title(group: str, name: str) -> str:
    """Return the option of a command line, or the name of a file that is only inherited."""
    return "every probe task" if name == "_probe" else f"{group}={name}"


def _files(group: str) -> list[Path]:
    return sorted((CONF / group).glob("*.yaml"))


def _about(path: Path) -> Iterator[str]:
    """Yield the comment that a file begins with."""
    if lines := read_comments(read_yaml_file(path))[()].above:
        yield linked("\n".join(lines))


def _inherited(path: Path, group: str) -> Iterator[str]:
    """Yield a sentence that names the files whose keys a file inherits."""
    defaults = yaml.safe_load(path.read_text("utf-8")).get("defaults", [])
    titles = [_title(group, name) for name in defaults if name != "_self_"]
    if parents := [f"`{title}`" if "=" in title else title for title in titles]:
        yield f"It inherits the keys of {' and '.join(parents)}."


def _keys(path: Path, schema: Schema) -> str:
    """Return the table of the keys of a file."""
    file = read_yaml_file(path)
    values = yaml.safe_load(file.text)  # 1e-9 as text, as the file has it
    mapping = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    rows = list(_rows(mapping, (), schema, read_comments(file)))
    return linked(table(["key", "default", "type", "meaning"], rows)) if rows else "It has no keys."


def _rows(
    mapping: Schema, path: tuple[str, ...], schema: Schema, comments: Mapping[tuple[str, ...], Comment]
) -> Iterator[tuple[str, ...]]:
    properties = _properties(schema, mapping)
    for name, value in mapping.items():
        own, comment = properties.get(name, {}), comments.get((*path, name), Comment())
        if isinstance(value, dict) and _properties(own, value):
            yield from _rows(value, (*path, name), own, comments)
        elif "const" not in own:
            default = "required" if value == "???" else f"`{cut(flow(value))}`"
            meaning = " ".join([*comment.above, comment.beside]).strip()
            yield f"`{'.'.join((*path, name))}`", default, _type(_resolved(own)), meaning


def _properties(schema: Schema, mapping: Schema) -> Schema:
    """Return the properties of a schema, or of the member of a union that the constants of a file choose."""
    members = [_resolved(one) for one in schema.get("oneOf", schema.get("anyOf", [schema]))]
    found = [one["properties"] for one in members if "properties" in one]
    fitting = (
        one for one in found if all(mapping.get(key) == own["const"] for key, own in one.items() if "const" in own)
    )
    return next(fitting, {})


def _resolved(schema: Schema) -> Schema:
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    resolved: Schema = SCHEMA["$defs"][name] if name else schema
    return resolved


def _type(schema: Schema) -> str:
    """Return a type with its bounds, such as `int ≥ 1 or null`."""
    if "anyOf" in schema:
        return " or ".join(_type(_resolved(one)) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    names = {
        "integer": "int",
        "number": "float",
        "boolean": "bool",
        "string": "text",
        "array": "list",
        "object": "mapping",
    }
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    kind = schema.get("type", "")
    limits = ", ".join(f"{sign} {schema[name]:g}" for name, sign in bounds.items() if name in schema)
    return f"{names.get(kind, kind)} {limits}".strip()


def _schema() -> Schema:
    """Return the JSON schema of all settings of a run and a sweep, without the model."""
    launchers = [implementation(PACKAGE, name, "LAUNCHER") for name in names_of(PACKAGE)]
    whole = run_settings().model_json_schema()
    for name, settings in (("sweep", SweepSettings), ("launcher", reduce(or_, launchers))):
        group = TypeAdapter(settings).json_schema()
        whole["$defs"] |= group.pop("$defs")
        whole["properties"][name] = group
    return whole


SCHEMA = _schema()
