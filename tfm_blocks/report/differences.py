"""The settings in which runs differ, and groups of runs of several seeds, arranged by model and task.

A model is the same on all tasks, and the runs of a task share a test set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from tfm_blocks.compose.resumable import EQUAL_WEIGHTS
from tfm_blocks.errors import printable
from tfm_blocks.runs.files import Setting
from tfm_blocks.runs.saved_run import EXTRA_SCORES, NO_EXPERIMENT, SavedRun

MODEL = "model"
TASK = "data.task"  # the name of a probe task
SEED = "seed"
RATES = ("schedule.peak", "schedule.scale")  # settings that set the learning rate
ABSENT = "–"
DATA = "data"  # the config group of tasks
RUNG = ("schedule", "trainer", "data")  # config groups that differ between the rungs of a ladder
EMPTY = ("null", "none")  # settings that leave something out, which a name need not say
Runs = Sequence[SavedRun]


@dataclass(frozen=True)
class Factor:
    """A setting that differs, and `others` that vary with it, such as `model.add_norm` with `model`.

    `values` maps each value of the setting to the values of the others. Copies of a knob, such as `model.args.heads` of
    `heads`, are excluded.
    """

    key: str
    others: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]

    def value_of(self, run: SavedRun) -> str:
        """Return the value of a run; empty if it is not known."""
        return show_setting(settings_of(run).get(self.key, ABSENT)) if run.settings else ""


@dataclass(frozen=True)
class Group:
    """Runs of one experiment, with their seeds; `label` names what differs from the other groups."""

    label: str
    runs: Runs

    @cached_property
    def counted(self) -> list[SavedRun]:
        """The newest finished run of each seed, else its newest run. A repeated run is not a second sample."""
        newest: dict[Setting, SavedRun] = {}
        for run in sorted(self.runs, key=lambda one: (one.state == "done", one.changed)):
            newest[run.settings.get(SEED)] = run
        return [run for run in self.runs if newest[run.settings.get(SEED)] is run]

    def scores_over_seeds(self, name: str) -> list[float]:
        """Return the values of one score of the counted runs; empty unless they share a test set and a method."""
        values = [value for run in self.counted if (value := run.value_of(name)) is not None]
        return values if len(self.methods(name)) == 1 else []

    def methods(self, name: str) -> set[tuple[str, str]]:
        """Return the test sets and the methods by which a score of the counted runs was computed."""
        return {(run.test_set, run.method_of(name)) for run in self.counted if run.value_of(name) is not None}

    def setting(self, factor: Factor) -> str:
        """Return the runs' value of a factor; empty if it is not known."""
        return factor.value_of(self.runs[0])


def find_factors(runs: Runs) -> list[Factor]:
    """Return the settings that differ between runs, without the seed.

    Settings that separate the runs in the same way form one factor. So do the model's name and the settings it
    determines, and the name of a probe task and the settings it determines.
    """
    known = [settings_of(run) for run in runs if run.settings]

    def parts_of(key: str) -> tuple[int, ...]:
        """Return for each run the index of its value among the distinct values."""
        seen: dict[Hashable, int] = {}
        return tuple(seen.setdefault(_hashable(settings.get(key, ABSENT)), len(seen)) for settings in known)

    def determines(parts: tuple[int, ...], others: tuple[int, ...]) -> bool:
        """Return True if equal entries of the first have equal entries in the second."""
        return len(set(zip(parts, others, strict=True))) == len(set(parts))

    names, tasks = parts_of(MODEL), parts_of(TASK)
    together: dict[tuple[int, ...], list[str]] = {}
    for key in dict.fromkeys(key for settings in known for key in settings):
        parts = parts_of(key)
        if _differs(key) and max(parts):
            # parts of the graph, and knobs that some models lack
            is_of_models = key.startswith(f"{MODEL}.") or any(key not in settings for settings in known)
            of_model = is_of_models and determines(names, parts)
            together.setdefault(names if of_model else tasks if determines(tasks, parts) else parts, []).append(key)
    return [_factor(group, known) for group in together.values()]


def _differs(key: str) -> bool:
    return key != SEED and key not in EXTRA_SCORES and key.partition(".")[0] not in NO_EXPERIMENT


def makes_another(key: str) -> bool:
    """Return True if runs with different values are different experiments, and not seeds of one.

    A setting that a resume may change without changing the weights makes no other experiment.
    """
    return _differs(key) and key not in EQUAL_WEIGHTS


def names_models(key: str, texts: Iterable[str]) -> bool:
    """Return True if a setting with these values distinguishes the models of a scaling law.

    It changes the experiment, it is not a setting of a rung, and a value is not a number.
    """
    if key.partition(".")[0] in RUNG or not makes_another(key):
        return False
    return key == MODEL or not all(map(is_number, set(texts) - {"", ABSENT, "null"}))


def is_number(text: str) -> bool:
    """Return True if a setting that is shown as this text is a number."""
    with suppress(ValueError):
        float(text)
        return True
    return False


def settings_of(run: SavedRun) -> dict[str, Setting]:
    """Return the settings of config.yaml and the model's name."""
    return {MODEL: run.model or ABSENT, **run.settings}


def without_seed(run: SavedRun) -> dict[str, Hashable]:
    """Return the settings that make another experiment, as keys that distinguish 1 and true."""
    return {key: _hashable(value) for key, value in settings_of(run).items() if makes_another(key)}


def show_setting(value: Setting) -> str:
    """Return the value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def group_seeds(runs: Iterable[SavedRun], factors: Factors) -> list[Group]:
    """Group runs that differ only by their seed, in the order of their first runs; keep runs without settings apart."""
    groups: dict[Hashable, list[SavedRun]] = {}
    for run in runs:
        groups.setdefault(frozenset(without_seed(run).items()) if run.settings else run.folder, []).append(run)
    return [Group(label_runs(group, factors), group) for group in groups.values()]


def label_runs(group: Runs, factors: Factors) -> str:
    """Return a label such as `prenorm, heads 4`; the model if nothing differs, the run if nothing is known."""
    first = group[0]
    if not first.settings or not factors:
        return (first.settings and first.model) or first.name
    values = [(factor.key, factor.value_of(first)) for factor in factors]
    return ", ".join(value if key == MODEL else f"{key.rpartition('.')[2]} {value}" for key, value in values)


def _hashable(value: Setting) -> Hashable:
    """Return a key that distinguishes 1 and true, but not 1 and 1.0."""
    return isinstance(value, bool), value


def _factor(keys: Sequence[str], known: Sequence[Mapping[str, Setting]]) -> Factor:
    def rank(key: str) -> tuple[bool, bool, bool, bool, bool, int, bool, str]:
        """Put the names of the model and the task first, then other names, then keys with fewer parts.

        Keys that make no other experiment are last.

        A key that each run has precedes others, such as the `name` of an optimizer and its own settings.
        """
        absent = any(key not in settings for settings in known)
        named = any(isinstance(settings.get(key), str) for settings in known)
        is_name = key.rpartition(".")[2] in ("name", "kind")
        is_last = not makes_another(key)
        return is_last, key != MODEL, key != TASK, absent, not named, key.count("."), not is_name, key

    def repeats(key: str, other: str) -> bool:
        return key != other and all(settings.get(key, ABSENT) == settings.get(other, ABSENT) for settings in known)

    first = min(keys, key=rank)
    rest = sorted(set(keys) - {first}, key=lambda key: (key.count("."), key))
    others = [key for key in rest if not repeats(key, first) and not repeats(key, key.rpartition(".")[2])]
    values = {
        show_setting(settings.get(first, ABSENT)): tuple(show_setting(settings.get(key, ABSENT)) for key in others)
        for settings in known
    }
    return Factor(first, tuple(others), values)


Factors = Sequence[Factor]
Groups = Sequence[Group]
TaskGroups = dict[str, dict[str, Group]]  # by task and by model


@dataclass(frozen=True)
class ModelGrid:
    """Groups by row and column. Rows are `models`, given by their values of `keys`; columns are `tasks`."""

    keys: Sequence[str]
    models: Sequence[tuple[str, ...]]
    tasks: Sequence[str]
    groups: Mapping[tuple[int, int], Group]

    @property
    def labels(self) -> list[str]:
        """Return the names of the models, such as `lstm` or `prenorm, heads 4`; of a single model, its name.

        A name has the first setting and those that vary among the models with this first setting.
        """
        if not self.keys:
            return [printable(group.runs[0].model) or ABSENT for group in self.groups.values()][:1]
        labels = [self._label(model, EMPTY) for model in self.models]
        return labels if len(set(labels)) == len(labels) else [self._label(model, ()) for model in self.models]

    def _label(self, model: Sequence[str], omitted: Sequence[str]) -> str:
        alike = [other for other in self.models if other[0] == model[0]]
        varying = [len(set(values)) > 1 for values in zip(*alike, strict=True)]
        settings = zip(self.keys, model, (True, *varying[1:]), strict=True)
        names = [
            label_setting(key, value) for key, value, shown in settings if shown and value not in (ABSENT, *omitted)
        ]
        return ", ".join(names) or model[0]

    def by_task(self) -> TaskGroups:
        """Return the groups of each task, by the names of their models."""
        tasks: TaskGroups = {task: {} for task in self.tasks}
        for (row, column), group in sorted(self.groups.items()):
            tasks[self.tasks[column]][self.labels[row]] = group
        return tasks

    @property
    def crossed(self) -> bool:
        """Return True if there are several models and several tasks."""
        return min(len(self.models), len(self.tasks)) > 1

    def counterpart(self, group: Group, baseline: Group) -> Group:
        """Return the group of the baseline's model on the test set of `group`; the baseline if there is none."""
        places = {id(one): place for place, one in self.groups.items()}
        if id(group) not in places or id(baseline) not in places:
            return baseline
        candidate = self.groups.get((places[id(baseline)][0], places[id(group)][1]), baseline)
        return candidate if test_sets(candidate) == test_sets(group) else baseline


NO_MODELS = ModelGrid((), (), (), {})


def label_setting(key: str, value: str) -> str:
    """Return a name as it is, and another value with its setting."""
    is_name = not value.replace(".", "").isdecimal() and value not in ("true", "false", *EMPTY)
    return value if is_name else f"{key.rpartition('.')[2]} {value}"


def arrange(groups: Groups, factors: Factors) -> ModelGrid:
    """Arrange the groups with known settings. The keys are the fewest factors that distinguish groups of one task."""
    known = [group for group in groups if group.runs[0].settings]
    settings = [settings_of(group.runs[0]) for group in known]
    rows_of_text = _texts(settings)
    tasks = _tasks(known, rows_of_text)

    def rank(key: str) -> tuple[bool, bool, int]:
        """Put names before numbers, many values before few, and learning rates last."""
        values = {row.get(key) for row in settings}
        return key in RATES, not any(isinstance(value, str) for value in values), -len(values)

    keys = _distinguishing(sorted((factor.key for factor in factors), key=rank), rows_of_text, tasks)
    models = [tuple(row.get(key, ABSENT) for key in keys) for row in rows_of_text]
    rows, columns = list(dict.fromkeys(models)), list(dict.fromkeys(tasks))
    places = [(rows.index(model), columns.index(task)) for model, task in zip(models, tasks, strict=True)]
    return ModelGrid(keys, rows, columns, dict(zip(places, known, strict=True)))


def test_sets(group: Group) -> frozenset[str]:
    """Return the hashes of the test sets of the scored runs that count."""
    return frozenset(run.test_set for run in group.counted if run.scored_on)


def _distinguishing(keys: Sequence[str], rows: Sequence[Mapping[str, str]], within: Sequence[Hashable]) -> list[str]:
    """Return the keys by which rows that are equal in `within` differ, without keys that earlier keys determine."""
    chosen: list[str] = []
    kinds = len(set(within))
    for key in keys:
        parts = {
            (same, *(row.get(column, ABSENT) for column in (*chosen, key)))
            for same, row in zip(within, rows, strict=True)
        }
        if len(parts) > kinds:
            chosen, kinds = [*chosen, key], len(parts)
    return chosen


def _tasks(groups: Groups, settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return for each group the name of its task, with the settings in which tasks of this name differ.

    These are settings of the data that never differ between groups with a common test set, also if they have no scores.
    """
    first_runs = [group.runs[0] for group in groups]
    names = [printable(str(run.settings.get(TASK) or run.start.choices.get(DATA) or ABSENT)) for run in first_runs]
    common: dict[Hashable, list[Mapping[str, str]]] = defaultdict(list)
    alike = defaultdict(list)
    for group, name, row in zip(groups, names, settings, strict=True):
        alike[name].append(row)
        if "" not in (known := test_sets(group)) and known:
            common[known].append(row)
        if prepared := _prepared_test_set(group.runs[0]):
            common[prepared].append(row)
    of_data = [key for key in dict.fromkeys(chain.from_iterable(settings)) if key.startswith(f"{DATA}.")]
    fixed = [key for key in of_data if not any(_varies(key, rows) for rows in common.values())]
    keys, tasks = _distinguishing(fixed, settings, names), []
    for name, row in zip(names, settings, strict=True):
        own = [f"{key.partition('.')[2]} {row.get(key, ABSENT)}" for key in keys if _varies(key, alike[name])]
        tasks.append(", ".join([name, *own]))
    return tasks


def _prepared_test_set(run: SavedRun) -> tuple[str, str] | None:
    """Return the vocabulary and the hash of the ids of the test set, known from the start; None if they are not."""
    texts = run.start.text
    prepared = texts.get("text of test") or (texts.get("text of val") if "text of test" in texts else None)
    return (run.tokenizer, prepared) if prepared else None


def _varies(key: str, rows: Sequence[Mapping[str, str]]) -> bool:
    return len({row.get(key, ABSENT) for row in rows}) > 1


def _texts(rows: Sequence[Mapping[str, Setting]]) -> list[dict[str, str]]:
    """Return the settings as texts. Values of a key that differ only after the sixth digit are written in full."""
    values = defaultdict(set)
    for key, value in chain.from_iterable(row.items() for row in rows):
        values[key, show_setting(value)].add(value)

    def write(key: str, value: Setting) -> str:
        text = show_setting(value)
        return printable(repr(value) if len(values[key, text]) > 1 else text)

    return [{key: write(key, value) for key, value in row.items()} for row in rows]
