from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.conftest import padded
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.errors import RunError
from tfm_blocks.language.spec import names
from tfm_blocks.metric_schema import columns
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.tracking.lightning_loggers import CsvLogger
from tfm_blocks.training.data import PlannedCorpus, TrainStream
from tfm_blocks.training.data_module import RunData
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.training.non_finite import SKIPPED, DivergedError, NonFiniteSteps
from tfm_blocks.training.settings import read_run

Made = tuple[TrainingModule, RunData]


def make(composed: Composed, ranks: Ranks = Ranks()) -> Made:  # noqa: B008
    settings = read_run(composed.mapping)
    load_plugins(settings.plugins)
    prepared = prepare(settings.data, 300, tell=lambda text: None)
    network = build_network(check_model(composed.with_vocab(prepared.tokenizer.size).model), seed=1)
    skipped = NonFiniteSteps(
        Path(os.environ["TFM_BLOCKS_CACHE"]) / SKIPPED, prepared.train, settings.trainer.patience_nan
    )
    module = TrainingModule(network, prepared, settings, ranks, skipped)
    layout = layout_of(prepared.train, names(network.spec.inputs))
    return module, RunData(prepared, layout, settings.data, seed=1, ranks=Ranks())


def trainer(steps: int, **options: Any) -> Trainer:
    """Return a trainer that neither validates nor saves nor logs, unless `options` change that."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(max_steps=steps, max_epochs=-1, **{"accelerator": "cpu", "limit_val_batches": 0, **quiet, **options})


def validating(steps: int, folder: Path, every: int = 2, **options: Any) -> Trainer:
    """Return a trainer that validates at an interval of steps."""
    often = {"val_check_interval": every, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    return trainer(steps, limit_val_batches=1.0, default_root_dir=folder, **often, **options)


def feed_of(data: RunData) -> PlannedCorpus:
    return PlannedCorpus(data.prepared.train, data.layout, data.settings)


def naive_step(made: Made, network: torch.nn.Module) -> torch.Tensor:
    """Return the mean loss of the first step by torch's cross entropy, pair by pair without padding."""
    data = made[1]
    stream = TrainStream(feed_of(data), seed=1, start=0, ranks=Ranks())
    (step,) = islice(stream, 1)
    total = torch.zeros(())
    for batch in step.batches:
        for src_S, tgt_T, labels_T in zip(batch.inputs["src"], batch.inputs["tgt"], batch.labels_BT, strict=True):
            kept = labels_T != 0
            logits_TV = network(src=src_S[src_S != 0][None], tgt=tgt_T[kept][None])[0]
            total = total + F.cross_entropy(logits_TV, labels_T[kept], label_smoothing=0.1, reduction="sum")
    return total / step.tokens


@pytest.mark.grid
def test_a_step_moves_the_weights_by_the_gradient_of_the_mean_loss_over_all_micro_batches(
    small: Callable[..., Composed],
) -> None:
    composed = small("data.batch_tokens=200", "optimizer.eps=1.0", "schedule.warmup=1", "schedule.peak=1.0")
    made = make(composed)
    reference, _ = make(composed)
    loss = naive_step(made, reference.network)
    gradients = torch.autograd.grad(loss, list(reference.network.parameters()))
    trainer(1).fit(made[0], datamodule=made[1])
    for new, old, gradient in zip(made[0].network.parameters(), reference.network.parameters(), gradients, strict=True):
        torch.testing.assert_close(new, old - gradient / (gradient.abs() + 1.0), rtol=1e-4, atol=1e-6)


def test_experts_of_an_encoder_learn_the_same_however_a_step_is_split(small: Callable[..., Composed]) -> None:
    """Their loss is weighted by the target tokens of each source, whose number varies."""
    mixture = "++model.graph.encoder.layer.ffn={block: moe, experts: 4, d_ff: 8, balance: 1.0}"
    weights = []
    for cap in ("data.batch_tokens=150", "data.batch_tokens=4000"):
        module, data = make(small(mixture, cap, "optimizer.eps=1.0", "schedule.warmup=1", "schedule.peak=1.0"))
        module.network.double()
        trainer(1).fit(module, datamodule=data)
        weights.append([parameter.detach() for parameter in module.network.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def plain_loop(made: Made, network: torch.nn.Module, steps: int, *, peak: float, warmup: int, clip: float) -> None:
    """Train `network` on the planned pairs with torch alone, each step as one batch."""
    corpus, optimizer = made[1].prepared.train, torch.optim.Adam(network.parameters(), betas=(0.9, 0.98), eps=1e-9)
    plans = chain.from_iterable(feed_of(made[1]).plan(seed=1, epoch=epoch) for epoch in count())
    for number, plan in enumerate(islice(plans, steps), 1):
        sources, targets = ([corpus.ids(name, pair).tolist() for pair in plan.rows_N] for name in ("src", "tgt"))
        logits_BTV = network(src=padded([[*ids, 2] for ids in sources]), tgt=padded([[1, *ids] for ids in targets]))
        labels_BT = padded([[*ids, 2] for ids in targets])
        optimizer.zero_grad()
        F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=0, label_smoothing=0.1).backward()
        norm = torch.cat([one.grad.flatten() for one in network.parameters() if one.grad is not None]).norm()
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad /= max(1.0, norm.item() / clip)
        optimizer.param_groups[0]["lr"] = peak * min(number / warmup, (warmup / number) ** 0.5)
        optimizer.step()


def test_twenty_steps_leave_the_weights_of_a_plain_loop(small: Callable[..., Composed]) -> None:
    """Compute in float64, because Adam amplifies the rounding errors of zero gradients."""
    composed = small("data.batch_tokens=200", "trainer.clip=0.5", "schedule.peak=5e-3", "schedule.warmup=4")
    made, reference = make(composed), make(composed)[0].network.double()
    begin = [parameter.detach().clone() for parameter in reference.parameters()]
    made[0].network.double()
    trainer(20).fit(made[0], datamodule=made[1])
    plain_loop(made, reference, 20, peak=5e-3, warmup=4, clip=0.5)
    for new, expected, old in zip(made[0].network.parameters(), reference.parameters(), begin, strict=True):
        torch.testing.assert_close(new, expected, rtol=0, atol=1e-6)
        assert (new - old).abs().max() > 1e-3


@pytest.mark.grid
def test_twenty_steps_in_bf16_end_within_two_percent_of_the_loss_in_fp32(small: Callable[..., Composed]) -> None:
    """The loss of an untrained model is ln 300 = 5.7."""
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        module, data = make(small("trainer.log_every=10", "schedule.peak=1e-2", "schedule.warmup=4"))
        trainer(20, precision=precision).fit(module, datamodule=data)  # type: ignore[arg-type]
        losses.append(module.latest["train/loss"])
    assert losses[1] < 5 and losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_in_bf16_the_backward_pass_and_the_optimizer_run_outside_autocast(small: Callable[..., Composed]) -> None:
    module, data = make(small("optimizer=lion"))
    autocast: dict[str, bool] = {}

    def note(moment: str) -> Callable[..., None]:
        return lambda *_: autocast.update({moment: torch.is_autocast_enabled("cpu")})

    block, run = module.network.calls[-1].block, trainer(1, precision="bf16-mixed")
    block.register_forward_hook(note("forward"))
    block.register_full_backward_hook(note("backward"))
    configure = module.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = configure()
        optimizer.members[0].register_step_pre_hook(note("step"))
        return optimizer

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    run.fit(module, datamodule=data)
    assert autocast == {"forward": True, "backward": False, "step": False}


def test_a_checkpoint_with_other_groups_of_weights_is_refused(small: Callable[..., Composed]) -> None:
    optimizer = make(small())[0].configure_optimizers()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    first, *others = state["param_groups"]
    parts = [first | {"params": first["params"][part]} for part in (slice(1), slice(1, None))]
    with pytest.raises(RunError, match="checkpoint, which was written by another version of tfm-blocks") as raised:
        optimizer.load_state_dict(state | {"param_groups": [*parts, *others]})
    assert "init_from=RUN" in raised.value.problems[0].help


def test_clipping_bounds_the_whole_gradient_and_logs_its_norm_before(small: Callable[..., Composed]) -> None:
    free, data = make(small("trainer.log_every=1"))
    trainer(1).fit(free, datamodule=data)
    clipped, data = make(small("trainer.log_every=1", "trainer.clip=0.01"))
    trainer(1).fit(clipped, datamodule=data)
    assert clipped.latest["train/gradient_norm"] == free.latest["train/gradient_norm"] > 0.01
    squares = [(one.grad**2).sum() for one in clipped.network.parameters() if one.grad is not None]
    assert torch.stack(squares).sum().sqrt().item() == pytest.approx(0.01, rel=1e-3)
    assert clipped.latest["train/gradient_norm_clipped"] == pytest.approx(0.01, rel=1e-3)
    assert free.latest["train/gradient_norm_clipped"] == free.latest["train/gradient_norm"]


def test_the_tokens_that_a_run_has_read_match_the_plan(small: Callable[..., Composed]) -> None:
    module, data = make(small("trainer.log_every=1"))
    trainer(9).fit(module, datamodule=data)  # an epoch has fewer steps
    plans = [feed_of(data).plan(seed=1, epoch=epoch) for epoch in range(9)]
    assert len(plans[0]) < 9
    assert module.latest["train/tokens"] == sum(step.tokens for step in islice(chain.from_iterable(plans), 9))


def test_perplexity_in_training_matches_the_loss_without_smoothing(small: Callable[..., Composed]) -> None:
    module, data = make(small("trainer.log_every=1", "label_smoothing=0"))
    trainer(2).fit(module, datamodule=data)
    assert module.latest["train/perplexity"] == pytest.approx(math.exp(module.latest["train/loss"]), rel=1e-5)
    smoothed, data = make(small("trainer.log_every=1"))
    trainer(1).fit(smoothed, datamodule=data)
    plain, data = make(small("trainer.log_every=1", "label_smoothing=0"))
    trainer(1).fit(plain, datamodule=data)
    assert smoothed.latest["train/perplexity"] == pytest.approx(plain.latest["train/perplexity"], rel=1e-5)


def harmed(small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Made:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    load_plugins(["faulty"])
    return make(small("plugins=[faulty]", "trainer.log_every=1", *overrides))


def poison(*steps: int) -> str:
    """Make the loss NaN in these steps of a run, counted from 1."""
    return f"++model.graph.bad={{block: faulty, harm: poison, sound: 0, steps: {'-'.join(map(str, steps))}-, after: src_pos}}"


def test_steps_with_gradients_that_are_not_finite_are_skipped_and_their_lines_recorded(
    small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights and Adam's step count equal the weights and the count of a run with only the other steps."""
    monkeypatch.chdir(os.environ["TFM_BLOCKS_CACHE"].rpartition("/")[0])
    module, data = harmed(small, monkeypatch, "trainer.patience_nan=3", poison(2, 3, 5))
    run = trainer(6)
    run.fit(module, datamodule=data)
    assert module.latest["train/skipped"] == 3
    steps = {int(value["step"]) for value in run.optimizers[0].state_dict()["state"].values()}
    assert steps == {3}
    lines = [json.loads(line) for line in module.skipped.path.read_text().splitlines()]  # type: ignore[union-attr]
    assert {line["step"] for line in lines} == {2, 3, 5}
    plan = feed_of(data).plan(seed=1, epoch=0)
    second = [line["row"] for line in lines if line["step"] == 2]
    assert second == plan[1].rows_N.tolist()
    assert lines[0]["src"] == data.prepared.train.text["src"][second[0]]
    with torch.no_grad():
        assert all(parameter.isfinite().all() for parameter in module.network.parameters())


def test_too_many_skipped_steps_in_a_row_end_the_run_with_the_weights_of_the_step_before(
    small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, data = harmed(small, monkeypatch, "trainer.patience_nan=2", poison(3, 4))
    with pytest.raises(DivergedError, match="diverged after 2 steps: the loss or the gradient of 2 steps") as caught:
        trainer(6).fit(module, datamodule=data)
    assert caught.value.exit_status == 3
    sound, data = make(small())
    trainer(2).fit(sound, datamodule=data)
    for one, other in zip(module.network.parameters(), sound.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_resume_with_a_patience_below_the_skipped_steps_ends_the_run(
    small: Callable[..., Composed],
) -> None:
    skipped = make(small("trainer.patience_nan=2"))[0].skipped
    skipped.in_row = 3  # restored from the checkpoint
    skipped.note(torch.tensor(True), 9, [])
    with pytest.raises(DivergedError, match="diverged after 5 steps: the loss or the gradient of 4 steps"):
        skipped.flush()


def test_an_interrupted_search_stops_and_logs_nothing(
    small: Callable[..., Composed],
) -> None:
    """The signal arrives after the tokens of the only batch are scored and all ranks agreed to search."""
    module, data = make(small("data.batch_tokens=4000"))
    signals = [0, 0]
    module.stop_signal = lambda: signals.pop() if signals else 15
    run = trainer(2)
    run.limit_val_batches, run.val_check_interval = 1.0, 2
    run.fit(module, datamodule=data)
    assert module.abandoned and module.scorer.outputs == [""] * 4
    assert not any(name.startswith("val/") for name in module.latest)


@pytest.mark.grid
def test_validation_scores_match_all_pairs_one_by_one(small: Callable[..., Composed]) -> None:
    module, data = make(small("data.batch_tokens=200"))
    trainer(0, limit_val_batches=1.0).validate(module, data, verbose=False)
    losses, right, tokens = 0.0, 0, 0
    for pair in range(len(data.prepared.val)):
        src, tgt = (data.prepared.val.ids(name, pair).tolist() for name in ("src", "tgt"))
        with torch.no_grad():
            logits_TV = module.network(src=torch.tensor([[*src, 2]]), tgt=torch.tensor([[1, *tgt]]))[0]
        labels_T = torch.tensor([*tgt, 2])
        losses += F.cross_entropy(logits_TV, labels_T, label_smoothing=0.1, reduction="sum").item()
        right += int((logits_TV.argmax(1) == labels_T).sum())
        tokens += len(labels_T)
    assert module.latest["val/loss"] == pytest.approx(losses / tokens, rel=1e-5)
    assert module.latest["val/token_accuracy"] == right / tokens
    assert len(module.scorer.outputs) == 4


def test_scores_of_a_corpus_of_a_mix_are_those_of_its_text_alone(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    for name, words in (("a", ("red boat", "rotes boot")), ("b", ("big dog", "großer hund"))):
        for side, text in zip(("src", "tgt"), words, strict=True):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{text} {number % 3}\n" for number in range(12)))

    def scores(val_of_b: str) -> dict[str, float]:
        files = "train: {src: b.src, tgt: b.tgt}, val: " + val_of_b
        text = ("data=text", f"data.dir={tmp_path}", "data.train={src: a.src, tgt: a.tgt}", "data.test=null")
        mix = "data.mix={a: {weight: 2}, b: {%s}}" % files  # noqa: UP031
        module, data = make(small(*text, "data.val={src: a.src, tgt: a.tgt}", mix, "trainer.validate_sentences=10"))
        trainer(0, limit_val_batches=1.0).validate(module, data, verbose=False)
        return module.latest

    both, first = scores("{src: b.src, tgt: b.tgt}"), scores("null")
    keys = ("loss", "perplexity", "token_accuracy")
    assert [both[f"val/{key}/a"] for key in keys] == pytest.approx([first[f"val/{key}"] for key in keys], rel=1e-5)
    assert both["val/loss/b"] != pytest.approx(both["val/loss/a"], rel=1e-3)
    low, high = sorted([both["val/loss/a"], both["val/loss/b"]])
    assert low < both["val/loss"] < high
    assert {"val/bleu/a", "val/bleu/b", "val/chrf/b", "val/exact_match/a"} <= set(both)
    assert "val/bleu/b" not in first


def test_dropout_of_a_step_does_not_depend_on_what_was_drawn_before(small: Callable[..., Composed]) -> None:
    weights = []
    for draws in (0, 17):
        module, data = make(small("dropout=0.3"))
        torch.rand(draws)
        trainer(3).fit(module, datamodule=data)
        weights.append([parameter.detach().clone() for parameter in module.network.parameters()])
    assert max(float((one - other).abs().max()) for one, other in zip(*weights, strict=True)) < 1e-6


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_ranks_draw_different_dropout_and_differ_in_nothing_else(
    small: Callable[..., Composed], dropout: float
) -> None:
    weights = []
    for rank in range(2):
        module, data = make(small(f"dropout={dropout}"), Ranks(rank, 2))
        trainer(1).fit(module, datamodule=data)  # the data are rank 0's of one
        weights.append([parameter.detach() for parameter in module.network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True)) == (dropout == 0)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_compiled_trunk_has_the_same_losses(small: Callable[..., Composed], dropout: float) -> None:
    """Micro-batches of many shapes, with the same dropout masks."""
    losses = []
    for compiled in (False, True):
        overrides = ("trainer.log_every=1", "data.batch_tokens=200", f"dropout={dropout}")
        module, data = make(small(f"trainer.compile={compiled}", *overrides))
        logged: list[float] = []
        log = module._log
        module._log = lambda scores, split, logged=logged, log=log: (logged.append(scores["loss"]), log(scores, split))  # type: ignore[assignment,misc]
        trainer(6).fit(module, datamodule=data)
        losses.append(logged)
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def test_layers_that_are_computed_again_leave_the_same_weights(small: Callable[..., Composed]) -> None:
    weights = []
    for again in ("false", "true"):
        module, data = make(small(f"trainer.activation_checkpointing={again}", "dropout=0.3", "layers=2"))
        trainer(4).fit(module, datamodule=data)
        weights.append([parameter.detach() for parameter in module.network.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class Record(Callback):
    """Record the metrics that callbacks see after each validation and each logged step."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], dict[str, float]] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer, "val")

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step % 2 == 0:
            self._keep(trainer, "train")

    def _keep(self, trainer: Trainer, split: str) -> None:
        values = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith(split)}
        self.rows[trainer.global_step, split] = values


@pytest.mark.grid
def test_callbacks_of_an_own_trainer_see_the_values_of_metrics_csv(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    module, data = make(small("trainer.log_every=2"))
    ours, theirs = CsvLogger(tmp_path / "metrics.csv", columns([], module.scorer.exact.groups)), CSVLogger(tmp_path)
    seen = Record()
    validating(4, tmp_path, callbacks=[seen], logger=[ours, theirs]).fit(module, data)
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 2, 4, 4], "each row is written once"
    for row in rows:
        split = "val" if "val/loss" in row else "train"
        shown = {name: value for name, value in row.items() if name.startswith(split)}
        assert {name: seen.rows[int(row["step"]), split][name] for name in shown} == shown
    theirs.save()
    (path,) = tmp_path.rglob("lightning_logs/*/metrics.csv")
    assert read_rows(path) == rows, "a logger of Lightning gets the same rows"


@pytest.mark.grid
def test_callbacks_of_lightning_can_monitor_the_metrics_of_training(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    module, data = make(small("trainer.log_every=2", "schedule.peak=1e-9"))
    stop = EarlyStopping("val/bleu", mode="max", patience=1, min_delta=100.0)
    best = ModelCheckpoint(tmp_path, "{step}", monitor="val/loss")
    last = ModelCheckpoint(tmp_path / "train", "{step}", monitor="train/loss")
    run = validating(50, tmp_path, callbacks=[stop, best, last], enable_checkpointing=True)
    run.fit(module, data)
    assert run.global_step == 4, "the second validation did not improve"
    assert best.best_model_score is not None
    assert best.best_model_score.item() <= module.latest["val/loss"]
    assert Path(best.best_model_path).is_file() and Path(last.best_model_path).is_file()
