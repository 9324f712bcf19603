"""`tfm dashboard`: Weights & Biases dashboards as files, and sweep files for W&B agents."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, Problem, config_error, expect_none
from tfm_blocks.metric_schema import OBJECTIVE

if TYPE_CHECKING:
    from tfm_blocks.tracking.dashboard import Dashboard

PROJECT: dict[str, Any] = {"default": "tfm-blocks", "help": "W&B project (%(default)s)"}


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of `tfm dashboard` and its actions."""
    what = "Weights & Biases dashboards, defined by files in conf/dashboard"
    command = commands.add_parser("dashboard", help="check W&B dashboards, push them, write a sweep", description=what)
    actions = command.add_subparsers(required=True, metavar="ACTION")
    folder = options.SHARED["--config-dir"] | {"help": "a config folder that contains dashboard/"}
    for name, run, what in (
        ("check", _check, "check that runs log every metric that the dashboards show"),
        ("render", _render, "print the JSON of a dashboard, without network access"),
        ("push", _push, "create or update dashboards as W&B workspaces"),
    ):
        action = options.add_command(actions, name, run, what)
        if name == "render":
            action.set_defaults(data=True)
            action.add("names", "a file of conf/dashboard, such as training", metavar="NAME", nargs=1)
            action.add_shared("-o")
        else:
            action.add("names", "files of conf/dashboard (all)", nargs="*", metavar="NAME")
        if name != "check":
            action.add_argument("--project", **PROJECT)
            action.add("--entity", "W&B team (default: the default entity of the API key)", default="")
        action.add_argument("--config-dir", **folder)
    what = "write the file for `wandb sweep`, whose agents start train.py"
    sweep = options.add_command(actions, "sweep", _sweep, "write a sweep.yaml for W&B's agents", what)
    sweep.add("model", "a name under conf/model/", metavar="MODEL")
    what = "such as heads=2,4 trainer.steps=100; lists of values are swept"
    sweep.add("overrides", what, nargs="+", metavar="KEY=VALUE")
    sweep.add("--method", "search method of W&B (%(default)s)", choices=("grid", "random", "bayes"), default="grid")
    sweep.add("--metric", "metric to optimize (%(default)s)", default=OBJECTIVE)
    sweep.add_argument("--project", **PROJECT)
    sweep.add_shared(*options.MODEL_OPTIONS, "-o")
    sweep.set_defaults(data=True)


def _read_dashboards(arguments: Namespace) -> dict[str, Dashboard]:
    from tfm_blocks.compose.folders import config_folders, list_options
    from tfm_blocks.tracking.dashboard import GROUP, read_dashboard

    folders = config_folders(arguments.config_dir)
    problems: list[Problem] = []
    by_name = {}
    for name in arguments.names or list_options(GROUP, folders):
        try:
            by_name[name] = read_dashboard(name, folders)
        except ConfigError as error:
            problems += error.problems
    expect_none(problems)
    return by_name


def _check(arguments: Namespace) -> None:
    for name, dashboard in _read_dashboards(arguments).items():
        print(f"{name}: fine, {sum(map(len, dashboard.sections.values()))} panels")


def _workspace(arguments: Namespace, dashboard: Dashboard) -> Any:
    from importlib.util import find_spec

    if find_spec("wandb_workspaces") is None:
        rule = "needs a library that is not installed: wandb-workspaces"
        raise config_error("tfm dashboard", rule, "pip install -c constraints.txt -e '.[dashboards]'")
    from tfm_blocks.tracking.dashboard import workspace

    return workspace(dashboard, arguments.project, arguments.entity)


def _render(arguments: Namespace) -> None:
    (dashboard,) = _read_dashboards(arguments).values()
    from tfm_blocks.tracking.dashboard import rendered

    options.write_output(json.dumps(rendered(_workspace(arguments, dashboard)), indent=1) + "\n", arguments.path)


def _push(arguments: Namespace) -> None:
    from tfm_blocks.tracking.dashboard import save_workspace

    for name, dashboard in _read_dashboards(arguments).items():
        print(f"{name}: {save_workspace(_workspace(arguments, dashboard))}")


def _sweep(arguments: Namespace) -> None:
    from tfm_blocks.compose.command_line import parse_request
    from tfm_blocks.compose.composition import Composer
    from tfm_blocks.compose.sweep import combinations, list_parts, vary_one_key
    from tfm_blocks.launch.check import check_remote_run
    from tfm_blocks.sweep.checks import JobChecker, expect_measured, refuse_wrong
    from tfm_blocks.tracking.dashboard import sweep_file

    folder = options.config_dir_words(arguments)
    plugins = options.plugin_words(arguments)  # for the agents
    request = parse_request(["-m", *folder, *options.model_words(arguments), *plugins, *arguments.overrides])
    text = sweep_file(request, arguments.method, arguments.metric, arguments.project)
    checker = JobChecker(Composer(request.folders), check_remote_run)
    parts = list_parts(request.overrides, request.folders)
    words = combinations(parts) if arguments.method == "grid" else vary_one_key(parts)  # or each value once
    jobs = [checker.check_job(job) for job in words]
    refuse_wrong(jobs)
    for job in jobs:
        expect_measured(arguments.metric, job.settings, "--metric")
        if not job.settings.logger.wandb:
            rule = "does not log to W&B, which would receive no metric"
            raise config_error("logger", rule, "add logger=wandb")
    options.write_output(text, arguments.path)
