"""Jobs get the budget of a reference before the first one starts."""

import json
from pathlib import Path

import pytest

from tests.conftest import COMPOSER, refused
from tests.preloaded import run_python
from tfm_blocks.cli import main
from tfm_blocks.compose.run import compose_job
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.settings import read_data
from tfm_blocks.errors import ConfigError
from tfm_blocks.launch.check import check_run
from tfm_blocks.network.build import count_parameters
from tfm_blocks.sweep.checks import JobChecker
from tfm_blocks.sweep.settings import read_match
from tfm_blocks.sweep.solve import BUDGETS, measure_cost

ROOT = Path(__file__).parents[2]
SMALL = ["d_model=32", "d_ff=64", "heads=4", "layers=1", "vocab=300"]
TEXT = ["data.train=200", "data.val=20", "data.test=10"]


def matcher(like, by, budget="parameters", within=None):
    match = read_match({"like": like, "by": by, "budget": budget, "within": within})
    return JobChecker(COMPOSER, check_run, match)


def cost(overrides, budget):
    return measure_cost(compose_job(overrides, COMPOSER), BUDGETS[budget])


@pytest.mark.grid
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_job_gets_the_cost_of_the_same_job_with_the_model_of_the_reference(budget):
    knob = "d_model" if budget == "decode_state" else "d_ff"
    job = ["model=macaron", "seed=3", *SMALL]
    overrides, record = matcher("tiny", [knob], budget, 0.1).match(job)
    kept = [text for text in job if not text.startswith(knob)]
    assert overrides == [*kept, f"{knob}={record['values'][knob]}"]
    assert record["requested"] == cost(["model=tiny", *job[1:]], budget)
    assert record["reached"] == cost(overrides, budget) == pytest.approx(record["requested"], rel=0.1)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("data", "vocab"),
    [(["data=parity"], 4 + 3), (["data=mqar", "data.vocab=64"], 4 + 64)],
)
def test_the_budget_of_a_probe_task_counts_the_alphabet_of_the_task(data, vocab):
    job = ["experiment=probe/lite", *data, "d_model=32", "d_ff=512", "heads=2"]
    match = matcher({"mixer": "attention"}, ["d_ff"], within=0.01).match
    overrides, record = match([*job, "mixer=lstm"])
    lstm, attention = (
        count_parameters(check_run(compose_job(texts, COMPOSER)).spec)
        for texts in (overrides, [*job, "mixer=attention"])
    )
    assert record["vocab"] == vocab and (record["requested"], record["reached"]) == (attention, lstm)
    assert lstm == pytest.approx(attention, rel=0.01) and record["values"]["d_ff"] < 512


def test_the_budget_of_text_counts_the_subwords_that_its_tokenizer_learns():
    job = ["model=macaron", *SMALL[:-1], "vocab=10000", *TEXT]
    overrides, record = matcher("tiny", ["d_ff"], within=0.02).match(job)
    text = read_data(compose_job(job, COMPOSER).mapping["data"])
    vocab = prepare(text, 10000).tokenizer.size
    assert record["vocab"] == vocab < 2000
    costs = [
        cost([*texts, f"vocab={vocab}"], "parameters")
        for texts in (["model=tiny", *SMALL[:-1]], [text for text in overrides if not text.startswith("vocab")])
    ]
    assert costs == [record["requested"], record["reached"]]


@pytest.mark.parametrize(
    ("like", "text"),
    [({"tie": None}, "tie=null"), pytest.param({"d_head": None}, "d_head=null", marks=pytest.mark.grid)],
)
def test_a_knob_of_the_reference_can_be_null(like, text):
    job = ["model=llama", *SMALL, "tie=emb", "d_head=16"]
    record = matcher(like, ["d_ff"], within=0.9).match(job)[1]
    kept = [other for other in job if other.partition("=")[0] != text.partition("=")[0]]
    assert record["requested"] == cost([*kept, text], "parameters") and record["like"] == like


@pytest.mark.grid
def test_the_reference_has_the_overrides_that_its_model_uses():
    match = matcher("base", ["d_ff"])
    job = ["model=restricted", "r=8", *SMALL]
    assert match.match(job)[1]["requested"] == cost(["model=base", *SMALL], "parameters")
    match = matcher("gqa", ["d_ff"])
    assert match.match(SMALL, ["kv_heads=1"])[1]["requested"] == cost(["model=gqa", "kv_heads=1", *SMALL], "parameters")


@pytest.mark.grid
def test_an_override_that_only_another_model_uses_is_named_and_left_out(capsys):
    jobs = ["model=base,restricted", "seed=1,2", *SMALL]
    main(["check", "-m", *jobs, "r=8"])
    output = capsys.readouterr().out
    assert "r=8: not used by model=base, whose jobs run without it" in output
    assert output.count("fine") == 4 and output.count("r=8 ") == 2 and output.startswith("r=8: ")
    main(["check", "-m", *jobs, "r=8,16", "sweep.together=[model,r]"])
    output = capsys.readouterr().out
    assert output.count("fine") == 4 and "r=16 " in output and "model=base d_model" not in output
    unused = "is not used by model=base, whose jobs with other values would be equal"
    for overrides, rule in (
        (["r=8,16"], f"r: {unused}: r=8"),
        (["q=8"], "q: no such key: q=8"),
    ):
        assert rule in refused("check", "-m", *jobs, *overrides)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("method", "models"),
    [
        ("random", "base,restricted"),
        pytest.param("optuna", "restricted,base", marks=pytest.mark.grid),
        pytest.param("random", "restricted,base", marks=pytest.mark.grid),
        pytest.param("optuna", "base,restricted", marks=pytest.mark.grid),
    ],
)
def test_a_search_leaves_out_overrides_by_the_rule_of_a_grid(method, models, capsys):
    """The jobs that are drawn first need not contain the model that uses the override."""
    jobs = ["check", "-m", f"sweep={method}", "sweep.trials=1", f"model={models}", "dropout=interval(0,0.1)", *SMALL]
    main([*jobs, "r=8"])
    output = capsys.readouterr().out
    assert output.startswith("r=8: not used by model=base, whose jobs run without it") and output.count("fine") == 1
    assert ("r=8 " in output.partition("\n")[2]) == ("model=restricted " in output)
    for values in ("8,16", "range(8,16)", "int(interval(8,16))"):
        assert "r: is not used by model=base, whose jobs with other values would be equal" in refused(
            *jobs, f"r={values}"
        )
    assert "q: no such key: q=8" in refused(*jobs, "q=8")


@pytest.mark.grid
def test_a_random_search_may_pair_a_knob_with_its_model(capsys):
    jobs = ["model=base,restricted", "r=8,16", "sweep.together=[model,r]", "seed=1,2", *SMALL]
    main(["check", "-m", "sweep=random", "sweep.trials=4", *jobs])
    output = capsys.readouterr().out
    assert output.count("r=16 ") == 2 and "model=base r" not in output.partition("\n")[2]


@pytest.mark.grid
def test_trials_of_a_search_leave_out_what_their_model_does_not_use(tmp_path):
    pytest.importorskip("optuna")
    jobs = ["sweep=optuna", "sweep.trials=3", "model=base,restricted", "r=8", "seed=1,2", *SMALL, *TEXT, *SHORT]
    done = run_python([ROOT / "train.py", "-m", *jobs, "sweep.name=searched"], tmp_path, timeout=300)
    assert done.returncode == 0 and "3 of 3 runs done" in done.stdout, done.stdout + done.stderr
    configs = list(tmp_path.glob("runs/searched/*/config.yaml"))
    assert {("restricted" in path.parent.name, "\nr: 8\n" in path.read_text()) for path in configs} == {
        (True, True),
        (False, False),
    }


def test_the_error_names_the_override_whose_values_would_give_equal_jobs():
    assert "kv_heads: is not used by model=base, whose jobs with other values" in refused(
        "check", "-m", "model=base,gemma2", "r=8", "kv_heads=1,2"
    )


def test_the_reference_itself_stays_as_it_is():
    overrides, record = matcher("tiny", ["d_ff"]).match(["model=tiny", *SMALL])
    assert overrides == ["model=tiny", *SMALL] and record["requested"] == record["reached"]


def test_a_reference_may_differ_in_a_knob_instead_of_the_model():
    overrides, record = matcher({"heads": 4}, ["d_ff"]).match(["model=gqa", "kv_heads=1", *SMALL])
    assert record["values"] == {} and overrides == ["model=gqa", "kv_heads=1", *SMALL]
    overrides, record = matcher({"kv_heads": 4}, ["d_ff"], within=0.01).match(["model=gqa", "kv_heads=1", *SMALL])
    assert record["values"]["d_ff"] > 64


def test_a_sweep_without_a_reference_changes_no_job():
    assert matcher(None, []).match(SMALL) == (SMALL, {})


@pytest.mark.parametrize(
    ("like", "by", "message"),
    [("tiny", [], "match.by: and match.like belong together"), (None, ["d_ff"], "belong together"),
     (3, ["d_ff"], "match.like: must be a mapping")],
)  # fmt: skip
def test_a_budget_needs_a_reference_and_a_knob(like, by, message):
    with pytest.raises(ConfigError) as raised:
        matcher(like, by)
    assert message in str(raised.value)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("match", "message"),
    [(["match.like=tny", "match.by=[d_ff]"], "match.like.model: no model is called 'tny'\n  help: did you mean tiny?"),
     (["match.like={modle: tiny}", "match.by=[d_ff]"], "match.like.modle: no such key: modle=tiny"),
     (["match.like={objective@x: y}", "match.by=[d_ff]"], "error: "),
     (["match.like=tiny", "match.by=[dff]"], "match.by.dff: must be a knob of the model that is")],
)  # fmt: skip
def test_a_wrong_name_of_a_match_has_its_address(match, message):
    error = refused("check", "-m", "model=tiny,prenorm", *match)
    assert message in error and "leave out" not in error


SHORT = ["trainer.steps=2", "trainer.validate_every=2", "trainer.validate_sentences=2", "logger=csv"]


@pytest.mark.grid
def test_a_sweep_records_what_it_requested_and_reached(tmp_path):
    jobs = ["model=tiny,swiglu", "seed=1,2", *SMALL[:-1], "vocab=5000", *TEXT, *SHORT]
    command = [
        ROOT / "train.py",
        "-m",
        *jobs,
        "match.like=tiny",
        "match.by=[d_ff]",
        "match.within=0.02",
        "sweep.name=fair",
    ]
    done = run_python(command, tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    records = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/fair/*/run.json")}
    assert sorted(records) == [f"model-{model}_seed-{seed}" for model in ("swiglu", "tiny") for seed in (1, 2)]
    requested = records["model-tiny_seed-1"]["facts"]["parameters"]
    assert requested < records["model-tiny_seed-1"]["facts"]["parameters_asked"]
    for record in records.values():
        assert record["match"]["requested"] == requested
        assert record["match"]["reached"] == record["facts"]["parameters"] == pytest.approx(requested, rel=0.02)
        assert f"{requested:,}" in done.stdout
    assert records["model-swiglu_seed-1"]["match"]["values"] == records["model-swiglu_seed-2"]["match"]["values"]
    again = run_python(command, tmp_path, timeout=300)
    assert "4 done before" in again.stdout


@pytest.mark.grid
def test_a_job_that_cannot_be_solved_is_named_and_nothing_starts(tmp_path):
    jobs = ["model=tiny,macaron", "layers=3", "match.like=tiny", "match.by=[layers]", *TEXT, *SHORT]
    done = run_python([ROOT / "train.py", "-m", *jobs], tmp_path, timeout=120)
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert "sweep: 1 of 2 jobs cannot start" in done.stderr and "leave out model=macaron" in done.stderr
    assert "layers: no value comes within 0.50% of" in done.stderr
