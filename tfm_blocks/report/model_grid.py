"""Groups of runs arranged by model and task: a model is the same on all tasks; the runs of a task share a test set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from tfm_blocks.errors import printable
from tfm_blocks.report.differences import ABSENT, TASK, Factor, Group, settings_of, show_setting
from tfm_blocks.report.rates import RATES
from tfm_blocks.runs.saved_run import SavedRun, Setting

TaskGroups = dict[str, dict[str, Group]]  # by task and by model
DATA = "data"  # the config group of tasks
EMPTY = ("null", "none")  # settings that leave something out, which a name need not say


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
        names = [_named(key, value) for key, value, shown in settings if shown and value not in (ABSENT, *omitted)]
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


def _named(key: str, value: str) -> str:
    """Return a name as it is, and another value with its setting."""
    is_name = not value.replace(".", "").isdecimal() and value not in ("true", "false", *EMPTY)
    return value if is_name else f"{key.rpartition('.')[2]} {value}"


def arrange(groups: Sequence[Group], factors: Sequence[Factor]) -> ModelGrid:
    """Arrange the groups with known settings. The keys are the fewest factors that distinguish groups of one task."""
    known = [group for group in groups if group.runs[0].settings]
    settings = [settings_of(group.runs[0]) for group in known]
    rows_of_text = _texts(settings)
    tasks = _tasks(known, rows_of_text)
    ordered = sorted(
        (factor.key for factor in factors), key=lambda key: _priority([row.get(key) for row in settings], key)
    )
    keys = _distinguishing(ordered, rows_of_text, tasks)
    models = [tuple(row.get(key, ABSENT) for key in keys) for row in rows_of_text]
    rows, columns = list(dict.fromkeys(models)), list(dict.fromkeys(tasks))
    places = [(rows.index(model), columns.index(task)) for model, task in zip(models, tasks, strict=True)]
    return ModelGrid(keys, rows, columns, dict(zip(places, known, strict=True)))


def test_sets(group: Group) -> frozenset[str]:
    """Return the hashes of the test sets of the scored runs that count."""
    return frozenset(run.test_set for run in group.counted if run.scored_on)


def _priority(values: Sequence[Setting], key: str) -> tuple[bool, bool, int]:
    """Return a sort key: names before numbers, many values before few, learning rates last."""
    return key in RATES, not any(isinstance(value, str) for value in values), -len(set(values))


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


def _tasks(groups: Sequence[Group], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return for each group the name of its task, with the settings in which tasks of this name differ."""
    names = [_name(group.runs[0]) for group in groups]
    keys = _distinguishing(list(_task_keys(groups, settings)), settings, names)
    alike = defaultdict(list)
    for name, row in zip(names, settings, strict=True):
        alike[name].append(row)
    return [
        ", ".join(
            [name, *(f"{key.partition('.')[2]} {row.get(key, ABSENT)}" for key in keys if _varies(key, alike[name]))]
        )
        for name, row in zip(names, settings, strict=True)
    ]


def _task_keys(groups: Sequence[Group], settings: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the settings of the data that never differ between groups with a common test set."""
    common = defaultdict(list)
    for group, row in zip(groups, settings, strict=True):
        if "" not in (known := test_sets(group)) and known:
            common[known].append(row)
    for key in dict.fromkeys(key for row in settings for key in row):
        if key.startswith(f"{DATA}.") and not any(_varies(key, rows) for rows in common.values()):
            yield key


def _varies(key: str, rows: Sequence[Mapping[str, str]]) -> bool:
    return len({row.get(key, ABSENT) for row in rows}) > 1


def _name(run: SavedRun) -> str:
    return printable(str(run.settings.get(TASK) or run.start.choices.get(DATA) or ABSENT))


def _texts(rows: Sequence[Mapping[str, Setting]]) -> list[dict[str, str]]:
    """Return the settings as texts. Values of a key that differ only after the sixth digit are written in full."""
    values = defaultdict(set)
    for key, value in chain.from_iterable(row.items() for row in rows):
        values[key, show_setting(value)].add(value)
    return [
        {
            key: printable(repr(value) if len(values[key, show_setting(value)]) > 1 else show_setting(value))
            for key, value in row.items()
        }
        for row in rows
    ]
