"""Commands on run folders: attention, average, runs, compare and report."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.errors import config_error, counted, print_line, printable, shown, suggest

if TYPE_CHECKING:
    from tfm_blocks.report.comparison import Comparison
    from tfm_blocks.report.scaling import Ladder
    from tfm_blocks.report.table import Table

RUNS = Path("runs")


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of these commands."""
    what = "draw the attention of every layer and head, for at most 64 tokens on each side"
    shared = ["folder", "--checkpoint"]
    command = options.add_command(commands, "attention", _attention, "draw the attention of a model", what, shared)
    command.add("sentence", "text to read, one for each source", type=options.text, metavar="SENTENCE", nargs="+")
    command.add("-o", "out.html or out.png", **options.OUTPUT, required=True)
    command.add("--target", "translation to use instead of the model's", type=options.text, metavar="TEXT")
    command.add_shared("--device", "--plugins")
    what = "average a run's last weights, into a folder next to it"
    command = options.add_command(commands, "average", _average, "average a run's last weights", what, ["folder"])
    command.add("--last", "number of validations to average (5)", type=options.count, default=5, metavar="K")
    what = "list the runs of a folder, newest first"
    command = options.add_command(commands, "runs", _runs, "list, find and delete runs", what)
    what = "show only runs with this word in their name, model, data or command line"
    command.add("words", what, nargs="*", metavar="WORD")
    command.add("--in", "folder of the runs (runs)", type=Path, default=RUNS, dest="root", metavar="FOLDER")
    command.add("--state", "only runs in this state, such as done or failed", metavar="STATE")
    command.add_shared("--json")
    what = "delete these runs, or sweeps with all their runs, permanently; needs --yes"
    command.add("--delete", what, nargs="+", type=Path, metavar="RUNS")
    command.add_flag("--yes", "confirm --delete")
    _add_comparisons(commands)


def _add_comparisons(commands: options.Commands) -> None:
    what = "show how runs differ, what they scored, and which differences are significant"
    command = options.add_command(commands, "compare", _compare, "compare runs", what)
    _add_runs(command)
    shapes = command.add_mutually_exclusive_group()
    for shape in ("csv", "markdown", "latex", "json"):
        shapes.add_argument(f"--{shape}", action="store_true", help=f"print {shape} instead of tables")
    command.add("--figures", "write figures for a paper into this folder, as PDF and SVG", type=Path, metavar="FOLDER")
    only = command.add_mutually_exclusive_group()
    only.add_argument("--matrix", action="store_true", help="print only the matrix of models and tasks")
    what = "fit a scaling law to runs of several sizes, and print each model's compute relative to the baseline"
    only.add_argument("--scaling", action="store_true", help=what)
    what = "with --scaling, also fit a law to each model alone; its exponents are uncertain if the ladder is small"
    command.add_flag("--exponents", what)
    what = "with --scaling, also fit two factors for each model, one on parameters and one on tokens"
    command.add_flag("--factors", what)
    what = "write one self-contained page with curves, tables, samples, attention, nodes and configs"
    command = options.add_command(commands, "report", _report, "write a page about runs", what)
    _add_runs(command)
    command.add("-o", "report.html", **options.OUTPUT, required=True)
    command.add_flag("--scaling", "fit a scaling law to runs of several sizes, and show it first")
    what = "sentence whose attention is shown (default: a line of the test set)"
    command.add("--sentence", what, type=options.text, metavar="TEXT")


def _add_runs(command: options.Command) -> None:
    command.add("folders", "run folders, or the folder of a sweep", type=Path, nargs="+", metavar="RUNS")
    command.add("--baseline", "a run; the tests compare with its model, over all its seeds", metavar="RUN")
    what = "scores that tfm evaluate --test wrote, such as beam4 (default: the scores of the training run)"
    command.add("--scores", what, metavar="NAME")
    what = "display names of models and tasks, as in '{lstm: LSTM}', or a YAML file"
    command.add("--names", what, type=options.text, metavar="YAML")
    what = "the first models and tasks, in this order, as in '[lstm, attention]', or a YAML file"
    command.add("--order", what, type=options.text, metavar="YAML")
    what = "the models or tasks to show, in this order, as in '[lstm, attention]', or a YAML file"
    command.add("--only", what, type=options.text, metavar="YAML")
    what = "score of the matrix of models and tasks, such as solved or accuracy@64 (default: the score of the tasks)"
    command.add("--metric", what, metavar="SCORE")
    command.add_flag("--held-out-seeds", "leave out the runs whose seeds chose the learning rate of their model")
    command.add_shared("--plugins")


def _attention(arguments: Namespace) -> None:
    from tfm_blocks.report.attention import check_path, save_attention
    from tfm_blocks.translation.classify import load_any
    from tfm_blocks.translation.sentence_attention import attention_of
    from tfm_blocks.translation.translator import Translator

    check_path(arguments.path)
    reader = load_any(arguments.folder, **options.loading_of(arguments))
    sources = reader.sources if isinstance(reader, Translator) else ()
    if len(arguments.sentence) != max(1, len(sources)):
        rule = f"has {counted(len(arguments.sentence), 'text')}, but the model reads {', '.join(sources) or 'one'}"
        raise config_error("SENTENCE", rule, "put each text in quotes")
    if arguments.target is not None and not sources:
        raise config_error("--target", "is a translation, but the model reads one text", "leave it out")
    attention = attention_of(reader, arguments.sentence, arguments.target)
    if isinstance(reader, Translator):
        reader.warn_of_unknown()
    for warning in save_attention(attention, arguments.path):
        print(printable(f"warning: {warning}"), file=sys.stderr)
    print_line(f"{attention.target}\n{arguments.path}" if sources else f"{arguments.path}")


def _average(arguments: Namespace) -> None:
    from tfm_blocks.exchange.folder import inherit_record
    from tfm_blocks.runs.checkpoints import average

    folder = average(arguments.folder, arguments.last)
    inherit_record(arguments.folder, folder)
    print_line(f"folder: {folder}")


def _runs(arguments: Namespace) -> None:
    from tfm_blocks.report.lists import show_runs
    from tfm_blocks.runs.listing import list_runs
    from tfm_blocks.runs.saved_run import UNFINISHED

    if arguments.delete:
        _delete(arguments)
        return
    if arguments.yes:
        help = "write --delete RUNS --yes, or leave --yes out"
        raise config_error("--yes", "confirms --delete, which is missing", help)
    runs = list_runs(arguments.root)
    states = {*UNFINISHED, *(run.state for run in runs)}
    if arguments.state not in (None, *states):
        help = suggest(arguments.state, states - {""})
        raise config_error("--state", f"is {shown(arguments.state)}, which is not a state of a run", help)
    matches = [run for run in runs if run.has(arguments.words) and arguments.state in (None, run.state)]
    show_runs(matches, as_json=arguments.json)


def _delete(arguments: Namespace) -> None:
    """Delete the folders of --delete, which must all be runs or sweeps. Raises ConfigError without --yes."""
    from tfm_blocks.runs.listing import delete_run, expect_deletable, size_of

    if arguments.words or arguments.state or arguments.json or arguments.root != RUNS:
        rule = "deletes exactly the folders that it names, so it takes no WORD, --state, --in or --json"
        raise config_error("--delete", rule, "leave them out")
    for folder in arguments.delete:
        expect_deletable(folder)
    named = {folder.resolve(): folder for folder in arguments.delete}
    folders = [folder for path, folder in named.items() if named.keys().isdisjoint(path.parents)]
    for folder in folders:
        print_line(f"{folder}: {size_of(folder) / 1e6:,.1f} MB")
    if not arguments.yes:
        raise config_error("--delete", "deletes permanently, and nothing was deleted yet", "add --yes to confirm")
    for folder in folders:
        delete_run(folder)


def _compare(arguments: Namespace) -> None:
    from tfm_blocks.report import comparison_tables as output

    for option in ("exponents", "factors"):
        if vars(arguments)[option] and not arguments.scaling:
            raise config_error(f"--{option}", "belongs to a scaling law", "add --scaling, or leave it out")
        if vars(arguments)[option] and arguments.csv:
            rule = "adds a table, but --csv prints only the table of the ladder"
            raise config_error(f"--{option}", rule, "leave it out, or write --json in place of --csv")
    comparison = _comparison(arguments)
    if arguments.scaling:
        for path in _compare_scaling(arguments, comparison):
            print(printable(str(path)), file=sys.stderr)
        return
    matrix = comparison.matrix if arguments.matrix else None
    if arguments.matrix and matrix is None:
        rule = "needs runs of several models on several tasks, with scores"
        help = "tfm train -m experiment=probe/lite mixer=attention,lstm data=parity,mqar trains such runs"
        raise config_error("--matrix", rule, help)
    if arguments.csv:
        output.print_matrix_csv(matrix) if matrix else output.print_csv(comparison)
    elif arguments.json:
        output.print_matrix_json(matrix, comparison.notes) if matrix else output.print_comparison_json(comparison)
    else:
        tables = output.tables_of_matrix(matrix) if matrix else output.tables_of(comparison)
        _show_tables(arguments, tables, comparison.notes)
    if arguments.figures:
        from tfm_blocks.report.paper import save_figures

        for path in save_figures(comparison, arguments.figures):
            print(printable(str(path)), file=sys.stderr)


def _show_tables(arguments: Namespace, tables: Sequence[Table], notes: Sequence[str]) -> None:
    from tfm_blocks.report import comparison_tables as output

    show = output.print_markdown if arguments.markdown else output.show_tables
    show = output.print_latex if arguments.latex else show
    show(tables, notes)


def _ladder(arguments: Namespace, comparison: Comparison) -> Ladder:
    """Return the scaling law of a comparison. Raises ConfigError if SciPy is missing, or as `read_ladder`."""
    from importlib.util import find_spec

    if find_spec("scipy") is None:
        help = "pip install -c constraints.txt 'tfm-blocks[scaling]'"
        raise config_error("--scaling", "needs SciPy, which is not installed", help)
    from tfm_blocks.report.scaling import read_ladder

    return read_ladder(comparison, arguments.plugins, arguments.metric)


def _compare_scaling(arguments: Namespace, comparison: Comparison) -> Iterable[Path]:
    ladder = _ladder(arguments, comparison)
    from tfm_blocks.report import scaling_tables as scaling
    from tfm_blocks.report.isoflops import draw_isoflops, find_profiles, profile_notes
    from tfm_blocks.report.screen import print_json
    from tfm_blocks.report.table import csv_text

    notes = [*comparison.notes, *ladder.notes, *(profile_notes(ladder.fit) if arguments.figures else ())]
    if arguments.json:
        record = scaling.scaling_record(ladder, exponents=arguments.exponents, factors=arguments.factors)
        print_json(record | {"notes": notes})
    elif arguments.csv:
        print(csv_text(scaling.rungs_table(ladder)), end="")
    else:
        tables = scaling.tables_of_ladder(ladder)
        tables += [scaling.two_factors_table(ladder)] if arguments.factors else []
        tables += [scaling.exponents_table(ladder)] if arguments.exponents else []
        _show_tables(arguments, tables, notes)
    if not arguments.figures:
        return ()
    from tfm_blocks.report.drawing import drawing_style, save_drawings

    with drawing_style():
        drawings = [("scaling", scaling.draw_scaling(ladder))]
        drawings += [("isoflops", draw_isoflops(ladder))] if find_profiles(ladder.fit) else []
        return save_drawings(drawings, arguments.figures)


def _comparison(arguments: Namespace) -> Comparison:
    from tfm_blocks.report.comparison import compare_runs
    from tfm_blocks.report.display import read_display

    shape = vars(arguments)
    scaling, tested = shape.get("scaling", False), not any(shape.get(view) for view in ("scaling", "matrix", "csv"))
    for option in ("names", "order", "only", "held_out_seeds"):
        if scaling and shape[option] not in (None, False):
            rule = "does not apply to --scaling, which fits all runs"
            raise config_error(options.flag_of(option), rule, "leave it out, or name the folders of fewer runs")
    if scaling and arguments.scores and not arguments.metric:
        rule = "has no effect with --scaling, which fits the losses of the last validations"
        raise config_error("--scores", rule, "name a score, as in --metric bits_per_byte, or leave it out")
    given = arguments.folders, arguments.baseline, arguments.scores, arguments.metric
    choices = {"held_out_seeds": arguments.held_out_seeds, "several_lengths": scaling, "tested": tested}
    return compare_runs(*given, **choices, display=read_display(arguments.names, arguments.order, arguments.only))


def _report(arguments: Namespace) -> None:
    from tfm_blocks.report.page import render_report
    from tfm_blocks.runs.files import write_bytes

    path: Path = arguments.path
    options.expect_file(path, "report.html")
    comparison = _comparison(arguments)
    title = ", ".join(str(folder) for folder in arguments.folders)
    ladder = _ladder(arguments, comparison) if arguments.scaling else None
    text = render_report(comparison, title, ladder=ladder, sentence=arguments.sentence, plugins=arguments.plugins)
    data = text.encode("utf-8", "replace")  # a run's text may hold an incomplete character
    write_bytes(path, data)
    print_line(f"{path}: {counted(len(comparison.runs), 'run')}, {len(data) / 1e6:.1f} MB")
