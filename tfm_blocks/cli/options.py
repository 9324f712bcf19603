"""Options that several commands share, and the settings that they select."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tfm_blocks.errors import ConfigError, Problem, is_utf8, shown
from tfm_blocks.translation.settings import LengthPenalty, Sampling, Search

LONGEST_COUNT = 18  # digits that fit into 64 bits

if TYPE_CHECKING:
    from tfm_blocks.network.graph import Network
    from tfm_blocks.translation.translator import Translator

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


OUTPUT: dict[str, Any] = {"type": Path, "dest": "path", "metavar": "FILE"}  # of -o
WHICH = "weights of a validation: last, best or a step; the run may be unfinished"
MODULE = "a module with blocks or probe tasks, on the Python path or in this folder"
DEVICE = "a device of torch, such as cpu; auto: the accelerator if there is one (auto)"
SHARED: dict[str, dict[str, Any]] = {
    "folder": {"type": Path, "metavar": "RUN", "help": "a run folder, such as runs/NAME"},
    "--checkpoint": {"metavar": "WHICH", "help": WHICH},
    "--config-dir": {"type": Path, "metavar": "DIR", "help": "a config folder that contains model/"},
    "--device": {"default": "auto", "help": DEVICE},
    "--json": {"action": "store_true", "help": "print JSON instead of a table"},
    "-o": OUTPUT | {"help": "write it to this file"},
    "--plugins": {"action": "append", "default": [], "metavar": "MODULE", "help": MODULE},
}
MODEL_OPTIONS = ("--config-dir", "--plugins")  # of commands that read models by name
SEARCH = ("beam", "patient", "alpha", "penalty", "coverage", "max_tokens")  # attributes of a search


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    help: str,
    about: str = "",
    shared: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a command with these options of SHARED.

    `help` describes it in the list of commands, and `about` (default: `help`) in its own help.
    """
    command = commands.add_parser(name, help=help, description=about or help)
    command.set_defaults(run=run)
    add_shared(command, *shared)
    return command


def add_shared(command: argparse.ArgumentParser, *names: str) -> None:
    """Add options of SHARED."""
    for name in names:
        command.add_argument(name, **SHARED[name])


def flag_of(name: str) -> str:
    """Return the option whose value is the attribute `name`."""
    return f"--{name.replace('_', '-')}"


def expect_figure(path: Path | None) -> None:
    """Raise ConfigError unless the file of -o, if there is one, is a figure."""
    if path and path.suffix not in (".svg", ".pdf", ".png"):
        rule = f"must be a file .svg, .pdf, .png, but is {shown(path.name)}"
        raise ConfigError(Problem("-o", rule, help=f"write -o {path.stem or 'figure'}.svg"))


def expect_file(path: Path, example: str) -> None:
    """Raise ConfigError unless the file of -o has the suffix of the example and lies in an existing folder."""
    suffix = Path(example).suffix
    if path.suffix != suffix or path.is_dir() or not path.parent.is_dir():
        rule = f"must be a {suffix} file in an existing folder, but is {path}"
        raise ConfigError(Problem("-o", rule, help=f"-o {example}"))


def write_output(text: str, path: Path | None) -> None:
    """Write the text to the file of -o, or to stdout."""
    if path:
        from tfm_blocks.runs.files import write_bytes

        write_bytes(path, text.encode("utf-8"))
    else:
        print(text, end="")


def load_requested_plugins(arguments: argparse.Namespace) -> None:
    """Import the modules of --plugins after the shipped blocks, whose names they cannot take. Raises ConfigError."""
    if getattr(arguments, "plugins", None):
        import tfm_blocks.blocks  # noqa: F401  registers them
        from tfm_blocks.registry.plugins import load_plugins

        load_plugins(arguments.plugins)


def config_dir_words(arguments: argparse.Namespace) -> list[str]:
    """Return the words of a command line that pass --config-dir on."""
    return ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []


def loading_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `load`: the device, the plug-ins and the checkpoint of the command line."""
    return {name: vars(arguments)[name] for name in ("device", "plugins", "checkpoint")}


def translator_of(arguments: argparse.Namespace, run: Path | None = None) -> Translator:
    """Load the run and checkpoint of the command line, or the final weights of `run`. Raises RunError."""
    from tfm_blocks.translation.translator import Translator

    final = {"checkpoint": None} if run else {}
    return Translator.load(run or arguments.folder, **loading_of(arguments) | final)


def add_search(command: argparse.ArgumentParser) -> None:
    """Add the options of beam search, and the options of `add_computing`."""
    add = command.add_argument
    add("--beam", type=count, default=Search.beam, metavar="K", help="hypotheses per sentence; 1: greedy search (1)")
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
    add_shared(command, "--device")
    what = "precision (fp32); int8: linear layers, on the CPU; with bf16 and int8, a few outputs depend on the batch"
    add("--precision", choices=("fp32", "bf16", "int8"), default="fp32", help=what)
    add_shared(command, "--plugins")


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
    try:
        return Search(**{name: vars(arguments)[name] for name in SEARCH}, nbest=nbest, sampling=sampling)
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="see --help for each option")) from None


def sampling_of(arguments: argparse.Namespace) -> Sampling | None:
    """Return the sampling settings, or None without --sample. Raises ConfigError."""
    settings = {name: vars(arguments)[name] for name in ("temperature", "top_k", "top_p", "seed")}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and not arguments.sample:
        options = ", ".join(map(flag_of, settings))
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
    return torch.autocast(network.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
