"""Commands on run folders: attention, average and runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tfm_blocks.cli import options
from tfm_blocks.errors import ConfigError, Problem, printable, shown, suggest


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of these commands."""
    what = "draw the attention of every layer and head, for at most 64 tokens on each side"
    command = options.add_command(commands, "attention", _attention, "draw the attention of a model", what)
    options.add_run(command)
    options.add_checkpoint(command)
    what = "text to translate, one for each source"
    command.add_argument("sentence", type=options.text, metavar="SENTENCE", nargs="+", help=what)
    options.add_file(command, "out.html or out.png", required=True)
    what = "translation to use instead of the model's"
    command.add_argument("--target", type=options.text, metavar="TEXT", help=what)
    options.add_device(command)
    options.add_plugins(command)
    what = "average a run's last weights, into a folder next to it"
    command = options.add_command(commands, "average", _average, "average a run's last weights", what)
    options.add_run(command)
    what = "number of validations to average (5)"
    command.add_argument("--last", type=options.count, default=5, metavar="K", help=what)
    what = "list the runs of a folder, newest first"
    command = options.add_command(commands, "runs", _runs, "list, find and delete runs", what)
    what = "show only runs with this word in their name, model, data or command line"
    command.add_argument("words", nargs="*", metavar="WORD", help=what)
    what = "folder of the runs (runs)"
    command.add_argument("--in", type=Path, default=Path("runs"), dest="root", metavar="FOLDER", help=what)
    command.add_argument("--state", metavar="STATE", help="only runs in this state, such as done or failed")
    options.add_json(command)
    what = "delete these runs, or sweeps with all their runs, permanently; needs --yes"
    command.add_argument("--delete", nargs="+", type=Path, metavar="RUNS", help=what)
    command.add_argument("--yes", action="store_true", help="confirm --delete")


def _runs(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.lists import show_runs
    from tfm_blocks.runs.listing import list_runs
    from tfm_blocks.runs.saved_run import UNFINISHED

    if arguments.delete:
        _delete(arguments)
        return
    runs = list_runs(arguments.root)
    states = {*UNFINISHED, *(run.state for run in runs)}
    if arguments.state not in (None, *states):
        help = suggest(arguments.state, states - {""})
        raise ConfigError(Problem("--state", f"is {shown(arguments.state)}, which is not a state of a run", help=help))
    matches = [run for run in runs if run.has(arguments.words) and arguments.state in (None, run.state)]
    show_runs(matches, as_json=arguments.json)


def _delete(arguments: argparse.Namespace) -> None:
    """Delete the folders of --delete, all of which must be runs or sweeps. Raises ConfigError without --yes."""
    from tfm_blocks.report.lists import show_sizes
    from tfm_blocks.runs.listing import delete_run, expect_deletable

    for folder in arguments.delete:
        expect_deletable(folder)
    show_sizes(arguments.delete)
    if not arguments.yes:
        rule = "deletes permanently, and nothing was deleted yet"
        raise ConfigError(Problem("--delete", rule, help="add --yes to confirm"))
    for folder in arguments.delete:
        delete_run(folder)


def _attention(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.attention import check_path, save_attention
    from tfm_blocks.translation.sentence_attention import attention_of

    check_path(arguments.path)
    translator = options.translator_of(arguments)
    translator.expect_sources()
    if len(arguments.sentence) != len(translator.sources):
        rule = f"has {len(arguments.sentence)} texts, but the model reads {', '.join(translator.sources)}"
        raise ConfigError(Problem("SENTENCE", rule, help="put each text in quotes"))
    attention = attention_of(translator, arguments.sentence, arguments.target)
    translator.warn_of_unknown()
    for warning in save_attention(attention, arguments.path):
        print(printable(f"warning: {warning}"), file=sys.stderr)
    print(printable(f"{attention.target}\n{arguments.path}"))


def _average(arguments: argparse.Namespace) -> None:
    from tfm_blocks.report.screen import print_line
    from tfm_blocks.runs.checkpoints import average

    print_line(f"folder: {average(arguments.folder, arguments.last)}")
