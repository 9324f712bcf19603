"""Options that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tfm_blocks.translation.settings import LengthPenalty, Search

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_plugins(command: argparse.ArgumentParser) -> None:
    """--plugins."""
    help = "a module with blocks of yours, on the path or in this folder"
    command.add_argument("--plugins", action="append", default=[], metavar="MODULE", help=help)


def add_run(command: argparse.ArgumentParser) -> None:
    """The run folder."""
    command.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")


def add_search(command: argparse.ArgumentParser) -> None:
    """How to look for translations, and where to compute them."""
    command.add_argument(
        "--beam", type=count, default=Search.beam, metavar="K", help="hypotheses a sentence; 1: greedy"
    )
    command.add_argument(
        "--alpha", type=float, default=Search.alpha, help="exponent of the length penalty (%(default)s)"
    )
    penalties = get_args(LengthPenalty)
    command.add_argument("--penalty", choices=penalties, default=Search.penalty, help="((5+n)/6)^alpha or n^alpha")
    command.add_argument(
        "--coverage", type=float, default=Search.coverage, metavar="BETA", help="weight of the coverage penalty (0)"
    )
    command.add_argument(
        "--max-tokens",
        type=count,
        default=Search.max_tokens,
        metavar="N",
        help="of a line and of its translation (1024)",
    )
    command.add_argument("--strict", action="store_true", help="refuse a line above --max-tokens, which else is cut")
    command.add_argument("--batch-tokens", type=count, default=4096, metavar="N", help="tokens at a time (4096)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, … (cpu)")
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the computation (fp32)")
    add_plugins(command)


def count(text: str) -> int:
    """The type of a number above 0. Raises ArgumentTypeError."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, but is {text!r}")
    return int(text)
