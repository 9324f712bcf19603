"""The settings in which runs differ, and the runs that are one model trained with several seeds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tfm_blocks.runs.saved_run import NO_EXPERIMENT, SavedRun, Setting

MODEL = "model"
TASK = "data.task"  # the name of a probe task
SEED = "seed"
ABSENT = "–"


@dataclass(frozen=True)
class Factor:
    """A setting that differs, and `others` that vary with it, such as `model.add_norm` with `model`.

    `values` maps each value of the setting to the values of the others. Copies of a knob, such as `model.args.heads` of
    `heads`, are excluded.
    """

    key: str
    others: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Group:
    """Runs that differ at most by their seed; `label` names what differs from the other groups."""

    label: str
    runs: Sequence[SavedRun]

    @cached_property
    def counted(self) -> list[SavedRun]:
        """The newest finished run of each seed, else its newest run. A repeated run is not a second sample."""
        newest: dict[Setting, SavedRun] = {}
        for run in sorted(self.runs, key=lambda one: (one.state == "done", one.changed)):
            newest[run.settings.get(SEED)] = run
        return [run for run in self.runs if newest[run.settings.get(SEED)] is run]

    def over_seeds(self, name: str) -> list[float]:
        """Return the values of one score of the counted runs; empty unless they share a test set and a method."""
        values = [value for run in self.counted if (value := run.value_of(name)) is not None]
        return values if len(self.methods(name)) == 1 else []

    def methods(self, name: str) -> set[tuple[str, str]]:
        """Return the test sets and the methods by which a score of the counted runs was computed."""
        return {(run.test_set, run.method_of(name)) for run in self.counted if run.value_of(name) is not None}

    def setting(self, factor: Factor) -> str:
        """Return the runs' value of a factor; empty if it is not known."""
        return show_setting(settings_of(self.runs[0]).get(factor.key, ABSENT)) if self.runs[0].settings else ""


def find_factors(runs: Sequence[SavedRun]) -> list[Factor]:
    """Return the settings that differ between experiments, without the seed.

    Settings that separate the runs in the same way form one factor. So do the model's name and the settings it
    determines, and the name of a probe task and the settings it determines.
    """
    known = [settings_of(run) for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    names = _parts([_hashable(settings[MODEL]) for settings in known])
    tasks = _parts([_hashable(settings.get(TASK, ABSENT)) for settings in known])
    together: dict[tuple[int, ...], list[str]] = {}
    for key in keys:
        if _makes_another(key):
            parts = _parts([_hashable(settings.get(key, ABSENT)) for settings in known])
            if max(parts):
                of_model = _is_of_models(key, known) and _determines(names, parts)
                of_task = _determines(tasks, parts)
                together.setdefault(names if of_model else tasks if of_task else parts, []).append(key)
    return [_factor(group, known) for group in together.values()]


def _makes_another(key: str) -> bool:
    return key != SEED and key.partition(".")[0] not in NO_EXPERIMENT


def _is_of_models(key: str, known: Sequence[Mapping[str, Setting]]) -> bool:
    """Return True for a part of the graph, or for a knob that some models lack."""
    return key.startswith(f"{MODEL}.") or any(key not in settings for settings in known)


def _determines(parts: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Return True if equal entries of the first have equal entries in the second."""
    return len(set(zip(parts, others, strict=True))) == len(set(parts))


def settings_of(run: SavedRun) -> dict[str, Setting]:
    """Return the settings of config.yaml and the model's name."""
    return {MODEL: run.model or ABSENT, **run.settings}


def without_seed(run: SavedRun) -> dict[str, Hashable]:
    """Return the settings that make another experiment, as keys that distinguish 1 and true."""
    return {key: _hashable(value) for key, value in settings_of(run).items() if _makes_another(key)}


def show_setting(value: Setting) -> str:
    """Return the value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def group_seeds(runs: Iterable[SavedRun], factors: Sequence[Factor]) -> list[Group]:
    """Group runs that differ only by their seed, in the order of their first runs; keep runs without settings apart."""
    groups: dict[Hashable, list[SavedRun]] = {}
    for run in runs:
        rest = frozenset(without_seed(run).items())
        groups.setdefault(rest if run.settings else run.folder, []).append(run)
    return [Group(label_runs(group, factors), group) for group in groups.values()]


def label_runs(group: Sequence[SavedRun], factors: Sequence[Factor]) -> str:
    """Return a label such as `prenorm, heads 4`; the model if nothing differs, the run if nothing is known."""
    first = group[0]
    if not first.settings or not factors:
        return (first.settings and first.model) or first.name
    settings = settings_of(first)
    values = [(factor.key, show_setting(settings.get(factor.key, ABSENT))) for factor in factors]
    return ", ".join(value if key == MODEL else f"{key.rpartition('.')[2]} {value}" for key, value in values)


def _hashable(value: Setting) -> Hashable:
    """Return a key that distinguishes 1 and true, but not 1 and 1.0."""
    return isinstance(value, bool), value


def _parts(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Return for each value the index of its first equal value, among the distinct values."""
    seen: dict[Hashable, int] = {}
    return tuple(seen.setdefault(value, len(seen)) for value in values)


def _rank(key: str, known: Sequence[Mapping[str, Setting]]) -> tuple[bool, bool, bool, int, str]:
    """Return a sort key: the names of the model and the task first, then other names, then keys with fewer parts."""
    named = any(isinstance(settings.get(key), str) for settings in known)
    return key != MODEL, key != TASK, not named, key.count("."), key


def _factor(keys: Sequence[str], known: Sequence[Mapping[str, Setting]]) -> Factor:
    first = min(keys, key=lambda key: _rank(key, known))
    rest = sorted(set(keys) - {first}, key=lambda key: (key.count("."), key))
    others = [key for key in rest if not any(_repeats(key, knob, known) for knob in (first, _knob(key)))]
    values = {
        show_setting(settings.get(first, ABSENT)): tuple(show_setting(settings.get(key, ABSENT)) for key in others)
        for settings in known
    }
    return Factor(first, tuple(others), values)


def _knob(key: str) -> str:
    """Return the last part of a key, such as `heads` of `model.args.heads`."""
    return key.rpartition(".")[2]


def _repeats(key: str, other: str, known: Sequence[Mapping[str, Setting]]) -> bool:
    return key != other and all(settings.get(key, ABSENT) == settings.get(other, ABSENT) for settings in known)
