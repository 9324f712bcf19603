"""Commands that draw, write and compare models: figure, diff, eject and view."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.cli import options
from tfm_blocks.cli.models import add_lengths, add_model, read_model_or_run, requested_lengths
from tfm_blocks.errors import ConfigError, Problem, RunError, config_error, print_line, print_warnings, printable, shown
from tfm_blocks.figures.drawing import THEMES, Fold

if TYPE_CHECKING:
    from tfm_blocks.language.spec import Spec
    from tfm_blocks.registry.blocks import Registry
    from tfm_blocks.report.model_page import ViewedModel

LARGE = 1.5  # scale of a figure of one node or layer
INITIAL_SEED = 1


def add_commands(commands: options.Commands) -> None:
    """Add the parsers of these commands."""
    what = "draw a model or a run like figure 1 of Attention Is All You Need"
    command = add_model(commands, "figure", _figure, what, "MODEL|RUN")
    add = command.add
    add("-o", "write the figure to this file: .svg, .pdf, .png or .tex (TikZ)", **options.OUTPUT, required=True)
    what = "draw every layer (none), identical layers once (layers), or each stack as one box (stacks)"
    add("--fold", what, choices=get_args(Fold), default="layers")
    add("--of", "draw only this node, layer or stack, such as encoder.0, enlarged", default="", metavar="ADDRESS")
    add("--theme", "colours (paper)", choices=list(THEMES), default="paper")
    command.add_flag("--shapes", "write shapes on the arrows, such as B S 512")
    what = "write parameters and multiply-adds into the boxes, for one sentence of 32 tokens per input"
    command.add_flag("--cost", what)
    what = "show how two models differ, what that costs, and which weights of the first load into the second"
    command = options.add_command(commands, "diff", _diff, "show how two models differ", what)
    what = "two models or run folders, each followed by its overrides: base heads=8 base heads=4"
    command.add("words", what, nargs="+", metavar="MODEL|RUN")
    command.add("-o", "draw both models with their changes marked: .svg, .pdf, .png or .tex", **options.OUTPUT)
    command.add_shared(*options.MODEL_OPTIONS)
    add_lengths(command)
    command.add_shared("--json")
    what = "write a model as one PyTorch file that imports torch and nothing else"
    command = add_model(commands, "eject", _eject, what, "MODEL|RUN")
    command.add("-o", "write the model to this Python file", **options.OUTPUT, required=True)
    what = "also write weights for torch.load: the weights of the run, or initial weights of a model"
    command.add("--weights", what, type=Path, metavar="FILE")
    what = "write one self-contained page about a model, or about two models and their difference"
    command = options.add_command(commands, "view", _view, "write a page about a model", what)
    what = "one or two models or run folders, each followed by its overrides"
    command.add("words", what, nargs="+", metavar="MODEL|RUN")
    output = command.add_mutually_exclusive_group(required=True)
    output.add_argument("-o", **options.OUTPUT, help="write the page to this .html file")
    what = "serve the page on 127.0.0.1, and reload it when a model file changes"
    output.add_argument("--watch", action="store_true", help=what)
    command.add("--port", "port of --watch (0: a free one)", type=int, default=0, metavar="N")
    command.add_shared(*options.MODEL_OPTIONS)


def _figure(arguments: Namespace) -> None:
    from tfm_blocks.figures.draw import Content
    from tfm_blocks.figures.figure import Style, expect_format, picture_of, write_figure

    expect_format(arguments.path)
    spec, registry = _spec(arguments)
    costs: dict[str, tuple[int, int]] = {}
    if arguments.cost:
        from tfm_blocks.language.sources import Sources
        from tfm_blocks.report.show import measure

        rows = measure(spec, Sources(), {}).rows
        costs = {row.node.address: (row.parameters, row.multiply_adds) for row in rows}
    content = Content(arguments.fold, arguments.of, arguments.shapes, costs)
    title = printable(" ".join([arguments.model, *arguments.overrides]))
    style = Style(THEMES[arguments.theme], title, LARGE if arguments.of else 1.0)
    write_figure(arguments.path, picture_of(spec, registry, content), style)


def _spec(arguments: Namespace) -> tuple[Spec, Registry]:
    """Return the model, checked without torch if it has shipped blocks, no changed maps and no requested cost."""
    from tfm_blocks.language.check import check
    from tfm_blocks.registry.declarations import read_declarations

    declared, model, config_dir = read_declarations(), arguments.model, arguments.config_dir
    options.refuse_config_dir(arguments, [model])
    if not arguments.cost and not arguments.plugins:
        try:
            if options.is_run_folder(model, config_dir) and not arguments.overrides:
                from tfm_blocks.runs.records import read_saved_model

                spec = check(read_saved_model(Path(model)).model, declared)
            else:
                from tfm_blocks.compose.model import compose_model

                composed = compose_model(model, arguments.overrides, config_dir)
                spec = check(composed.model, declared, composed.sources)
            if not (spec.mapping.get("adapt") or spec.mapping.get("quantize")):  # their maps are known from the modules
                print_warnings(spec.warnings)
                return spec, declared
        except ConfigError:  # blocks of an installed plug-in, or an error: the full check knows both better
            pass
    from tfm_blocks.registry.blocks import REGISTRY

    spec, *_ = read_model_or_run(model, arguments.overrides, arguments)
    return spec, REGISTRY


def _diff(arguments: Namespace) -> None:
    from tfm_blocks.report import model_difference as report
    from tfm_blocks.report.screen import print_json

    models = split_models(arguments.words, (2,))
    options.refuse_config_dir(arguments, [name for name, _ in models])
    (a, *_), (b, *_) = (read_model_or_run(name, overrides, arguments) for name, overrides in models)
    first, second = (" ".join([name, *overrides]) for name, overrides in models)
    difference = report.compare_models((first, second), a, b, requested_lengths(arguments, [*a.inputs, *b.inputs]))
    if arguments.path:
        from tfm_blocks.figures.figure import Style, write_figure

        first, second = printable(first), printable(second)
        picture = report.difference_picture(a, b, replace(difference, names=(first, second)))
        write_figure(arguments.path, picture, Style(title=f"{first} → {second}"))
    if arguments.json:
        print_json(report.model_difference_record(difference))
    else:
        report.show_model_difference(difference, a, b)


def split_models(words: Sequence[str], counts: Collection[int]) -> list[tuple[str, list[str]]]:
    """Return each model with the overrides after it. Raises ConfigError unless the number of models is in `counts`."""
    from tfm_blocks.compose.command_line import keep_last

    models: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" in word and models and not word.startswith("model=") and not Path(word).exists():
            models[-1][1].append(word)
        else:
            models.append((word.removeprefix("model="), []))
    models = [(model, keep_last(overrides)) for model, overrides in models]
    if len(models) not in counts:
        rule = f"needs {' or '.join(map(str, counts))} models, but has {len(models)}: {shown(' '.join(words))}"
        help = "write each model with its overrides after it, such as base heads=8 base heads=4"
        raise config_error("command line", rule, help)
    return models


def _eject(arguments: Namespace) -> None:
    from tfm_blocks.exchange.eject.file import eject
    from tfm_blocks.network.adapters import without_adapters
    from tfm_blocks.runs.files import written_beside

    if arguments.weights and arguments.weights.resolve() == arguments.path.resolve():
        rule = f"must differ from the file of -o, but both are {arguments.path}"
        raise config_error("--weights", rule, "--weights model.pt")
    options.refuse_config_dir(arguments, [arguments.model])
    spec, sources, composed = read_model_or_run(arguments.model, arguments.overrides, arguments)
    if spec.adapted and composed:
        rule = "a file of torch alone has no adapters, and this model has no trained ones to merge"
        raise config_error("model.adapt", rule, "leave model.adapt out, or eject a trained run")
    spec = without_adapters(spec)
    title = printable(" ".join([Path(arguments.model).name, *arguments.overrides]))
    text = eject(spec, sources, title)
    with written_beside(arguments.path) as part:
        part.write_text(text, "utf-8")
        parameters = _write_weights(arguments, spec) if arguments.weights else 0
    print_line(f"{arguments.path}: {len(text.splitlines())} lines")
    if arguments.weights:
        print_line(f"{arguments.weights}: {parameters:,} parameters")


def _write_weights(arguments: Namespace, spec: Spec) -> int:
    """Write the state dict of the run, or of the model's initial values, and return the number of parameters.

    An old model file is removed before the weights appear, so that no kill leaves it with the new weights. Raises
    RunError.
    """
    import torch

    from tfm_blocks.network.build import build_network
    from tfm_blocks.runs.files import written_beside
    from tfm_blocks.runs.model import read_network

    if options.is_run_folder(arguments.model, arguments.config_dir):
        network = read_network(Path(arguments.model), arguments.plugins)
    else:
        network = build_network(spec, seed=INITIAL_SEED)
    with written_beside(arguments.weights) as part:
        try:
            torch.save(network.state_dict(), part)
        except RuntimeError as error:  # torch's writer does not raise OSError
            rule = f"cannot be written: {str(error).rpartition('strerror: ')[2].splitlines()[0]}"
            help = "choose a file in an existing folder, on a disk with enough space"
            raise RunError(Problem(str(arguments.weights), rule, help=help)) from None
        if arguments.path.is_file():
            arguments.path.resolve().unlink()
    return network.parameter_count


def _view(arguments: Namespace) -> None:
    from tfm_blocks.figures.figure import write_content
    from tfm_blocks.report.model_page import ViewedModel, render_view

    words = split_models(arguments.words, (1, 2))
    options.refuse_config_dir(arguments, [name for name, _ in words])
    if arguments.port and not arguments.watch:
        raise config_error("--port", "belongs to --watch", "leave it out, or write --watch in place of -o")

    def read() -> list[ViewedModel]:
        return [
            ViewedModel(printable(" ".join([name, *overrides])), *read_model_or_run(name, overrides, arguments))
            for name, overrides in words
        ]

    if arguments.watch:
        from tfm_blocks.cli.view_server import serve

        serve(read, arguments.port)
        return
    path: Path = arguments.path
    options.expect_file(path, "page.html")
    text = render_view(read()).encode("utf-8", "replace")
    write_content(path, text)
    print(f"{printable(str(path))}: {len(text) / 1e3:.0f} kB")
