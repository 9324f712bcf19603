"""`tfm evaluate --test` keeps scores in runs, and `tfm compare --scores` reads them."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from sacrebleu.metrics.chrf import CHRF

import tfm_blocks as tfm
from tests.conftest import sentences
from tests.report.test_compare import comparison, said
from tests.run_folders import leave_run
from tfm_blocks.cli import main
from tfm_blocks.cli.saved_scores import _scores_name
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.folder import CONFIG, TOKENIZER, TRANSLATIONS
from tfm_blocks.runs.model import write_model, write_weights
from tfm_blocks.runs.records import SavedScores, scores_folder
from tfm_blocks.runs.row_results import read_translations
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

SOURCES = [f"the {number}th" for number in range(8)]  # as in `leave_run`
BEAM = Search(beam=3)


@pytest.fixture(scope="module")
def translator():
    """Return an untrained translator whose outputs are not empty."""
    tokenizer = Tokenizer.train(sentences(60, 0), 280)
    sizes = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocab": tokenizer.size}
    return Translator(tfm.build("tiny", seed=3, **sizes).eval(), tokenizer, ("src", "tgt"))


@pytest.fixture
def sweep(tmp_path, translator):
    """Write two finished runs of the same weights with greedy scores, and an unfinished one."""
    for seed in (1, 2, 3):
        run = leave_run(tmp_path / "sweep" / f"seed-{seed}", *2 * [references(translator)], seed=seed)
        write_model(run, translator.network.spec.mapping, [], ["src", "tgt"])
        write_weights(run, weights_of(translator.network))
        translator.tokenizer.save(run / TOKENIZER)
    status = run / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "preempted"}))
    return tmp_path / "sweep"


def translate(translator):
    return [hypotheses[0].text for hypotheses in translator.search([(text,) for text in SOURCES], BEAM)]


def references(translator):
    """Return beam translations of which every second one is changed."""
    return [text if number % 2 else "another text" for number, text in enumerate(translate(translator))]


def test_every_finished_run_keeps_the_scores_of_the_search_and_compare_reads_them(sweep, translator, capsys):
    main(["evaluate", str(sweep), "--beam", "3", "--test"])
    assert "saved as scores/beam3 in 2 runs; 1 are not done" in capsys.readouterr().out
    outputs, expected = translate(translator), references(translator)
    chrf = CHRF().corpus_score(outputs, [expected]).score
    for seed in (1, 2):
        run = sweep / f"seed-{seed}"
        lines = read_translations(run / "scores" / "beam3")
        assert [(one.source, one.output, one.reference) for one in lines] == list(
            zip(SOURCES, outputs, expected, strict=True)
        )
        saved = SavedScores.read(scores_folder(run, "beam3"))
        assert (saved.search["beam"], saved.search["alpha"], saved.steps, saved.test) == (3, 0.6, 60, "")
        assert saved.scores[1].value == pytest.approx(chrf)
    groups = comparison(sweep, "--scores", "beam3")["groups"][0]["runs"]
    assert [run["scored_on"] for run in groups] == ["beam3", "beam3", ""]
    assert groups[0]["scores"]["chrF"]["value"] == pytest.approx(chrf) and 0 < chrf < 100
    assert groups[0]["scores"]["exact match"]["value"] == 50
    trained = comparison(sweep)["groups"][0]["runs"]
    assert trained[0]["scores"]["chrF"]["value"] == pytest.approx(100), "the scores of the training stay"


def test_a_file_of_pairs_is_another_test_set_under_its_name(sweep, tmp_path, capsys):
    pairs = tmp_path / "news.tsv"
    pairs.write_text("".join(f"source {number}\t{text}\n" for number, text in enumerate(SOURCES[:5])))
    main(["evaluate", str(sweep / "seed-1"), "--test", str(pairs), "--alpha", "1"])
    assert "--scores greedy-alpha1-news" in capsys.readouterr().out
    saved = SavedScores.read(scores_folder(sweep / "seed-1", "greedy-alpha1-news"))
    assert saved.test == "news.tsv" and saved.test_set.rows == 5
    report = comparison(sweep, "--scores", "greedy-alpha1-news")
    assert any("without scores greedy-alpha1-news" in note and "seed-2" in note for note in report["notes"])


@pytest.mark.grid
def test_each_run_has_the_number_of_lines_of_its_own_test_set(sweep, capsys):
    path = sweep / "seed-2" / TRANSLATIONS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    main(["evaluate", str(sweep), "--test", "--json"])
    assert json.loads(capsys.readouterr().out)["lines"] == {str(sweep / "seed-1"): 8, str(sweep / "seed-2"): 3}
    main(["evaluate", str(sweep), "--test"])
    assert capsys.readouterr().out.startswith("3 to 8 lines\n")


@pytest.mark.grid
def test_a_run_whose_folder_cannot_be_written_does_not_keep_the_others_from_their_scores(sweep, capsys):
    (sweep / "seed-1" / "scores").write_text("stands for a folder without write permission")
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(sweep), "--test"])
    said = capsys.readouterr()
    assert left.value.code == 1 and f"error: {sweep / 'seed-1' / 'scores'}" in said.err
    assert "saved as scores/greedy in 1 run;" in said.out and (sweep / "seed-2" / "scores" / "greedy").is_dir()


def test_scores_of_earlier_weights_do_not_count(sweep, capsys):
    main(["evaluate", str(sweep), "--test"])
    status = sweep / "seed-1" / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"steps": 90}))
    runs = comparison(sweep, "--scores", "greedy")["groups"][0]["runs"]
    assert [run["scored_on"] for run in runs] == ["", "greedy", ""]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--test", "--src", "x"], 2, "error: --src: --test scores the final weights on one test set"),
        (["--test", "--context", "4"], 2, "error: --context: --test scores the final weights on one test set"),
        (["--text", "x", "--bleu", "none"], 2, "error: --bleu: --text computes a perplexity without a search"),
        (["--text", "x", "--max-tokens", "3"], 2, "error: --max-tokens: --text computes a perplexity"),
        (["--text", "x", "--against", "x"], 2, "error: --against: --text computes a perplexity"),
        (["--src", "x", "--ref", "x", "--context", "3"], 2, "error: --context: --src and --ref score translations"),
        (["--test", "missing.tsv"], 1, "missing.tsv"),
        (["--test", "one.tsv"], 1, "each line needs 2 tab-separated texts (src, the reference), but line 1 has 1"),
        (["--test", "empty.tsv"], 1, "but there is no line"),
    ],
)
def test_a_test_set_or_an_option_that_does_not_fit_is_refused(arguments, status, message, sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    (sweep.parent / "one.tsv").write_text("no tab\n")
    (sweep.parent / "empty.tsv").write_text("")
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(sweep), *arguments])
    assert left.value.code == status and message in capsys.readouterr().err
    assert not list(sweep.glob("*/scores"))


@pytest.mark.grid
def test_two_files_never_share_a_name_of_scores(sweep, tmp_path, capsys):
    run, saved = sweep / "seed-1", []
    for name in ("test.de.tsv", "test.fr.tsv", "тест.tsv", "测试.tsv"):
        (tmp_path / name).write_text(f"{name}\t{SOURCES[0]}\n")
        main(["evaluate", str(run), "--test", str(tmp_path / name)])
        saved.append(SavedScores.read(scores_folder(run, f"greedy-{name.removesuffix('.tsv')}")).test)
    assert saved == ["test.de.tsv", "test.fr.tsv", "тест.tsv", "测试.tsv"]
    (tmp_path / "test.de.tsv").write_text("another\ttest set\n")
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--test", str(tmp_path / "test.de.tsv")])
    assert "greedy-test.de: has the scores of another test set" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_the_name_of_scores_has_no_suffix_of_a_compressed_file(suffix):
    arguments = Namespace(test=Path(f"news.de.tsv{suffix}"), precision="fp32", bleu="13a")
    assert _scores_name(arguments, Search(), "") == "greedy-news.de"


@pytest.mark.parametrize("hiding", ["seed-1", "seed-2"])
def test_runs_that_hide_tokens_are_not_scored_with_others(hiding, sweep, capsys):
    config = yaml.safe_load((path := sweep / hiding / CONFIG).read_text())
    path.write_text(yaml.safe_dump(config | {"objective": {"name": "masked"}}))
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(sweep), "--test"])
    error = capsys.readouterr().err
    assert left.value.code == 1 and f"{sweep / hiding} hides tokens, but" in error
    assert "evaluate them in separate commands" in error and not list(sweep.glob("*/scores"))


def test_a_run_that_cannot_be_scored_is_named_after_the_scores_of_the_others(sweep, tmp_path, translator, capsys):
    write_model(sweep / "seed-1", translator.network.spec.mapping, [], ["src", "other", "tgt"])
    (sweep / "seed-1" / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(sweep), "--test"])
    shown = capsys.readouterr()
    assert left.value.code == 1 and "saved as scores/greedy in 1 run;" in shown.out and "seed-1" in shown.err
    assert scores_folder(sweep / "seed-2", "greedy").is_dir() and not scores_folder(sweep / "seed-1", "greedy").exists()


def test_a_classifier_is_named_after_the_scores_of_the_other_runs(sweep, capsys):
    config = yaml.safe_load((path := sweep / "seed-1" / CONFIG).read_text())
    path.write_text(yaml.safe_dump(config | {"objective": {"name": "label"}}))
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(sweep), "--test"])
    shown = capsys.readouterr()
    assert left.value.code == 1 and "saved as scores/greedy in 1 run; 1 are not done" in shown.out
    assert (
        f"error: {sweep / 'seed-1'}: is a classifier, and its scores" in shown.err and "tfm classify RUN" in shown.err
    )
    assert scores_folder(sweep / "seed-2", "greedy").is_dir() and not scores_folder(sweep / "seed-1", "greedy").exists()
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(sweep / "seed-1"), "--test"])
    shown = capsys.readouterr()
    assert left.value.code == 1 and not shown.out and "seed-1: is a classifier" in shown.err


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ("saved", "contains a model that was imported or saved from Python, and only a training run keeps scores"),
        ("averaged", "contains a model that was averaged from weights, and only a training run keeps scores"),
        ("failed", "contains no finished run, and only finished runs keep scores"),
    ],
)
def test_a_model_without_a_finished_training_has_no_scores_to_keep(state, rule, sweep, capsys):
    run = sweep / "seed-1"
    (run / "status.json").write_text(json.dumps({"state": state}))
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(run), "--test"])
    error = capsys.readouterr().err
    assert left.value.code == 1 and f"error: {run}: {rule}" in error
    assert (f"tfm evaluate {run} --src FILE" in error) == (state != "failed")


def test_unknown_scores_are_refused_with_the_known_ones(sweep, capsys):
    main(["evaluate", str(sweep), "--test"])
    with pytest.raises(SystemExit) as left:
        said(sweep, "--scores", "gredy")
    assert left.value.code == 2 and "did you mean greedy" in capsys.readouterr().err


def test_damaged_scores_count_as_missing_and_the_other_runs_are_compared(sweep):
    main(["evaluate", str(sweep), "--test"])
    (sweep / "seed-1" / "scores" / "greedy" / "scores.json").write_text("{")
    report = comparison(sweep, "--scores", "greedy")
    assert [run["scored_on"] for run in report["groups"][0]["runs"]] == ["", "greedy", ""]
    assert any("without scores greedy of their final weights: seed-1" in note for note in report["notes"])
