"""Find the values of a model's knobs that meet a budget.

The cost must grow with the knobs. Several knobs are first scaled by a common factor, which keeps their ratio. Then each
knob is adjusted separately, beginning with the knob whose steps are relatively smallest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, Problem, config_error, shown, suggest
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import check_model, count_parameters, network_without_values, read_model
from tfm_blocks.network.cost import axis_lengths, decoding_state, multiply_adds
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import count_without_embeddings

GROWTH = 256  # largest factor by which a knob grows
TRIES = 128  # neighbouring values that are tried if the check refuses a value
SECANTS = 12  # secant steps after which the search switches to bisection
PLATEAU = 2  # steps without growth of the cost after which the search stops
CLOSE = 0.1  # fraction of the allowed difference at which no further knob is adjusted

Values = Mapping[str, int]
Cost = TypeVar("Cost")


@dataclass(frozen=True)
class Budget:
    """A cost that models can have in common.

    `unit` names it in messages. `within` is the largest relative difference that counts as equal. `measure` computes
    the cost for one sentence of LENGTH tokens per input.
    """

    unit: str
    within: float
    measure: Callable[[Spec], int]


def _measured(spec: Spec, cost: Callable[[Network, Mapping[str, int]], Cost]) -> Cost:
    network = network_without_values(spec)
    return cost(network, axis_lengths(network, {}))


BUDGETS = {
    "parameters": Budget("parameters", 0.005, count_parameters),
    "non_embedding": Budget(
        "parameters without embeddings", 0.005, lambda spec: count_without_embeddings(network_without_values(spec))
    ),
    "multiply_adds": Budget("multiply-adds", 0.01, lambda spec: sum(_measured(spec, multiply_adds).values())),
    "decode_state": Budget("floats of decoding state", 0.01, lambda spec: _measured(spec, decoding_state)),
}


@dataclass(frozen=True)
class Solution:
    """Values of knobs, the requested cost, and the cost that they reach."""

    values: Values
    requested: int
    reached: int

    @property
    def difference(self) -> float:
        """Return the relative difference from the requested cost."""
        return self.reached / self.requested - 1


def measure_cost(composed: Composed, budget: Budget) -> int:
    """Return the cost of a model. Raises ConfigError if the check refuses it, or if it has no such cost."""
    cost = budget.measure(check_model(composed.model, composed.sources))
    if not cost:
        raise config_error("model", f"has no {budget.unit} to match", "choose another budget or model")
    return cost


def solve(composed: Composed, knobs: Sequence[str], budget: Budget, requested: int, within: float) -> Solution:
    """Return values of the knobs whose cost differs from `requested` by at most the fraction `within`.

    Raises ConfigError if there are none; the error lists the nearest values.
    """
    search = _Search(composed, budget, requested)
    expect_knobs(composed, knobs)
    current = {knob: int(composed.mapping[knob]) for knob in knobs}
    if search.cost(current) == requested:
        return Solution(current, requested, requested)
    grids = {knob: _grid(search, current, knob) for knob in knobs}
    candidates = search.bracket(*_line_of_all_knobs(current, grids)) if len(knobs) > 1 else []
    on_grids = {knob: grid[_nearest(grid, current[knob])] for knob, grid in grids.items()}
    start = min(candidates, key=search.distance, default=on_grids)
    for knob in sorted(knobs, key=lambda knob: grids[knob].step / current[knob]):

        def line(index: int, knob: str = knob) -> Values:
            return {**start, knob: grids[knob][index]}

        candidates += search.bracket(line, _nearest(grids[knob], start[knob]))
        if candidates and min(map(search.distance, candidates)) <= CLOSE * within * requested:
            break
    candidates.sort(key=search.distance)
    for values in candidates:
        solution = Solution(values, requested, search.cost_of(values))
        if abs(solution.difference) <= within and search.passes(values):
            return solution
    raise ConfigError(_no_solution(search, knobs, candidates[:2], within))


def expect_knobs(composed: Composed, knobs: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not a knob to solve for."""
    known = knobs_of(composed)
    for knob in knobs:
        if knob not in known:
            value = f", but is {shown(composed.mapping[knob])}" if knob in composed.mapping else ""
            rule = f"must be a knob of the model that is a whole number above 0{value}"
            raise config_error(knob, rule, suggest(knob, known))


def knobs_of(composed: Composed) -> list[str]:
    """Return the knobs of the model that are whole numbers above 0."""
    keys = dict.fromkeys(key for file in composed.chain for key in file.value if key not in ("defaults", "model"))
    return [key for key in keys if type(value := composed.mapping.get(key)) is int and value > 0]


SearchLine = Callable[[int], Values]  # maps 0, 1, … to values of the knobs with growing cost


@dataclass
class _Search:
    """The costs of a model by the values of its knobs. `refusal` is of the first values that the check refused."""

    composed: Composed
    budget: Budget
    requested: int
    costs: dict[tuple[tuple[str, int], ...], int | None] = field(default_factory=dict)
    refusal: tuple[Problem, ...] = ()

    def cost(self, values: Values) -> int | None:
        """Return the cost, or None if the check refuses the values."""
        key = tuple(values.items())
        if key not in self.costs:
            self.costs[key] = None
            try:
                composed = self.composed.with_values(values)
                self.costs[key] = self.budget.measure(read_model(composed.model, composed.sources))
            except ConfigError as error:
                self.refusal = self.refusal or error.problems
            except (ValueError, TypeError, RuntimeError) as error:  # of a block's constructor
                self.refusal = self.refusal or (Problem("model", str(error)),)
        return self.costs[key]

    def cost_of(self, values: Values) -> int:
        """Return the cost of values that the check accepts."""
        cost = self.cost(values)
        assert cost is not None
        return cost

    def distance(self, values: Values) -> int:
        """Return the distance from the requested cost."""
        return abs(self.cost_of(values) - self.requested)

    def passes(self, values: Values) -> bool:
        """Return True if the full check accepts the values, including the shape trace, which `cost` omits."""
        composed = self.composed.with_values(values)
        try:
            check_model(composed.model, composed.sources)
        except ConfigError:
            return False
        return True

    def bracket(self, line: SearchLine, start: int) -> list[Values]:
        """Return accepted values just below and just above the budget, or [] if the cost does not grow along the line.

        The secant through the last two indices leads to the next index, since costs are nearly linear or quadratic.
        """
        top = GROWTH * (start + 1)
        below, above = -1, top  # the indices between them were not tried
        index, steps, flat = self._first(line, _outward(start, 0, top - 1)), 0, 0
        last: tuple[int, int] | None = None
        while index is not None and flat <= PLATEAU:
            cost = self.cost_of(line(index))
            below, above = (index, above) if cost <= self.requested else (below, index)
            slope = (cost - last[1]) / (index - last[0]) if last else 0.0
            flat += bool(last) and slope <= 0
            guess = index + (1 if cost <= self.requested else -1)
            if slope > 0:
                guess = round(index + (self.requested - cost) / slope) if steps < SECANTS else (below + above) // 2
            elif last:  # several values may have the same cost, such as d_ff = 64 and 65 in 2 * d_ff // 3
                guess = 2 * index + 1 if cost <= self.requested else (index - 1) // 2
            last, steps = (index, cost), steps + 1
            index = self._first(line, _outward(guess, below + 1, above - 1))
        return [line(side) for side in (below, above) if 0 <= side < top] if flat <= PLATEAU else []

    def _first(self, line: SearchLine, indices: Iterable[int]) -> int | None:
        return next((index for index in islice(indices, TRIES) if self.cost(line(index)) is not None), None)


def _outward(middle: int, low: int, high: int) -> Iterator[int]:
    """Yield the integers from low to high, those next to the middle first."""
    middle = min(max(middle, low), high)
    for distance in range(high - low + 1):
        yield from (index for index in dict.fromkeys((middle + distance, middle - distance)) if low <= index <= high)


def _grid(search: _Search, current: Values, knob: str) -> range:
    """Return evenly spaced values through the first two, from the current value up, that the check accepts."""
    tried = range(current[knob], current[knob] + TRIES)
    accepted = (value for value in tried if search.cost({**current, knob: value}) is not None)
    two = list(islice(accepted, 2))
    if not two:
        rule = f"the check refuses every value from {tried[0]} to {tried[-1]}"
        first = search.refusal[0]
        raise ConfigError(replace(first, address=knob, rule=f"{rule}: {first.address}: {first.rule}"))
    step = two[-1] - two[0] or 1
    return range((two[0] - 1) % step + 1, sys.maxsize, step)


def _nearest(grid: range, value: float) -> int:
    """Return the index of the value of the grid that is nearest."""
    return max(0, round((value - grid.start) / grid.step))


def _line_of_all_knobs(current: Values, grids: Mapping[str, range]) -> tuple[SearchLine, int]:
    """Return the line of all knobs in their current ratio, and its current index. The finest knob sets the scale."""
    finest = max(grids, key=lambda knob: current[knob] / grids[knob].step)

    def scaled(index: int) -> Values:
        scale = grids[finest][index] / current[finest]
        return {knob: grid[_nearest(grid, scale * current[knob])] for knob, grid in grids.items()}

    return scaled, _nearest(grids[finest], current[finest])


def _no_solution(search: _Search, knobs: Sequence[str], nearest: Sequence[Values], within: float) -> Problem:
    budget, requested = search.budget, search.requested
    others = [knob for knob in knobs_of(search.composed) if knob not in knobs]
    help = f"add a knob with smaller effect, such as {' or '.join(others[:3])}" if others else "choose another budget"
    if not nearest:
        return Problem(", ".join(knobs), f"the {budget.unit} do not grow with this knob", help=help)
    sides = (Solution(values, requested, search.cost_of(values)) for values in nearest)
    reached = "; ".join(
        f"{' '.join(f'{knob}={value}' for knob, value in side.values.items())} gives {side.reached:,} "
        f"({side.difference:+.2%})"
        for side in sides
    )
    rule = f"no value comes within {within:.2%} of {requested:,} {budget.unit}: {reached}"
    return Problem(", ".join(knobs), rule, help=help)
