"""Search and sampling settings from the command line."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

from tfm_blocks.cli.options import count
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.translation.settings import Sampling, Search


def add_sampling(command: argparse.ArgumentParser) -> None:
    """Add the options that draw tokens instead of searching."""
    command.add_argument("--sample", action="store_true", help="draw tokens instead of searching")
    command.add_argument("--temperature", type=float, metavar="T", help="with --sample: temperature (1)")
    command.add_argument(
        "--top-k", type=int, metavar="K", help="with --sample: draw from the K most likely tokens (0: all)"
    )
    command.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="with --sample: draw from the most likely tokens with total probability P (1)",
    )
    command.add_argument("--seed", type=int, help="with --sample: random seed (1)")


def add_output(command: argparse.ArgumentParser) -> None:
    """Add the options that control how hypotheses are printed."""
    command.add_argument(
        "--nbest",
        type=count,
        default=Search.nbest,
        metavar="K",
        help="print the K best hypotheses as line, score and text (1)",
    )
    command.add_argument(
        "--scores", action="store_true", help="print the score before the text: log probability over length penalty"
    )


def search_of(arguments: argparse.Namespace, *, nbest: int = 1, sampling: Sampling | None = None) -> Search:
    """Return the requested search settings. Raises ConfigError."""
    names = ("beam", "patient", "alpha", "penalty", "coverage", "max_tokens")
    try:
        return Search(**{name: vars(arguments)[name] for name in names}, nbest=nbest, sampling=sampling)
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="see --help for each option")) from None


def sampling_of(arguments: argparse.Namespace) -> Sampling | None:
    """Return the sampling settings, or None without --sample. Raises ConfigError."""
    given = {name: vars(arguments)[name] for name in ("temperature", "top_k", "top_p", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not arguments.sample:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(Problem("", f"{options}: no effect without --sample", help="add --sample"))
    try:
        return Sampling(**given) if arguments.sample else None
    except ValueError as error:
        raise ConfigError(Problem("", str(error), help="see --help for each option")) from None


def precision_of(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    """Return a context manager that computes in the precision of --precision."""
    import torch

    from tfm_blocks.network.build import choose_device

    device = torch.device(choose_device(arguments.device))
    return torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16")
