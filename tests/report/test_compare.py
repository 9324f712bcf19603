"""`tfm compare`: numbers recomputed by scipy and sacreBLEU, and what cannot be compared."""

import contextlib
import csv
import io
import json
import os
import shutil

import numpy as np
import pytest
import scipy.stats
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from tests.conftest import sentences
from tests.run_folders import garbled, leave_run, processor_time
from tfm_blocks.cli import main

REFERENCES = sentences(40, 7)
SHARES = {"base": 0.3, "prenorm": 0.2, "wide": 0.28}


def said(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, arguments)])
    return out.getvalue()


def asked(*arguments):
    return json.loads(said(*arguments, "--json"))


def outputs_of(model, seed):
    return garbled(REFERENCES, SHARES[model], 100 * seed + len(model))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three models of three seeds; the third differs in a knob."""
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    for model in SHARES:
        for seed in (1, 2, 3):
            changed = {"heads": 4, "model.args.heads": 4} if model == "wide" else {}
            name = "base" if model == "wide" else model
            leave_run(
                folder / f"{model}-{seed}", REFERENCES, outputs_of(model, seed), model=name, seed=seed, changed=changed
            )
    return folder


def test_only_what_differs_is_told_and_each_thing_once(sweep):
    found = asked(sweep)
    assert found["differences"] == {
        "model": {"base": {"model.add_norm": "post"}, "prenorm": {"model.add_norm": "pre"}},
        "heads": {"2": {}, "4": {}},
    }
    assert [group["group"] for group in found["groups"]] == ["base, heads 2", "prenorm, heads 2", "base, heads 4"]
    assert [[run["seed"] for run in group["runs"]] for group in found["groups"]] == [[1, 2, 3]] * 3
    assert found["notes"] == []


def test_what_models_bring_along_is_one_difference_however_many_they_are(tmp_path):
    local = {"r": 8, "model.args.r": 8, "model.graph.src_emb.block": "local"}
    leave_run(tmp_path / "base", REFERENCES, REFERENCES)
    leave_run(tmp_path / "prenorm", REFERENCES, REFERENCES, model="prenorm")
    leave_run(tmp_path / "local", REFERENCES, REFERENCES, model="local", changed=local)
    found = asked(tmp_path)
    assert {group["group"] for group in found["groups"]} == {"base", "prenorm", "local"}
    assert found["differences"].keys() == {"model"}
    assert found["differences"]["model"]["base"] == {
        "r": "–", "model.add_norm": "post", "model.graph.src_emb.block": "embedding"
    }  # fmt: skip
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said(tmp_path).splitlines()]
    for row in (["base", ""], ["prenorm", "model.add_norm pre"], ["local", "r 8, model.graph.src_emb.block local"]):
        assert row in rows


def test_a_knob_that_one_model_has_with_several_values_is_a_difference_of_its_own(tmp_path):
    leave_run(tmp_path / "base", REFERENCES, REFERENCES)
    for r in (2, 8):
        leave_run(tmp_path / f"local-{r}", REFERENCES, REFERENCES, model="local", changed={"r": r, "model.args.r": r})
    assert asked(tmp_path)["differences"] == {"model": {"base": {}, "local": {}}, "r": {"–": {}, "2": {}, "8": {}}}


def test_scores_have_the_intervals_of_sacrebleu_and_of_wilson(sweep):
    for group, model in zip(asked(sweep)["groups"], ("base", "prenorm", "wide"), strict=True):
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


def resampled_bleu(outputs):
    """BLEU of a thousand draws of as many lines, from what sacreBLEU counts in each line."""
    lines = [BLEU(force=True).corpus_score([output], [[one]]) for output, one in zip(outputs, REFERENCES, strict=True)]
    counted_NK = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in lines])
    draws_RN = np.random.default_rng(12345).choice(len(lines), size=(1000, len(lines)), replace=True)
    sums_RK = [counted_NK[draw_N].sum(0).tolist() for draw_N in draws_RN]
    return [BLEU.compute_bleu(one[:4], one[4:8], one[8], one[9], smooth_method="exp").score for one in sums_RK]


def test_means_deviations_and_chances_are_recomputed_by_scipy_and_sacrebleu(sweep):
    scores = {
        model: [BLEU(force=True).corpus_score(outputs_of(model, seed), [REFERENCES]).score for seed in (1, 2, 3)]
        for model in SHARES
    }
    shown = said(sweep, "--markdown")
    for values in scores.values():
        assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in shown
    against = {
        one["group"]: one for one in asked(sweep, "--baseline", sweep / "base-2")["against"] if one["score"] == "BLEU"
    }
    names = {"prenorm": "prenorm, heads 2", "wide": "base, heads 4"}
    resamples = {model: np.mean([resampled_bleu(outputs_of(model, seed)) for seed in (1, 2, 3)], 0) for model in SHARES}

    def over_sentences(model):
        """Koehn (2004): how often the means over the seeds differ by more on other sentences than here."""
        distances_R = np.abs(resamples[model] - resamples["base"])
        difference = abs(np.mean(scores[model]) - np.mean(scores["base"]))
        return (1 + sum(one - distances_R.mean() > difference for one in distances_R)) / (1 + len(distances_R))

    for kind, chance in (
        ("seeds", lambda model: scipy.stats.ttest_ind(scores[model], scores["base"], equal_var=False).pvalue),
        ("sentences", over_sentences),
    ):
        chances = {model: chance(model) for model in names}
        lower, higher = sorted(chances, key=chances.get)
        corrected = {lower: min(1, 2 * chances[lower])}
        corrected[higher] = max(corrected[lower], chances[higher])
        for model, group in names.items():
            assert against[group][kind] == pytest.approx(chances[model])
            assert against[group][f"{kind}_corrected"] == pytest.approx(corrected[model])
            assert against[group]["difference"] == pytest.approx(np.mean(scores[model]) - np.mean(scores["base"]))


def test_every_score_of_the_table_is_tested_against_the_baseline(sweep):
    found = asked(sweep, "--baseline", sweep / "base-1")
    tested = {one["score"]: one for one in found["against"] if one["group"] == "prenorm, heads 2"}
    assert list(tested) == list(found["groups"][0]["runs"][0]["scores"]) == ["exact match", "BLEU", "chrF", "TER"]
    assert all(0 < one["sentences"] <= 1 and 0 < one["seeds"] <= 1 for one in tested.values())
    assert tested["TER"]["difference"] < 0 < tested["BLEU"]["difference"], "fewer edits are better"


def test_csv_has_a_row_for_each_run_unrounded(sweep):
    rows = list(csv.DictReader(io.StringIO(said(sweep, "--csv"))))
    assert len(rows) == 9 and {row["model"] for row in rows} == {"base", "prenorm"}
    first = asked(sweep)["groups"][0]["runs"][0]
    assert float(rows[0]["BLEU"]) == first["scores"]["BLEU"]["value"] and rows[0]["run"] == first["folder"]
    assert float(rows[0]["parameters"]) == 12345 and float(rows[0]["best val/loss"]) == 1.25


def test_the_tables_show_sizes_speed_time_and_the_best_validation(sweep):
    shown = said(sweep, "--baseline", "base-1")
    for text in ("12,345", "67,890", "1,040", "15.0 s", "1.25 @ 60", "against base, heads 2", "over seeds"):
        assert text in shown
    assert "Holm" in shown and "Holm" not in said(sweep)


def test_a_run_and_its_repeat_are_one_seed(sweep, tmp_path):
    """The repeat of base-1 is bit-identical, that of prenorm-1 was killed."""
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    alone = asked(tmp_path, "--baseline", "base-1"), said(tmp_path, "--markdown")
    for name, age in (("base-1", -60), ("prenorm-1", 60)):
        repeat = shutil.copytree(tmp_path / name, tmp_path / f"{name}-2")
        newer = (tmp_path / name / "status.json").stat().st_mtime + age
        for path in (repeat, *repeat.iterdir()):
            os.utime(path, (newer, newer))
    status = tmp_path / "prenorm-1-2" / "status.json"
    killed = json.dumps(json.loads(status.read_text()) | {"state": "failed", "scores": {}, "translation": []})
    status.write_text(killed)
    found, shown = asked(tmp_path, "--baseline", "base-1"), said(tmp_path, "--markdown")
    assert found["against"] == alone[0]["against"]
    over_seeds = [line for line in alone[1].splitlines() if "| 3 | 1.2500 ±" in line]
    assert len(over_seeds) == 3 and all(line in shown.splitlines() for line in over_seeds)
    (note,) = (one for one in found["notes"] if "not counted" in one)
    assert "base-1-2, prenorm-1-2:" in note and sum(len(group["runs"]) for group in found["groups"]) == 11


def test_of_two_finished_runs_of_one_seed_the_newer_counts(tmp_path):
    outputs = {"new": garbled(REFERENCES, 0.3, 1), "old": garbled(REFERENCES, 0.2, 2)}
    for name, seconds in (("new", 2e9), ("old", 1e9)):
        run = leave_run(tmp_path / name, REFERENCES, outputs[name])
        for path in (run, *run.iterdir()):
            os.utime(path, (seconds, seconds))
    leave_run(tmp_path / "other", REFERENCES, REFERENCES, changed={"heads": 4})
    against = {one["score"]: one for one in asked(tmp_path, "--baseline", "old")["against"]}
    newer = BLEU(force=True).corpus_score(outputs["new"], [REFERENCES]).score
    assert against["BLEU"]["difference"] == pytest.approx(100 - newer) and against["BLEU"]["seeds"] is None


def test_scores_that_were_computed_in_several_ways_are_not_tested(tmp_path):
    for name, heads in (("one", 2), ("two", 4)):
        run = leave_run(tmp_path / name, REFERENCES, garbled(REFERENCES, 0.3, heads), changed={"heads": heads})
    status = (run / "status.json").read_text()
    (run / "status.json").write_text(status.replace("tok:13a", "tok:char"))
    found = asked(tmp_path, "--baseline", "one")
    assert [one["score"] for one in found["against"]] == ["exact match", "chrF", "TER"]
    assert any("another way to compute BLEU" in note for note in found["notes"])


def test_scores_of_several_test_sets_have_no_mean_over_seeds(tmp_path):
    for seed, lines in ((1, 40), (2, 40), (3, 20)):
        leave_run(tmp_path / f"run-{seed}", REFERENCES[:lines], REFERENCES[:lines], seed=seed)
    row = "| 3 | 1.2500 ± 0.0000 |  |  |  |  | 4.00 ± 0.00 |"
    assert row in said(tmp_path, "--markdown")
    assert "| 2 | 1.2500 ± 0.0000 | 100.00 ± 0.00 |" in said(tmp_path / "run-1", tmp_path / "run-2", "--markdown")


def test_test_sets_that_are_not_known_are_not_taken_for_the_same(tmp_path):
    for number in range(4):
        name, heads = f"run-{number}", 2 + number // 2
        leave_run(tmp_path / name, REFERENCES, REFERENCES, seed=number % 2, changed={"heads": heads}, old=True)
    found = asked(tmp_path, "--baseline", "run-0")
    assert found["against"] == []
    assert any("the test set of heads 3 is not known, so they are not tested" in note for note in found["notes"])


def test_what_cannot_be_compared_is_told(tmp_path):
    leave_run(tmp_path / "one", REFERENCES, REFERENCES)
    leave_run(tmp_path / "two", REFERENCES[:20], REFERENCES[:20], tokenizer="two", changed={"heads": 4})
    status = json.loads((tmp_path / "two" / "status.json").read_text())
    (tmp_path / "two" / "status.json").write_text(json.dumps(status | {"tokens_seen": 900.0}))
    found = asked(tmp_path / "one", tmp_path / "two", "--baseline", "one")
    assert found["against"] == []
    for text in (
        "two had another test set than one",
        "another tokenizer",
        "one saw 600 target tokens in training, and two 900",
    ):
        assert any(text in note for note in found["notes"])
    assert any("so they are not tested" in note for note in found["notes"])


def test_runs_of_several_versions_of_torch_are_told_with_what_a_resume_has_changed(tmp_path):
    facts = [{"versions": {"torch": version}} for version in ("2.13.0", "2.14.0")]
    leave_run(tmp_path / "unknown", REFERENCES, REFERENCES, seed=3)
    for seed, (name, more) in enumerate(
        {
            "one": {"facts": facts[0]},
            "two": {"facts": facts[1]},
            "both": {"facts": facts[0], "changes": facts[1:]},
        }.items()
    ):
        run = leave_run(tmp_path / name, REFERENCES, REFERENCES, seed=seed)
        (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | more))
    assert asked(tmp_path / "one", tmp_path / "unknown")["notes"] == []
    (note,) = asked(tmp_path)["notes"]
    assert note.endswith("other weights: both by 2.13.0, then 2.14.0; one by 2.13.0; two by 2.14.0")
    told = {run["folder"].rpartition("/")[2]: run for group in asked(tmp_path)["groups"] for run in group["runs"]}
    assert (told["both"]["facts"], told["both"]["changes"]) == (facts[0], facts[1:])


def test_a_run_of_an_older_version_is_compared_by_what_it_has(tmp_path):
    run = leave_run(tmp_path / "old", REFERENCES, garbled(REFERENCES, 0.2, 1), old=True)
    with (run / "metrics.csv").open("a") as file:
        file.write("70,9,90,700,17.5,,,\n")
    with (run / "metrics.csv").open() as file:
        speeds = [float(row["train/tokens_per_second"] or "nan") for row in csv.DictReader(file)]
    leave_run(tmp_path / "new", REFERENCES, garbled(REFERENCES, 0.3, 2), changed={"heads": 4})
    found = asked(tmp_path, "--baseline", "new")
    old = next(run for group in found["groups"] for run in group["runs"] if run["folder"].endswith("old"))
    assert "parameters" not in old and old["best"]["val/loss"] == {"value": pytest.approx(1 + 20 / 60), "step": 60}
    assert (
        old["tokens_per_second"] == np.nanmedian(speeds) != np.nanmean(speeds)
        and old["scores"]["exact match"]["low"] is None
    )
    assert any(note.startswith("written by an older version: old:") for note in found["notes"])
    assert found["against"] == [] and any("not tested" in note for note in found["notes"])


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
    found = asked(tmp_path)
    states = {run["folder"].rpartition("/")[2]: run["state"] for group in found["groups"] for run in group["runs"]}
    assert states == {"fine": "done", "cut": "out of memory", "later": "waiting"}
    assert found["notes"] == ["not done: cut: out of memory (24 GB)", "not done: later: waiting"]
    assert "waiting" in said(tmp_path) and "later" in said(tmp_path, "--csv")


def test_a_baseline_that_is_not_compared_is_refused_with_the_nearest(sweep, capsys):
    with pytest.raises(SystemExit) as left:
        main(["compare", str(sweep), "--baseline", "base-9"])
    assert left.value.code == 2 and "did you mean base-" in capsys.readouterr().err


def test_a_folder_without_runs_is_told(tmp_path, capsys):
    for folder, rule in (
        (tmp_path, "is no run folder, and holds none"),
        (tmp_path / "none", "there is no such run folder"),
    ):
        with pytest.raises(SystemExit):
            main(["compare", str(folder)])
        assert rule in capsys.readouterr().err


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
def test_a_damaged_folder_is_listed_by_what_is_left(tmp_path, damage):
    run = leave_run(tmp_path / "a", REFERENCES, REFERENCES)
    leave_run(tmp_path / "b", REFERENCES, REFERENCES, seed=2)
    for name in ("status.json", "run.json", "config.yaml", "metrics.csv", "translations.jsonl"):
        (run / name).write_text(damage)
    assert "a" in said(tmp_path, "--baseline", "b") and len(asked(tmp_path, "--baseline", "a")["groups"]) == 2


@pytest.fixture(scope="module")
def thousand_runs(tmp_path_factory):
    """In ten folders, of 334 models and three seeds."""
    folder = tmp_path_factory.mktemp("thousand")
    run = leave_run(folder / "made", REFERENCES, REFERENCES)
    config = (run / "config.yaml").read_text()
    files = {name: (run / name).read_bytes() for name in ("run.json", "status.json", "metrics.csv")}
    for number in range(1000):
        one = folder / "runs" / f"sweep-{number // 100}" / f"run-{number}"
        one.mkdir(parents=True)
        for name, content in files.items():
            (one / name).write_bytes(content)
        own = config.replace("heads: 2", f"heads: {number // 3}").replace("seed: 1", f"seed: {number % 3}")
        (one / "config.yaml").write_text(own)
    return folder / "runs"


@pytest.mark.parametrize("shape", [[], ["--csv"], ["--json"], ["--markdown"]])
def test_a_thousand_runs_are_compared_in_three_seconds_of_a_processor(thousand_runs, shape):
    shown, seconds = processor_time("compare", thousand_runs, *shape)
    assert shown.count("run-") >= 1000 and seconds < 3


@pytest.mark.parametrize("shape", [[], ["--json"]])
def test_a_thousand_runs_are_listed_in_three_seconds_of_a_processor(thousand_runs, shape):
    shown, seconds = processor_time("runs", "--in", thousand_runs, *shape)
    assert shown.count("run-") >= 1000 and seconds < 3


def test_models_of_plain_text_are_compared_by_their_perplexity(tmp_path):
    for seed, perplexity in ((1, 4.0), (2, 5.0)):
        run = leave_run(tmp_path / f"plain-{seed}", REFERENCES, REFERENCES, seed=seed)
        status = json.loads((run / "status.json").read_text())
        scores = {"test/loss": 1.5, "test/perplexity": perplexity}
        (run / "status.json").write_text(json.dumps(status | {"scores": scores, "translation": []}))
        (run / "translations.jsonl").unlink()
    shown = said(tmp_path, "--markdown", "--baseline", "plain-1")
    assert f"| 2 | 1.2500 ± 0.0000 | {np.mean([4, 5]):.2f} ± {np.std([4, 5], ddof=1):.2f} |" in shown
