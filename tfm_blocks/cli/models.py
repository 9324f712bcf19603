"""Commands on models: check, show, models, blocks and schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.plan import add_plan, check_plan_options, show_plan
from tfm_blocks.cli.probes import test_blocks
from tfm_blocks.errors import ConfigError, Problem, counted, print_warnings, printable, shown, suggest

if TYPE_CHECKING:
    from tfm_blocks.compose.resolve import Composed
    from tfm_blocks.language.sources import Sources
    from tfm_blocks.language.spec import Input, Spec
    from tfm_blocks.network.weights import Learning
    from tfm_blocks.report.coordinates import RunRates
    from tfm_blocks.training.settings import RunSettings


POINTS = 200  # steps of a curve of learning rates
CHECK = "check a model without allocating it; tfm blocks --test MODULE computes with the blocks of a plug-in"


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of these commands."""
    check = add_model(commands, "check", _check, CHECK, "MODEL")
    what = "check every combination of values given as a,b,c"
    check.add_argument("-m", "--multirun", action="store_true", help=what)
    what = "show the nodes of a model, with shapes and parameters"
    show = add_model(commands, "show", _show, what, "MODEL|RUN")
    what = "show the weights in place of the nodes: role, shape and initial values"
    views = show.add_mutually_exclusive_group()
    views.add_argument("--weights", action="store_true", help=what)
    what = "show the learning rates of all groups of weights of a run"
    views.add_argument("--schedule", action="store_true", help=what)
    show.add_argument("-o", **options.OUTPUT, help="with --schedule: also draw a figure: .svg, .pdf or .png")
    add_lengths(show)
    add_plan(show, views)
    options.add_shared(show, "--json")
    options.add_command(commands, "models", _models, "list the models", shared=["--config-dir", "--json"])
    blocks = options.add_command(commands, "blocks", _blocks, "list the registered blocks")
    what = "show these blocks in detail; with --test: the only blocks to test, or BLOCK.ARGUMENT=VALUE"
    blocks.add_argument("names", nargs="*", metavar="BLOCK", help=what)
    what = "test the blocks of your module: causality, padding, steps, gradients, and more"
    blocks.add_argument("--test", metavar="MODULE", help=what)
    blocks.add_argument("--markdown", action="store_true", help="print the page docs/blocks.md")
    options.add_shared(blocks, "--plugins")
    what = "print the JSON schema of a model file"
    about = f"{what}, for YAML editors"
    schema = options.add_command(commands, "schema", _schema, what, about, ["-o", "--plugins"])
    schema.set_defaults(data=True)


def add_model(
    commands: options.Commands, name: str, run: Callable[[argparse.Namespace], int | None], help: str, metavar: str
) -> argparse.ArgumentParser:
    """Add a command on a model with overrides."""
    command = options.add_command(commands, name, run, help)
    run_too = ", or a run folder" if "RUN" in metavar else ""
    what = f"a name under conf/model/, a path to a YAML file{run_too}"
    command.add_argument("model", metavar=metavar, help=f"{what}; optional if an override chooses the model")
    what = "as in tfm train, such as heads=4, model.add_norm=pre or experiment=probe/lite"
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=what)
    options.add_shared(command, *options.MODEL_OPTIONS)
    return command


def add_lengths(command: argparse.ArgumentParser) -> None:
    """Add the options --src, --tgt and --length, from which costs are computed."""
    for side in ("src", "tgt"):
        what = f"number of {side} tokens for the costs (32)"
        command.add_argument(f"--{side}", type=options.count, metavar="N", help=what)
    what = "number of tokens of another input for the costs"
    command.add_argument("--length", type=_length, action="append", default=[], metavar="NAME=N", help=what)


def requested_lengths(arguments: argparse.Namespace, inputs: Sequence[Input]) -> dict[str, int]:
    """Return the requested numbers of tokens by input. Raises ConfigError for a name that is not an input."""
    from tfm_blocks.language.spec import names

    typed = {name: length for name in ("src", "tgt") if (length := vars(arguments)[name]) is not None}
    requested = {**dict(arguments.length), **typed}
    for name in requested:
        if name not in names(inputs):
            help = suggest(name, names(inputs))
            address = f"--{name}" if name in typed else "--length"
            raise ConfigError(Problem(address, f"the model has no input {name!r}", help=help))
    return requested


def _check(arguments: argparse.Namespace) -> None:
    if arguments.multirun:
        _check_several(arguments)
        return
    from tfm_blocks.compose.model import sets_run
    from tfm_blocks.launch.check import check_remote_run

    composed = compose_requested_model(arguments.model, arguments.overrides, arguments)
    if sets_run(arguments.overrides):
        spec = check_remote_run(composed).spec
        print_warnings(spec.warnings)
    else:
        spec = _checked_model(composed)
    print_warnings(spec.notes)
    print(f"{arguments.model}: fine, {counted(len(spec.nodes), 'node')}")


def _check_several(arguments: argparse.Namespace) -> None:
    """Check the jobs of a sweep: as runs if an override sets a run, else as models only."""
    from tfm_blocks.compose.model import sets_run
    from tfm_blocks.launch.check import check_remote_run
    from tfm_blocks.network.build import check_model
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.sweep.command import check_sweep

    load_plugins(())
    words = ["-m", *options.config_dir_words(arguments), f"model={arguments.model}", *arguments.overrides]
    if sets_run(arguments.overrides):
        check_sweep(words, check_remote_run)
    else:
        check_sweep(words, lambda composed: check_model(composed.model, composed.sources))


def _show(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.lists import entry_record, show_run
    from tfm_blocks.report.screen import print_json
    from tfm_blocks.report.show import measure, model_record, show_model
    from tfm_blocks.runs.saved_run import SavedRun

    _expect_effects(arguments)
    folder = Path(arguments.model)
    spec, sources, composed = read_model_or_run(arguments.model, arguments.overrides, arguments)
    if arguments.weights:
        from tfm_blocks.report.weights import group_weights, show_weights, weight_records

        groups = group_weights(spec, composed, _learned_weights(arguments, spec, composed))
        if arguments.json:
            print_json({"model": arguments.model, "weights": weight_records(groups)})
        else:
            show_weights(groups, arguments.model)
        return
    if arguments.schedule:
        _show_schedule(arguments, spec, composed)
        return
    if arguments.plan:
        settings = _run_settings(arguments, composed)
        vocab = composed.mapping.get("vocab", 0) if composed else 0  # a run recorded the definition of its generator
        show_plan(arguments, spec, requested_lengths(arguments, spec.inputs), settings, vocab)
        return
    size = measure(spec, sources, requested_lengths(arguments, spec.inputs))
    run = SavedRun(folder) if folder.is_dir() else None
    if arguments.json:
        described = {"run": entry_record(run) | run.describe()} if run else {}
        print_json({**described, **model_record(size, arguments.model)})
        return
    if run:
        show_run(run)
    show_model(size, arguments.model)


def _show_schedule(arguments: argparse.Namespace, spec: Spec, composed: Composed | None) -> None:
    from tfm_blocks.report.coordinates import draw_rates, rate_records, show_rates
    from tfm_blocks.report.screen import print_json

    settings = _run_settings(arguments, composed)
    if settings is None:
        rule = f"{arguments.model} is a model without the settings of a run, so it has no schedule"
        help = "name a run folder, or add settings of a run, such as schedule=cosine"
        raise ConfigError(Problem("--schedule", rule, help=help))
    rates = _run_rates(spec, settings)
    if arguments.json:
        print_json({"model": arguments.model, **rate_records(rates)})
    else:
        show_rates(rates, arguments.model)
    if arguments.path:
        draw_rates(rates, printable(arguments.model), arguments.path)


def _run_rates(spec: Spec, settings: RunSettings) -> RunRates:
    """Return the rates of a run at its first and its last step and between them. Nothing is allocated."""
    import numpy as np

    from tfm_blocks.network.build import network_without_values, weight_rules
    from tfm_blocks.report.coordinates import RunRates
    from tfm_blocks.training.groups import assign

    rules = weight_rules(spec)
    factors: dict[tuple[str, str], list[float]] = {}
    for one in assign(settings.optimizer, network_without_values(spec)):
        rule = rules.get(one.weight.name)
        factor = one.rate * (rule.with_optimizer(one.optimizer).rate if rule else 1.0)
        factors.setdefault((one.group, one.optimizer or "frozen"), []).append(factor)
    steps = np.unique(np.linspace(1, settings.trainer.steps, POINTS).round().astype(np.int64))
    rates = np.array([settings.schedule.rate(step) for step in steps.tolist()])
    groups = {group: (min(own), max(own)) for group, own in factors.items()}
    followers = settings.schedule.model_dump(include={"momentum", "weight_decay"}, exclude_none=True)
    return RunRates(settings.schedule.name, steps, rates, groups, followers)


def _expect_effects(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options of `tfm show` without effect on what the other options show."""
    check_plan_options(arguments)
    lengths = [f"--{name}" for name in ("src", "tgt", "length") if vars(arguments)[name]]
    view = "--weights" if arguments.weights else "--schedule" if arguments.schedule else ""
    if view and lengths:
        rule = f"{', '.join(lengths)}: no effect with {view}"
        raise ConfigError(Problem("", rule, help=f"leave {view} out to see the costs at these lengths"))
    if arguments.path and not arguments.schedule:
        raise ConfigError(Problem("-o", "has no effect without --schedule", help="tfm figure draws a model"))
    options.expect_figure(arguments.path)
    if arguments.config_dir and Path(arguments.model).is_dir():
        rule = f"has no effect on {arguments.model}, a run folder, which has its own config"
        raise ConfigError(Problem("--config-dir", rule, help="leave it out"))


def _learned_weights(arguments: argparse.Namespace, spec: Spec, composed: Composed | None) -> dict[str, Learning]:
    """Return the optimizer, rate and decay of each weight of a run folder, or of a model with overrides of a run."""
    from tfm_blocks.network.build import network_without_values
    from tfm_blocks.training.groups import assign

    run = _run_settings(arguments, composed)
    learned = assign(run.optimizer, network_without_values(spec)) if run else []
    return {one.weight.name: one.learning for one in learned}


def _run_settings(arguments: argparse.Namespace, composed: Composed | None) -> RunSettings | None:
    """Return the settings of a run folder, or of a model with overrides of a run; None for a model alone."""
    from tfm_blocks.registry.plugins import is_loaded
    from tfm_blocks.runs.saved_run import SavedRun
    from tfm_blocks.training.settings import read_run

    config = composed.mapping if composed else SavedRun(Path(arguments.model)).config
    if "optimizer" not in config:
        return None
    if missing := [module for module in config["plugins"] if not is_loaded(module)]:
        rule = f"the optimizer of the run needs the plug-in {shown(missing[0])}"
        help = f"name it: --plugins {missing[0]}"
        raise ConfigError(Problem(arguments.model, rule, help=help))
    return read_run(config)


def read_model_or_run(
    model: str, overrides: list[str], arguments: argparse.Namespace
) -> tuple[Spec, Sources, Composed | None]:
    """Return a checked model with the places of its nodes and its config, or the model of a run folder without both.

    `arguments` has the options --config-dir and --plugins. Raises ConfigError or RunError.
    """
    from tfm_blocks.language.sources import Sources
    from tfm_blocks.runs.model import read_spec

    if not Path(model).is_dir():
        composed = compose_requested_model(model, overrides, arguments)
        return _checked_model(composed), composed.sources, composed
    if overrides:
        rule = f"is a run folder, whose settings cannot be changed: {shown(overrides[0])}"
        raise ConfigError(Problem(model, rule, help="write the name of the model and the overrides"))
    return read_spec(Path(model), arguments.plugins), Sources(), None


def compose_requested_model(
    model: str, overrides: list[str], arguments: argparse.Namespace, *, learn: bool = False
) -> Composed:
    """Compose a model and load installed plug-ins; with overrides of a run, it has the vocabulary of the run's data.

    Without `learn`, the vocabulary of text whose tokenizer has yet to be learned is the requested one.
    Raises ConfigError.
    """
    from tfm_blocks.compose.model import compose_requested
    from tfm_blocks.registry.plugins import load_plugins

    load_plugins(())
    composed = compose_requested(model, overrides, arguments.config_dir)
    if not composed.choices:
        return composed
    from tfm_blocks.launch.check import load_listed, with_locations, with_vocab_of_data

    with with_locations(composed):
        load_listed(composed.mapping["plugins"])
    return with_vocab_of_data(composed, learn=learn)


def _checked_model(composed: Composed) -> Spec:
    """Return the checked model, and print its warnings."""
    from tfm_blocks.network.build import check_model

    spec = check_model(composed.model, composed.sources)
    print_warnings(spec.warnings)
    return spec


def _models(arguments: argparse.Namespace) -> None:
    from tfm_blocks.compose.comments import describe_models
    from tfm_blocks.report.lists import show_models

    show_models(describe_models(arguments.config_dir), as_json=arguments.json)


def _length(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    return name, options.count(length)


def _blocks(arguments: argparse.Namespace) -> int:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.registry.blocks import REGISTRY
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.blocks import blocks_page, show_block, show_blocks

    if arguments.test:
        return test_blocks(arguments)
    load_plugins(())
    if arguments.markdown:
        print(blocks_page(REGISTRY.blocks.values()), end="")
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

    load_plugins(())
    text = json.dumps(build_schema(REGISTRY), indent=1, ensure_ascii=False)
    options.write_output(f"{text}\n", arguments.path)
