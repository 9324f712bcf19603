"""How a comparison shows its models and tasks: display names, an order and a subset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.errors import config_error, shown, suggest
from tfm_blocks.report.differences import MODEL, ModelGrid


@dataclass(frozen=True)
class Display:
    """The display names of models and tasks, their order, and which are shown; empty: all."""

    names: Mapping[str, str] = field(default_factory=dict)
    order: Sequence[str] = ()
    only: Sequence[str] = ()

    def apply(self, grid: ModelGrid) -> ModelGrid:
        """Return the grid with these names and this order. Raises ConfigError for a name of no model and no task."""
        labels, known = grid.labels, [*grid.labels, *grid.tasks]
        for option, given in (("--names", self.names), ("--order", self.order), ("--only", self.only)):
            for name in given:
                if name not in known:
                    rule = f"{shown(name)} is the name of no model and no task"
                    raise config_error(option, rule, suggest(name, known))
        displayed = [self.names.get(name, name) for name in known]
        if self.names and (twice := [name for name in displayed if displayed.count(name) > 1]):
            raise config_error("--names", f"gives two models or tasks the name {shown(twice[0])}")
        rows, columns = self._chosen(labels), self._chosen(grid.tasks)
        groups = {
            (rows.index(row), columns.index(column)): group
            for (row, column), group in grid.groups.items()
            if row in rows and column in columns
        }
        tasks = [self.names.get(grid.tasks[column], grid.tasks[column]) for column in columns]
        if self.names.keys() & set(labels):
            models = [(self.names.get(labels[row], labels[row]),) for row in rows]
            return ModelGrid((MODEL,), models, tasks, groups)
        return ModelGrid(grid.keys, [grid.models[row] for row in rows], tasks, groups)

    def _chosen(self, names: Sequence[str]) -> list[int]:
        """Return the places of the shown names in their order."""
        kept = [name for name in self.only if name in names] or names
        first = [name for name in self.order if name in kept]
        return [names.index(name) for name in dict.fromkeys([*first, *kept])]


DISPLAY_ALL = Display()


def read_display(names: str | None, order: str | None, only: str | None) -> Display:
    """Return the display of the options --names, --order and --only. Raises ConfigError."""
    mapping = _read("--names", names, dict, "{lstm: LSTM}")
    lists = [_read(option, text, list, "[lstm, attention]") for option, text in (("--order", order), ("--only", only))]
    texts = {str(name): str(display) for name, display in mapping.items()}
    return Display(texts, *([str(name) for name in given] for given in lists))


def _read(option: str, text: str | None, kind: type, example: str) -> Any:
    if text is None:
        return kind()
    path = Path(text)
    try:
        value = yaml.safe_load(path.read_text() if path.suffix in (".yaml", ".yml") else text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: invalid UTF-8 or date
        reason = " ".join(str(error).split())
        raise config_error(option, f"is not YAML: {reason}", f"{option} '{example}'") from None
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    if not isinstance(value, kind) or not all(isinstance(part, str | int | float) for part in parts):
        rule = f"must be {'a mapping' if kind is dict else 'a list'} of names, but is {shown(value)}"
        raise config_error(option, rule, f"{option} '{example}'")
    return value
