"""In which settings runs differ, and which of them are one model trained with several seeds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tfm_blocks.runs.record import NO_EXPERIMENT, RunRecord, Setting

MODEL = "model"
SEED = "seed"
ABSENT = "–"


@dataclass(frozen=True)
class Factor:
    """Something that differs: a setting, and `others` that go with it, such as `model.add_norm` with `model`.

    `values` maps each value of the first to those of the others. What only repeats a knob, as `model.args.heads` does
    `heads`, is not among them.
    """

    key: str
    others: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed at most; `label` is what differs from the other groups."""

    label: str
    runs: Sequence[RunRecord]

    @cached_property
    def counted(self) -> list[RunRecord]:
        """One of each seed: the newest that is done, else the newest. A run and its repeat are no two samples."""
        newest: dict[Setting, RunRecord] = {}
        for run in sorted(self.runs, key=lambda one: (one.state == "done", one.changed)):
            newest[run.settings.get(SEED)] = run
        return [run for run in self.runs if newest[run.settings.get(SEED)] is run]

    def over_seeds(self, name: str) -> list[float]:
        """The values of one score, of the runs that count and have it; none where some have it of another test set, or
        computed in another way.
        """
        having = [(run, value) for run in self.counted if (value := run.value_of(name)) is not None]
        alike = len({(run.test_set, run.method_of(name)) for run, _ in having}) == 1
        return [value for _, value in having] if alike else []

    def setting(self, factor: Factor) -> str:
        """What the runs have of it; nothing where that is not known."""
        return show_setting(settings_of(self.runs[0]).get(factor.key, ABSENT)) if self.runs[0].settings else ""


def find_factors(runs: Sequence[RunRecord]) -> list[Factor]:
    """What makes runs other experiments, the seed aside: settings that tell the same runs apart are one factor, and so
    are the model's name and what it brings along.
    """
    known = [settings_of(run) for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    names = _parts([_hashable(settings[MODEL]) for settings in known])
    together: dict[tuple[int, ...], list[str]] = {}
    for key in keys:
        if _makes_another(key):
            parts = _parts([_hashable(settings.get(key, ABSENT)) for settings in known])
            if max(parts):
                comes_along = _is_of_models(key, known) and _determines(names, parts)
                together.setdefault(names if comes_along else parts, []).append(key)
    return [_factor(sorted(group, key=_rank), known) for group in together.values()]


def _makes_another(key: str) -> bool:
    return key != SEED and key.partition(".")[0] not in NO_EXPERIMENT


def _is_of_models(key: str, known: Sequence[Mapping[str, Setting]]) -> bool:
    """A part of the graph, or a knob that some models lack."""
    return key.startswith(f"{MODEL}.") or any(key not in settings for settings in known)


def _determines(parts: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether equal ones of the first are equal in the second."""
    return len(set(zip(parts, others, strict=True))) == len(set(parts))


def settings_of(run: RunRecord) -> dict[str, Setting]:
    """Those of config.yaml, and the model's name."""
    return {MODEL: run.model or ABSENT, **run.settings}


def show_setting(value: Setting) -> str:
    """As YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def group_seeds(runs: Iterable[RunRecord], factors: Sequence[Factor]) -> list[Group]:
    """In the order of their first runs; one without settings is by itself."""
    groups: dict[Hashable, list[RunRecord]] = {}
    for run in runs:
        settings = settings_of(run)
        rest = frozenset((key, _hashable(value)) for key, value in settings.items() if _makes_another(key))
        groups.setdefault(rest if run.settings else run.folder, []).append(run)
    return [Group(_label(group, factors), group) for group in groups.values()]


def _label(group: Sequence[RunRecord], factors: Sequence[Factor]) -> str:
    """`prenorm, heads 4`; where nothing differs, or nothing is known, the name of a run."""
    first = group[0]
    if not first.settings or not factors:
        return first.name
    settings = settings_of(first)
    values = [(factor.key, show_setting(settings.get(factor.key, ABSENT))) for factor in factors]
    return ", ".join(value if key == MODEL else f"{key.rpartition('.')[2]} {value}" for key, value in values)


def _hashable(value: Setting) -> Hashable:
    """1, 1.0 and true are three values."""
    return type(value).__name__, value


def _parts(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Which values are equal: each as the number of the first of its kind."""
    seen: dict[Hashable, int] = {}
    return tuple(seen.setdefault(value, len(seen)) for value in values)


def _rank(key: str) -> tuple[bool, int, str]:
    """The model's name says most, then what is short to type."""
    return key != MODEL, key.count("."), key


def _factor(keys: Sequence[str], known: Sequence[Mapping[str, Setting]]) -> Factor:
    first = keys[0]
    others = [key for key in keys[1:] if not any(_repeats(key, knob, known) for knob in (first, _knob(key)))]
    values = {
        show_setting(settings.get(first, ABSENT)): tuple(show_setting(settings.get(key, ABSENT)) for key in others)
        for settings in known
    }
    return Factor(first, tuple(others), values)


def _knob(key: str) -> str:
    """`heads` of `model.args.heads`."""
    return key.rpartition(".")[2]


def _repeats(key: str, other: str, known: Sequence[Mapping[str, Setting]]) -> bool:
    return key != other and all(one.get(key, ABSENT) == one.get(other, ABSENT) for one in known)
