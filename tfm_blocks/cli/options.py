"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.errors import shown
from tfm_blocks.translation.settings import LengthPenalty, Search

LONGEST_COUNT = 18  # digits that fit into 64 bits

if TYPE_CHECKING:
    from tfm_blocks.translation.translator import Translator

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_plugins(command: argparse.ArgumentParser) -> None:
    """Add the option --plugins."""
    help = "a module with custom blocks, on the Python path or in this folder"
    command.add_argument("--plugins", action="append", default=[], metavar="MODULE", help=help)


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the argument RUN, a run folder."""
    command.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")


def add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the option --checkpoint."""
    help = "weights of a validation: last, best or a step; the run may be unfinished"
    command.add_argument("--checkpoint", metavar="WHICH", help=help)


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    command.add_argument("--device", default="auto", help="cpu, cuda, …; auto: cuda if available (auto)")


def translator_of(arguments: argparse.Namespace, run: Path | None = None) -> Translator:
    """Load the run and checkpoint of the command line, or the final weights of another `run`. Raises RunError."""
    from tfm_blocks.translation.translator import Translator

    checkpoint = arguments.checkpoint if run is None else None
    options = {"device": arguments.device, "plugins": arguments.plugins, "checkpoint": checkpoint}
    return Translator.load(run or arguments.folder, **options)


def add_search(command: argparse.ArgumentParser) -> None:
    """Add the options of beam search, device and precision."""
    command.add_argument(
        "--beam", type=count, default=Search.beam, metavar="K", help="hypotheses per sentence; 1: greedy search"
    )
    command.add_argument(
        "--patient", action="store_true", help="continue while an unfinished hypothesis can still win (slower)"
    )
    command.add_argument(
        "--alpha", type=float, default=Search.alpha, help="exponent of the length penalty (%(default)s)"
    )
    penalties = get_args(LengthPenalty)
    command.add_argument(
        "--penalty", choices=penalties, default=Search.penalty, help="length penalty: ((5+n)/6)^alpha or n^alpha"
    )
    command.add_argument(
        "--coverage", type=float, default=Search.coverage, metavar="BETA", help="weight of the coverage penalty (0)"
    )
    command.add_argument(
        "--max-tokens",
        type=count,
        default=Search.max_tokens,
        metavar="N",
        help="maximum length of a line and of its translation (1024)",
    )
    command.add_argument("--strict", action="store_true", help="fail on a line that is too long or not UTF-8")
    command.add_argument("--batch-tokens", type=count, default=4096, metavar="N", help="tokens per batch (4096)")
    add_device(command)
    precision = "precision (fp32); with bf16, a few translations depend on the batch"
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help=precision)
    add_plugins(command)


def count(text: str) -> int:
    """Parse an integer above 0, as an argparse type. Raises ArgumentTypeError."""
    if not text.isdecimal() or len(text) > LONGEST_COUNT or not int(text):
        rule = f"must be a whole number above 0 of at most {LONGEST_COUNT} digits, but is {shown(text)}"
        raise argparse.ArgumentTypeError(rule)
    return int(text)
