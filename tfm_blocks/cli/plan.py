"""The option --plan of `tfm show`, and the options that it adds."""

from __future__ import annotations

from argparse import Namespace, _MutuallyExclusiveGroup
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_blocks.cli.options import Command, count, flag_of
from tfm_blocks.errors import config_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tfm_blocks.language.spec import Spec
    from tfm_blocks.scaling.step_plan import StepSettings
    from tfm_blocks.scaling.step_trace import PlannedObjective
    from tfm_blocks.training.settings import RunSettings

DEFAULTS: dict[str, Any] = {
    "card": "h100",
    "devices": [1],
    "batch_tokens": 8192,  # as data.batch_tokens
    "precision": "bf16",
    "strategy": "ddp",
    "activation_checkpointing": False,
}


def add_plan(command: Command, views: _MutuallyExclusiveGroup) -> None:
    """Add --plan to the views, and its options. Without --plan they have no effect, so their defaults are set later."""
    add = command.add
    views.add_argument(
        "--plan", action="store_true", help="compute the memory, communication and time of a training step"
    )
    add("--card", "with --plan: cpu, h100, h200, or a YAML file (h100)", metavar="NAME|FILE")
    add("--devices", "with --plan: numbers of devices, such as 1,8,64 (1)", type=_counts, metavar="N,…")
    what = "with --plan: tokens of a micro-batch on each device (data.batch_tokens of a run, or 8192)"
    add("--batch-tokens", what, type=count, metavar="N")
    add("--precision", "with --plan: precision (trainer.precision of a run, or bf16)", choices=["bf16", "fp32"])
    add("--strategy", "with --plan: strategy (trainer.strategy of a run, or ddp)", choices=["ddp", "fsdp2"])
    what = "with --plan: as trainer.activation_checkpointing=true"
    add("--activation-checkpointing", what, action="store_true", default=None)


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(map(count, text.split(","))))


def check_plan_options(arguments: Namespace) -> None:
    """Raise ConfigError if an option of --plan is used without it."""
    used = [name for name in DEFAULTS if vars(arguments)[name] is not None]
    if used and not arguments.plan:
        options = ", ".join(map(flag_of, used))
        raise config_error("", f"{options}: no effect without --plan", "add --plan")


def show_plan(
    arguments: Namespace, spec: Spec, lengths: Mapping[str, int], run: RunSettings | None, vocab: int
) -> None:
    """Print the plan of a training step; `lengths` are the requested tokens by input. Raises ConfigError.

    The settings of a run name the optimizer and the objective, with its teacher or its generator of `vocab` tokens, and
    replace the defaults of the options.
    """
    from tfm_blocks.network.build import network_without_values
    from tfm_blocks.network.cost import axis_lengths
    from tfm_blocks.report.screen import print_json, print_table
    from tfm_blocks.scaling.step_plan import StepSettings, plan_steps, plan_table, read_card
    from tfm_blocks.scaling.step_trace import PLAIN_OBJECTIVE, Batching

    options = {name: value for name in DEFAULTS if (value := vars(arguments)[name]) is not None}
    values = DEFAULTS | (_values_of(run) if run else {}) | options
    card = read_card(values["card"])
    averages = bool(run and run.trainer.ema)
    settings = StepSettings(values["precision"], values["strategy"], values["activation_checkpointing"], averages)
    tokens, by_axis = values["batch_tokens"], axis_lengths(network_without_values(spec), lengths)
    width = sum(by_axis[axis.name] for input in spec.inputs for axis in input.sequences)
    if width > tokens:
        rule = f"is {tokens:,}, but a row has {width:,} tokens"
        raise config_error("--batch-tokens", rule, f"write --batch-tokens {width}, or shorten the row")
    batching = Batching(tokens // width, dict(by_axis), width)
    optimizer, training = (run.optimizer, _training(run, vocab, settings)) if run else (None, PLAIN_OBJECTIVE)
    plans = plan_steps(spec, batching, settings, card, values["devices"], optimizer, training)
    if arguments.json:
        facts = {"model": arguments.model, "card": card.model_dump(), **asdict(settings), **asdict(batching)}
        print_json({**facts, "plans": [asdict(plan) for plan in plans]})
    else:
        print_table(plan_table(arguments.model, plans, batching, settings, card))


def _values_of(run: RunSettings) -> dict[str, Any]:
    """Return the settings of a run in place of DEFAULTS; a precision of `auto` depends on the device of the run."""
    trainer = run.trainer
    return {
        "batch_tokens": run.data.batch_tokens,
        "strategy": trainer.strategy,
        "activation_checkpointing": trainer.activation_checkpointing,
        **({} if trainer.precision == "auto" else {"precision": trainer.precision}),
    }


def _training(run: RunSettings, vocab: int, settings: StepSettings) -> PlannedObjective:
    """Return the objective of a run with the model of its teacher or its generator. Raises ConfigError."""
    from tfm_blocks.data.objectives import DistilSettings, ReplacedTokenSettings
    from tfm_blocks.launch.generator import NOT_DIVIDED, read_generator
    from tfm_blocks.runs.model import read_spec
    from tfm_blocks.scaling.step_trace import PlannedObjective

    companion = None
    if isinstance(run.objective, DistilSettings):
        companion = read_spec(Path(run.objective.teacher))
    elif isinstance(run.objective, ReplacedTokenSettings):
        if settings.strategy == "fsdp2":
            raise config_error("--strategy", NOT_DIVIDED, "write --strategy ddp")
        companion = read_generator(run.objective.generator, vocab)
    return PlannedObjective(run.objective, run.losses, companion)
