"""Commands on models: check, show, models, blocks and schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli.block_test import test_blocks
from tfm_blocks.cli.options import add_plugins, count
from tfm_blocks.errors import ConfigError, Problem, print_warnings, shown, suggest

if TYPE_CHECKING:
    from tfm_blocks.cli.options import Commands
    from tfm_blocks.compose.resolve import Composed
    from tfm_blocks.language.sources import Sources
    from tfm_blocks.language.spec import Input, Spec
    from tfm_blocks.runs.listing import RunEntry
    from tfm_blocks.runs.record import RunRecord


CHECK = "check a model without allocating it; tfm blocks --test MODULE computes with the blocks of a plug-in"


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    for name, run, text in (
        ("check", _check, CHECK),
        ("show", _show, "show the nodes of a model, with shapes and parameters"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        run_too, metavar = (", or a run folder", "MODEL|RUN") if name == "show" else ("", "MODEL")
        what = f"a name under conf/model/, a path to a YAML file{run_too}"
        command.add_argument("model", metavar=metavar, help=what)
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as heads=4 or model.add_norm=pre")
        command.add_argument("--config-dir", type=Path, metavar="DIR", help="a config folder that contains model/")
        add_plugins(command)
        command.set_defaults(run=run)
        if name == "check":
            what = "check every combination of values given as a,b,c"
            command.add_argument("-m", "--multirun", action="store_true", help=what)
        else:
            add_lengths(command)
            command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    models = commands.add_parser("models", help="list the models", description="list the models")
    models.add_argument("--config-dir", type=Path, metavar="DIR", help="a config folder that contains model/")
    models.add_argument("--json", action="store_true", help="print JSON instead of a table")
    models.set_defaults(run=_models)
    blocks = commands.add_parser("blocks", help="list the registered blocks", description="list the registered blocks")
    what = "show these blocks in detail; with --test: the only blocks to test, or BLOCK.ARGUMENT=VALUE"
    blocks.add_argument("names", nargs="*", metavar="BLOCK", help=what)
    what = "test the blocks of your module: causality, padding, steps, gradients, and more"
    blocks.add_argument("--test", metavar="MODULE", help=what)
    blocks.add_argument("--markdown", action="store_true", help="print the page docs/blocks.md")
    add_plugins(blocks)
    blocks.set_defaults(run=_blocks)
    schema = commands.add_parser(
        "schema",
        help="print the JSON schema of a model file",
        description="print the JSON schema of a model file, for YAML editors",
    )
    schema.add_argument("-o", type=Path, dest="path", metavar="FILE", help="write it to this file")
    add_plugins(schema)
    schema.set_defaults(run=_schema, data=True)


def add_lengths(command: argparse.ArgumentParser) -> None:
    """Add the options --src, --tgt and --length, from which costs are computed."""
    for side in ("src", "tgt"):
        what = f"number of {side} tokens, from which the cost is computed (32)"
        command.add_argument(f"--{side}", type=count, metavar="N", help=what)
    what = "number of tokens of another input, from which the cost is computed"
    command.add_argument("--length", type=_length, action="append", default=[], metavar="NAME=N", help=what)


def requested_lengths(arguments: argparse.Namespace, inputs: Sequence[Input]) -> dict[str, int]:
    """Return the requested numbers of tokens by input. Raises ConfigError for a name that is not an input."""
    from tfm_blocks.language.spec import names

    lengths = {**dict(arguments.length), **{name: vars(arguments)[name] for name in ("src", "tgt")}}
    requested = {name: length for name, length in lengths.items() if length is not None}
    for name in requested:
        if name not in names(inputs):
            help = suggest(name, names(inputs))
            raise ConfigError(Problem(f"--{name}", f"the model has no input {name!r}", help=help))
    return requested


def _check(arguments: argparse.Namespace) -> None:
    from tfm_blocks.network.build import check_model

    if arguments.multirun:
        _check_several(arguments)
        return
    composed = _composed(arguments.model, arguments.overrides, arguments)
    spec = check_model(composed.model, composed.sources)
    print_warnings(spec.warnings)
    print(f"{arguments.model}: fine, {len(spec.nodes)} nodes")


def _check_several(arguments: argparse.Namespace) -> None:
    from tfm_blocks.compose.model import compose_model
    from tfm_blocks.compose.sweep import combinations, parse_parts
    from tfm_blocks.launch.check import CheckedModel
    from tfm_blocks.network.build import check_model
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.jobs import show_jobs
    from tfm_blocks.sweep.check import check_jobs, refuse_wrong

    load_plugins(arguments.plugins)
    jobs = combinations(parse_parts([f"model={arguments.model}", *arguments.overrides], arguments.config_dir))

    def compose(job: list[str]) -> Composed:
        return compose_model(job[0].partition("=")[2], job[1:], arguments.config_dir)

    def check(composed: Composed) -> CheckedModel:
        return CheckedModel(composed, check_model(composed.model, composed.sources))

    found = check_jobs(jobs, compose, check)
    show_jobs([(job.overrides, job.parameters, job.problems) for job in found])
    refuse_wrong(found)


def _show(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.run import run_record, show_run
    from tfm_blocks.report.screen import print_json
    from tfm_blocks.report.show import model_record, show_model

    folder = Path(arguments.model)
    spec, sources = read_model_or_run(arguments.model, arguments.overrides, arguments)
    lengths = requested_lengths(arguments, spec.inputs)
    if arguments.json:
        run = {"run": run_record(*_read_run(folder))} if folder.is_dir() else {}
        print_json({**run, **model_record(spec, arguments.model, sources, lengths)})
        return
    if folder.is_dir():
        show_run(*_read_run(folder))
    show_model(spec, arguments.model, sources, lengths)


def read_model_or_run(model: str, overrides: list[str], arguments: argparse.Namespace) -> tuple[Spec, Sources]:
    """Return a checked model with the places of its nodes, or the model of a run folder, whose nodes have no place.

    `arguments` has the options --config-dir and --plugins. Raises ConfigError or RunError.
    """
    from tfm_blocks.language.sources import Sources
    from tfm_blocks.network.build import check_model
    from tfm_blocks.runs.model import read_spec

    if not Path(model).is_dir():
        composed = _composed(model, overrides, arguments)
        spec = check_model(composed.model, composed.sources)
        print_warnings(spec.warnings)
        return spec, composed.sources
    if overrides:
        rule = f"has its settings, and none can be changed: {shown(overrides[0])}"
        raise ConfigError(Problem(model, rule, help="show the model by its name, with what differs"))
    return read_spec(Path(model), arguments.plugins), Sources()


def _read_run(folder: Path) -> tuple[RunEntry, RunRecord]:
    from tfm_blocks.runs.listing import read_entry
    from tfm_blocks.runs.record import read_records

    (run,) = read_records([folder])
    return read_entry(folder), run


def _models(arguments: argparse.Namespace) -> None:
    from tfm_blocks.compose.catalogue import describe_models
    from tfm_blocks.report.catalogue import print_models_json, show_models

    (print_models_json if arguments.json else show_models)(describe_models(arguments.config_dir))


def _length(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    return name, count(length)


def _composed(model: str, overrides: list[str], arguments: argparse.Namespace) -> Composed:
    from tfm_blocks.compose.model import compose_model
    from tfm_blocks.registry.plugins import load_plugins

    composed = compose_model(model, overrides, arguments.config_dir)
    load_plugins(arguments.plugins)
    return composed


def _blocks(arguments: argparse.Namespace) -> int:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.registry.blocks import REGISTRY
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.block_page import markdown
    from tfm_blocks.report.blocks import show_block, show_blocks

    if arguments.test:
        return test_blocks(arguments)
    load_plugins(arguments.plugins)
    if arguments.markdown:
        print(markdown(REGISTRY.blocks.values()), end="")
    elif arguments.names:
        for name in arguments.names:
            show_block(name)
    else:
        show_blocks()
    return 0


def _schema(arguments: argparse.Namespace) -> None:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.language.schema import build_schema
    from tfm_blocks.registry.blocks import REGISTRY
    from tfm_blocks.registry.plugins import load_plugins

    load_plugins(arguments.plugins)
    text = json.dumps(build_schema(REGISTRY), indent=1, ensure_ascii=False)
    if arguments.path:
        arguments.path.write_text(f"{text}\n", "utf-8")
    else:
        print(text)
