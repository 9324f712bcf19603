"""Pseudo-perplexity of encoders: recomputed token by token, stored by document, and compared between runs."""

import contextlib
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

import tfm_blocks as tfm
from tests.launch.test_bits_per_byte import CONTEXT, TEXTS, text, train_on  # noqa: F401  a fixture
from tfm_blocks.cli import main
from tfm_blocks.runs.records import SavedScores, scores_folder
from tfm_blocks.runs.row_results import read_losses

PSEUDO = "pseudo-perplexity"


def encoder_on(text: Path, name: str, *overrides: str) -> Path:  # noqa: F811
    return train_on(text, name, "model=encoder_only", "objective=masked", *overrides)


@torch.no_grad()
def naive(run: Path, texts: list[str], context: int = CONTEXT) -> list[list[float]]:
    """Return -log p and the predicted tokens of each document that is not blank, one masked token at a time."""
    model = tfm.load(run)
    network, tokenizer = model.network.eval(), model.tokenizer
    sums = []
    for ids in (tokenizer.encode(line) for line in texts if line.strip()):
        nll = 0.0
        for start in range(0, len(ids), context - 1):
            piece = [*ids[start : start + context - 1], 2]
            for place, id in enumerate(piece[:-1]):
                read = torch.tensor([[*piece[:place], tokenizer.mask, *piece[place + 1 :]]])
                nll -= float(network(src=read)[0, place].log_softmax(0)[id])
        sums.append([nll, len(ids)])
    return sums


def compared(*arguments: object) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, arguments), "--json"])
    return json.loads(out.getvalue())


def scores_of(report: dict) -> list[dict]:
    return [run["scores"].get(PSEUDO) for group in report["groups"] for run in group["runs"]]


@pytest.mark.grid
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("mix", ["null", "{a: {}, b: {val: [more.txt], test: [more.txt]}}"])
def test_a_run_stores_the_pseudo_perplexity_of_the_first_documents(
    text: Path,  # noqa: F811
    mix: str,
    devices: int,
) -> None:
    (text / "more.txt").write_text("x y\n\nn\n")
    texts = [line for line in TEXTS if line.strip()][: 5 if mix == "null" else None]
    texts += [] if mix == "null" else ["x y"]  # the documents of a mix stand corpus by corpus
    overrides = [f"data.mix={mix}", f"trainer.devices={devices}", f"objective.pseudo_documents={len(texts)}"]
    run = encoder_on(text, "run", *overrides)
    expected = np.array(naive(run, texts))
    losses_N6 = read_losses(scores_folder(run, PSEUDO))
    assert losses_N6 is not None and losses_N6[:, 1:3].tolist() == [pytest.approx(one, rel=1e-4) for one in expected]
    (score,) = scores_of(compared(run))
    without_N = [math.exp(np.divide(*np.delete(expected, n, 0).sum(0))) for n in range(len(texts))]
    error = math.sqrt((len(texts) - 1) ** 2 / len(texts) * np.var(without_N, ddof=1))
    value, half = math.exp(np.divide(*expected.sum(0))), scipy.stats.t.ppf(0.975, len(texts) - 1) * error
    assert [score[key] for key in ("value", "low", "high")] == pytest.approx([value, value - half, value + half], 1e-3)


@pytest.mark.grid
def test_encoders_are_compared_over_documents_after_their_training(text: Path, capsys: pytest.CaptureFixture) -> None:  # noqa: F811
    runs = [encoder_on(text, f"run{width}", f"d_ff={width}", "objective.eval_rate=0.3") for width in (24, 32)]
    assert scores_of(compared(*runs)) == [None, None]
    for run in runs:
        main(["evaluate", str(run), "--test"])
    assert f"saved as scores/{PSEUDO} in 1 run" in capsys.readouterr().out
    before, after = (np.array(naive(run, TEXTS)) for run in runs)
    values = [math.exp(np.divide(*side.sum(0))) for side in (before, after)]
    tokens = before[:, 1].sum()

    def difference(first_N: np.ndarray, second_N: np.ndarray) -> float:
        return math.exp(second_N.sum() / tokens) - math.exp(first_N.sum() / tokens)

    reports = [compared(*runs, "--baseline", runs[0], *scores) for scores in ([], ["--scores", PSEUDO])]
    for report in reports:
        assert [one["value"] for one in scores_of(report)] == pytest.approx(values, rel=1e-4)
        (row,) = (row for row in report["against"] if row["score"] == PSEUDO)
        assert row["difference"] == pytest.approx(values[1] - values[0], rel=1e-3)
        options = {"permutation_type": "samples", "n_resamples": 20_000, "rng": 1}
        theirs = scipy.stats.permutation_test((before[:, 0], after[:, 0]), difference, **options)
        assert row["sentences"] == pytest.approx(theirs.pvalue, abs=0.02)
        assert row["sentences_interval"][0] < row["difference"] < row["sentences_interval"][1]
    assert {"loss", PSEUDO} <= {row["score"] for row in reports[0]["against"]}
    trained = encoder_on(text, "again", "d_ff=32", "objective.eval_rate=0.3", "objective.pseudo_documents=99")
    assert scores_of(compared(trained)) == [pytest.approx(scores_of(reports[0])[1])]
    status = runs[0] / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"steps": 9}))
    assert scores_of(compared(runs[0])) == [None], "it was trained further"


def test_pseudo_perplexities_of_different_tokenizers_are_not_tested(text: Path) -> None:  # noqa: F811
    runs = [encoder_on(text, f"run{vocab}", f"vocab={vocab}", "objective.pseudo_documents=5") for vocab in (270, 330)]
    report = compared(*runs, "--baseline", runs[0])
    assert None not in scores_of(report) and PSEUDO not in {row["score"] for row in report["against"]}
    assert any(f"{PSEUDO} cannot be compared" in note for note in report["notes"])


def test_a_file_is_scored_and_wrong_uses_are_refused(text: Path, capsys: pytest.CaptureFixture) -> None:  # noqa: F811
    run, file = encoder_on(text, "run"), text / "news.txt"
    file.write_text("ban den\n\nfast\n")
    main(["evaluate", str(run), "--test", str(file)])
    saved = SavedScores.read(scores_folder(run, f"{PSEUDO}-news"))
    value = math.exp(np.divide(*np.sum(naive(run, ["ban den", "fast"]), 0)))
    assert saved.scores[0].value == pytest.approx(value, rel=1e-4) and saved.test_set.rows == 2
    assert "2 documents" in capsys.readouterr().out
    main(["evaluate", str(run), "--text", str(file), "--context", "3", "--json"])
    value = math.exp(np.divide(*np.sum(naive(run, ["ban den", "fast"], 3), 0)))
    assert json.loads(capsys.readouterr().out)["pseudo_perplexity_per_token"] == pytest.approx(value, rel=1e-4)
    (text / "test.txt").write_text("another text\n")
    for arguments, message in (
        (["--beam", "4"], "--beam: a pseudo-perplexity is computed without a search"),
        ([], "its test set has changed"),
    ):
        with pytest.raises(SystemExit):
            main(["evaluate", str(run), "--test", *arguments])
        assert message in capsys.readouterr().err
