"""`tfm compare --scaling`: run folders of a ladder with a known law, read back with its factor."""

import contextlib
import csv
import io
import json
import math
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import yaml
from matplotlib.collections import PathCollection

import tfm_blocks as tfm
from tests.conftest import refused
from tests.run_folders import change_json
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model, count_parameters
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.scaling import Ladder, read_ladder
from tfm_blocks.report.scaling_tables import (
    draw_scaling,
    exponents_table,
    factors_table,
    scaling_record,
    two_factors_table,
)
from tfm_blocks.report.table import latex, markdown
from tfm_blocks.runs.model import write_model
from tfm_blocks.scoring.scaling_law import LadderFit, LadderPoint, ScalingLaw, fit_ladder

FACTOR = 0.7
EMBEDDINGS = {"decoder_only": 0, "llama": 1}  # llama does not tie the embedding to its logits


def said(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, arguments), "--scaling"])
    return out.getvalue()


def law_error(*arguments, status=2):
    return refused("compare", *arguments, "--scaling", status=status)


cached_output = cache(said)  # of a ladder that no test changes


@cache
def measured(model, width):
    """Return a model's mapping, the number of its parameters, and the number without embeddings."""
    knobs = {"d_model": width, "d_ff": 2 * width, "heads": 2, "layers": 1, "vocab": 50}
    composed = compose_model(model, [f"{key}={value}" for key, value in knobs.items()])
    parameters = count_parameters(check_model(composed.model))
    return knobs, composed.model, parameters, parameters - 50 * width * EMBEDDINGS[model]


def leave_rung(folder, model, width, per_parameter, seed, *, noise=0.0, rate=0.001, worse=1.0, parent=""):
    """Write a finished run whose loss follows the law."""
    knobs, mapping, whole, parameters = measured(model, width)
    tokens = per_parameter * parameters
    root = math.sqrt(FACTOR) if model == "llama" else 1
    loss = 1.5 + 20 * (parameters / root) ** -0.4 + 60 * (tokens / root) ** -0.3
    loss *= worse * math.exp(noise)
    folder.mkdir(parents=True)
    write_model(folder, mapping, [])
    steps = round(tokens / 64)
    config = {**knobs, "name": folder.name, "seed": seed, "schedule": {"peak": rate}, "trainer": {"steps": steps}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    record = {"choices": {"model": model, "data": "lm"}, "commands": ["tfm train"], "parent": parent}
    (folder / "run.json").write_text(json.dumps(record))
    best = {"val/loss": {"value": loss, "step": steps}}
    status = {"state": "done", "steps": steps, "parameters": whole, "tokens_seen": tokens, "best": best}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "metrics.csv").write_text(f"step,val/loss\n{steps // 2},{0.9 * loss}\n{steps},{loss}\n")
    return parameters


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """Write a ladder of two models, four sizes, two lengths and two seeds."""
    folder, random = tmp_path_factory.mktemp("ladder"), np.random.default_rng(0)
    for model in EMBEDDINGS:
        for width in (8, 16, 32, 64):
            for length in (10, 40):
                for seed in (1, 2):
                    name = f"{model}-{width}-{length}-{seed}"
                    leave_rung(folder / name, model, width, length, seed, noise=random.normal(0, 0.002))
    return folder


@pytest.mark.grid
def test_the_factor_of_a_ladder_is_found_without_embeddings(ladder):
    record = json.loads(cached_output(ladder, "--baseline", "decoder_only-8-10-1", "--json"))
    assert record["baseline"] == "decoder_only"
    found = record["factors"]["llama"]
    low, high = found["interval"]
    assert low < FACTOR < high < 0.85
    assert found["p"] < 0.01
    widest = [point for point in record["points"] if point["model"] == "llama"]
    network = tfm.build("llama", d_model=64, d_ff=128, heads=2, layers=1, vocab=50)
    without = sum(parameter.numel() for parameter in network.parameters()) - 50 * 64
    assert max(point["parameters"] for point in widest) == without
    assert record["seed_deviation"] == pytest.approx(0.002, rel=0.5)


def test_the_answer_is_a_sentence(ladder):
    text = cached_output(ladder, "--baseline", "decoder_only-8-10-1")
    assert "noise: losses vary by 0." in text
    assert "% over seeds; 8 model sizes, 32 results" in text
    assert "llama needs 0.7" in text
    assert "times the compute of decoder_only for the same loss, p " in text
    assert (
        "held-out check: the fit without the largest size predicts its losses with an RMS error of decoder_only" in text
    )
    assert "note: all models have fewer than 4,000,000 parameters" in text


def test_equal_models_cannot_be_told_apart(ladder, tmp_path):
    random = np.random.default_rng(1)
    for norm in ("layernorm", "other"):
        for width in (8, 16, 32, 64):
            for length in (10, 40):
                for seed in (1, 2):
                    folder = tmp_path / f"{norm}-{width}-{length}-{seed}"
                    leave_rung(folder, "decoder_only", width, length, seed, noise=random.normal(0, 0.002))
                    config = yaml.safe_load((folder / "config.yaml").read_text())
                    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "norm": norm}))
    text = said(tmp_path)
    assert "this ladder cannot tell other from layernorm" in text
    assert "it would detect a factor of 0." in text


@pytest.mark.grid
def test_models_that_differ_in_a_boolean_and_a_number_are_named_by_the_boolean(ladder, tmp_path):
    for copy in (True, False):
        for run in ladder.glob("llama-*-1"):
            shutil.copytree(run, folder := tmp_path / f"{copy}-{run.name}")
            config = yaml.safe_load((folder / "config.yaml").read_text())
            (folder / "config.yaml").write_text(yaml.safe_dump({**config, "tie": copy, "rope_base": 10 + copy}))
    compared = compare_runs([tmp_path], several_lengths=True, tested=False)
    assert {*read_ladder(compared).fit.models} == {"tie true", "tie false"}


def test_only_the_best_rate_of_a_size_counts_and_no_run_before_its_cooldown(ladder, tmp_path):
    before = json.loads(cached_output(ladder, "--baseline", "decoder_only-8-10-1", "--json"))
    for run in ladder.iterdir():
        shutil.copytree(run, tmp_path / run.name)
    leave_rung(tmp_path / "high", "llama", 16, 10, 1, rate=0.01, worse=1.2)
    stable = tmp_path / "stable"
    leave_rung(stable, "llama", 32, 80, 1, worse=1.1)
    leave_rung(tmp_path / "cooled", "llama", 32, 80, 2, parent="runs/then/stable@100")  # the runs were moved
    after = json.loads(said(tmp_path, "--baseline", "decoder_only-8-10-1", "--json"))
    assert len(after["points"]) == len(before["points"]) + 1
    assert after["factors"]["llama"]["factor"] == pytest.approx(FACTOR, rel=0.1)
    reasons = {note.split(": ")[1]: note.split(": ")[2] for note in after["notes"] if note.startswith("not in the fit")}
    assert reasons["stable"].startswith("others branched off them")
    assert reasons["high"].startswith("another learning rate is better")
    leave_rung(tmp_path / "failed", "decoder_only", 16, 160, 1)
    change_json(tmp_path / "failed" / "status.json", {"state": "failed"})
    failed = json.loads(said(tmp_path, "--baseline", "decoder_only-8-10-1", "--json"))
    assert any(note.startswith("not done: failed") for note in failed["notes"])
    assert "name a finished run whose learning rate has decayed" in law_error(tmp_path, "--baseline", "failed")


def test_a_rate_that_was_only_tried_does_not_count_even_if_it_is_better(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    leave_rung(tmp_path / "all" / "tried", "llama", 16, 10, 1, rate=0.01, worse=0.5)
    record = json.loads(said(tmp_path / "all", "--baseline", "tried", "--json"))
    assert len(record["points"]) == 32 and record["baseline"] == "llama"
    assert any(note.startswith("not in the fit: tried: another learning rate") for note in record["notes"])


def test_a_tried_rate_is_no_result_of_a_size_whose_results_are_not_done(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    leave_rung(tmp_path / "all" / "tried", "llama", 16, 10, 1, rate=0.01)
    for path in (tmp_path / "all").glob("llama-16-*/status.json"):
        change_json(path, {"state": "diverged"})
    record = json.loads(said(tmp_path / "all", "--json"))
    assert len(record["points"]) == 28
    assert any(note.startswith("not in the fit: tried: another learning rate") for note in record["notes"])


def test_a_rate_of_a_full_grid_that_diverged_at_one_length_counts_at_no_length(ladder, tmp_path):
    for run in ladder.glob("llama-*-1"):
        shutil.copytree(run, tmp_path / run.name)
    for length in (10, 40):
        leave_rung(tmp_path / f"fast-{length}", "llama", 16, length, 1, rate=0.01, worse=0.9)
    change_json(tmp_path / "fast-40" / "status.json", {"state": "diverged"})
    notes = read_ladder(compare_runs([tmp_path], several_lengths=True, tested=False)).notes
    assert any(note.startswith("not in the fit: fast-10: another learning rate") for note in notes)


def test_a_parent_whose_own_rate_decayed_is_a_result(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    branch = tmp_path / "all" / "llama-16-10-1" / "run.json"
    change_json(branch, {"parent": "runs/then/llama-16-40-1@9"})
    assert len(json.loads(said(tmp_path / "all", "--json"))["points"]) == 31
    for path in (tmp_path / "all").glob("llama-16-40-*/config.yaml"):
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"schedule": {"peak": 0.001, "decay": 5}}))
    assert len(json.loads(said(tmp_path / "all", "--json"))["points"]) == 32


def test_the_record_has_the_extrapolation_and_the_held_out_errors(ladder):
    record = json.loads(cached_output(ladder, "--json"))
    further = record["factors"]["llama"]["extrapolated"]
    assert further["compute"] == pytest.approx(10 * max(point["compute"] for point in record["points"]))
    low, high = further["interval"]
    assert low < FACTOR < high and low < further["factor"] < high
    assert record["held_out_errors"].keys() == EMBEDDINGS.keys()
    assert max(map(abs, record["held_out_errors"].values())) < 0.02
    assert any(
        f"extrapolated to 10 times the largest run: {further['factor']:.2f} [" in text for text in record["answers"]
    )


@pytest.mark.grid
def test_the_noise_is_told_before_the_results_and_exponents_come_with_a_warning(ladder):
    text = cached_output(ladder, "--exponents")
    assert text.startswith("standard deviation of the val/loss over seeds")
    assert (
        text.index("this ladder would detect a factor of 0.")
        < text.index("rungs: ")
        < text.index("a law for each model")
    )
    assert "warning: the exponents of small ladders cannot be distinguished" in text
    assert "a law for each model" not in cached_output(ladder)
    alone = json.loads(cached_output(ladder, "--exponents", "--json"))["exponents"]
    assert alone.keys() == EMBEDDINGS.keys()
    low, high = alone["llama"]["beta"]["interval"]
    assert f"{alone['llama']['beta']['value']:.3f} [{low:.3f}, {high:.3f}]" in text


def test_factors_on_parameters_and_on_tokens_are_asked_for(ladder):
    text = cached_output(ladder, "--factors")
    assert "factors of what decoder_only needs" in text and "factors of what" not in cached_output(ladder)
    found = json.loads(cached_output(ladder, "--factors", "--json"))["factors"]["llama"]
    for name in ("on_parameters", "on_tokens"):
        low, high = found[name]["interval"]
        assert low < math.sqrt(FACTOR) < high
        assert f"{found[name]['factor']:.2f} [{low:.2f}, {high:.2f}]" in text
    assert "--factors: belongs to a scaling law" in refused("compare", ladder, "--factors")


def test_a_single_model_has_a_law_and_no_factor(ladder, tmp_path):
    for run in ladder.glob("llama-*"):
        (tmp_path / "llama").mkdir(exist_ok=True)
        shutil.copytree(run, tmp_path / "llama" / run.name)
    text = said(tmp_path)
    assert "rungs: " in text and "law: L = " in text and "4 model sizes, 16 results" in text
    assert "relative to" not in text
    assert "--factors: compares models, but all runs are of llama" in law_error(tmp_path, "--factors")


def test_the_report_begins_with_the_law_and_its_figure(ladder, tmp_path):
    path = tmp_path / "report.html"
    with contextlib.redirect_stdout(io.StringIO()):
        main(["report", str(ladder), "--scaling", "--baseline", "decoder_only-8-10-1", "-o", str(path)])
    page = path.read_text()
    assert "<h3>against" not in page, "nothing was tested"
    section = page[page.index('<section id="scaling">') : page.index('<h2 id="comparison">')]
    assert section.count("<table") == 3 and section.count("<svg") == 1 and "with embeddings" in section
    assert "llama needs 0." in section and "note" in section
    assert 'id="scaling"' not in page_without_law(ladder, tmp_path)


def page_without_law(ladder, folder):
    with contextlib.redirect_stdout(io.StringIO()):
        main(["report", str(ladder), "-o", str(folder / "plain.html")])
    return (folder / "plain.html").read_text()


def test_the_figure_has_what_smaller_sizes_predict_for_the_largest(ladder):
    compared = compare_runs([ladder], None, None, None, several_lengths=True, tested=False)
    drawn = draw_scaling(law := read_ladder(compared))
    circles = [one for one in drawn.axes[0].collections if isinstance(one, PathCollection)]
    filled, opened = circles[:2], circles[2:4]  # the last one is in the legend
    assert len(filled) == len(opened) == 2 and not any(len(one.get_facecolors()) for one in opened)
    for index, name in enumerate(law.fit.models):
        largest = max(point.parameters for point in law.fit.points if point.model == name)
        smaller = fit_ladder(
            [
                p
                for p in law.fit.points
                if p.parameters < max(q.parameters for q in law.fit.points if q.model == p.model)
            ],
            law.fit.models,
        )
        tokens = sorted({p.tokens for p in law.fit.points if p.model == name and p.parameters == largest})
        expected = [smaller.law.loss(largest, one, index) for one in tokens]
        assert opened[index].get_offsets()[:, 1].tolist() == pytest.approx(expected)


def test_a_ladder_without_a_model_or_with_a_subset_is_refused(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    (tmp_path / "all" / "llama-16-10-2" / "model.json").unlink()
    for options, error, status in (
        ([], "llama-16-10-2/model.json: the file is missing", 1),
        (["--only", "[llama]"], "--only: does not apply to --scaling", 2),
        (["--held-out-seeds"], "--held-out-seeds: does not apply to --scaling", 2),
        (["--scores", "beam4"], "--scores: has no effect with --scaling, which fits the losses", 2),
    ):
        assert error in law_error(tmp_path / "all", *options, status=status)


def test_losses_that_hardly_depend_on_size_and_tokens_have_a_note_and_finite_factors():
    random = np.random.default_rng(3)
    points = [
        LadderPoint(model, 1e4 * 2**size, 1e5 * 4**length, 2 * math.exp(random.normal(0, 0.01)))
        for model in "ab"
        for size in range(4)
        for length in range(3)
    ]
    law = ScalingLaw(2.0, 1e-320, 0.0, 0.5, 0.5, (0.0, 500.0), (0.0, 0.0), (0.0, 0.0), 1e10)
    without = [replace(law, log_factors=(0.0, factor)) for factor in (-500.0, 0.0, 500.0)]
    ladder = Ladder(LadderFit(["a", "b"], points, law, without), None, [])
    assert ladder.fit.unseen() == ["size", "number of tokens"]
    assert law.lowest_loss(1e10, 1) == pytest.approx(2)
    assert "2.7e+43]" in markdown(factors_table(ladder))
    assert math.isfinite(scaling_record(ladder)["factors"]["b"]["interval"][1])
    equal = Ladder(replace(ladder.fit, laws_without=[law] * 3), None, [])  # factors that are all at their limit
    row = next(line for line in markdown(factors_table(equal)).splitlines() if line.startswith("| b |"))
    assert row == "| b | 2.7e+43 | 1.0000 | 1.0000 |  |  |"
    of_b = scaling_record(equal)["factors"]["b"]
    assert of_b["interval"] is of_b["smallest_visible"] is None
    assert not any("would detect" in text for text in scaling_record(equal)["answers"])


def points_of_terms(**terms):
    """Return a ladder of models whose losses depend on the size, on the tokens, or on both."""
    return [
        LadderPoint(model, size, tokens, 1.5 + 20 * of_size * size**-0.4 + 60 * of_tokens * tokens**-0.3)
        for model, (of_size, of_tokens) in terms.items()
        for size in (1e5, 2e5, 4e5)
        for tokens in (10 * size, 40 * size)
    ]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "exponent", "shown"), [("size", "alpha", (0, 1)), ("number of tokens", "beta", (1, 0))]
)
def test_values_of_a_term_that_a_model_does_not_show_are_not_determined(name, exponent, shown):
    ladder = Ladder(fit_ladder(points_of_terms(a=(1, 1), b=shown), ["a", "b"]), None, [])
    reason = f"b: less than 0.1 % of each loss is attributed to the {name}, so neither its exponent nor a factor"
    for table, columns in (
        (exponents_table(ladder), ("alpha", "beta")),
        (two_factors_table(ladder), ("alpha", "beta")),
    ):
        cells = dict(zip(columns, table.rows[-1][-2:], strict=True))
        assert cells.pop(exponent) == "not determined" and float(cells.popitem()[1].split()[0])
        assert "not determined" in latex(table) and reason in table.note
    record = scaling_record(ladder, exponents=True, factors=True)
    of_factor = {"alpha": "on_parameters", "beta": "on_tokens"}[exponent]
    for values, key in ((record["exponents"]["b"][exponent], "value"), (record["factors"]["b"][of_factor], "factor")):
        assert values[key] is values["interval"] is None and values["reason"].startswith(reason)
    assert record["exponents"]["a"][exponent]["value"] == pytest.approx({"alpha": 0.4, "beta": 0.3}[exponent])


@pytest.mark.grid
def test_constants_of_losses_that_show_no_irreducible_loss_stay_within_their_ranges():
    """The fit leaves it close to 0, where it has no slope, and the jackknife no error."""
    losses = [4.182, 3.789, 3.451, 3.712, 3.362, 3.014, 3.284, 2.871, 2.651, 2.855, 2.541, 2.359]
    rungs = [(size, length * size) for size in (25_080, 50_080, 100_080, 199_640) for length in (10, 20, 40)]
    points = [LadderPoint("a", *rung, loss) for rung, loss in zip(rungs, losses, strict=True)]
    ladder = Ladder(fit_ladder(points, ["a"]), None, [])
    assert ladder.fit.unseen() == ["irreducible loss"]
    assert ladder.fit.estimate(lambda law: law.alpha).interval[0] < 0
    _, irreducible, alpha, _ = exponents_table(ladder).rows[0]
    assert irreducible == "not determined" and "[0.000, " in alpha
    record = scaling_record(ladder, exponents=True)
    assert record["law"]["irreducible"] is record["standard_errors"]["irreducible"] is None
    assert record["exponents"]["a"]["irreducible"]["reason"].endswith("add longer runs of larger models")
    assert record["exponents"]["a"]["alpha"]["interval"][0] == 0
    law = next(text for text in record["answers"] if text.startswith("law: L = "))
    assert "(exponent of N), " in law and law.endswith("of each loss is attributed to the irreducible loss")


def test_the_law_has_no_constants_of_a_term_that_no_loss_shows():
    ladder = Ladder(fit_ladder(points_of_terms(a=(0, 1)), ["a"]), None, [])
    record = scaling_record(ladder)
    assert (
        record["law"]["alpha"] is record["law"]["parameter_coefficient"] is record["standard_errors"]["alpha"] is None
    )
    assert "/ D^" in record["answers"][1] and "/ N^" not in record["answers"][1]
    assert record["answers"][1].endswith("; less than 0.1 % of each loss is attributed to the size")


@pytest.mark.grid
def test_a_score_stands_in_place_of_the_loss(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    for path in (tmp_path / "all").glob("*/status.json"):
        status = json.loads(path.read_text())
        loss = status["best"]["val/loss"]["value"]
        scores = {"test/exact_match": 1 - loss / 10, "test/bits_per_byte": loss / 4, "test/loss": 1.0}
        path.write_text(
            json.dumps(status | {"scored_on": "test", "scores": scores, "test_set": {"sha256": "1", "rows": 9}})
        )
    leave_rung(tried := tmp_path / "all" / "tried", "llama", 16, 10, 1, rate=0.01)
    status = {"scored_on": "test", "scores": {"test/exact_match": 1.0}, "test_set": {"sha256": "1", "rows": 9}}
    change_json(tried / "status.json", status)
    record = json.loads(said(tmp_path / "all", "--metric", "exact match", "--json"))
    assert record["measure"] == "1 - exact match"
    tables = said(tmp_path / "all", "--metric", "exact match", "--markdown")
    assert tables.startswith("**standard deviation of 1 - exact match over seeds**")
    assert "| runs | 1 - exact match | law |" in tables
    by_loss = json.loads(cached_output(ladder, "--json"))
    assert record["factors"]["llama"]["factor"] == pytest.approx(by_loss["factors"]["llama"]["factor"], rel=1e-3)
    assert record["law"]["irreducible"] == pytest.approx(by_loss["law"]["irreducible"] / 10, rel=1e-2)
    record = json.loads(said(tmp_path / "all", "--metric", "bits_per_byte", "--json"))
    assert record["law"]["irreducible"] == pytest.approx(by_loss["law"]["irreducible"] / 4, rel=1e-2)
    assert "in place of the loss stands bits per byte or a score whose best value is 100 %" in law_error(
        tmp_path / "all", "--metric", "loss"
    )
    best = tmp_path / "all" / "llama-64-40-1" / "status.json"
    best.write_text(best.read_text().replace('"test/exact_match": 0.', '"test/exact_match": 1, "x": 0.'))
    error = law_error(tmp_path / "all", "--metric", "exact match")
    assert "--metric: llama-64-40-1 has 100 % of exact match, and no law has a distance of 0" in error
    assert "help: choose a harder score" in error


def test_runs_that_differ_in_more_than_their_seed_are_no_seeds_of_a_rung(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    folder = tmp_path / "all" / "llama-16-10-2"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "dropout": 0.5}))
    assert "runs of llama of one size and length, within 2 %, differ in more than their seed" in law_error(
        tmp_path / "all"
    )


def test_variants_of_a_model_with_equal_budgets_are_no_sizes_of_it(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    leave_rung(wide := tmp_path / "all" / "wide", "llama", 64, 10, 1, worse=1.15)
    knobs = yaml.safe_load((wide / "config.yaml").read_text())
    composed = compose_model(
        "llama", [f"{key}={knobs[key]}" for key in ("d_model", "heads", "layers", "vocab")] + ["d_ff=129"]
    )
    write_model(wide, composed.model, [])  # 0.4 % more parameters
    (wide / "config.yaml").write_text(yaml.safe_dump({**knobs, "d_ff": 129, "window": 8}))
    assert "runs of llama of one size and length, within 2 %, differ in more than" in law_error(tmp_path / "all")


def test_losses_of_several_objectives_and_scores_of_several_test_sets_are_refused(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    for run in (tmp_path / "all").iterdir():
        status = json.loads((run / "status.json").read_text())
        scores = {"test/exact_match": 1 - status["best"]["val/loss"]["value"] / 10}
        test_set = {"sha256": run.name[:5], "rows": 9}
        (run / "status.json").write_text(
            json.dumps(status | {"scored_on": "test", "scores": scores, "test_set": test_set})
        )
        objective = {"name": "masked", "rate": 0.15} if run.name.startswith("llama") else {"name": "next_token"}
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "objective": objective}))
    for options, rule in (
        ([], "the runs have different objectives or label_smoothing, so their losses cannot be compared"),
        (
            ["--metric", "exact match"],
            "the exact match of the runs was not computed in the same way on the same test set",
        ),
    ):
        assert rule in law_error(tmp_path / "all", *options)
    for path in (tmp_path / "all").glob("*/status.json"):
        change_json(path, {"test_set": {"sha256": "one", "rows": 9}})
    path = tmp_path / "all" / "llama-16-10-2" / "run.json"
    change_json(path, {"text": {"vocabulary": "other"}})
    assert "llama needs 0.7" in said(tmp_path / "all", "--metric", "exact match"), "answers have no tokenizer"


def test_losses_of_an_objective_that_hides_tokens_have_a_note(ladder, tmp_path):
    for run in ladder.glob("llama-*-1"):
        shutil.copytree(run, tmp_path / run.name)
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"objective": {"name": "masked", "rate": 0.15}}
        (tmp_path / run.name / "config.yaml").write_text(yaml.safe_dump(config))
    shutil.copytree(next(ladder.glob("llama-*-2")), tmp_path / "failed")
    change_json(tmp_path / "failed" / "status.json", {"state": "failed"})  # and its objective hides no tokens
    notes = read_ladder(compare_runs([tmp_path], several_lengths=True, tested=False)).notes
    assert any(note.startswith("D counts only the predicted tokens: models with objective=masked") for note in notes)


def test_runs_of_several_tokenizers_are_refused(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    path = tmp_path / "all" / "llama-16-10-2" / "run.json"
    change_json(path, {"text": {"vocabulary": "other"}})
    assert "the runs have 2 tokenizers" in law_error(tmp_path / "all")


def test_losses_of_several_validation_sets_are_refused(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    for path in (tmp_path / "all").glob("*/run.json"):
        text = {"text of val": path.parent.name[:5]}
        change_json(path, {"text": text})
    assert "the runs have different validation sets" in law_error(tmp_path / "all")


def test_losses_of_several_contexts_have_a_note(ladder, tmp_path):
    for run in ladder.glob("llama-*"):
        shutil.copytree(run, tmp_path / run.name)
    for path in tmp_path.glob("*/config.yaml"):
        data = {"context": 128 if "llama-64" in path.parent.name else 64}
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"data": data}))
        status = json.loads((path.parent / "status.json").read_text())
        scores = {f"test/{name}": status["best"]["val/loss"]["value"] / 10 for name in ("bits_per_byte", "exact_match")}
        scored = {"scored_on": "test", "scores": scores, "test_set": {"sha256": "1", "rows": 9}}
        (path.parent / "status.json").write_text(json.dumps(status | scored))
    compared = compare_runs([tmp_path], several_lengths=True, tested=False)
    for metric, measure in ((None, "loss per token"), ("bits_per_byte", "bits per byte"), ("exact match", "")):
        notes = [note for note in read_ladder(compared, metric=metric).notes if "data.context" in note]
        assert len(notes) == bool(measure)
        for note in notes:
            assert note.startswith("not comparable: llama-64-10-1, ")
            assert note.endswith(f"; a longer context lowers the {measure}")


def test_rungs_have_the_parameters_with_embeddings(ladder):
    points = json.loads(cached_output(ladder, "--json"))["points"]
    rows = list(csv.DictReader(cached_output(ladder, "--csv").splitlines()))
    for model, tied in (("decoder_only", True), ("llama", False)):
        for width in (8, 16, 32, 64):
            network = tfm.build(model, d_model=width, d_ff=2 * width, heads=2, layers=1, vocab=50)
            whole = sum(parameter.numel() for parameter in network.parameters())
            without = whole if tied else whole - 50 * width
            own = [point for point in points if (point["model"], point["parameters"]) == (model, without)]
            assert len(own) == 4 and {point["with_embeddings"] for point in own} == {whole}
            shown = [row for row in rows if (row["model"], float(row["parameters"])) == (model, without)]
            assert len(shown) == 2 and {float(row["with embeddings"]) for row in shown} == {whole}
    assert "| model | parameters | with embeddings | tokens |" in cached_output(ladder, "--markdown")


@pytest.mark.grid
def test_figures_have_profiles_of_models_with_runs_of_equal_compute(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    note = "note: no IsoFLOP profile of "
    before = said(tmp_path / "all", "--figures", tmp_path / "before")
    assert before.count(note) == 2 and note not in cached_output(ladder)
    assert {path.stem for path in (tmp_path / "before").iterdir()} == {"scaling"}
    *_, middle, _ = (measured("llama", width)[-1] for width in (8, 16, 32, 64))
    for width in (16, 64):
        tokens_per_parameter = 40 * middle**2 / measured("llama", width)[-1] ** 2
        leave_rung(tmp_path / "all" / f"equal-{width}", "llama", width, tokens_per_parameter, 1)
    after = said(tmp_path / "all", "--figures", tmp_path / "after")
    assert after.count(note) == 1 and f"{note}decoder_only" in after
    assert {path.name for path in (tmp_path / "after").iterdir()} == {
        "scaling.pdf", "scaling.svg", "isoflops.pdf", "isoflops.svg"
    }  # fmt: skip


def test_the_formats_have_the_rungs(ladder):
    lines = cached_output(ladder, "--csv").splitlines()
    assert lines[0] == "model,parameters,with embeddings,tokens,runs,val/loss,law"
    assert len(lines) == 1 + 16
    assert cached_output(ladder, "--latex").count("\\begin{tabular}") >= 2
    markdown_text = cached_output(ladder, "--markdown")
    assert markdown_text.count("| model |") == 3
    assert (
        "\n\nlaw: L" in markdown_text and "\n\nllama needs" in markdown_text and "\n\nheld-out check" in markdown_text
    )


@pytest.mark.grid
def test_the_figure_is_written_twice_with_the_same_bytes(ladder, tmp_path):
    for folder in ("one", "two"):
        said(ladder, "--figures", tmp_path / folder)
    one, two = ((tmp_path / folder / "scaling.svg").read_bytes() for folder in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "scaling.pdf").stat().st_size > 5000


def test_a_ladder_of_too_few_sizes_is_refused(ladder):
    folders = sorted(path for path in ladder.iterdir() if "-8-" in path.name or "-16-" in path.name)
    error = law_error(*folders)
    assert "needs at least 3 sizes of each model, but this one has 2" in error
    assert "help: train it at more sizes" in error
