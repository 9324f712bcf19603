"""Find the values of a model's knobs that meet a budget.

The cost must grow with the knobs. Several knobs are first scaled by a common factor, which keeps their ratio. Then each
knob is adjusted separately, beginning with the knob whose steps are relatively smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.network.budget import Budget
from tfm_blocks.network.build import check_model, read_model

GROWTH = 256  # largest factor by which a knob grows
TRIES = 128  # neighbouring values that are tried if the check refuses a value
SECANTS = 12  # steps after which the search halves its interval
PLATEAU = 2  # steps without growth after which the search gives up
CLOSE = 0.1  # fraction of the allowed difference at which no further knob is adjusted

Values = Mapping[str, int]


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
        raise ConfigError(Problem("model", f"has no {budget.unit} to match", help="choose another budget or model"))
    return cost


def solve(composed: Composed, knobs: Sequence[str], budget: Budget, requested: int, within: float) -> Solution:
    """Return values of the knobs whose cost differs from `requested` by at most the fraction `within`.

    Raises ConfigError if there are none; the error lists the nearest values.
    """
    search = _Search(composed, budget, requested)
    present = {knob: _present_value(composed, knob) for knob in knobs}
    if search.cost(present) == requested:
        return Solution(present, requested, requested)
    grids = {knob: _grid(search, present, knob) for knob in knobs}
    candidates = search.neighbours(*_together(present, grids)) if len(knobs) > 1 else []
    start = min(candidates, key=search.miss, default=_on_grids(present, grids))
    for knob in sorted(knobs, key=lambda knob: grids[knob].step / present[knob]):
        candidates += search.neighbours(*_alone(start, grids[knob], knob))
        if candidates and min(map(search.miss, candidates)) <= CLOSE * within * requested:
            break
    candidates.sort(key=search.miss)
    for values in candidates:
        solution = Solution(values, requested, search.known(values))
        if abs(solution.difference) <= within and search.passes(values):
            return solution
    raise ConfigError(_unmet(search, knobs, candidates[:2], within))


def knobs_of(composed: Composed) -> list[str]:
    """Return the knobs of the model that are whole numbers above 0."""
    keys = dict.fromkeys(key for file in composed.chain for key in file.mapping if key not in ("defaults", "model"))
    return [key for key in keys if type(value := composed.mapping.get(key)) is int and value > 0]


def _present_value(composed: Composed, knob: str) -> int:
    known = knobs_of(composed)
    if knob not in known:
        value = f", but is {shown(composed.mapping[knob])}" if knob in composed.mapping else ""
        rule = f"must be a knob of the model that is a whole number above 0{value}"
        raise ConfigError(Problem(knob, rule, help=suggest(knob, known)))
    return int(composed.mapping[knob])


@dataclass(frozen=True)
class _Grid:
    """The values first, first + step, … of a knob, which the check accepts."""

    first: int
    step: int

    def value(self, rung: int) -> int:
        return self.first + rung * self.step

    def rung(self, value: float) -> int:
        return max(0, round((value - self.first) / self.step))


Ladder = Callable[[int], Values]  # the values of the knobs at rung 0, 1, … of a search in which the cost grows


class _Search:
    """The costs of a model by the values of its knobs."""

    def __init__(self, composed: Composed, budget: Budget, requested: int) -> None:
        self.composed, self.budget, self.requested = composed, budget, requested
        self.costs: dict[tuple[tuple[str, int], ...], int | None] = {}

    def cost(self, values: Values) -> int | None:
        """Return the cost, or None if the check refuses the values."""
        key = tuple(values.items())
        if key not in self.costs:
            self.costs[key] = self._measure(values)
        return self.costs[key]

    def _measure(self, values: Values) -> int | None:
        composed = self.composed.with_values(values)
        try:
            return self.budget.measure(read_model(composed.model, composed.sources))
        except (ConfigError, ValueError, TypeError, RuntimeError):  # all but the first come from a block's constructor
            return None

    def known(self, values: Values) -> int:
        """Return the cost of accepted values."""
        cost = self.cost(values)
        assert cost is not None
        return cost

    def miss(self, values: Values) -> int:
        """Return the distance from the requested cost."""
        return abs(self.known(values) - self.requested)

    def passes(self, values: Values) -> bool:
        """Return True if the whole check accepts the values, with the trace that `cost` omits."""
        composed = self.composed.with_values(values)
        try:
            check_model(composed.model, composed.sources)
        except ConfigError:
            return False
        return True

    def neighbours(self, ladder: Ladder, start: int) -> list[Values]:
        """Return the accepted values on both sides of the budget; empty if the cost does not grow along the ladder.

        The secant through the last two rungs leads to the next rung, since costs are nearly linear or quadratic.
        """
        top = GROWTH * (start + 1)
        below, above = -1, top  # no rung between them is known
        rung, steps, flat = self._first(ladder, _outward(start, 0, top - 1)), 0, 0
        last: tuple[int, int] | None = None
        while rung is not None and flat <= PLATEAU:
            cost = self.known(ladder(rung))
            below, above = (rung, above) if cost <= self.requested else (below, rung)
            slope = (cost - last[1]) / (rung - last[0]) if last else 0.0
            flat += bool(last) and slope <= 0
            guess = rung + (1 if cost <= self.requested else -1)
            if slope > 0:
                guess = round(rung + (self.requested - cost) / slope) if steps < SECANTS else (below + above) // 2
            elif last:  # several values may have the same cost, such as d_ff = 64 and 65 in 2 * d_ff // 3
                guess = 2 * rung + 1 if cost <= self.requested else (rung - 1) // 2
            last, steps = (rung, cost), steps + 1
            rung = self._first(ladder, _outward(guess, below + 1, above - 1))
        return [ladder(side) for side in (below, above) if 0 <= side < top] if flat <= PLATEAU else []

    def _first(self, ladder: Ladder, rungs: Iterable[int]) -> int | None:
        return next((rung for rung in islice(rungs, TRIES) if self.cost(ladder(rung)) is not None), None)


def _outward(middle: int, low: int, high: int) -> Iterator[int]:
    """Yield the integers from low to high, those next to the middle first."""
    middle = min(max(middle, low), high)
    for distance in range(high - low + 1):
        yield from (rung for rung in dict.fromkeys((middle + distance, middle - distance)) if low <= rung <= high)


def _grid(search: _Search, present: Values, knob: str) -> _Grid:
    """Return the grid through the first two values, from the current value up, that the check accepts."""
    ladder = range(present[knob], present[knob] + TRIES)
    accepted = (value for value in ladder if search.cost({**present, knob: value}) is not None)
    two = list(islice(accepted, 2))
    if not two:
        rule = f"the check refuses every value from {ladder[0]} to {ladder[-1]}"
        raise ConfigError(Problem(knob, rule, help="tfm check MODEL prints the reason"))
    step = two[-1] - two[0] or 1
    return _Grid((two[0] - 1) % step + 1, step)


def _on_grids(present: Values, grids: Mapping[str, _Grid]) -> Values:
    return {knob: grid.value(grid.rung(present[knob])) for knob, grid in grids.items()}


def _alone(start: Values, grid: _Grid, knob: str) -> tuple[Ladder, int]:
    """Return the ladder of one knob, with the others fixed, and its current rung."""
    return lambda rung: {**start, knob: grid.value(rung)}, grid.rung(start[knob])


def _together(present: Values, grids: Mapping[str, _Grid]) -> tuple[Ladder, int]:
    """Return the ladder of all knobs in their current ratio, and its current rung. The finest knob sets the scale."""
    finest = max(grids, key=lambda knob: present[knob] / grids[knob].step)

    def scaled(rung: int) -> Values:
        scale = grids[finest].value(rung) / present[finest]
        return {knob: grid.value(grid.rung(scale * present[knob])) for knob, grid in grids.items()}

    return scaled, grids[finest].rung(present[finest])


def _unmet(search: _Search, knobs: Sequence[str], nearest: Sequence[Values], within: float) -> Problem:
    budget, requested = search.budget, search.requested
    others = [knob for knob in knobs_of(search.composed) if knob not in knobs]
    help = f"add a knob with smaller effect, such as {' or '.join(others[:3])}" if others else "choose another budget"
    if not nearest:
        return Problem(", ".join(knobs), f"the {budget.unit} do not grow with this knob", help=help)
    sides = (Solution(values, requested, search.known(values)) for values in nearest)
    reached = "; ".join(
        f"{' '.join(f'{knob}={value}' for knob, value in side.values.items())} gives {side.reached:,} "
        f"({side.difference:+.2%})"
        for side in sides
    )
    rule = f"no value comes within {within:.2%} of {requested:,} {budget.unit}: {reached}"
    return Problem(", ".join(knobs), rule, help=help)
