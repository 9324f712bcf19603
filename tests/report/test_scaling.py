"""`tfm compare --scaling`: run folders of a ladder with a known law, read back with its factor."""

import contextlib
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
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import check_model, count_parameters
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.scaling import Ladder, read_ladder
from tfm_blocks.report.scaling_tables import draw_scaling, factors_table, scaling_record
from tfm_blocks.report.table import markdown
from tfm_blocks.runs.model import write_model
from tfm_blocks.scoring.scaling_law import LadderFit, LadderPoint, ScalingLaw, fit_ladder

FACTOR = 0.7
EMBEDDINGS = {"decoder_only": 0, "llama": 1}  # llama does not tie the embedding to its logits


def said(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, arguments), "--scaling"])
    return out.getvalue()


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
    assert "held-out check: the fit without the largest size predicts its losses with an error of decoder_only" in text
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


def test_only_the_best_rate_of_a_size_counts_and_no_run_before_its_cooldown(ladder, tmp_path, capsys):
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
    status = json.loads((tmp_path / "failed" / "status.json").read_text())
    (tmp_path / "failed" / "status.json").write_text(json.dumps(status | {"state": "failed"}))
    failed = json.loads(said(tmp_path, "--baseline", "decoder_only-8-10-1", "--json"))
    assert any(note.startswith("not done: failed") for note in failed["notes"])
    with pytest.raises(SystemExit):
        said(tmp_path, "--baseline", "failed")
    assert "name a finished run whose learning rate has decayed" in capsys.readouterr().err


def test_a_rate_that_was_only_tried_does_not_count_even_if_it_is_better(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    leave_rung(tmp_path / "all" / "tried", "llama", 16, 10, 1, rate=0.01, worse=0.5)
    record = json.loads(said(tmp_path / "all", "--baseline", "tried", "--json"))
    assert len(record["points"]) == 32 and record["baseline"] == "llama"
    assert any(note.startswith("not in the fit: tried: another learning rate") for note in record["notes"])


def test_a_parent_whose_own_rate_decayed_is_a_result(ladder, tmp_path):
    shutil.copytree(ladder, tmp_path / "all")
    branch = tmp_path / "all" / "llama-16-10-1" / "run.json"
    branch.write_text(json.dumps(json.loads(branch.read_text()) | {"parent": "runs/then/llama-16-40-1@9"}))
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


def test_factors_on_parameters_and_on_tokens_are_asked_for(ladder, capsys):
    text = cached_output(ladder, "--factors")
    assert "factors of what decoder_only needs" in text and "factors of what" not in cached_output(ladder)
    found = json.loads(cached_output(ladder, "--factors", "--json"))["factors"]["llama"]
    for name in ("on_parameters", "on_tokens"):
        low, high = found[name]["interval"]
        assert low < math.sqrt(FACTOR) < high
        assert f"{found[name]['factor']:.2f} [{low:.2f}, {high:.2f}]" in text
    with pytest.raises(SystemExit):
        main(["compare", str(ladder), "--factors"])
    assert "--factors: belongs to a scaling law" in capsys.readouterr().err


def test_a_single_model_has_a_law_and_no_factor(ladder, tmp_path, capsys):
    for run in ladder.glob("llama-*"):
        (tmp_path / "llama").mkdir(exist_ok=True)
        shutil.copytree(run, tmp_path / "llama" / run.name)
    text = said(tmp_path)
    assert "rungs: " in text and "law: L = " in text and "4 model sizes, 16 results" in text
    assert "relative to" not in text
    with pytest.raises(SystemExit):
        said(tmp_path, "--factors")
    assert "--factors: compares models, but all runs are of llama" in capsys.readouterr().err


def test_the_report_begins_with_the_law_and_its_figure(ladder, tmp_path):
    path = tmp_path / "report.html"
    with contextlib.redirect_stdout(io.StringIO()):
        main(["report", str(ladder), "--scaling", "-o", str(path)])
    page = path.read_text()
    section = page[page.index('<section id="scaling">') : page.index('<h2 id="comparison">')]
    assert section.count("<table") == 3 and section.count("<svg") == 1
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


def test_a_ladder_without_a_model_or_with_a_subset_is_refused(ladder, tmp_path, capsys):
    shutil.copytree(ladder, tmp_path / "all")
    (tmp_path / "all" / "llama-16-10-2" / "model.json").unlink()
    for options, error in (
        ([], "llama-16-10-2/model.json: the file is missing"),
        (["--only", "[llama]"], "--only: does not apply to --scaling"),
    ):
        with pytest.raises(SystemExit):
            said(tmp_path / "all", *options)
        assert error in capsys.readouterr().err


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
    assert ladder.fit.unseen == ["size", "number of tokens"]
    assert law.lowest_loss(1e10, 1) == pytest.approx(2)
    assert "2.7e+43]" in markdown(factors_table(ladder))
    assert math.isfinite(scaling_record(ladder)["factors"]["b"]["interval"][1])
    equal = Ladder(replace(ladder.fit, laws_without=[law] * 3), None, [])  # factors that are all at their limit
    row = next(line for line in markdown(factors_table(equal)).splitlines() if line.startswith("| b |"))
    assert row == "| b | 2.7e+43 | 1.0000 | 1.0000 |  |  |"
    of_b = scaling_record(equal)["factors"]["b"]
    assert of_b["interval"] is of_b["smallest_visible"] is None
    assert not any("would detect" in text for text in scaling_record(equal)["answers"])


def test_a_score_stands_in_place_of_the_loss(ladder, tmp_path, capsys):
    shutil.copytree(ladder, tmp_path / "all")
    for path in (tmp_path / "all").glob("*/status.json"):
        status = json.loads(path.read_text())
        loss = status["best"]["val/loss"]["value"]
        scores = {"test/exact_match": 1 - loss / 10, "test/bits_per_byte": loss / 4, "test/loss": 1.0}
        path.write_text(
            json.dumps(status | {"scored_on": "test", "scores": scores, "test_set": {"sha256": "1", "rows": 9}})
        )
    record = json.loads(said(tmp_path / "all", "--metric", "exact match", "--json"))
    assert record["measure"] == "exact match"
    by_loss = json.loads(cached_output(ladder, "--json"))
    assert record["factors"]["llama"]["factor"] == pytest.approx(by_loss["factors"]["llama"]["factor"], rel=1e-3)
    assert record["law"]["irreducible"] == pytest.approx(by_loss["law"]["irreducible"] / 10, rel=1e-2)
    record = json.loads(said(tmp_path / "all", "--metric", "bits_per_byte", "--json"))
    assert record["law"]["irreducible"] == pytest.approx(by_loss["law"]["irreducible"] / 4, rel=1e-2)
    with pytest.raises(SystemExit):
        said(tmp_path / "all", "--metric", "loss")
    assert "in place of the loss stands bits per byte or a score whose best value is 100 %" in capsys.readouterr().err
    best = tmp_path / "all" / "llama-64-40-1" / "status.json"
    best.write_text(best.read_text().replace('"test/exact_match": 0.', '"test/exact_match": 1, "x": 0.'))
    with pytest.raises(SystemExit):
        said(tmp_path / "all", "--metric", "exact match")
    error = capsys.readouterr().err
    assert "--metric: llama-64-40-1 has 100 % of exact match, and no law has a distance of 0" in error
    assert "help: choose a harder score" in error


def test_runs_that_differ_in_more_than_their_seed_are_no_seeds_of_a_rung(ladder, tmp_path, capsys):
    shutil.copytree(ladder, tmp_path / "all")
    folder = tmp_path / "all" / "llama-16-10-2"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "dropout": 0.5}))
    with pytest.raises(SystemExit):
        said(tmp_path / "all")
    assert "runs of llama of one size and length differ in more than their seed" in capsys.readouterr().err


def test_runs_of_several_tokenizers_are_refused(ladder, tmp_path, capsys):
    shutil.copytree(ladder, tmp_path / "all")
    path = tmp_path / "all" / "llama-16-10-2" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"text": {"vocabulary": "other"}}))
    with pytest.raises(SystemExit):
        said(tmp_path / "all")
    assert "the runs have 2 tokenizers" in capsys.readouterr().err


def test_the_formats_have_the_rungs(ladder):
    lines = cached_output(ladder, "--csv").splitlines()
    assert lines[0] == "model,parameters,tokens,runs,val/loss,law"
    assert len(lines) == 1 + 16
    assert cached_output(ladder, "--latex").count("\\begin{tabular}") >= 2
    assert cached_output(ladder, "--markdown").count("| model |") == 3


def test_the_figure_is_written_twice_with_the_same_bytes(ladder, tmp_path):
    for folder in ("one", "two"):
        said(ladder, "--figures", tmp_path / folder)
    one, two = ((tmp_path / folder / "scaling.svg").read_bytes() for folder in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "scaling.pdf").stat().st_size > 5000


def test_a_ladder_of_too_few_sizes_is_refused(ladder, capsys):
    folders = sorted(path for path in ladder.iterdir() if "-8-" in path.name or "-16-" in path.name)
    with pytest.raises(SystemExit) as ending:
        main(["compare", *map(str, folders), "--scaling"])
    assert ending.value.code == 2
    error = capsys.readouterr().err
    assert "needs at least 3 sizes of each model, but this one has 2" in error
    assert "help: train it at more sizes" in error
