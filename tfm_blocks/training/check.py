"""All that is wrong with a run, told before anything is started; nothing heavier than torch is imported for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.errors import ConfigError, Problem, TfmError
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.training.settings import RunSettings, TrainerSettings, read_run


def checked(composed: Composed) -> RunSettings:
    """The settings of a run that can be trained. Raises ConfigError with the places of what is wrong."""
    with placed(composed):
        settings = read_run(composed.mapping)
        load_plugins(settings.plugins)
        composed.with_vocab(composed.mapping.get("vocab") or 0)
        spec = check_model(composed.model, composed.sources)
        if sorted(put.name for put in spec.inputs) != ["src", "tgt"]:
            names = ", ".join(put.name for put in spec.inputs)
            rule = f"training reads pairs of text, so the inputs must be src and tgt, but are {names}"
            raise ConfigError(Problem("model.inputs", rule, help="such a model can be checked, shown and built"))
        _gives_logits(spec, composed)
        _enough_devices(settings.trainer)
    return settings


@contextmanager
def placed(composed: Composed) -> Iterator[None]:
    """Adds to each problem of a TfmError the spot of the config that it is about, where it has none."""
    try:
        yield
    except TfmError as error:
        raise type(error)([_placed(problem, composed) for problem in error.problems]) from None


def _gives_logits(spec: Spec, composed: Composed) -> None:
    width, vocab = spec.sink.shape[-1], composed.mapping["vocab"]
    if width != vocab:
        rule = f"gives {width} numbers a position, but the vocabulary has {vocab}"
        raise ConfigError(
            composed.sources.problem(spec.sink.path, rule, help="end the graph with an unembed of ${vocab}")
        )


def check_lengths(network: Network, prepared: Prepared, settings: RunSettings, composed: Composed) -> None:
    """Every sequence of the corpora fits into the positions that the network knows. Raises ConfigError."""
    asked = {"train": (settings.data.max_length, settings.data.max_length)}
    for name, corpus in (("val", prepared.val), ("test", prepared.test)):
        asked[name] = (int(corpus.src_lengths_N.max()), int(corpus.tgt_lengths_N.max()))
    for side, put in enumerate(("src", "tgt")):
        bound = network.longest(put)
        for name, lengths in asked.items():
            if bound.node and lengths[side] + 1 > bound.tokens:
                rule = f"knows {bound.tokens} positions, but {put} of {name} has up to {lengths[side] + 1} with eos"
                help = "raise its max_length, or lower data.max_length or shorten the text"
                raise ConfigError(composed.sources.problem(bound.node.path, rule, help=help))


def _placed(problem: Problem, composed: Composed) -> Problem:
    if problem.place or problem.origin:
        return problem
    return composed.sources.problem(tuple(problem.address.split(".")), problem.rule, help=problem.help)


def _enough_devices(settings: TrainerSettings) -> None:
    found = torch.cuda.device_count()
    if settings.accelerator == "cuda" and not found:
        raise ConfigError(
            Problem("trainer.accelerator", "is cuda, but there is no CUDA device", help="write cpu or auto")
        )
    if device_of(settings) == "cuda" and settings.devices > found:
        rule = f"is {settings.devices}, but there are {found} CUDA devices"
        raise ConfigError(Problem("trainer.devices", rule, help="ask for fewer, or write trainer.accelerator=cpu"))


def device_of(settings: TrainerSettings) -> str:
    """`cpu` or `cuda`."""
    if settings.accelerator != "auto":
        return settings.accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"
