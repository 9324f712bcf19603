"""All that is wrong with a run, told before anything is started; nothing heavier than torch is imported for it."""

from __future__ import annotations

import torch

from tfm_blocks.compose import Composed
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.training.settings import RunSettings, TrainerSettings, read_run


def checked(composed: Composed) -> RunSettings:
    """The settings of a run that can be trained. Raises ConfigError with the places of what is wrong."""
    try:
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
    except ConfigError as error:
        raise ConfigError([_placed(problem, composed) for problem in error.problems]) from None
    return settings


def _gives_logits(spec: Spec, composed: Composed) -> None:
    width, vocab = spec.sink.shape[-1], composed.mapping["vocab"]
    if width != vocab:
        rule = f"gives {width} numbers a position, but the vocabulary has {vocab}"
        raise ConfigError(
            composed.sources.problem(spec.sink.path, rule, help="end the graph with an unembed of ${vocab}")
        )


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
