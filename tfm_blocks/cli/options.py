"""Options that several commands share, and the settings that they select."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from tfm_blocks.errors import config_error, is_utf8, printable, shown
from tfm_blocks.translation.settings import LengthPenalty, Sampling, Search

LONGEST_COUNT = 18  # digits that fit into 64 bits

if TYPE_CHECKING:
    from tfm_blocks.network.graph import Network
    from tfm_blocks.translation.translator import Translator

    Commands = _SubParsersAction["Command"]


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


class Command(ArgumentParser):
    """A parser whose errors are printable: an argument can hold escape sequences, such as the name of a folder."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def add(self, name: str, help: str, **options: Any) -> None:
        """Add an argument."""
        self.add_argument(name, help=help, **options)

    def add_flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, help=help, action="store_true")

    def add_shared(self, *names: str) -> None:
        """Add options of SHARED."""
        for name in names:
            self.add_argument(name, **SHARED[name])


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[Namespace], int | None],
    help: str,
    about: str = "",
    shared: Sequence[str] = (),
) -> Command:
    """Add a command with these options of SHARED.

    `help` describes it in the list of commands, and `about` (default: `help`) in its own help.
    """
    command = commands.add_parser(name, help=help, description=about or help)
    command.set_defaults(run=run)
    command.add_shared(*shared)
    return command


def flag_of(name: str) -> str:
    """Return the option whose value is the attribute `name`."""
    return f"--{name.replace('_', '-')}"


def expect_figure(path: Path | None) -> None:
    """Raise ConfigError unless the file of -o, if there is one, is a figure."""
    if path and path.suffix not in (".svg", ".pdf", ".png"):
        rule = f"must be a file .svg, .pdf, .png, but is {shown(path.name)}"
        raise config_error("-o", rule, f"write -o {path.stem or 'figure'}.svg")


def expect_file(path: Path, example: str) -> None:
    """Raise ConfigError unless the file of -o has the suffix of the example and lies in an existing folder."""
    suffix = Path(example).suffix
    if path.suffix != suffix or path.is_dir() or not path.parent.is_dir():
        raise config_error("-o", f"must be a {suffix} file in an existing folder, but is {path}", f"-o {example}")


def write_output(text: str, path: Path | None) -> None:
    """Write the text to the file of -o, or to stdout."""
    if path:
        from tfm_blocks.runs.files import write_bytes

        write_bytes(path, text.encode("utf-8"))
    else:
        print(text, end="")


def load_requested_plugins(arguments: Namespace) -> None:
    """Import the modules of --plugins after the shipped blocks, whose names they cannot take. Raises ConfigError."""
    if getattr(arguments, "plugins", None):
        import tfm_blocks.blocks  # noqa: F401  registers them
        from tfm_blocks.registry.plugins import load_plugins

        load_plugins(arguments.plugins)


def is_run_folder(model: str, config_dir: Path | None) -> bool:
    """Return True for a folder, unless it only shares its name with a model, such as weights downloaded to `gpt2`."""
    from tfm_blocks.compose.folders import config_folders, list_options
    from tfm_blocks.runs.folder import is_run

    folder = Path(model)
    return folder.is_dir() and (is_run(folder) or model not in list_options("model", config_folders(config_dir)))


def refuse_config_dir(arguments: Namespace, models: Sequence[str]) -> None:
    """Raise ConfigError if --config-dir has no effect because all models are run folders."""
    config_dir = arguments.config_dir
    if config_dir and all(is_run_folder(model, config_dir) for model in models):
        rule = f"has no effect on {models[0]}, a run folder, which has its own config"
        raise config_error("--config-dir", rule, "leave it out")


def model_words(arguments: Namespace) -> list[str]:
    """Return the override that chooses the model of a sweep; none if each of its experiments chooses another model."""
    return [] if getattr(arguments, "models_of_experiments", False) else [f"model={arguments.model}"]


def plugin_words(arguments: Namespace) -> list[str]:
    """Return the override of a run that loads the modules of --plugins."""
    return [f"plugins=[{','.join(arguments.plugins)}]"] if arguments.plugins else []


def config_dir_words(arguments: Namespace) -> list[str]:
    """Return the words of a command line that pass --config-dir on."""
    return ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []


def loading_of(arguments: Namespace) -> dict[str, Any]:
    """Return the arguments of `load`: the device, the plug-ins and the checkpoint of the command line."""
    return {name: vars(arguments)[name] for name in ("device", "plugins", "checkpoint")}


def translator_of(arguments: Namespace, run: Path | None = None) -> Translator:
    """Load the run and checkpoint of the command line, or the final weights of `run`. Raises RunError."""
    from tfm_blocks.translation.translator import Translator

    final = {"checkpoint": None} if run else {}
    return Translator.load(run or arguments.folder, **loading_of(arguments) | final)


def add_search(command: Command, limited: str = "a line and of its translation") -> None:
    """Add the options of beam search, and the options of `add_computing`; --max-tokens is the limit of `limited`."""
    add = command.add
    add("--beam", "hypotheses per sentence; 1: greedy search (1)", type=count, default=Search.beam, metavar="K")
    what = "with --beam 2 or more: continue while an unfinished hypothesis can still win (slower)"
    command.add_flag("--patient", what)
    add("--alpha", "exponent of the length penalty, 0 to 10 (%(default)s)", type=float, default=Search.alpha)
    what = "length penalty: ((5+n)/6)^alpha or n^alpha"
    add("--penalty", what, choices=get_args(LengthPenalty), default=Search.penalty)
    what = "with --beam 2 or more: weight of the coverage penalty, 0 to 1000 (0)"
    add("--coverage", what, type=float, default=Search.coverage, metavar="BETA")
    add("--max-tokens", f"maximum length of {limited} (1024)", type=count, default=Search.max_tokens, metavar="N")
    command.add_flag("--strict", "fail on a line that is too long or not UTF-8")
    add_computing(command)


def add_computing(command: Command) -> None:
    """Add the options of batches, device, precision and plug-ins."""
    add = command.add
    add("--batch-tokens", "tokens per batch (4096)", type=count, default=4096, metavar="N")
    command.add_shared("--device")
    what = "precision (fp32); int8: linear layers, on the CPU; with bf16 and int8, a few outputs depend on the batch"
    add("--precision", what, choices=("fp32", "bf16", "int8"), default="fp32")
    command.add_shared("--plugins")


def count(text: str) -> int:
    """Parse an integer above 0, as an argparse type. Raises ArgumentTypeError."""
    if not text.isdecimal() or len(text) > LONGEST_COUNT or not int(text):
        rule = f"must be a whole number above 0 of at most {LONGEST_COUNT} digits, but is {shown(text)}"
        raise ArgumentTypeError(rule)
    return int(text)


def text(argument: str) -> str:
    """Parse text for a model, as an argparse type. Raises ArgumentTypeError."""
    if not is_utf8(argument):
        raise ArgumentTypeError(f"must be UTF-8 text, but is {shown(argument)}")
    return argument


def add_generation(command: Command) -> None:
    """Add the options for printing hypotheses and for sampling."""
    add = command.add
    what = "print the K best of the hypotheses of --beam as line, score and text (1)"
    add("--nbest", what, type=count, default=Search.nbest, metavar="K")
    command.add_flag("--scores", "print the score before the text: log probability over length penalty")
    command.add_flag("--sample", "with --beam 1: draw tokens instead of searching")
    add("--temperature", "with --sample: temperature (1)", type=float, metavar="T")
    add("--top-k", "with --sample: draw from the K most likely tokens (0: all)", type=int, metavar="K")
    what = "with --sample: draw from the most likely tokens with total probability P (1)"
    add("--top-p", what, type=float, metavar="P")
    add("--seed", "with --sample: random seed (1)", type=int)


def search_of(arguments: Namespace, *, nbest: int = 1, sampling: Sampling | None = None) -> Search:
    """Return the requested search settings. Raises ConfigError."""
    try:
        return Search(**{name: vars(arguments)[name] for name in SEARCH}, nbest=nbest, sampling=sampling)
    except ValueError as error:
        raise config_error("", str(error), "see --help for each option") from None


def sampling_of(arguments: Namespace) -> Sampling | None:
    """Return the sampling settings, or None without --sample. Raises ConfigError."""
    settings = {name: vars(arguments)[name] for name in ("temperature", "top_k", "top_p", "seed")}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and not arguments.sample:
        options = ", ".join(map(flag_of, settings))
        raise config_error("", f"{options}: no effect without --sample", "add --sample")
    try:
        return Sampling(**settings) if arguments.sample else None
    except ValueError as error:
        raise config_error("", str(error), "see --help for each option") from None


def precision_of(arguments: Namespace, network: Network) -> AbstractContextManager[object]:
    """Return a context manager in which the network computes in the precision of --precision. Raises ConfigError."""
    import torch

    from tfm_blocks.network.packed import quantized

    if arguments.precision == "int8":
        return quantized(network)
    return torch.autocast(network.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
