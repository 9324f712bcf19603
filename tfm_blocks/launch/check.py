"""Check the config of a run before anything starts. Nothing heavier than torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tfm_blocks.compose.resolve import SOURCE_VOCAB, Composed
from tfm_blocks.compose.run import compose_resumed, compose_run, read_cooldown, read_resume_folder, read_value
from tfm_blocks.config.settings import Settings, read_settings
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.objectives import NEXT_TOKEN, DistilSettings, LabelSettings, ReplacedTokenSettings, read_objective
from tfm_blocks.data.prepare import Prepared, vocabulary_sizes
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.settings import DataSettings, LabelsSettings, read_data
from tfm_blocks.data.tokenizer_files import read_tokenizer
from tfm_blocks.devices import CPU, choose_device, device_count, devices_here, names_here
from tfm_blocks.distributed.cluster import RankInfo, find_rank_info
from tfm_blocks.errors import ConfigError, Problem, TfmError, expect_none
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.language.tree import MODEL
from tfm_blocks.launch.generator import find_generator_problems, read_generator
from tfm_blocks.launch.init_from import blocks_of_teacher
from tfm_blocks.launch.suitability import (
    find_data_problems,
    find_loss_problems,
    find_optimizer_problems,
    find_small_tables,
    find_vocabulary_problems,
)
from tfm_blocks.network.build import check_model, network_without_values, read_model
from tfm_blocks.network.contract.plugins import plugin_problems
from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.network.weights import attach_generator
from tfm_blocks.registry.plugins import load_plugins, plugins_in_use
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.groups import assign, expect_optimizers
from tfm_blocks.training.optimizer_settings import names_used
from tfm_blocks.training.settings import DeviceSettings, RunSettings, read_run

LENGTH_SETTINGS = {"lm": "data.context", "probe": "data.test_lengths"}


def expect_devices(settings: DeviceSettings, rank_info: RankInfo) -> None:
    """Raise ConfigError if there are fewer accelerators or CPU cores than requested.

    Cores are not checked under an external launcher, which may bind each process to separate cores.
    """
    kind = choose_device(settings.accelerator)
    if kind != CPU:
        available = device_count(kind)
        if not available:
            rule = f"is {kind}, but this machine has {devices_here()}"
            raise ConfigError(Problem("trainer.accelerator", rule, help=f"write {names_here()}"))
        if settings.devices > available:
            rule = f"is {settings.devices}, but this machine has {devices_here()}"
            help = f"write trainer.devices={available} or less, or trainer.accelerator=cpu"
            raise ConfigError(Problem("trainer.devices", rule, help=help))
    elif not rank_info.is_external and settings.devices > (cores := available_cores()):
        rule = f"is {settings.devices}, but this process may use {cores} CPU cores, and each device needs one"
        raise ConfigError(Problem("trainer.devices", rule, help=f"write trainer.devices={cores} or less"))


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class CheckedRun:
    """A run whose config was checked, and its model. The vocabulary has the size that the config requests.

    `settings` lists only the plug-ins that the run uses.
    """

    composed: Composed
    spec: Spec
    settings: RunSettings
    generator: Spec | None = None

    def with_vocab(self, size: int, source: int | None = None) -> CheckedRun:
        """Return the run for a tokenizer of `size`. The model is not retraced, because only widths change.

        `source` is the size of a separate vocabulary of sources. Raises ConfigError if the model has none.
        """
        composed = self.composed.with_vocab(size, source)
        if composed.vocabulary == self.composed.vocabulary:
            return self
        spec = read_model(composed.model, composed.sources)
        run = replace(self, composed=composed.with_model(spec.mapping), spec=spec)
        if self.generator is None:
            return run
        return run.with_generator(read_generator(composed.mapping["objective"][GENERATOR], size))

    def with_generator(self, generator: Spec) -> CheckedRun:
        """Return the run with the whole definition of the generator, in place of its name and knobs."""
        mapping = dict(generator.mapping)
        objective = self.settings.objective.model_copy(update={GENERATOR: mapping})
        recorded = self.composed.mapping["objective"] | {GENERATOR: mapping}
        composed = replace(self.composed, mapping=self.composed.mapping | {"objective": recorded})
        settings = self.settings.model_copy(update={"objective": objective})
        return replace(self, composed=composed, settings=settings, generator=generator)


def check_run(composed: Composed) -> CheckedRun:
    """Check a new run that trains on this machine. Raises ConfigError with all problems and their places."""
    return _with_plugins_tested(_expect_size_of_tokenizer(_check(composed, _check_devices, check_model)))


def check_request(config: Any) -> tuple[CheckedRun, SavedRun | tuple[SavedRun, int] | None]:
    """Check the run that a composed command line requests, and return it with the run that it resumes.

    A branch comes with its parent, and the step of the parent's checkpoint at which it begins.

    Raises ConfigError with all problems and their places, and RunError if the folder to resume is damaged.
    """
    if cooldown := read_cooldown(config):
        from tfm_blocks.launch.cooldown import check_cooldown

        return check_cooldown(config, *cooldown)
    folder = read_resume_folder(config)
    if folder is None:
        ladder = read_value(config, "ladder")
        composed = compose_run(config)
        if ladder is not None:
            rule, help = "sets the sizes of a sweep, but this is a single run", "add -m, or train experiment=lm"
            raise ConfigError(composed.sources.problem(("ladder",), rule, help=help))
        return check_run(composed), None
    from tfm_blocks.launch.run_spec import read_saved_run  # imports Lightning, which a wrong config does not wait for

    load_listed(read_value(config, "plugins"))
    saved = read_saved_run(folder)
    composed = compose_resumed(config, saved.config, str(saved.folder / "config.yaml"), saved.config_text)
    return check_resumed_run(composed), saved


def check_remote_run(composed: Composed) -> CheckedRun:
    """Check a new run that trains on another machine. Its devices are not checked. Raises ConfigError."""
    return _with_plugins_tested(_check(composed, lambda config: None, check_model))


def check_resumed_run(composed: Composed) -> CheckedRun:
    """Check a resumed run. Its plug-ins were tested before its first step. Raises ConfigError."""
    return _check(composed, _check_devices, check_model)


def check_job(composed: Composed) -> CheckedRun:
    """Check a job on the machine that trains it, whose devices the sweep did not check. Raises ConfigError.

    The model is not retraced.
    """
    return _expect_size_of_tokenizer(_check(composed, _check_devices, read_model))


def warn_about_schedule(settings: RunSettings) -> None:
    """Warn on stderr if a new run ends before its warmup, or after the last step with a learning rate above 0.

    Neither is an error: a resume may add steps later, and the steps without a learning rate change no weights.
    """
    steps, schedule = settings.trainer.steps, settings.schedule
    warmup, last = schedule.warmup, getattr(schedule, "steps", steps)
    if steps < warmup:
        rule = (
            f"trainer.steps={steps} is less than schedule.warmup={warmup}, so the learning rate never reaches its peak"
        )
        help = f"write schedule.warmup={max(1, steps // 10)}, or trainer.steps={4 * warmup} or more"
    elif not schedule.rate(steps):
        rule = f"trainer.steps={steps} is more than schedule.steps={last}, after which the learning rate is 0"
        help = f"write schedule.steps={steps}, or trainer.steps={last}"
    else:
        return
    print(f"warning: {rule}\n  help: {help}", file=sys.stderr)


def _check(
    composed: Composed, check_devices: Callable[[Mapping[str, Any]], object], make_spec: Callable[..., Spec]
) -> CheckedRun:
    failures = _problems(lambda: load_listed(composed.mapping["plugins"]))  # a task of data can be in a plug-in
    data, config = read_data(composed.mapping["data"]), composed.mapping
    if isinstance(data, ProbeSettings) and config.get("vocab") not in (None, data.vocab):
        composed = composed.with_vocab(data.vocab)  # which a run needs no text to know
        composed = replace(composed, mapping=composed.mapping | {"name": config["name"]})
    settings, specs, config = list[RunSettings](), list[Spec](), composed.mapping
    with with_locations(composed):
        problems = _problems(lambda: settings.append(read_run(config)))
        problems += _problems(lambda: check_devices(config))
        if not any(problem.address.startswith("plugins") for problem in problems):
            problems += failures or _problems(lambda: specs.append(_check_network(composed, data, make_spec)))
        expect_none(problems)
    (run,), (spec,) = settings, specs
    if spec.adapted and run.init_from is None:
        rule = "has adapters, but init_from names no run whose weights they change"
        raise ConfigError(composed.sources.problem((*MODEL, "adapt"), rule, help="write init_from=RUN"))
    network, generator = network_without_values(spec), None
    with with_locations(composed):
        if isinstance(run.objective, ReplacedTokenSettings):
            generator = read_generator(run.objective.generator, config["vocab"])
            replacer = network_without_values(generator)
            expect_none(list(find_generator_problems(network, replacer, run, config["vocab"])))
            attach_generator(network, replacer)
        learned = assign(run.optimizer, network)
        expect_none([*find_optimizer_problems(spec, run, learned), *find_loss_problems(spec, run)])
        expect_optimizers(learned)
    blocks = spec.blocks | blocks_of_teacher(run.objective) | (generator.blocks if generator else set())
    plugins = plugins_in_use(run.plugins, blocks, _tasks(run), names_used(run.optimizer))
    checked = CheckedRun(composed.with_model(spec.mapping), spec, run.model_copy(update={"plugins": plugins}))
    return checked.with_generator(generator) if generator else checked


def plugins_of_model(run: CheckedRun) -> list[str]:
    """Return the plug-ins without which the trained model cannot be read; the optimizer's is not among them."""
    return plugins_in_use(run.settings.plugins, run.spec.blocks, _tasks(run.settings))


def _tasks(run: RunSettings) -> list[str]:
    return [run.data.task] if isinstance(run.data, ProbeSettings) else []


class _Plugins(Settings):
    plugins: list[str]


def load_listed(modules: object) -> None:
    """Import the plug-ins of a config. Raises ConfigError, also if `modules` is not a list of names."""
    load_plugins(read_settings(_Plugins, {"plugins": modules}).plugins)


def _expect_size_of_tokenizer(run: CheckedRun) -> CheckedRun:
    """Raise ConfigError if the command line sets vocab to a size that differs from the size of data.tokenizer."""
    data, mapping = run.settings.data, run.composed.mapping
    knobs = [knob for knob in ("vocab", SOURCE_VOCAB) if (knob,) in run.composed.sources.overrides]
    if isinstance(data, ProbeSettings) or not data.tokenizer or not knobs:
        return run
    with with_locations(run.composed):
        tokenizer = read_tokenizer(data.tokenizer)
        for knob in knobs:
            size = tokenizer.of(TARGET if knob == "vocab" else "src").size
            if size != mapping[knob]:
                rule = f"is {mapping[knob]}, but the tokenizer {data.tokenizer} has {size} ids"
                raise ConfigError(Problem(knob, rule, help=f"leave {knob} out, because data.tokenizer sets it"))
    return run


def with_vocab_of_data(composed: Composed, *, learn: bool = True) -> Composed:
    """Return the config with the vocabulary that its data has; for text, a tokenizer is read or learned.

    Without `learn`, the vocabulary of text whose tokenizer has yet to be learned is the requested one. Invalid settings
    are kept, because the check of the run reports them. Raises ConfigError and DataError.
    """
    data, (vocab, source) = read_data(composed.mapping["data"]), composed.vocabulary
    objective = read_objective(composed.mapping.get("objective")) or NEXT_TOKEN
    if data is None or type(vocab) is not int or not (learn or isinstance(data, ProbeSettings) or data.tokenizer):
        return composed
    with with_locations(composed):
        return composed.with_vocab(*vocabulary_sizes(data, vocab, objective.special, source))


def _problems(check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_devices(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the devices do not exist. Invalid settings are skipped, because `read_run` reports them."""
    trainer = config.get("trainer") or {}
    values = {key: trainer[key] for key in DeviceSettings.model_fields if key in trainer}
    with suppress(ValidationError):
        settings = DeviceSettings.model_validate(values)
        expect_devices(settings, find_rank_info(settings, os.environ))


def _check_network(composed: Composed, data: DataSettings | None, make_spec: Callable[..., Spec]) -> Spec:
    """Check the model, and that the data of the config can train it; return its spec. Raises ConfigError."""
    composed.expect_vocab()
    spec = make_spec(composed.model, composed.sources)
    objective = read_objective(composed.mapping.get("objective"))
    problems = list(find_data_problems(spec, data, objective)) if objective else []  # else `read_run` reports it
    width, (vocab, source) = spec.sink.shape[-1], composed.vocabulary
    if source is not None:
        problems += find_vocabulary_problems(spec, data, objective, vocab, source)
    else:
        problems += find_small_tables(spec, vocab)
    own_outputs = isinstance(data, LabelsSettings) or isinstance(objective, LabelSettings | ReplacedTokenSettings)
    if width != vocab and not own_outputs:
        rule = f"returns {width} logits for each position, but the vocabulary has {vocab}"
        problems.append(
            composed.sources.problem(spec.sink.path, rule, help="end the graph with an unembed of ${vocab}")
        )
    expect_none(problems)
    return spec


def _with_plugins_tested(run: CheckedRun) -> CheckedRun:
    """Run the blocks of plug-ins on a few short sequences. Raises ConfigError if a block violates the contract."""
    expect_none(plugin_problems(run.spec, run.composed.sources))
    return run


@contextmanager
def with_locations(composed: Composed) -> Iterator[None]:
    """Add the file and line of the config to each problem of a TfmError that has no location."""
    try:
        yield
    except TfmError as error:
        problems = [
            problem
            if problem.place or problem.origin
            else composed.sources.problem(tuple(problem.address.split(".")), problem.rule, help=problem.help)
            for problem in error.problems
        ]
        raise type(error)(problems) from None


def check_lengths(network: Network, prepared: Prepared, run: CheckedRun) -> None:
    """Raise ConfigError if a sequence of the corpora has more tokens than a network of the run has positions."""
    objective = run.settings.objective
    layout = layout_of(prepared.train, names(network.spec.inputs), objective)
    networks = {"": network}
    if run.generator:
        networks[f"objective.{GENERATOR}"] = network_without_values(run.generator)
    if isinstance(objective, DistilSettings):
        networks["objective.teacher"] = network_without_values(read_spec(Path(objective.teacher)))
    for name, corpus in (("train", prepared.train), ("val", prepared.val), ("test", prepared.test)):
        if corpus is None:
            continue
        widths = dict(zip(layout.inputs, layout.longest_C(corpus.longest).tolist(), strict=True))
        for input, width in widths.items():
            bounds = {address: one.longest(input, widths) for address, one in networks.items()}
            address, bound = min(bounds.items(), key=lambda pair: pair[1].tokens)
            if bound.node and width > bound.tokens:
                rule = f"has {bound.positions(input, widths)}, but {input} of {name} has up to {width} tokens with eos"
                setting = LENGTH_SETTINGS.get(run.settings.data.kind, "data.max_length")
                help = f"raise its max_length, or lower {setting} or shorten the text"
                path = tuple(address.split(".")) if address else bound.node.path
                rule = f"has a node {bound.node.address} which {rule}" if address else rule
                raise ConfigError(run.composed.sources.problem(path, rule, help=help))
