"""All that is wrong with a run, told before anything is started; nothing heavier than torch is imported for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import ValidationError

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.layout import layout_of
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.data.settings import LmSettings, columns_in
from tfm_blocks.distributed.cluster import find_place
from tfm_blocks.errors import ConfigError, Problem, TfmError
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.launch.devices import expect_devices
from tfm_blocks.network.build import check_model
from tfm_blocks.network.contract.plugins import plugin_problems
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.plugins import load_plugins, plugins_in_use
from tfm_blocks.training.settings import DeviceSettings, RunSettings, read_run


def checked(composed: Composed) -> RunSettings:
    """Return the settings of a run that can be trained here; `plugins` are those that its model uses.

    Raises ConfigError with all problems and their places.
    """
    settings, spec = _checked(composed, _check_devices)
    _check_plugins(spec, composed)
    return settings


def warn_about_warmup(settings: RunSettings) -> None:
    """Warn on stderr if a new run ends before its warmup. A run that is resumed for longer may want that."""
    steps, warmup = settings.trainer.steps, settings.schedule.warmup
    if steps < warmup:
        rule = (
            f"trainer.steps={steps} is less than schedule.warmup={warmup}, so the learning rate never reaches its peak"
        )
        help = f"write schedule.warmup={max(1, steps // 10)}, or trainer.steps={4 * warmup} or more"
        print(f"warning: {rule}\n  help: {help}", file=sys.stderr)


def checked_to_resume(composed: Composed) -> RunSettings:
    """Return the same for a run whose plug-ins were tried before its first step."""
    return _checked(composed, _check_devices)[0]


def checked_elsewhere(composed: Composed) -> RunSettings:
    """Return the same for a new run on another machine, whose devices this one does not know."""
    settings, spec = _checked(composed, lambda config: None)
    _check_plugins(spec, composed)
    return settings


def _checked(composed: Composed, check_devices: Callable[[Mapping[str, Any]], object]) -> tuple[RunSettings, Spec]:
    config, specs = composed.mapping, list[Spec]()
    with with_locations(composed):
        problems = [*_problems(lambda: read_run(config)), *_problems(lambda: check_devices(config))]
        if not any(problem.address.startswith("plugins") for problem in problems):
            problems += _problems(lambda: specs.append(_check_network(composed)))
        if problems:
            raise ConfigError(problems)
    settings = read_run(config)
    return settings.model_copy(update={"plugins": plugins_in_use(settings.plugins, specs[0].blocks)}), specs[0]


def _problems(check: Callable[[], object]) -> Sequence[Problem]:
    try:
        check()
    except ConfigError as error:
        return error.problems
    return ()


def _check_devices(config: Mapping[str, Any]) -> None:
    """What is wrong with the settings themselves, `read_run` tells. Raises ConfigError."""
    trainer = config.get("trainer") or {}
    given = {key: trainer[key] for key in DeviceSettings.model_fields if key in trainer}
    with suppress(ValidationError):
        settings = DeviceSettings.model_validate(given)
        expect_devices(settings, find_place(settings, os.environ))


def _check_network(composed: Composed) -> Spec:
    """Return the checked model, which can be trained on the text of the config. Raises ConfigError."""
    load_plugins(composed.mapping["plugins"])
    composed.with_vocab(composed.mapping.get("vocab") or 0)
    spec = check_model(composed.model, composed.sources)
    problems = [*_input_problems(spec, composed.mapping["data"]), *_output_problems(spec, composed)]
    if problems:
        raise ConfigError(problems)
    return spec


def _check_plugins(spec: Spec, composed: Composed) -> None:
    """Compute with the blocks of plug-ins on a few short sequences. Raises ConfigError if one breaks the contract."""
    if problems := plugin_problems(spec, composed.sources):
        raise ConfigError(problems)


def _input_problems(spec: Spec, data: Any) -> Iterator[Problem]:
    """Training predicts tgt, and every other input is a column of the text."""
    if TARGET not in names(spec.inputs):
        rule = f"training predicts {TARGET}, but the inputs are {', '.join(names(spec.inputs))}"
        yield Problem("model.inputs", rule, help="such a model can be checked, shown and built")
    columns = columns_in(data)
    for one in spec.sources:
        if not one.tokens:
            rule = "holds vectors, and training reads text"
            yield Problem(f"model.inputs.{one.name}", rule, help="such a model can be checked, shown and built")
        elif columns and one.name not in columns:
            rule = f"is no column of the data, which has {', '.join(columns)}"
            files = " ".join(f"data.{split}.{one.name}=FILE" for split in ("train", "val", "test"))
            help = f"data=text reads a file for each input: add {files}"
            yield Problem(f"model.inputs.{one.name}", rule, help=help)


@contextmanager
def with_locations(composed: Composed) -> Iterator[None]:
    """Adds to each problem of a TfmError the spot of the config that it is about, where it has none."""
    try:
        yield
    except TfmError as error:
        raise type(error)([_placed(problem, composed) for problem in error.problems]) from None


def _output_problems(spec: Spec, composed: Composed) -> Iterator[Problem]:
    width, vocab = spec.sink.shape[-1], composed.mapping["vocab"]
    if width != vocab:
        rule = f"gives {width} numbers a position, but the vocabulary has {vocab}"
        yield composed.sources.problem(spec.sink.path, rule, help="end the graph with an unembed of ${vocab}")


def check_lengths(network: Network, prepared: Prepared, settings: RunSettings, composed: Composed) -> None:
    """Every sequence of the corpora fits into the positions that the network knows. Raises ConfigError."""
    layout = layout_of(prepared.train.columns, names(network.spec.sources))
    for name, corpus in (("train", prepared.train), ("val", prepared.val), ("test", prepared.test)):
        if corpus is None:
            continue
        for one, width in zip(layout.inputs, layout.widths_NC(corpus).max(0).tolist(), strict=True):
            bound = network.longest(one)
            if bound.node and width > bound.tokens:
                rule = f"knows {bound.tokens} positions, but {one} of {name} has up to {width} with eos"
                setting = "data.context" if isinstance(settings.data, LmSettings) else "data.max_length"
                help = f"raise its max_length, or lower {setting} or shorten the text"
                raise ConfigError(composed.sources.problem(bound.node.path, rule, help=help))


def _placed(problem: Problem, composed: Composed) -> Problem:
    if problem.place or problem.origin:
        return problem
    return composed.sources.problem(tuple(problem.address.split(".")), problem.rule, help=problem.help)
