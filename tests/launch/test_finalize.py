"""Scores and translations of a finished run."""

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

import tfm_blocks as tfm
from tests.stopping import train_part
from tests.training.test_module import feed_of, make
from tfm_blocks.compose.resolve import Composed, recorded_config
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import RunError
from tfm_blocks.language.sources import Sources
from tfm_blocks.launch.check import check_resumed_run, check_run
from tfm_blocks.launch.finalize import expect_kept_weights
from tfm_blocks.launch.job import resume, train
from tfm_blocks.launch.run_spec import read_saved_run
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.runs.folder import step_file
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.row_results import read_losses, read_translations
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.training.data import TrainStream
from tfm_blocks.training.settings import read_run


@pytest.mark.grid
def test_a_resumed_run_saves_its_sizes_best_validation_and_number_of_tokens(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    composed = small()
    stream = iter(TrainStream(feed_of(make(composed)[1]), seed=1, start=0, ranks=Ranks()))
    planned = [next(stream).tokens for _ in range(6)]
    train_part(3, check_run(composed), tmp_path)
    left = read_saved_run(tmp_path / "run")
    resume(check_resumed_run(recorded_config(left.config, Sources())), left)
    status, vocab = json.loads((tmp_path / "run" / "status.json").read_text()), left.config["vocab"]
    network = tfm.build("tiny", d_model=16, d_ff=24, heads=2, layers=1, vocab=vocab)
    assert status["parameters"] == sum(one.numel() for one in network.parameters())
    assert status["multiply_adds"] > 32 * vocab * 16 and status["lengths"] == {"S": 32, "T": 32}
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    losses = {int(row["step"]): row["val/loss"] for row in rows if "val/loss" in row}
    step = min(losses, key=lambda one: losses[one])
    assert status["best"]["val/loss"] == {"value": losses[step], "step": step}
    seen = {int(row["step"]): row["train/tokens"] for row in rows if "train/tokens" in row}
    assert seen == {step: sum(planned[:step]) for step in (2, 4, 6)} and status["tokens_seen"] == sum(planned)
    seconds = [row["train/seconds"] for row in rows if "train/seconds" in row]
    assert seconds == sorted(seconds) and seconds[0] > 0


@pytest.mark.parametrize(
    ("patience", "waited", "missing"),
    [("null", 0, ""), ("2", 0, ""), ("2", 1, "step-00000090"), ("1", 0, "step-00000090")],
)
def test_a_resume_that_may_stop_early_needs_the_validations_before_its_checkpoint(
    small: Callable[..., Composed], tmp_path: Path, patience: str, waited: int, missing: str
) -> None:
    """`trainer.average=5` is new, so that step 90, which a stop at step 130 needs, was deleted."""
    steps = ["trainer.steps=200", "trainer.validate_every=10", "trainer.average=5", "trainer.keep_last=5"]
    settings = read_run(small(*steps, f"callbacks.early_stopping.patience={patience}").mapping)
    checkpoint = tmp_path / "step-00000120.ckpt"
    callbacks = {"BestWeights": {"best_step": 120}, "EarlyStopping": {"waited": waited}}
    torch.save({"validated": 120, "callbacks": callbacks}, checkpoint)
    for step in (100, 110, 120):
        step_file(tmp_path, step).touch()
    with pytest.raises(RunError, match=missing) if missing else nullcontext():
        expect_kept_weights(settings, checkpoint)


@pytest.mark.grid
def test_translations_and_hash_belong_to_the_test_set(small: Callable[..., Composed], tmp_path: Path) -> None:
    composed = small("trainer.steps=2")
    train(check_run(composed), tmp_path)
    lines = read_translations(tmp_path / "run")
    assert len(lines) == 10
    translator = tfm.load(tmp_path / "run")
    assert [one.output for one in lines] == translator.translate([one.source for one in lines])
    record = SavedRun(tmp_path / "run")
    texts = "".join(json.dumps([one.source, one.reference]) for one in lines)
    assert record.test_set == hashlib.sha256(texts.encode()).hexdigest()
    assert record.scores["exact match"].value == 100 * sum(one.output == one.reference for one in lines) / 10


@pytest.mark.grid
def test_translations_of_each_corpus_of_a_mix_are_scored_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores are sacreBLEU's, the interval is the jackknife over the lines of the corpus."""
    monkeypatch.chdir(tmp_path)
    numbers = [*range(3, 9), 1, 2, 1, 5, 4, 7]
    for name, (source, target) in {"a": ("red boat", "rotes boot"), "b": ("big dog", "großer hund")}.items():
        for side, text in (("src", source), ("tgt", target)):
            lines = [" ".join([text] * number) for number in numbers]
            (tmp_path / f"{name}.{side}").write_text("\n".join(lines) + "\n")
    files = {name: f"{{src: {name}.src, tgt: {name}.tgt}}" for name in "ab"}
    splits = {name: ", ".join(f"{split}: {pair}" for split in ("train", "val", "test")) for name, pair in files.items()}
    data = ["data=text", f"data.dir={tmp_path}", f"data.mix={{a: {{{splits['a']}}}, b: {{{splits['b']}}}}}"]
    sizes = ["d_model=16", "d_ff=24", "heads=2", "layers=1", "vocab=300", "dropout=0", "trainer.validate_every=10"]
    rates = ["schedule=linear", "schedule.peak=1e-2", "schedule.warmup=2", "data.step_tokens=200"]
    for steps in (20, 30):
        options = [*data, *sizes, *rates, f"trainer.steps={steps}", f"name=steps{steps}", "logger=csv"]
        tfm.train("tiny", overrides=options)
    runs = [tmp_path / "runs" / name for name in ("steps20", "steps30")]
    rows = {row.score: row for row in compare_runs(runs, baseline="steps20").baseline_tests}
    for corpus in "ab":
        sides = []
        for run in runs:
            lines = [one for one in read_translations(run) if (one.source.startswith("red")) == (corpus == "a")]
            assert len(lines) == 12
            outputs, references = [one.output for one in lines], [one.reference for one in lines]
            scores = json.loads((run / "status.json").read_text())["scores"]
            for name, metric in (("bleu", BLEU(force=True)), ("chrf", CHRF())):
                expected = metric.corpus_score(outputs, [references]).score
                assert scores[f"test/{name}/{corpus}"] == pytest.approx(expected), name
            without = [
                CHRF().corpus_score(outputs[:n] + outputs[n + 1 :], [references[:n] + references[n + 1 :]]).score
                for n in range(12)
            ]
            sides.append(np.array([scores[f"test/chrf/{corpus}"], *without]))
        gap, *without_N = sides[1] - sides[0]
        row = rows[f"chrF/{corpus}"]
        half = scipy.stats.t.ppf(0.975, 11) * np.sqrt(11**2 / 12 * np.var(without_N, ddof=1))
        assert row.difference == pytest.approx(gap)
        assert row.sentences_interval == pytest.approx((gap - half, gap + half), rel=1e-3)
        assert row.sentences is not None and 0 < row.sentences <= 1


@pytest.mark.grid
def test_status_json_has_null_for_an_infinite_perplexity(small: Callable[..., Composed], tmp_path: Path) -> None:
    """A learning rate of 300 gives losses of thousands of nats, whose perplexity overflows a float."""
    composed = small("schedule.peak=300", "schedule.warmup=1", "trainer.steps=2", "trainer.validate_every=2")
    train(check_run(composed), tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    status = json.loads((tmp_path / "run" / "status.json").read_text(), parse_constant=refuse)
    assert status["scores"]["test/loss"] > 700 and status["scores"]["test/perplexity"] is None
    record = SavedRun(tmp_path / "run")
    assert "perplexity" not in record.values and record.values["loss"] == status["scores"]["test/loss"]


@pytest.mark.parametrize(("devices", "rows"), [(1, 10), pytest.param(2, 3, marks=pytest.mark.grid)])
def test_the_loss_of_each_test_line_is_saved(
    small: Callable[..., Composed], tmp_path: Path, devices: int, rows: int
) -> None:
    """Compare with torch's cross entropy line by line; the sums give the loss and perplexity of the run."""
    composed = small("trainer.steps=2", f"trainer.devices={devices}", f"data.test={rows}", "data.batch_tokens=122")
    train(check_run(composed), tmp_path)
    losses_N6 = read_losses(tmp_path / "run")
    assert losses_N6 is not None
    translator = tfm.load(tmp_path / "run")
    encode = translator.tokenizer.encode
    for line, losses_6 in zip(read_translations(tmp_path / "run"), losses_N6, strict=True):
        src_S, tgt_T = [*encode(line.source), Tokenizer.EOS], encode(line.reference)
        logits_BTV = translator.network(src=torch.tensor([src_S]), tgt=torch.tensor([[Tokenizer.BOS, *tgt_T]]))
        labels_T = torch.tensor([*tgt_T, Tokenizer.EOS])
        expected = [
            float(F.cross_entropy(logits_BTV[0], labels_T, label_smoothing=smoothing, reduction="sum"))
            for smoothing in (0.1, 0.0)
        ]
        correct = int((logits_BTV[0].argmax(1) == labels_T).sum())
        assert losses_6.tolist() == pytest.approx([*expected, len(labels_T), 0, correct, len(labels_T)], rel=1e-4)
    record = SavedRun(tmp_path / "run")
    loss, nll, tokens = losses_N6.sum(0)[:3]
    assert (record.values["loss"], record.values["perplexity"]) == pytest.approx(
        (loss / tokens, np.exp(nll / tokens)), rel=1e-6
    )
