"""What a ladder refuses before its sizes are planned: searches, keys that it sets, data, and nameless variants."""

from __future__ import annotations

from collections.abc import Sequence

from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.overrides import override_key
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.compose.sweep import SweepRequest
from tfm_blocks.errors import ConfigError, Problem, config_error
from tfm_blocks.report.differences import ABSENT, MODEL, RUNG, SEED, names_models, show_setting
from tfm_blocks.runs.files import Setting, flat_settings
from tfm_blocks.sweep.ladder import LadderSettings
from tfm_blocks.sweep.settings import SweepSettings

KEYS = (
    "schedule.peak",
    "schedule.warmup",
    "schedule.decay",
    "trainer.steps",
    "trainer.validate_every",
    "trainer.checkpoint_at",
    "data.step_tokens",
)  # that a ladder sets, with its knobs


def expect_grid(request: SweepRequest, sweep: SweepSettings, settings: LadderSettings) -> None:
    """Raise ConfigError if the sweep searches or tunes itself, or sets a key that the ladder sets."""
    if sweep.method != "grid" or sweep.tune:
        key = "sweep.tune" if sweep.method == "grid" else "sweep"
        raise config_error(key, "a ladder tunes its rates itself", f"leave {key} out")
    own = {settings.width, *settings.grow, *request.match["by"], *KEYS}
    if typed := [part.key for part in request.parts if part.key in own]:
        rule = "is set by the ladder at each size"
        raise ConfigError([Problem(key, rule, help="leave it out, and write ladder.…") for key in typed])


def expect_names(variants: Sequence[Sequence[str]], swept: Sequence[str], composer: Composer) -> None:
    """Raise ConfigError if variants differ only in settings that are not names of models in a scaling law."""
    unused = [composer.unused(variant) for variant in variants]
    used = {override_key(text) for own, left in zip(variants, unused, strict=True) for text in {*own} - {*left}}
    kept: list[tuple[str, ...]] = []
    rows: list[dict[str, Setting]] = []
    for own, left in zip(variants, unused, strict=True):
        kept.append(tuple(text for text in own if text not in left or override_key(text) not in used))
        composed = compose_job(kept[-1], composer)
        rows.append({MODEL: composed.choices[MODEL], **flat_settings(composed.mapping)})
    columns = {key: [show_setting(row.get(key, ABSENT)) for row in rows] for row in rows for key in row}
    naming = {key: column for key, column in columns.items() if names_models(key, column)}
    if len({*zip(*naming.values(), strict=True)}) < len({*kept}) > 1:  # `find_used` refuses equal ones
        keys = [key for key in swept if key != SEED]
        wrong = [key for key in keys if not any(f"{name}.".startswith(f"{key}.") for name in naming)]
        rule = f"distinguishes no models in a scaling law: its values are numbers, or it belongs to {', '.join(RUNG)}"
        help = "leave out all but one value, or write a model file for each value and list them: model=one,two"
        raise ConfigError([Problem(key, rule, help=help) for key in wrong or keys])


def context_of(composed: Composed) -> int:
    """Return the context of the data, 1 if it has none. Raises ConfigError if its steps have no number of tokens."""
    data = composed.mapping["data"]
    if "step_tokens" not in data:
        rule = f"is {composed.choices['data']}, whose steps have a number of rows, but a ladder sets data.step_tokens"
        help = (
            "choose other data, such as data=lm, or sweep the sizes and trainer.steps without a ladder, and fit a score"
            " with tfm compare --scaling --metric"
        )
        raise config_error("data", rule, help)
    return int(data.get("context") or 1)
