from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.prepare import prepare
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.plugins import load_plugins
from tfm_blocks.training.data import RunData, TrainStream
from tfm_blocks.training.module import DivergedError, TrainingModule
from tfm_blocks.training.processes import Ranks
from tfm_blocks.training.settings import read_run

Made = tuple[TrainingModule, RunData]


def make(composed: Composed) -> Made:
    settings = read_run(composed.mapping)
    load_plugins(settings.plugins)
    prepared = prepare(settings.data, 300, 1, tell=lambda text: None)
    network = build_network(check_model(composed.with_vocab(prepared.tokenizer.size).model), seed=1)
    module = TrainingModule(network, prepared, settings, Ranks())
    return module, RunData(prepared, settings.data, seed=1, ranks=Ranks())


def trainer(steps: int) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, limit_val_batches=0, enable_model_summary=False, **quiet
    )


def naive_step(made: Made, network: torch.nn.Module) -> torch.Tensor:
    """The mean loss of the first step, pair by pair without padding, by torch's cross entropy."""
    data = made[1]
    stream = TrainStream(data.prepared.train, data.settings, seed=1, start=0, ranks=Ranks())
    (step,) = islice(stream, 1)
    total = torch.zeros(())
    for batch in step.batches:
        for src_S, tgt_T, labels_T in zip(batch.src_BS, batch.tgt_BT, batch.labels_BT, strict=True):
            kept = labels_T != 0
            logits_TV = network(src=src_S[src_S != 0][None], tgt=tgt_T[kept][None])[0]
            total = total + F.cross_entropy(logits_TV, labels_T[kept], label_smoothing=0.1, reduction="sum")
    return total / step.tokens


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


def test_clipping_bounds_the_whole_gradient_and_logs_its_norm_before(small: Callable[..., Composed]) -> None:
    free, data = make(small("trainer.log_every=1"))
    trainer(1).fit(free, datamodule=data)
    clipped, data = make(small("trainer.log_every=1", "trainer.clip=0.01"))
    trainer(1).fit(clipped, datamodule=data)
    assert clipped.latest["train/gradient_norm"] == free.latest["train/gradient_norm"] > 0.01
    squares = [(one.grad**2).sum() for one in clipped.network.parameters() if one.grad is not None]
    assert torch.stack(squares).sum().sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_is_no_number_stops_the_run_with_the_weights_of_the_step_before(
    small: Callable[..., Composed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    load_plugins(["faulty"])
    harmed, data = make(
        small("plugins=[faulty]", "++model.graph.bad={block: faulty, harm: poison, sound: 2, after: src_pos}")
    )
    with pytest.raises(DivergedError, match="diverged after 2 steps: loss nan") as caught:
        trainer(6).fit(harmed, datamodule=data)
    assert caught.value.exit_status == 3
    sound, data = make(small())
    trainer(2).fit(sound, datamodule=data)
    for one, other in zip(harmed.network.parameters(), sound.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_validation_scores_are_those_of_all_pairs_one_by_one(small: Callable[..., Composed]) -> None:
    module, data = make(small("data.batch_tokens=200"))
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(module, data, verbose=False)
    losses, right, tokens = 0.0, 0, 0
    for pair in range(len(data.prepared.val)):
        src, tgt = (ids(pair).tolist() for ids in (data.prepared.val.src_ids, data.prepared.val.tgt_ids))
        with torch.no_grad():
            logits_TV = module.network(src=torch.tensor([[*src, 2]]), tgt=torch.tensor([[1, *tgt]]))[0]
        labels_T = torch.tensor([*tgt, 2])
        losses += F.cross_entropy(logits_TV, labels_T, label_smoothing=0.1, reduction="sum").item()
        right += int((logits_TV.argmax(1) == labels_T).sum())
        tokens += len(labels_T)
    assert module.latest["val/loss"] == pytest.approx(losses / tokens, rel=1e-5)
    assert module.latest["val/token_accuracy"] == right / tokens
    assert len(module.outputs) == 4


def test_dropout_of_a_step_does_not_depend_on_what_was_drawn_before(small: Callable[..., Composed]) -> None:
    weights = []
    for draws in (0, 17):
        module, data = make(small("dropout=0.3"))
        torch.rand(draws)
        trainer(3).fit(module, datamodule=data)
        weights.append([parameter.detach().clone() for parameter in module.network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
