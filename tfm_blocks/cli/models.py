"""Commands on models: check, show, models, blocks and schema."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.plan import add_plan, check_plan_options, show_plan
from tfm_blocks.cli.probes import test_blocks
from tfm_blocks.errors import config_error, counted, print_warnings, printable, shown, suggest

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
    check.add_argument("-m", "--multirun", action="store_true", help="check every combination of values given as a,b,c")
    show = add_model(commands, "show", _show, "show the nodes of a model, with shapes and parameters", "MODEL|RUN")
    what = "show the weights in place of the nodes: role, shape and initial values"
    views = show.add_mutually_exclusive_group()
    views.add_argument("--weights", action="store_true", help=what)
    what = "show the learning rates of all groups of weights of a run"
    views.add_argument("--schedule", action="store_true", help=what)
    show.add("-o", "with --schedule: also draw a figure: .svg, .pdf or .png", **options.OUTPUT)
    add_lengths(show)
    add_plan(show, views)
    show.add_shared("--json")
    options.add_command(commands, "models", _models, "list the models", shared=["--config-dir", "--json"])
    blocks = options.add_command(commands, "blocks", _blocks, "list the registered blocks")
    what = "show these blocks in detail; with --test: the only blocks to test, or BLOCK.ARGUMENT=VALUE"
    blocks.add("names", what, nargs="*", metavar="BLOCK")
    what = "test the blocks of your module: causality, padding, steps, gradients, and more"
    blocks.add("--test", what, metavar="MODULE")
    blocks.add_flag("--markdown", "print the page docs/blocks.md")
    blocks.add_shared("--plugins")
    what = "print the JSON schema of a model file"
    schema = options.add_command(commands, "schema", _schema, what, f"{what}, for YAML editors", ["-o", "--plugins"])
    schema.set_defaults(data=True)


def add_model(
    commands: options.Commands, name: str, run: Callable[[Namespace], int | None], help: str, metavar: str
) -> options.Command:
    """Add a command on a model with overrides."""
    command = options.add_command(commands, name, run, help)
    run_too = ", or a run folder" if "RUN" in metavar else ""
    what = f"a name under conf/model/, a path to a YAML file{run_too}"
    command.add("model", f"{what}; optional if an override chooses the model", metavar=metavar)
    what = "as in tfm train, such as heads=4, model.add_norm=pre or experiment=probe/lite"
    command.add("overrides", what, nargs="*", default=[], metavar="KEY=VALUE")
    command.add_shared(*options.MODEL_OPTIONS)
    return command


def add_lengths(command: options.Command) -> None:
    """Add the options --src, --tgt and --length, from which costs are computed."""
    for side in ("src", "tgt"):
        command.add(f"--{side}", f"number of {side} tokens for the costs (32)", type=options.count, metavar="N")
    what = "number of tokens of another input for the costs"
    command.add("--length", what, type=_length, action="append", default=[], metavar="NAME=N")


def requested_lengths(arguments: Namespace, inputs: Sequence[Input]) -> dict[str, int]:
    """Return the requested numbers of tokens by input. Raises ConfigError for a name that is not an input."""
    from tfm_blocks.language.spec import names

    typed = {name: length for name in ("src", "tgt") if (length := vars(arguments)[name]) is not None}
    requested = {**dict(arguments.length), **typed}
    for name in requested:
        if name not in names(inputs):
            address = f"--{name}" if name in typed else "--length"
            raise config_error(address, f"the model has no input {name!r}", suggest(name, names(inputs)))
    return requested


def _check(arguments: Namespace) -> None:
    """Check a model, or the jobs of a sweep: as runs if an override sets a run, else as models only."""
    from tfm_blocks.compose.model import sets_run
    from tfm_blocks.launch.check import check_remote_run

    is_run = sets_run(arguments.overrides)
    if arguments.multirun:
        from tfm_blocks.network.build import check_model
        from tfm_blocks.registry.plugins import load_plugins
        from tfm_blocks.sweep.command import check_sweep

        load_plugins(())
        words = ["-m", *options.config_dir_words(arguments), *options.model_words(arguments), *arguments.overrides]
        check_sweep(words, check_remote_run if is_run else lambda one: check_model(one.model, one.sources))
        return
    composed = compose_requested_model(arguments.model, arguments.overrides, arguments)
    if is_run:
        spec = check_remote_run(composed).spec
        print_warnings(spec.warnings)
    else:
        spec = _checked_model(composed)
    print_warnings(spec.notes)
    print(f"{arguments.model}: fine, {counted(len(spec.nodes), 'node')}")


def _show(arguments: Namespace) -> None:
    from tfm_blocks.report.lists import entry_record, show_run
    from tfm_blocks.report.screen import print_json
    from tfm_blocks.report.show import measure, model_record, show_model
    from tfm_blocks.runs.saved_run import SavedRun

    _expect_effects(arguments)
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
        show_plan(arguments, spec, requested_lengths(arguments, spec.inputs), settings, _vocabulary(composed))
        return
    size = measure(spec, sources, requested_lengths(arguments, spec.inputs))
    run = None if composed else SavedRun(Path(arguments.model))
    if arguments.json:
        described = {"run": entry_record(run) | run.describe()} if run else {}
        print_json({**described, **model_record(size, arguments.model)})
        return
    if run:
        show_run(run)
    show_model(size, arguments.model)


def _show_schedule(arguments: Namespace, spec: Spec, composed: Composed | None) -> None:
    from tfm_blocks.report.coordinates import draw_rates, rate_records, show_rates
    from tfm_blocks.report.screen import print_json

    settings = _run_settings(arguments, composed)
    if settings is None:
        rule = f"{arguments.model} is a model without the settings of a run, so it has no schedule"
        raise config_error("--schedule", rule, "name a run folder, or add settings of a run, such as schedule=cosine")
    with _located(composed):
        rates = _run_rates(spec, settings, _vocabulary(composed))
    if arguments.json:
        print_json({"model": arguments.model, **rate_records(rates)})
    else:
        show_rates(rates, arguments.model)
    if arguments.path:
        draw_rates(rates, printable(arguments.model), arguments.path)


def _vocabulary(composed: Composed | None) -> int:
    """Return the vocabulary of a generator; 0 for a run folder, which has the definition of its generator."""
    return composed.mapping.get("vocab", 0) if composed else 0


def _run_rates(spec: Spec, settings: RunSettings, vocab: int) -> RunRates:
    """Return the rates of a run at its first and its last step and between them. Nothing is allocated."""
    import numpy as np

    from tfm_blocks.launch.generator import trained_network
    from tfm_blocks.network.build import weight_rules
    from tfm_blocks.report.coordinates import RunRates
    from tfm_blocks.training.groups import assign

    rules = weight_rules(spec)
    factors: dict[tuple[str, str], list[float]] = {}
    for one in assign(settings.optimizer, trained_network(spec, settings.objective, vocab)):
        rule = rules.get(one.weight.name)
        factor = one.rate * (rule.with_optimizer(one.optimizer).rate if rule else 1.0)
        factors.setdefault((one.group, one.optimizer or "frozen"), []).append(factor)
    last = settings.trainer.steps
    peak = max(1, min(settings.schedule.warmup, last))  # the step with the largest rate
    steps = np.unique([*np.linspace(1, last, POINTS).round().astype(np.int64), peak])
    rates = np.array([settings.schedule.rate(step) for step in steps.tolist()])
    groups = {group: (min(own), max(own)) for group, own in factors.items()}
    followers = settings.schedule.model_dump(include={"momentum", "weight_decay"}, exclude_none=True)
    return RunRates(settings.schedule.name, steps, rates, groups, followers)


def _expect_effects(arguments: Namespace) -> None:
    """Raise ConfigError for options of `tfm show` without effect on what the other options show."""
    check_plan_options(arguments)
    lengths = [f"--{name}" for name in ("src", "tgt", "length") if vars(arguments)[name]]
    view = "--weights" if arguments.weights else "--schedule" if arguments.schedule else ""
    if view and lengths:
        rule = f"{', '.join(lengths)}: no effect with {view}"
        raise config_error("", rule, f"leave {view} out to see the costs at these lengths")
    if arguments.path and not arguments.schedule:
        raise config_error("-o", "has no effect without --schedule", "tfm figure draws a model")
    options.expect_figure(arguments.path)
    options.refuse_config_dir(arguments, [arguments.model])


def _learned_weights(arguments: Namespace, spec: Spec, composed: Composed | None) -> dict[str, Learning]:
    """Return the optimizer, rate and decay of each weight of a run folder, or of a model with overrides of a run."""
    from tfm_blocks.launch.generator import trained_network
    from tfm_blocks.training.groups import assign

    run = _run_settings(arguments, composed)
    with _located(composed):
        learned = assign(run.optimizer, trained_network(spec, run.objective, _vocabulary(composed))) if run else []
    return {one.weight.name: one.learning for one in learned}


def _run_settings(arguments: Namespace, composed: Composed | None) -> RunSettings | None:
    """Return the settings of a run folder, or of a model with overrides of a run; None for a model alone."""
    from tfm_blocks.registry.plugins import is_loaded
    from tfm_blocks.runs.saved_run import SavedRun
    from tfm_blocks.training.settings import read_run

    config = composed.mapping if composed else SavedRun(Path(arguments.model)).config
    if "optimizer" not in config:
        return None
    if missing := [module for module in config["plugins"] if not is_loaded(module)]:
        rule = f"the optimizer of the run needs the plug-in {shown(missing[0])}"
        raise config_error(arguments.model, rule, f"name it: --plugins {missing[0]}")
    with _located(composed):
        return read_run(config)


def _located(composed: Composed | None) -> AbstractContextManager[None]:
    """Add the file and line of a config to the problems of the block; a run folder has no such places."""
    from tfm_blocks.launch.check import with_locations

    return with_locations(composed) if composed else nullcontext()


def read_model_or_run(model: str, overrides: list[str], arguments: Namespace) -> tuple[Spec, Sources, Composed | None]:
    """Return a checked model with the places of its nodes and its config, or the model of a run folder without both.

    `arguments` has the options --config-dir and --plugins. Raises ConfigError or RunError.
    """
    from tfm_blocks.language.sources import Sources
    from tfm_blocks.runs.model import read_spec

    if not options.is_run_folder(model, arguments.config_dir):
        composed = compose_requested_model(model, overrides, arguments)
        return _checked_model(composed), composed.sources, composed
    if overrides:
        rule = f"is a run folder, whose settings cannot be changed: {shown(overrides[0])}"
        raise config_error(model, rule, "write the name of the model and the overrides")
    return read_spec(Path(model), arguments.plugins), Sources(), None


def compose_requested_model(model: str, overrides: list[str], arguments: Namespace, *, learn: bool = False) -> Composed:
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


def _models(arguments: Namespace) -> None:
    from tfm_blocks.compose.comments import describe_models
    from tfm_blocks.report.lists import show_models

    show_models(describe_models(arguments.config_dir), as_json=arguments.json)


def _length(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    return name, options.count(length)


def _blocks(arguments: Namespace) -> int:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.registry.blocks import REGISTRY
    from tfm_blocks.registry.plugins import load_plugins
    from tfm_blocks.report.blocks import blocks_page, show_block, show_blocks

    if arguments.markdown and (arguments.names or arguments.test):
        raise config_error("--markdown", "prints the page of all blocks", "leave out BLOCK and --test")
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


def _schema(arguments: Namespace) -> None:
    import tfm_blocks.blocks  # noqa: F401  registers them
    from tfm_blocks.language.schema import build_schema
    from tfm_blocks.registry.blocks import REGISTRY
    from tfm_blocks.registry.plugins import load_plugins

    load_plugins(())
    text = json.dumps(build_schema(REGISTRY), indent=1, ensure_ascii=False)
    options.write_output(f"{text}\n", arguments.path)
