"""`tfm compare`: values recomputed by scipy and sacreBLEU, and runs that cannot be compared."""

import contextlib
import csv
import io
import itertools
import json
import os
import shutil
from functools import cache

import numpy as np
import pytest
import scipy.stats
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from tests.conftest import refused, sentences
from tests.run_folders import change_json, garbled, leave_run, leave_thousand, printed
from tfm_blocks.cli import main
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.comparison_tables import runs_table, seeds_table
from tfm_blocks.report.lists import show_scores
from tfm_blocks.runs.records import Score, spread_text, with_intervals
from tfm_blocks.runs.row_results import write_losses

REFERENCES = sentences(40, 7)
SHARES = {"base": 0.3, "prenorm": 0.2, "wide": 0.28}


def said(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, arguments)])
    return out.getvalue()


def comparison(*arguments):
    return json.loads(said(*arguments, "--json"))


cached_output = cache(said)  # of runs that no test changes


def compared(*arguments):
    return json.loads(cached_output(*arguments, "--json"))


def outputs_of(model, seed):
    return garbled(REFERENCES, SHARES[model], 100 * seed + len(model))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Write runs of three models with three seeds each; the third model differs in a knob."""
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    for model in SHARES:
        for seed in (1, 2, 3):
            changed = {"heads": 4, "model.args.heads": 4} if model == "wide" else {}
            name = "base" if model == "wide" else model
            leave_run(
                folder / f"{model}-{seed}", REFERENCES, outputs_of(model, seed), model=name, seed=seed, changed=changed
            )
    return folder


def test_only_differences_are_listed_and_each_once(sweep):
    report = compared(sweep)
    assert report["differences"] == {
        "model": {"base": {"model.add_norm": "post"}, "prenorm": {"model.add_norm": "pre"}},
        "heads": {"2": {}, "4": {}},
    }
    assert [group["group"] for group in report["groups"]] == ["base, heads 2", "prenorm, heads 2", "base, heads 4"]
    assert [[run["seed"] for run in group["runs"]] for group in report["groups"]] == [[1, 2, 3]] * 3
    assert report["notes"] == []


def test_settings_that_vary_with_the_model_are_one_difference(tmp_path):
    local = {"r": 8, "model.args.r": 8, "model.graph.src_emb.block": "local"}
    leave_run(tmp_path / "base", REFERENCES, REFERENCES)
    leave_run(tmp_path / "prenorm", REFERENCES, REFERENCES, model="prenorm")
    leave_run(tmp_path / "local", REFERENCES, REFERENCES, model="local", changed=local)
    report = comparison(tmp_path)
    assert {group["group"] for group in report["groups"]} == {"base", "prenorm", "local"}
    assert report["differences"].keys() == {"model"}
    assert report["differences"]["model"]["base"] == {
        "r": "–", "model.add_norm": "post", "model.graph.src_emb.block": "embedding"
    }  # fmt: skip
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said(tmp_path).splitlines()]
    for row in (["base", ""], ["prenorm", "model.add_norm pre"], ["local", "r 8, model.graph.src_emb.block local"]):
        assert row in rows


def test_a_knob_that_one_model_has_with_several_values_is_a_difference_of_its_own(tmp_path):
    leave_run(tmp_path / "base", REFERENCES, REFERENCES)
    for r in (2, 8):
        leave_run(tmp_path / f"local-{r}", REFERENCES, REFERENCES, model="local", changed={"r": r, "model.args.r": r})
    assert comparison(tmp_path)["differences"] == {"model": {"base": {}, "local": {}}, "r": {"–": {}, "2": {}, "8": {}}}


@pytest.mark.grid
def test_scores_have_the_intervals_of_sacrebleu_and_of_wilson(sweep):
    for group, model in zip(compared(sweep)["groups"], ("base", "prenorm", "wide"), strict=True):
        for run in group["runs"]:
            outputs = outputs_of(model, run["seed"])
            for name, metric in (("BLEU", BLEU(force=True)), ("chrF", CHRF()), ("TER", TER())):
                theirs, ours = metric.corpus_score(outputs, [REFERENCES], n_bootstrap=1000), run["scores"][name]
                assert (ours["value"], ours["high"] - ours["value"], ours["value"] - ours["low"]) == pytest.approx(
                    (theirs.score, theirs._ci, theirs._ci)
                )
            hits = sum(one == two for one, two in zip(outputs, REFERENCES, strict=True))
            wilson = scipy.stats.binomtest(hits, len(outputs)).proportion_ci(method="wilson")
            exact = run["scores"]["exact match"]
            assert (exact["value"], exact["low"], exact["high"]) == pytest.approx(
                (100 * hits / len(outputs), 100 * wilson.low, 100 * wilson.high)
            )


@pytest.mark.parametrize(
    ("name", "value", "half", "ends", "shown"),
    [
        ("BLEU", 0.37, 0.42, (0.0, 0.79), "[0.00, 0.79]"),
        ("chrF", 99.5, 1.5, (98.0, 100.0), "[98.00, 100.00]"),
        ("TER", 99.5, 1.5, (98.0, 101.0), "± 1.50"),
        ("BLEU", 1.34, 0.0, (1.34, 1.34), "± 0.00"),
        ("BLEU", 1.34, np.nan, (np.nan, np.nan), None),
    ],
)
def test_intervals_of_sacrebleu_stay_within_the_possible_scores(name, value, half, ends, shown, capsys):
    score = with_intervals({}, 0, [Score(name, value, half)], {})[name]
    assert (score.low, score.high) == pytest.approx(ends, nan_ok=True)
    assert shown is None or spread_text(value, score.low, score.high) == shown
    show_scores({"run": [Score(name, value, half)]}, {"run": 1}, as_json=True)
    (record,) = json.loads(capsys.readouterr().out)["runs"]["run"]
    assert shown is None or (record["low"], record["high"]) == pytest.approx(ends)


def counted_bleu(outputs):
    """Return sacreBLEU's statistics of each line."""
    lines = [BLEU(force=True).corpus_score([output], [[one]]) for output, one in zip(outputs, REFERENCES, strict=True)]
    return np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in lines], float)


def bleu_of(sums_RK):
    return np.array(
        [
            BLEU.compute_bleu(one[:4], one[4:8], round(one[8]), round(one[9]), smooth_method="exp").score
            for one in sums_RK.tolist()
        ]
    )


def share_of_swaps(before, after):
    """Return the fraction of 2,000 random swaps of the two models' lines with at least the observed difference."""
    one_NK, two_NK = (np.mean([counted_bleu(outputs) for outputs in side], 0) for side in (before, after))
    swap_RN = np.random.default_rng(1).integers(2, size=(2000, len(REFERENCES)))
    swap_RN[0] = 0
    mixed = (swap_RN @ two_NK + (1 - swap_RN) @ one_NK, swap_RN @ one_NK + (1 - swap_RN) @ two_NK)
    distance_R = abs(np.subtract(*map(bleu_of, mixed)))
    return np.mean(distance_R >= distance_R[0] - 1e-9)


def seeds_p(after, before):
    """Return the larger p-value of scipy's permutation test and Welch test."""
    exact = scipy.stats.permutation_test((before, after), lambda x, y: np.mean(y) - np.mean(x)).pvalue
    return max(exact, scipy.stats.ttest_ind(after, before, equal_var=False).pvalue)


def test_means_deviations_and_chances_are_recomputed_by_scipy_and_sacrebleu(sweep):
    scores = {
        model: [BLEU(force=True).corpus_score(outputs_of(model, seed), [REFERENCES]).score for seed in (1, 2, 3)]
        for model in SHARES
    }
    shown = cached_output(sweep, "--markdown")
    for values in scores.values():
        assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in shown
    against = {
        one["group"]: one
        for one in compared(sweep, "--baseline", sweep / "base-2")["against"]
        if one["score"] == "BLEU"
    }
    names = {"prenorm": "prenorm, heads 2", "wide": "base, heads 4"}
    for kind, chance in (
        ("seeds", lambda model: seeds_p(scores[model], scores["base"])),
        (
            "sentences",
            lambda model: share_of_swaps(*([outputs_of(one, seed) for seed in (1, 2, 3)] for one in ("base", model))),
        ),
    ):
        for model, group in names.items():
            near = {"abs": 0.04} if kind == "sentences" else {}
            assert against[group][kind] == pytest.approx(chance(model), **near)
            assert against[group]["difference"] == pytest.approx(np.mean(scores[model]) - np.mean(scores["base"]))


@pytest.mark.parametrize("kind", ["sentences", "seeds"])
def test_the_family_of_the_correction_is_one_score_of_all_models(sweep, kind):
    rows = [one for one in compared(sweep, "--baseline", "base-1")["against"] if one[kind] is not None]
    for score in {one["score"] for one in rows}:
        tests = sorted((one for one in rows if one["score"] == score), key=lambda one: one[kind])
        assert len({one["group"] for one in tests}) == 2
        least = [one["least"] if kind == "seeds" else 0 for one in tests]
        counts = [sum(p <= one[kind] for p in least[rank:]) for rank, one in enumerate(tests)]  # Holm 1979, Tarone 1990
        steps = [min(1, count * one[kind]) for count, one in zip(counts, tests, strict=True)]
        assert [one[f"{kind}_corrected"] for one in tests] == pytest.approx([steps[0], max(steps)])
    bleu = [one for one in rows if one["score"] == "BLEU"]
    assert {one["least"] for one in bleu} == {0.1}, "three against three"


def test_a_model_with_a_failed_seed_is_not_tested_over_seeds(sweep, tmp_path):
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    status = tmp_path / "prenorm-3" / "status.json"
    failed = {"state": "diverged", "scores": {}, "translation": [], "scored_on": ""}
    failed["best"] = {"val/loss": {"value": 9.0, "step": 30}}
    change_json(status, failed)
    rows = comparison(tmp_path, "--baseline", "base-1")["against"]
    assert {one["seeds"] is None for one in rows if one["group"].startswith("prenorm")} == {True}
    assert all(one["seeds"] is not None for one in rows if not one["group"].startswith("prenorm"))
    shown = said(tmp_path, "--baseline", "base-1", "--markdown")
    assert {
        "(1 seed without score) |" in row for row in shown.splitlines() if row.startswith("| prenorm, heads 2 | BLEU |")
    } == {True}
    means = shown.partition("**over seeds")[2].partition("\n\n**")[0]
    (row,) = (line for line in means.splitlines() if line.startswith("| prenorm"))
    assert "| 2 of 3 | 1.2500 ± 0.0000 |" in row and "**" not in row and "**" in means


def test_each_model_is_tested_against_the_baseline_on_its_own_test_set(tmp_path):
    for task, share in (("dates", 0), ("numbers", 0.1)):
        texts = REFERENCES if task == "dates" else sentences(40, 9)
        for model in ("base", "prenorm"):
            for seed in (1, 2):
                outputs = garbled(texts, share + 0.1 * (model == "prenorm"), seed)
                changed = {"data.kind": task, "trainer.steps": 60 if task == "dates" else 80}
                run = tmp_path / f"{task}-{model}-{seed}"
                leave_run(run, texts, outputs, model=model, seed=seed, changed=changed)
    report = comparison(tmp_path, "--baseline", "dates-base-1")
    bleu = {one["group"]: one for one in report["against"] if one["score"] == "BLEU"}
    assert list(bleu) == ["prenorm, kind dates", "prenorm, kind numbers"]
    means = {
        group["group"]: np.mean([run["scores"]["BLEU"]["value"] for run in group["runs"]]) for group in report["groups"]
    }
    for task in ("dates", "numbers"):
        expected = means[f"prenorm, kind {task}"] - means[f"base, kind {task}"]
        assert bleu[f"prenorm, kind {task}"]["difference"] == pytest.approx(expected)


def test_every_score_of_the_table_is_tested_against_the_baseline(sweep):
    report = compared(sweep, "--baseline", sweep / "base-1")
    tested = {one["score"]: one for one in report["against"] if one["group"] == "prenorm, heads 2"}
    assert list(tested) == ["exact match", "BLEU", "chrF", "TER", "loss", "perplexity"]
    assert all(0 < one["seeds"] <= 1 for one in tested.values())
    assert all((one["sentences"] is None) == (name in ("loss", "perplexity")) for name, one in tested.items())
    assert tested["TER"]["difference"] < 0 < tested["BLEU"]["difference"], "fewer edits are better"


def losses_of(seed, mean):
    """Return losses of 40 lines of ten tokens, none of them correct; -log p is half of the loss."""
    loss_N = np.random.default_rng(seed).normal(10 * mean, 2, len(REFERENCES))
    ten_N, zero_N = np.full(len(REFERENCES), 10), np.zeros(len(REFERENCES))
    return np.stack([loss_N, loss_N / 2, ten_N, zero_N, zero_N, ten_N], 1)


@pytest.fixture
def with_losses(tmp_path):
    """Write runs of two models with three seeds each whose losses are known by line."""
    for model, mean in (("base", 1.5), ("prenorm", 1.45)):
        for seed in (1, 2, 3):
            run = leave_run(tmp_path / f"{model}-{seed}", REFERENCES, outputs_of(model, seed), model=model, seed=seed)
            losses_N6 = losses_of(seed, mean)
            write_losses(run, losses_N6)
            loss, nll, tokens, *_ = losses_N6.sum(0)
            status = json.loads((run / "status.json").read_text())
            scores = {"test/loss": loss / tokens, "test/perplexity": np.exp(nll / tokens)}
            (run / "status.json").write_text(json.dumps(status | {"scores": status["scores"] | scores}))
    return tmp_path


def test_losses_are_tested_over_sentences_and_over_seeds(with_losses):
    rows = comparison(with_losses, "--baseline", "base-1")["against"]
    tested = {one["score"]: one for one in rows}
    sides = [[losses_of(seed, mean) for seed in (1, 2, 3)] for mean in (1.5, 1.45)]
    means = [[one.sum(0)[0] / one.sum(0)[2] for one in side] for side in sides]
    gaps = [np.mean([one[:, 0] for one in side], 0) for side in sides]
    theirs = scipy.stats.permutation_test(gaps, lambda x, y: np.mean(y - x), permutation_type="samples", rng=1)
    welch = scipy.stats.ttest_ind(means[1], means[0], equal_var=False)
    loss = tested["loss"]
    assert loss["difference"] == pytest.approx(np.mean(means[1]) - np.mean(means[0]))
    assert loss["sentences"] == pytest.approx(theirs.pvalue, abs=0.02) and loss["seeds"] == pytest.approx(
        seeds_p(*means[::-1])
    )
    assert loss["seeds_interval"] == pytest.approx(tuple(welch.confidence_interval(0.95)))
    paired = scipy.stats.ttest_rel(gaps[1] / 10, gaps[0] / 10).confidence_interval(0.95)
    assert loss["sentences_interval"] == pytest.approx(tuple(paired), rel=0.01)
    assert 0 < tested["perplexity"]["sentences"] <= 1


def test_a_missing_file_of_losses_has_a_note(with_losses):
    assert not comparison(with_losses, "--baseline", "base-1")["notes"]
    (with_losses / "prenorm-2" / "losses.csv").unlink()
    (note,) = comparison(with_losses, "--baseline", "base-1")["notes"]
    assert note.endswith("prenorm-2/losses.csv is missing, so its losses are not tested over sentences")


def test_no_loss_over_seeds_is_the_best_of_several_tokenizers(tmp_path):
    for model, loss in (("base", 1.25), ("prenorm", 2.25)):
        for seed in (1, 2):
            run = leave_run(tmp_path / f"{model}-{seed}", REFERENCES[:9], REFERENCES[:9], model=model, seed=seed)
            text = (run / "status.json").read_text().replace('"value": 1.25', f'"value": {loss}')
            (run / "status.json").write_text(text)
    assert "| base | 2 | **1.2500 ± 0.0000** |" in said(tmp_path, "--markdown")
    for seed in (1, 2):
        change_json(tmp_path / f"base-{seed}" / "run.json", {"text": {"vocabulary": "two"}})
    assert "| base | 2 | 1.2500 ± 0.0000 |" in said(tmp_path, "--markdown")


def test_losses_of_other_tokenizers_or_smoothings_are_not_tested(with_losses):
    config = with_losses / "prenorm-1" / "config.yaml"
    text = config.read_text()
    for seed in (1, 2, 3):
        changed = text.replace("seed: 1", f"seed: {seed}") + "label_smoothing: 0.2\n"
        (with_losses / f"prenorm-{seed}" / "config.yaml").write_text(changed)
    names = [one["score"] for one in comparison(with_losses, "--baseline", "base-1")["against"]]
    assert "perplexity" in names and "loss" not in names
    for seed in (1, 2, 3):
        record = with_losses / f"prenorm-{seed}" / "run.json"
        record.write_text(record.read_text().replace('"one"', '"two"'))
    assert "perplexity" not in [one["score"] for one in comparison(with_losses, "--baseline", "base-1")["against"]]


COLUMNS = "loss,nll,tokens,bytes,correct,labels\n"


@pytest.mark.parametrize(
    "damage",
    ["", COLUMNS, f"{COLUMNS}1,1,1,1,0\n", "loss,nll,tokens,bytes\n1,1,1,1\n", f"{COLUMNS}1,1,0,0,0,0\n", "x"],
)
def test_damaged_losses_are_noted_and_the_rest_is_tested(with_losses, damage):
    (with_losses / "base-1" / "losses.csv").write_text(damage)
    report = comparison(with_losses, "--baseline", "base-1")
    assert any("losses.csv is damaged" in note for note in report["notes"])
    tested = {one["score"]: one for one in report["against"]}
    assert tested["loss"]["sentences"] is None and tested["BLEU"]["sentences"] is not None


def test_single_runs_have_sacrebleus_p_beside_the_two_sided_one(tmp_path):
    outputs = {name: garbled(REFERENCES, share, 5) for name, share in (("one", 0.3), ("two", 0.2))}
    for heads, (name, texts) in enumerate(outputs.items(), 2):
        leave_run(tmp_path / name, REFERENCES, texts, changed={"heads": heads})
    tested = {one["score"]: one for one in comparison(tmp_path, "--baseline", "one")["against"]}
    for name, metric in (("BLEU", BLEU(force=True)), ("chrF", CHRF()), ("TER", TER())):
        _, theirs = PairedTest(list(outputs.items()), {name: metric}, [REFERENCES], "bs", 1000)()
        ((_, two),) = [results for key, results in theirs.items() if key != "System"]
        assert tested[name]["sacrebleu"] == pytest.approx(two.p_value)
    assert tested["exact match"]["sacrebleu"] is None


def test_csv_has_a_row_for_each_run_unrounded(sweep):
    rows = list(csv.DictReader(io.StringIO(cached_output(sweep, "--csv"))))
    assert len(rows) == 9 and {row["model"] for row in rows} == {"base", "prenorm"}
    first = compared(sweep)["groups"][0]["runs"][0]
    assert float(rows[0]["BLEU"]) == first["scores"]["BLEU"]["value"] and rows[0]["run"] == first["folder"]
    assert float(rows[0]["parameters"]) == 12345 and float(rows[0]["best val/loss"]) == 1.25


def test_csv_has_a_setting_and_a_number_of_the_same_name(tmp_path):
    for steps in (1, 2):
        leave_run(tmp_path / f"run-{steps}", REFERENCES, REFERENCES, changed={"steps": steps})
    rows = list(csv.DictReader(io.StringIO(said(tmp_path, "--csv"))))
    assert [(row["settings.steps"], row["steps"]) for row in rows] == [("1", "60"), ("2", "60")]


def test_scores_that_no_run_has_have_no_column(sweep):
    printed = cached_output(sweep)
    assert "perplexity" in printed
    assert "F1" not in printed and "Spearman" not in printed


def test_the_tables_show_sizes_speed_time_and_the_best_validation(sweep):
    shown = cached_output(sweep, "--baseline", "base-1")
    for text in ("12,345", "67,890", "1,040", "15.0 s", "1.25 @ 60", "against base, heads 2", "over seeds"):
        assert text in shown
    assert "Holm" in shown and "Holm" not in cached_output(sweep)
    assert "these trained models differ, and nothing about other seeds" in shown


def test_a_run_and_its_repeat_are_one_seed(sweep, tmp_path):
    """The repeat of base-1 is bit-identical, that of prenorm-1 was killed."""
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    alone = comparison(tmp_path, "--baseline", "base-1"), said(tmp_path, "--markdown")
    for name, age in (("base-1", -60), ("prenorm-1", 60)):
        repeat = shutil.copytree(tmp_path / name, tmp_path / f"{name}-2")
        newer = (tmp_path / name / "status.json").stat().st_mtime + age
        for path in (repeat, *repeat.iterdir()):
            os.utime(path, (newer, newer))
    status = tmp_path / "prenorm-1-2" / "status.json"
    killed = json.dumps(json.loads(status.read_text()) | {"state": "failed", "scores": {}, "translation": []})
    status.write_text(killed)
    report, shown = comparison(tmp_path, "--baseline", "base-1"), said(tmp_path, "--markdown")
    assert report["against"] == alone[0]["against"]
    over_seeds = [line for line in alone[1].splitlines() if "| 3 | 1.2500 ±" in line]
    assert len(over_seeds) == 3 and all(line in shown.splitlines() for line in over_seeds)
    (note,) = (one for one in report["notes"] if "not counted" in one)
    assert "base-1-2, prenorm-1-2:" in note and sum(len(group["runs"]) for group in report["groups"]) == 11


def test_of_two_finished_runs_of_one_seed_the_newer_counts(tmp_path):
    outputs = {"new": garbled(REFERENCES, 0.3, 1), "old": garbled(REFERENCES, 0.2, 2)}
    for name, seconds in (("new", 2e9), ("old", 1e9)):
        run = leave_run(tmp_path / name, REFERENCES, outputs[name])
        for path in (run, *run.iterdir()):
            os.utime(path, (seconds, seconds))
    leave_run(tmp_path / "other", REFERENCES, REFERENCES, changed={"heads": 4})
    against = {one["score"]: one for one in comparison(tmp_path, "--baseline", "old")["against"]}
    newer = BLEU(force=True).corpus_score(outputs["new"], [REFERENCES]).score
    assert against["BLEU"]["difference"] == pytest.approx(100 - newer) and against["BLEU"]["seeds"] is None


def test_scores_that_were_computed_in_several_ways_are_not_tested(tmp_path):
    for name, heads in (("one", 2), ("two", 4)):
        run = leave_run(tmp_path / name, REFERENCES, garbled(REFERENCES, 0.3, heads), changed={"heads": heads})
    status = (run / "status.json").read_text()
    (run / "status.json").write_text(status.replace("tok:13a", "tok:char"))
    report = comparison(tmp_path, "--baseline", "one")
    assert [one["score"] for one in report["against"]] == ["exact match", "chrF", "TER", "loss", "perplexity"]
    assert any("a different way to compute BLEU" in note for note in report["notes"])


def test_an_interval_of_width_0_is_not_shown_and_a_score_near_0_has_the_digits_of_its_interval(tmp_path):
    run = leave_run(tmp_path / "run", REFERENCES, ["x"] * len(REFERENCES))
    status = json.loads((run / "status.json").read_text())
    status["scores"] = {"test/f1": 1.0, "test/mcc": -1e-17, "test/spearman": 0.9, "test/loss": 0.25}
    status["halves"] = {"f1": 0.0, "mcc": 0.25, "spearman": 0.25, "loss": 0.125}
    (run / "status.json").write_text(json.dumps(status))
    shown = said(run, "--markdown")
    row = "| 0.00 | 0.00 | 100.00 | 0.2500 ± 0.1250 | 1 | 0.0000 ± 0.2500 | 0.9000 [0.6500, 1.0000] |"
    assert row in shown.replace("\\", "")  # BLEU, chrF, TER, loss, F1, MCC, Spearman


def test_runs_of_two_tasks_are_not_tested_and_a_note_says_so(tmp_path):
    leave_run(tmp_path / "a", REFERENCES, REFERENCES)
    leave_run(tmp_path / "b", REFERENCES[:20], REFERENCES[:20], model="prenorm", changed={"data.seed": 2})
    report = comparison(tmp_path, "--baseline", "a")
    assert report["against"] == []
    (note,) = (note for note in report["notes"] if "not tested" in note)
    assert "prenorm was not scored on the test set of base, so they are not tested" in note


def test_scores_of_several_test_sets_have_no_mean_over_seeds(tmp_path):
    for seed, lines in ((1, 40), (2, 40), (3, 20)):
        leave_run(tmp_path / f"run-{seed}", REFERENCES[:lines], REFERENCES[:lines], seed=seed)
    row = "| 3 | 1.2500 ± 0.0000 |  |  |  |  |  |"
    assert row in said(tmp_path, "--markdown")
    assert "| 2 | 1.2500 ± 0.0000 | 100.00 ± 0.00 |" in said(tmp_path / "run-1", tmp_path / "run-2", "--markdown")


def test_test_sets_that_are_not_known_are_not_taken_for_the_same(tmp_path):
    for number in range(4):
        name, heads = f"run-{number}", 2 + number // 2
        leave_run(tmp_path / name, REFERENCES, REFERENCES, seed=number % 2, changed={"heads": heads}, old=True)
    report = comparison(tmp_path, "--baseline", "run-0")
    assert report["against"] == []
    assert any("the test set of heads 3 is not known, so they are not tested" in note for note in report["notes"])


def test_runs_that_cannot_be_compared_have_a_note(tmp_path):
    leave_run(tmp_path / "one", REFERENCES, REFERENCES)
    leave_run(tmp_path / "two", REFERENCES[:20], REFERENCES[:20], tokenizer="two", changed={"heads": 4})
    change_json(tmp_path / "two" / "status.json", {"tokens_seen": 900.0})
    report = comparison(tmp_path / "one", tmp_path / "two", "--baseline", "one")
    assert report["against"] == []
    for text in (
        "two used a different test set from one",
        "a different tokenizer",
        "one trained on 600 target tokens, and two on 900",
    ):
        assert any(text in note for note in report["notes"])
    assert any("so they are not tested" in note for note in report["notes"])


def test_an_integer_and_an_equal_float_are_the_same_setting(tmp_path):
    for seed, dropout in enumerate((0, 0.0)):
        leave_run(tmp_path / str(seed), REFERENCES, REFERENCES, seed=seed, changed={"dropout": dropout})
    (group,) = comparison(tmp_path)["groups"]
    assert len(group["runs"]) == 2


def test_a_seed_that_resumed_with_other_workers_is_a_seed_of_its_model(tmp_path):
    for model, seed in itertools.product(("base", "prenorm"), (1, 2)):
        trainer = {"steps": 60, "workers": 2 if (model, seed) == ("base", 1) else None}
        leave_run(
            tmp_path / f"{model}-{seed}", REFERENCES, REFERENCES, model=model, seed=seed, changed={"trainer": trainer}
        )
    compared = compare_runs([tmp_path])
    assert [(group.label, len(group.counted)) for group in compared.groups] == [("base", 2), ("prenorm", 2)]
    assert compared.grid.labels == ["base", "prenorm"]
    assert "trainer.workers" in [column.heading for column in runs_table(compared).columns]


def test_the_documents_of_a_pseudo_perplexity_make_no_other_experiment(tmp_path):
    for seed, documents in ((1, 0), (2, 9)):
        objective = {"name": "masked", "eval_rate": 0.15, "pseudo_documents": documents}
        leave_run(tmp_path / str(seed), REFERENCES, REFERENCES, seed=seed, changed={"objective": objective})
    report = comparison(tmp_path)
    assert [len(group["runs"]) for group in report["groups"]] == [2] and not report["differences"]
    assert not any("objective" in note for note in report["notes"])


def test_runs_with_the_same_data_settings_and_another_training_text_have_a_note(tmp_path):
    texts = ("old", 100, "a"), ("new", 100, "a"), ("new", 100, "a"), ("half", 50, "a"), ("ids of b", 100, "b")
    for number, (text, rows, tokenizer) in enumerate(texts):
        changed = {"data.first": rows}
        run = leave_run(
            tmp_path / str(number), REFERENCES, REFERENCES, seed=number, tokenizer=tokenizer, changed=changed
        )
        start = json.loads((run / "run.json").read_text())
        start["text"]["text of train"] = text
        (run / "run.json").write_text(json.dumps(start))
    assert [note for note in comparison(tmp_path)["notes"] if "training text" in note] == [
        "not comparable: 0 used a different training text from 1, 2; it changed between the trainings"
    ]


@pytest.mark.parametrize(
    ("other", "differ"),
    [({"text of val": "b"}, True), ({"text of val": "ids of b", "vocabulary of sources": "two"}, False), ({}, False)],
)
def test_no_validation_loss_over_several_validation_sets_is_the_best(tmp_path, other, differ):
    for model, loss, text in (("base", 2.0, {"text of val": "a"}), ("prenorm", 1.0, other)):
        for seed in (1, 2):
            run = leave_run(tmp_path / f"{model}-{seed}", REFERENCES, REFERENCES, model=model, seed=seed)
            start, status = (json.loads((run / name).read_text()) for name in ("run.json", "status.json"))
            (run / "run.json").write_text(json.dumps(start | {"text": start["text"] | text}))
            best = {"val/loss": {"value": loss, "step": 60}}
            (run / "status.json").write_text(json.dumps(status | {"best": best}))
    compared = compare_runs([tmp_path])
    cells = [row[2] for row in seeds_table(compared).rows]
    assert [cell.ranked for cell in cells] == [not differ] * 2
    assert any("a different validation set from" in note for note in compared.notes) == differ


def test_the_row_of_a_model_with_several_seeds_alone_has_the_name_of_the_model(tmp_path):
    for seed in (1, 2):
        leave_run(tmp_path / f"seed-{seed}", REFERENCES, REFERENCES, model="prenorm", seed=seed)
    assert [group["group"] for group in comparison(tmp_path)["groups"]] == ["prenorm"]
    assert "| prenorm | 2 |" in said(tmp_path, "--markdown")


def test_rates_that_show_the_same_six_digits_are_two_settings(tmp_path):
    rates = (0.001, 0.0010000001)
    for heads, rate in enumerate(rates):
        leave_run(tmp_path / str(heads), REFERENCES, REFERENCES, changed={"optimizer.eps": rate})
    assert [group["group"] for group in comparison(tmp_path)["groups"]] == ["eps 0.001", "eps 0.0010000001"]


def test_seeds_that_were_trained_in_several_precisions_are_noted(tmp_path):
    """trainer.precision=auto chooses by a timing on each machine."""
    for seed, name in enumerate(("bf16", "fp32", "bf16"), 1):
        run = leave_run(tmp_path / f"run-{seed}", REFERENCES, REFERENCES, seed=seed)
        record = json.loads((run / "run.json").read_text()) | {"facts": {"precision": {"name": name}}}
        (run / "run.json").write_text(json.dumps(record))
    assert comparison(tmp_path)["notes"] == [
        "trained in several precisions, in which the same seed may give other weights: run-1, run-3 by bf16; run-2 by fp32"
    ]
    assert comparison(tmp_path / "run-1", tmp_path / "run-3")["notes"] == []


def test_several_versions_of_torch_are_noted_with_changes_by_a_resume(tmp_path):
    facts = [{"versions": {"torch": version}} for version in ("2.13.0", "2.14.0")]
    leave_run(tmp_path / "unknown", REFERENCES, REFERENCES, seed=3)
    for seed, (name, record) in enumerate(
        {
            "one": {"facts": facts[0]},
            "two": {"facts": facts[1]},
            "both": {"facts": facts[0], "changes": facts[1:]},
        }.items()
    ):
        run = leave_run(tmp_path / name, REFERENCES, REFERENCES, seed=seed)
        change_json(run / "run.json", record)
    assert comparison(tmp_path / "one", tmp_path / "unknown")["notes"] == []
    (note,) = comparison(tmp_path)["notes"]
    assert note.endswith("other weights: both by 2.13.0, then 2.14.0; one by 2.13.0; two by 2.14.0")
    runs = {run["folder"].rpartition("/")[2]: run for group in comparison(tmp_path)["groups"] for run in group["runs"]}
    assert (runs["both"]["facts"], runs["both"]["changes"]) == (facts[0], facts[1:])


def test_jobs_that_are_not_done_stay_in_the_table_with_their_state(tmp_path):
    leave_run(tmp_path / "fine", REFERENCES, REFERENCES)
    cut = leave_run(tmp_path / "cut", REFERENCES, REFERENCES, seed=2)
    (cut / "status.json").write_text(json.dumps({"state": "failed", "reason": "ValueError: no"}))
    jobs = [
        {"name": "fine", "overrides": ["seed=1"], "log": "fine.log", "state": "done"},
        {"name": "cut", "overrides": ["seed=2"], "log": "cut.log", "state": "out of memory", "reason": "24 GB"},
        {"name": "later", "overrides": ["seed=3"], "log": "later.log"},
        {"name": "../fine", "overrides": [], "log": "x"},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "command": "python train.py -m", "jobs": jobs}))
    report = comparison(tmp_path)
    states = {run["folder"].rpartition("/")[2]: run["state"] for group in report["groups"] for run in group["runs"]}
    assert states == {"fine": "done", "cut": "out of memory", "later": "waiting"}
    assert report["notes"] == ["not done: cut: out of memory (24 GB)", "not done: later: waiting"]
    assert "waiting" in said(tmp_path) and "later" in said(tmp_path, "--csv")
    assert comparison(tmp_path, "--baseline", str(tmp_path / "fine"))["notes"] == report["notes"]


def test_a_baseline_that_is_not_compared_is_refused_with_the_nearest(sweep):
    assert "did you mean base-" in refused("compare", sweep, "--baseline", "base-9")


def test_a_folder_without_runs_is_an_error(tmp_path):
    for folder, rule in (
        (tmp_path, "is not a run folder, and contains none"),
        (tmp_path / "none", "there is no such run folder"),
    ):
        assert rule in refused("compare", folder, status=1)


def test_text_of_a_run_is_no_markup_and_breaks_no_table(tmp_path):
    run = leave_run(tmp_path / "[red]a|b<i>", REFERENCES, REFERENCES)
    (run / "status.json").write_text(json.dumps({"state": "[/bold]x|\ny"}))
    assert "[red]a|b<i>" in said(run) and "[/bold]x" in said(run)
    rows = [line for line in said(run, "--markdown").splitlines() if line.startswith("| ")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1 and "&lt;i>" in rows[2]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"best": 3, "scores": [], "translation": [1, {}], "test_set": {"rows": "x"}, "state": 7, "facts": {"versions": 3}, "changes": {"x": 1}}',
    ],
)
def test_a_damaged_folder_is_listed_with_its_readable_data(tmp_path, damage):
    run = leave_run(tmp_path / "a", REFERENCES, REFERENCES)
    leave_run(tmp_path / "b", REFERENCES, REFERENCES, seed=2)
    for name in ("status.json", "run.json", "config.yaml", "metrics.csv", "translations.jsonl"):
        (run / name).write_text(damage)
    assert "a" in said(tmp_path, "--baseline", "b") and len(comparison(tmp_path, "--baseline", "a")["groups"]) == 2


@pytest.fixture(scope="module")
def thousand_runs(tmp_path_factory):
    return leave_thousand(tmp_path_factory.mktemp("thousand"))


@pytest.mark.grid
@pytest.mark.parametrize("shape", [[], ["--csv"], ["--json"], ["--markdown"]])
def test_a_thousand_runs_are_compared(thousand_runs, shape):
    assert printed("compare", thousand_runs, *shape).count("run-") >= 1000


@pytest.mark.grid
@pytest.mark.parametrize("shape", [[], ["--json"]])
def test_a_thousand_runs_are_listed(thousand_runs, shape):
    assert printed("runs", "--in", thousand_runs, *shape).count("run-") >= 1000


def test_models_of_plain_text_are_compared_by_their_perplexity(tmp_path):
    for seed, perplexity in ((1, 4.0), (2, 5.0)):
        run = leave_run(tmp_path / f"plain-{seed}", REFERENCES, REFERENCES, seed=seed)
        scores = {"test/loss": 1.5, "test/perplexity": perplexity}
        change_json(run / "status.json", {"scores": scores, "translation": []})
        (run / "translations.jsonl").unlink()
    shown = said(tmp_path, "--markdown", "--baseline", "plain-1")
    assert f"| 2 | 1.2500 ± 0.0000 | {np.mean([4, 5]):.2f} ± {np.std([4, 5], ddof=1):.2f} |" in shown


def test_two_optimizers_are_named_by_their_names_and_their_own_settings_are_counted(tmp_path):
    shared = {"weight_decay": 0.01, "groups": "{}"}
    muon = {f"own_{number}": number for number in range(30)}
    adam = {"betas": "[0.9, 0.98]", "eps": 1e-9, "cautious": False}
    for name, own in (("adamw", adam), ("muon", muon)):
        optimizer = {"name": name, **own, **shared, "rate": 1 + len(own)}
        leave_run(tmp_path / name, REFERENCES, REFERENCES, changed={"optimizer": optimizer})
    report = comparison(tmp_path)
    assert list(report["differences"]) == ["optimizer.name"]
    assert {group["group"] for group in report["groups"]} == {"name adamw", "name muon"}
    shown = said(tmp_path, "--markdown")
    assert "| muon | optimizer.rate 31, 30 settings of optimizer that the others lack |" in shown
    assert "| adamw | optimizer.rate 4, 3 settings of optimizer that the others lack |" in shown
    assert max(map(len, shown[shown.index("what else") :].splitlines())) < 100
