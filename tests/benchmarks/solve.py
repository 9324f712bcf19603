"""Give every shipped model the parameters and the multiply-adds of base. Print values, differences and CPU seconds.

python tests/benchmarks/solve.py
"""

from __future__ import annotations

import time

from tfm_blocks.compose.folders import CONF
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.sweep.solve import BUDGETS, measure_cost, solve

KNOBS = ("d_model", "d_ff")


def solved(model: str, budget: str, requested: int) -> str:
    """Return the cells of a model: values, difference and CPU seconds."""
    composed = compose_model(model)
    start = time.process_time()
    try:
        solution = solve(composed, KNOBS, BUDGETS[budget], requested, BUDGETS[budget].within)
        values = ", ".join(f"{knob}={value}" for knob, value in solution.values.items())
        result = f"{values} | {solution.difference:+.3%}"
    except ConfigError as error:
        result = f"{error.problems[0].rule} | "
    return f"{result} | {time.process_time() - start:.2f}"


if __name__ == "__main__":
    requested = {
        budget: measure_cost(compose_model("base"), BUDGETS[budget]) for budget in ("parameters", "multiply_adds")
    }
    print(
        f"| model | {' | '.join(f'{budget} of base: {count:,} | difference | s' for budget, count in requested.items())} |"
    )
    print("|---|---|---:|---:|---|---:|---:|")
    for path in sorted((CONF / "model").glob("*.yaml")):
        cells = " | ".join(solved(path.stem, budget, count) for budget, count in requested.items())
        print(f"| {path.stem} | {cells} |", flush=True)
