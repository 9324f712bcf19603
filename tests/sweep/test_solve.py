"""`tfm solve`: its values equal the result of an exhaustive search, and its command line has the stated cost."""

import json
import shlex

import pytest

from tests.conftest import refused
from tests.network.examples import SHIPPED, name
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model
from tfm_blocks.sweep.solve import BUDGETS, measure_cost, solve

SMALL = ["d_model=32", "d_ff=48", "heads=4", "layers=2", "vocab=50"]
PARAMETERS = BUDGETS["parameters"]


def composed(model, *overrides):
    return compose_model(model, list(overrides))


def cost(model, overrides, budget):
    """Return the cost of a model that the check accepts, or None."""
    config = composed(model, *overrides)
    try:
        return budget.measure(check_model(config.model, config.sources))
    except ConfigError:
        return None


@pytest.mark.parametrize("requested", [30_000, 55_555])
def test_one_knob_gets_the_value_whose_neighbours_are_further_from_the_budget(requested):
    solution = solve(composed("tiny", *SMALL), ["d_ff"], PARAMETERS, requested, 1)
    overrides, value = [text for text in SMALL if not text.startswith("d_ff")], solution.values["d_ff"]
    costs = [cost("tiny", [*overrides, f"d_ff={one}"], PARAMETERS) for one in (value - 1, value, value + 1)]
    assert costs == sorted(costs) and solution.reached == costs[1]
    assert min(costs, key=lambda one: abs(one - requested)) == costs[1]


@pytest.mark.grid
def test_a_width_that_the_heads_must_divide_is_searched_among_the_widths_that_the_check_accepts():
    solution = solve(composed("tiny", *SMALL), ["d_model"], PARAMETERS, 61_000, 1)
    costs = {width: cost("tiny", [*SMALL[1:], f"d_model={width}"], PARAMETERS) for width in range(36, 53)}
    accepted = [width for width, one in costs.items() if one]
    assert accepted == [36, 40, 44, 48, 52] and costs[36] < 61_000 < costs[52]
    assert solution.values["d_model"] == min(accepted, key=lambda width: abs(costs[width] - 61_000))


@pytest.mark.grid
def test_several_knobs_keep_their_ratio_and_meet_a_budget_that_the_coarse_one_cannot():
    requested = measure_cost(composed("tiny", "d_model=96", "d_ff=144", *SMALL[2:]), PARAMETERS) + 5_000
    coarse, both = (
        solve(composed("tiny", *SMALL), knobs, PARAMETERS, requested, 1) for knobs in (["d_model"], ["d_model", "d_ff"])
    )
    assert abs(both.difference) < min(0.002, abs(coarse.difference))
    assert both.values["d_model"] % 4 == 0
    assert both.values["d_ff"] / both.values["d_model"] == pytest.approx(48 / 32, rel=0.1)


@pytest.mark.grid
def test_values_that_share_a_cost_are_a_step_and_not_the_end_of_the_search():
    requested = measure_cost(composed("tiny", *SMALL), PARAMETERS)
    solution = solve(composed("swiglu", *SMALL), ["d_ff"], PARAMETERS, requested, 1)
    costs = [cost("swiglu", [*SMALL[:1], f"d_ff={width}", *SMALL[2:]], PARAMETERS) for width in range(45, 57)]
    assert len(set(costs)) < len(costs), "swiglu has an inner width of 2 * d_ff // 3"
    assert abs(solution.reached - requested) == min(abs(one - requested) for one in costs)


def test_values_that_meet_the_budget_already_stay():
    config = composed("tiny", *SMALL)
    assert solve(config, ["d_model", "d_ff"], PARAMETERS, measure_cost(config, PARAMETERS), 0).values == {
        "d_model": 32, "d_ff": 48
    }  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "requested", "message"),
    [
        pytest.param(["heads"], 50_000, r"heads: the parameters do not grow with this knob", marks=pytest.mark.grid),
        (["layers"], 30_000, r"layers: no value comes within 0\.50% of 30,000 parameters: layers=\d+ gives [\d,]+ \("),
        (["d_ff"], 5_000, r"no value comes within .*: d_ff=1 gives [\d,]+ \(\+"),
        (
            ["d_f"],
            30_000,
            r"d_f: must be a knob of the model that is a whole number above 0\n  help: did you mean d_ff",
        ),
        (["dropout"], 30_000, r"dropout: must be a knob .* above 0, but is 0\.0"),
    ],
)
def test_a_budget_that_no_value_meets_is_refused_with_the_nearest_values(knobs, requested, message):
    with pytest.raises(ConfigError, match=message):
        solve(composed("tiny", *SMALL), knobs, PARAMETERS, requested, 0.005)


@pytest.mark.grid
def test_the_reason_why_the_check_refuses_all_values_is_printed():
    rule = (
        r"d_ff: the check refuses every value from 48 to 175: model\.graph\.encoder.*\n.*base\.yaml:\d+(.|\n)*heads=5"
    )
    with pytest.raises(ConfigError, match=rule):
        solve(composed("tiny", *SMALL[:2], "heads=5", *SMALL[3:]), ["d_ff"], PARAMETERS, 30_000, 1)


def test_the_printed_command_line_has_the_printed_cost(capsys):
    main(["solve", "swiglu", "d_ff", *SMALL[:1], *SMALL[2:], "--like", "base", *SMALL, "--multiply-adds", "--json"])
    report = json.loads(capsys.readouterr().out)
    program, command, *overrides = shlex.split(report["command"])
    assert (program, command, overrides[0]) == ("tfm", "train", "model=swiglu")
    assert report["requested"] == cost("base", SMALL, BUDGETS["multiply_adds"])
    assert report["reached"] == cost("swiglu", overrides[1:], BUDGETS["multiply_adds"])
    assert report["reached"] == pytest.approx(report["requested"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--like", "base"], "one of the arguments --parameters --multiply-adds --decode-state is required"),
        (["--parameters"], "error: --like: the budget needs a reference model"),
        (["--parameters", "65M", "--like", "base"], "error: --like: cannot be combined with the number 65,000,000"),
        (["--parameters", "many"], "must be a number above 0 such as 65M"),
        (["--decode-state", "--like", "encoder_only"], "error: model: has no floats of decoding state to match"),
    ],
)
def test_a_budget_is_one_number_or_one_model(arguments, message):
    assert message in refused("solve", "tiny", "d_ff", *arguments)


WIDTHS = ["d_model", "d_ff"]


@pytest.mark.grid
@pytest.mark.parametrize("budget", ["parameters", "multiply_adds"])
@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_a_shipped_model_meets_the_budget_of_base(path, budget):
    requested = measure_cost(composed("base"), BUDGETS[budget])
    solution = solve(composed(str(path)), WIDTHS, BUDGETS[budget], requested, BUDGETS[budget].within)
    reached = cost(str(path), [f"{knob}={value}" for knob, value in solution.values.items()], BUDGETS[budget])
    assert solution.reached == reached == pytest.approx(requested, rel=BUDGETS[budget].within)
