"""Options that several commands share, and the settings that they select."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.errors import ConfigError, Problem, is_utf8, shown
from tfm_blocks.translation.settings import LengthPenalty, Sampling, Search

LONGEST_COUNT = 18  # digits that fit into 64 bits

if TYPE_CHECKING:
    from tfm_blocks.network.graph import Network
    from tfm_blocks.translation.translator import Translator

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], help: str, about: str = ""
) -> argparse.ArgumentParser:
    """Add a command. `help` describes it in the list of commands, and `about` (default: `help`) in its own help."""
    command = commands.add_parser(name, help=help, description=about or help)
    command.set_defaults(run=run)
    return command


def add_model_options(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that read models by name: --config-dir and --plugins."""
    add_config_dir(command)
    add_plugins(command)


def add_config_dir(command: argparse.ArgumentParser, group: str = "model") -> None:
    """Add the option --config-dir."""
    command.add_argument("--config-dir", type=Path, metavar="DIR", help=f"a config folder that contains {group}/")


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option --json."""
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_file(command: argparse.ArgumentParser, help: str = "write it to this file", *, required: bool = False) -> None:
    """Add the option -o."""
    command.add_argument("-o", type=Path, required=required, dest="path", metavar="FILE", help=help)


def expect_figure(path: Path | None) -> None:
    """Raise ConfigError unless the file of -o, if there is one, is a figure."""
    if path and path.suffix not in (".svg", ".pdf", ".png"):
        rule = f"must be a file .svg, .pdf, .png, but is {shown(path.name)}"
        raise ConfigError(Problem("-o", rule, help=f"write -o {path.stem or 'figure'}.svg"))


def expect_html(path: Path, example: str) -> None:
    """Raise ConfigError unless the file of -o is an .html file in an existing folder."""
    if path.suffix != ".html" or path.is_dir() or not path.parent.is_dir():
        rule = f"must be an .html file in an existing folder, but is {path}"
        raise ConfigError(Problem("-o", rule, help=f"-o {example}"))


def write_output(text: str, path: Path | None) -> None:
    """Write the text to the file of -o, or to stdout."""
    if path:
        from tfm_blocks.runs.files import write_bytes

        write_bytes(path, text.encode("utf-8"))
    else:
        print(text, end="")


def add_plugins(command: argparse.ArgumentParser) -> None:
    """Add the option --plugins, whose modules are imported before the command runs."""
    help = "a module with blocks or probe tasks, on the Python path or in this folder"
    command.add_argument("--plugins", action="append", default=[], metavar="MODULE", help=help)


def load_requested_plugins(arguments: argparse.Namespace) -> None:
    """Import the modules of --plugins after the shipped blocks, whose names they cannot take. Raises ConfigError."""
    if getattr(arguments, "plugins", None):
        import tfm_blocks.blocks  # noqa: F401  registers them
        from tfm_blocks.registry.plugins import load_plugins

        load_plugins(arguments.plugins)


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the argument RUN, a run folder."""
    command.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")


def add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the option --checkpoint."""
    help = "weights of a validation: last, best or a step; the run may be unfinished"
    command.add_argument("--checkpoint", metavar="WHICH", help=help)


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    help = "a device of torch, such as cpu; auto: the accelerator if there is one (auto)"
    command.add_argument("--device", default="auto", help=help)


def translator_of(arguments: argparse.Namespace, run: Path | None = None) -> Translator:
    """Load the run and checkpoint of the command line, or the final weights of `run`. Raises RunError."""
    from tfm_blocks.translation.translator import Translator

    checkpoint = arguments.checkpoint if run is None else None
    options = {"device": arguments.device, "plugins": arguments.plugins, "checkpoint": checkpoint}
    return Translator.load(run or arguments.folder, **options)


def add_search(command: argparse.ArgumentParser) -> None:
    """Add the options of beam search, and the options of `add_computing`."""
    add = command.add_argument
    add("--beam", type=count, default=Search.beam, metavar="K", help="hypotheses per sentence; 1: greedy search")
    add("--patient", action="store_true", help="continue while an unfinished hypothesis can still win (slower)")
    add("--alpha", type=float, default=Search.alpha, help="exponent of the length penalty (%(default)s)")
    what = "length penalty: ((5+n)/6)^alpha or n^alpha"
    add("--penalty", choices=get_args(LengthPenalty), default=Search.penalty, help=what)
    what = "weight of the coverage penalty (0)"
    add("--coverage", type=float, default=Search.coverage, metavar="BETA", help=what)
    what = "maximum length of a line and of its translation (1024)"
    add("--max-tokens", type=count, default=Search.max_tokens, metavar="N", help=what)
    add("--strict", action="store_true", help="fail on a line that is too long or not UTF-8")
    add_computing(command)


def add_computing(command: argparse.ArgumentParser) -> None:
    """Add the options of batches, device, precision and plug-ins."""
    add = command.add_argument
    add("--batch-tokens", type=count, default=4096, metavar="N", help="tokens per batch (4096)")
    add_device(command)
    what = "precision (fp32); int8: linear maps, on the CPU; except with fp32, a few translations depend on the batch"
    add("--precision", choices=("fp32", "bf16", "int8"), default="fp32", help=what)
    add_plugins(command)


def count(text: str) -> int:
    """Parse an integer above 0, as an argparse type. Raises ArgumentTypeError."""
    if not text.isdecimal() or len(text) > LONGEST_COUNT or not int(text):
        rule = f"must be a whole number above 0 of at most {LONGEST_COUNT} digits, but is {shown(text)}"
        raise argparse.ArgumentTypeError(rule)
    return int(text)


def text(argument: str) -> str:
    """Parse text for a model, as an argparse type. Raises ArgumentTypeError."""
    if not is_utf8(argument):
        raise argparse.ArgumentTypeError(f"must be UTF-8 text, but is {shown(argument)}")
    return argument


def add_generation(command: argparse.ArgumentParser) -> None:
    """Add the options for printing hypotheses and for sampling."""
    add = command.add_argument
    what = "print the K best hypotheses as line, score and text (1)"
    add("--nbest", type=count, default=Search.nbest, metavar="K", help=what)
    add("--scores", action="store_true", help="print the score before the text: log probability over length penalty")
    add("--sample", action="store_true", help="draw tokens instead of searching")
    add("--temperature", type=float, metavar="T", help="with --sample: temperature (1)")
    add("--top-k", type=int, metavar="K", help="with --sample: draw from the K most likely tokens (0: all)")
    what = "with --sample: draw from the most likely tokens with total probability P (1)"
    add("--top-p", type=float, metavar="P", help=what)
    add("--seed", type=int, help="with --sample: random seed (1)")


def search_of(arguments: argparse.Namespace, *, nbest: int = 1, sampling: Sampling | None = None) -> Search:
    """Return the requested search settings. Raises ConfigError."""
    names = ("beam", "patient", "alpha", "penalty", "coverage", "max_tokens")
    try:
        return Search(**{name: vars(arguments)[name] for name in names}, nbest=nbest, sampling=sampling)
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="see --help for each option")) from None


def sampling_of(arguments: argparse.Namespace) -> Sampling | None:
    """Return the sampling settings, or None without --sample. Raises ConfigError."""
    settings = {name: vars(arguments)[name] for name in ("temperature", "top_k", "top_p", "seed")}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and not arguments.sample:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in settings)
        raise ConfigError(Problem("", f"{options}: no effect without --sample", help="add --sample"))
    try:
        return Sampling(**settings) if arguments.sample else None
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="see --help for each option")) from None


def precision_of(arguments: argparse.Namespace, network: Network) -> AbstractContextManager[object]:
    """Return a context manager in which the network computes in the precision of --precision. Raises ConfigError."""
    import torch

    from tfm_blocks.network.packed import quantized

    if arguments.precision == "int8":
        return quantized(network)
    device = next(network.parameters()).device
    return torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
