"""The command `tfm eject`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import options
from tfm_blocks.cli.models import add_model, read_model_or_run
from tfm_blocks.errors import ConfigError, Problem, RunError, printable

if TYPE_CHECKING:
    from tfm_blocks.language.spec import Spec

INITIAL_SEED = 1


def add_commands(commands: options.Commands) -> None:
    """Add the parser of this command."""
    what = "write a model as one PyTorch file that imports torch and nothing else"
    command = add_model(commands, "eject", _eject, what, "MODEL|RUN")
    options.add_file(command, "write the model to this Python file", required=True)
    what = "also write the weights for torch.load: those of the run, or initial ones"
    command.add_argument("--weights", type=Path, metavar="FILE", help=what)


def _eject(arguments: argparse.Namespace) -> None:
    from tfm_blocks.exchange.eject.file import eject
    from tfm_blocks.network.adapters import without_adapters
    from tfm_blocks.runs.files import written_beside

    if arguments.weights and arguments.weights.resolve() == arguments.path.resolve():
        rule = f"must differ from the file of -o, but both are {arguments.path}"
        raise ConfigError(Problem("--weights", rule, help="--weights model.pt"))
    spec, sources, _ = read_model_or_run(arguments.model, arguments.overrides, arguments)
    if spec.adapted and not Path(arguments.model).is_dir():
        rule = "a file of torch alone has no adapters, and this model has no trained ones to merge"
        raise ConfigError(Problem("model.adapt", rule, help="leave model.adapt out, or eject a trained run"))
    spec = without_adapters(spec)
    title = printable(" ".join([Path(arguments.model).name, *arguments.overrides]))
    text = eject(spec, sources, title)
    with written_beside(arguments.path) as part:
        part.write_text(text, "utf-8")
        parameters = _write_weights(arguments, spec) if arguments.weights else 0
    print(printable(f"{arguments.path}: {len(text.splitlines())} lines"))
    if arguments.weights:
        print(printable(f"{arguments.weights}: {parameters:,} parameters"))


def _write_weights(arguments: argparse.Namespace, spec: Spec) -> int:
    """Write the state dict of the run, or of the model's initial values, and return the number of parameters.

    An old model file is removed before the weights appear, so that no kill leaves it with the new weights. Raises
    RunError.
    """
    import torch

    from tfm_blocks.network.build import build_network
    from tfm_blocks.runs.files import written_beside
    from tfm_blocks.runs.model import read_network

    run = Path(arguments.model)
    network = read_network(run, arguments.plugins) if run.is_dir() else build_network(spec, seed=INITIAL_SEED)
    with written_beside(arguments.weights) as part:
        try:
            torch.save(network.state_dict(), part)
        except RuntimeError as error:  # torch's writer does not raise OSError
            rule = f"cannot be written: {str(error).rpartition('strerror: ')[2].splitlines()[0]}"
            help = "choose a file in an existing folder, on a disk with enough space"
            raise RunError(Problem(str(arguments.weights), rule, help=help)) from None
        if arguments.path.is_file():
            arguments.path.resolve().unlink()
    return sum(parameter.numel() for parameter in network.parameters())
