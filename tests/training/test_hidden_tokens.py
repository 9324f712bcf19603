"""Objectives that predict some positions of a row: where logits are computed, and the scores of hidden tokens."""

import contextlib
import io
import json

import numpy as np
import pytest
import scipy.stats
import torch

import tfm_blocks as tfm
from tests.conftest import OBJECTIVES, composed_small
from tests.data.test_noisy_pairs import DIFFUSION, SPANS
from tests.data.test_objectives import MASKED, WORDS, masked, packed
from tests.run_folders import leave_run
from tfm_blocks.cli import main
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.objectives import ReplacedTokenSettings
from tfm_blocks.data.prepare import prepare
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.data.vocabulary import sentinel
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.network.weights import attach_generator
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.row_results import read_losses, read_translations
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.objective import Objective, ReplacedTokenObjective
from tfm_blocks.training.settings import read_run

SIZES = {"d_model": 16, "d_ff": 24, "heads": 2, "layers": 1, "max_length": 64, "dropout": 0.0}
ELECTRA = SIZES | {"d_embedding": 12, "segments": 1}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([" ".join(WORDS)] * 3, 450, special=[MASK, *map(sentinel, range(40))])


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    return packed(tmp_path_factory.mktemp("packed"), tokenizer, 800, context=64)


def counted(network):
    """Return a list that gets the number of positions of each call of the first node of the head."""
    counts = []
    network.head_calls[0].block.register_forward_hook(lambda module, inputs, x_1NX: counts.append(x_1NX.shape[1]))
    return counts


@pytest.mark.parametrize(
    ("model", "objective"), [("bert", masked()), ("bert", DIFFUSION), ("decoder_only", SPANS)], ids=lambda one: str(one)[:15]
)  # fmt: skip
def test_logits_are_computed_only_at_predicted_positions(corpus, tokenizer, model, objective):
    """BERT's head also has a linear map and a norm, which no other position reads."""
    sizes = SIZES if model == "bert" else {name: SIZES[name] for name in SIZES if name != "max_length"}
    network = tfm.build(model, **sizes, vocab=tokenizer.size)
    layout = layout_of(corpus, [tensor.name for tensor in network.spec.inputs], objective).drawn(1, 0)
    batch, own = layout.batch(corpus, range(8)), Objective(network, 0.0)
    predicted = int((batch.labels_BT != 0).sum())
    assert 0 < predicted < 0.7 * batch.labels_BT.numel()
    counts = counted(network)
    own.loss(batch)[0].backward()
    assert sum(counts) == predicted
    for scores in (own.scores, own.position_scores):
        counts.clear()
        with torch.no_grad():
            scores(batch)
        assert sum(counts) == predicted


def test_the_generator_computes_logits_only_at_hidden_positions(corpus, tokenizer):
    network, generator = (
        tfm.build(name, **ELECTRA, vocab=tokenizer.size) for name in ("electra_discriminator", "electra")
    )
    attach_generator(network, generator)
    changes = {"name": "replaced_token", "generator": {"model": "electra"}, "mask": 0.85, "random": 0.0}
    layout = layout_of(corpus, ["src"], ReplacedTokenSettings(**MASKED | changes)).drawn(1, 0)
    batch, counts = layout.for_step(corpus, range(8)).batch(corpus, range(8)), counted(generator)
    ReplacedTokenObjective(network, 0.0).loss(batch)[0].backward()
    assert sum(counts) == 2 * int((batch.labels_BT != 0).sum()) < 0.5 * batch.labels_BT.numel()  # loss and samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train two models with masked tokens, and one with masked diffusion, on the same text."""
    folder = tmp_path_factory.mktemp("hidden")
    short = ["trainer.steps=2", "trainer.validate_every=2", "trainer.log_every=1", "data.test=30"]
    names = {"one": "masked", "two": "masked", "diffusion": "masked_diffusion"}
    with pytest.MonkeyPatch.context() as patch:
        small = composed_small(folder, patch)
        yield {
            name: train(check_run(small(*OBJECTIVES[objective], *short, f"d_ff={width}")), folder / name)
            for width, (name, objective) in enumerate(names.items(), 24)
        }


def compared(*runs):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["compare", *map(str, runs), "--baseline", str(runs[0]), "--json"])
    return json.loads(out.getvalue())


def naive_counts(run, rows):
    """Return the labels that are ranked first and all labels of each row, one row at a time."""
    encoder = tfm.load(run)
    counts = []
    for batch in rows:
        (ids_BT,) = batch.inputs.values()
        with torch.no_grad():
            best_BT = encoder.network.eval()(src=ids_BT).argmax(2)
        hidden_BT = batch.labels_BT != 0
        counts.append([int((best_BT == batch.labels_BT)[hidden_BT].sum()), int(hidden_BT.sum())])
    return counts


@pytest.mark.grid
def test_the_token_accuracy_has_intervals_and_tests_over_rows(runs, tmp_path):
    losses = [read_losses(run) for run in runs.values()]
    for (name, run), losses_N6 in zip(runs.items(), losses, strict=True):
        settings = read_run(SavedRun(run).config)
        data = prepare(settings.data, 300, lambda text: None, settings.objective.special)
        layout = layout_of(data.test, ["src"], settings.objective).evaluating
        rows = [layout.batch(data.test, [row]) for row in range(30)]
        assert losses_N6[:, 4:].tolist() == naive_counts(run, rows)
        assert (losses_N6[:, 5] < losses_N6[:, 2]).any() == (name == "diffusion")
        correct, labels = losses_N6[:, 4:].sum(0)
        assert SavedRun(run).scores["token accuracy"].value == pytest.approx(100 * correct / labels)
    report = compared(runs["one"], runs["two"])
    (row,) = (row for row in report["against"] if row["score"] == "token accuracy")
    before, after = losses[0][:, 4:], losses[1][:, 4:]
    assert before[:, 1].tolist() == after[:, 1].tolist()
    gaps_N, labels = 100 * (after - before)[:, 0], before[:, 1].sum()
    assert row["difference"] == pytest.approx(gaps_N.sum() / labels)
    options = {"permutation_type": "samples", "n_resamples": 20_000, "rng": 1}
    theirs = scipy.stats.permutation_test((gaps_N, 0 * gaps_N), lambda x, y: np.sum(x - y), **options)
    assert row["sentences"] == pytest.approx(theirs.pvalue, abs=0.02)
    low, high = row["sentences_interval"]
    assert low < row["difference"] < high and {"loss", "perplexity"} <= {row["score"] for row in report["against"]}


def test_losses_of_different_objectives_are_not_compared(runs):
    report = compared(runs["one"], runs["diffusion"])
    assert report["against"] == []
    assert any("different objective" in note and "losses cannot be compared" in note for note in report["notes"])


def test_only_the_evaluated_task_separates_losses(tmp_path):
    """Rates of training, teachers and later tokens do not change what validation and test predict."""
    objectives = {
        "a": {"name": "masked", "rate": 0.15, "eval_rate": 0.15},
        "b": {"name": "masked", "rate": 0.3, "static": True, "eval_rate": 0.15},
        "c": {"name": "masked", "rate": 0.15, "eval_rate": 0.3},
        "d": {"name": "next_token"},
        "e": {"name": "distil", "teacher": "runs/x"},
        "f": None,
    }
    for name, objective in objectives.items():
        leave_run(tmp_path / name, ["a b"], ["a b"], changed={"objective": objective} if objective else {})
    tasks = {name: SavedRun(tmp_path / name).predicted for name in objectives}
    assert tasks["a"] == tasks["b"] != tasks["c"] and tasks["d"] == tasks["e"] == tasks["f"] != tasks["a"]


@pytest.mark.grid
def test_translations_have_no_token_accuracy_in_comparisons(small, tmp_path):
    run = train(check_run(small("trainer.steps=1", "trainer.validate_every=1")), tmp_path)
    assert "token_accuracy" in SavedRun(run).values and "token accuracy" not in SavedRun(run).scores


def test_a_report_shows_samples_of_hidden_tokens(runs, tmp_path):
    lines = read_translations(runs["one"])
    assert len(lines) == 3 and all(MASK in line.source and MASK not in line.reference for line in lines)
    main(["report", str(runs["one"]), "-o", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    samples = page[page.index('id="samples"') : page.index('id="attention"')]
    assert samples.count("<article>") == 3 and "&lt;mask&gt;" in samples


@pytest.mark.grid
def test_the_weight_of_a_loss_follows_its_schedule_in_a_run(small, tmp_path):
    """At a rate near 0, the weights stay, and the logged values are in proportion to the weight of z-loss."""
    options = ["trainer.steps=3", "trainer.validate_every=3", "trainer.log_every=1", "schedule.peak=1e-9"]
    logged = []
    for weight in ("{start: 1, end: 0, steps: 4}", "1"):
        composed = small(*OBJECTIVES["masked"], *options, f"losses.z_loss={weight}", "objective.static=true")
        run = train(check_run(composed), tmp_path)
        rows = read_rows(run / "metrics.csv")
        logged.append([row["train/aux_loss/z_loss"] for row in rows if "train/aux_loss/z_loss" in row])
    assert np.divide(*logged).tolist() == pytest.approx([0.75, 0.5, 0.25], rel=1e-4)
