"""The group against which a group is tested: the runs of the baseline's model on the same test set."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from tfm_blocks.report.differences import ABSENT, Group, without_seed
from tfm_blocks.report.rates import RATES


def find_counterpart(group: Group, baseline: Group, groups: Sequence[Group]) -> Group:
    """Return the group that has the test set of `group` and the model of the baseline; the baseline if there is none.

    Two groups have the same model if they agree in every setting in which groups with a common test set differ, except
    for the learning rate. Settings that only vary between test sets belong to the task. If no groups with a common test
    set differ, the model is unknown.
    """
    if test_sets(group) == test_sets(baseline):
        return baseline
    keys = _model_keys(groups)
    model = _model(baseline, keys)
    same_task = [one for one in groups if keys and test_sets(one) == test_sets(group)]
    return next((one for one in same_task if _model(one, keys) == model), baseline)


def test_sets(group: Group) -> frozenset[str]:
    """Return the hashes of the test sets of the scored runs that count."""
    return frozenset(run.test_set for run in group.counted if run.scored_on)


def _model_keys(groups: Sequence[Group]) -> list[str]:
    tasks: dict[frozenset[str], list[Mapping[str, Hashable]]] = {}
    for group in groups:
        tasks.setdefault(test_sets(group), []).append(without_seed(group.runs[0]))
    keys = dict.fromkeys(key for settings in tasks.values() for one in settings for key in one if key not in RATES)
    return [key for key in keys if any(len({one.get(key, ABSENT) for one in same}) > 1 for same in tasks.values())]


def _model(group: Group, keys: Sequence[str]) -> list[Hashable]:
    settings = without_seed(group.runs[0])
    return [settings.get(key, ABSENT) for key in keys]
