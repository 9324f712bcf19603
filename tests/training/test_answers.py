"""Scores of answers, against naive loops over positions and over generated tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tfm_blocks.compose.model import compose_model
from tfm_blocks.data.layout import BOS, EOS, Layout
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared, prepare
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.language.spec import names
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.scoring.corpus import answer_statistics
from tfm_blocks.training.answers import AnswerScorer, answer_scores
from tfm_blocks.training.data import EvalStream, PlannedCorpus
from tfm_blocks.training.objective import Objective
from tfm_blocks.training.split_scorer import Generation
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

Made = tuple[Network, Prepared, ProbeSettings, Layout]


@pytest.fixture
def make(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    """Return a function that makes a network with random weights and the corpora of a task."""
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path))

    def made(model: str, task: str, **keys: Any) -> Made:
        sizes = {"train": 40, "val": 12, "test": 6, "batch": 4, "batch_tokens": 300}
        settings = ProbeSettings(kind="probe", task=task, size="lite", seed=1, **{**sizes, **keys})
        composed = compose_model(model, ["d_model=16", "d_ff=24", "layers=1", f"vocab={settings.vocab}"])
        network = build_network(check_model(composed.model, composed.sources), seed=2).eval()
        prepared = prepare(settings, settings.vocab, tell=lambda text: None)
        return network, prepared, settings, layout_of(prepared.train, names(network.spec.inputs))

    return made


@pytest.mark.parametrize(
    ("model", "task"),
    [("probe_decoder", "mqar"), ("probe_encoder", "parity"), ("probe_encoder", "reverse"), ("probe_seq2seq", "parity")],
)
def test_the_loss_at_scored_positions_matches_a_loop_over_all_positions(
    make: Callable[..., Made], model: str, task: str
) -> None:
    network, prepared, _, layout = make(model, task)
    batch = layout.batch(prepared.train, range(5))
    loss, _ = Objective(network, 0.1).loss(batch)
    ours = torch.autograd.grad(loss, list(network.parameters()))
    logits_BTV = network(**batch.inputs)
    total = torch.zeros(())
    for row, labels_T in enumerate(batch.labels_BT):
        for place, label in enumerate(labels_T):
            if label:
                total = total + F.cross_entropy(logits_BTV[row, place], label, label_smoothing=0.1)
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-6)
    theirs = torch.autograd.grad(total, list(network.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def score(made: Made, split: str, *, sentences: int = 100) -> tuple[dict[str, float], AnswerScorer]:
    network, prepared, settings, layout = made
    translator = None if layout.at_positions else Translator(network, prepared.tokenizer, prepared.train.columns)
    scorer = AnswerScorer(translator, prepared, Ranks(), settings.probe.chance)
    corpus = getattr(prepared, split)
    with torch.inference_mode():
        for batch in EvalStream(PlannedCorpus(corpus, layout, settings), Ranks()):
            scorer.count_rows(Objective(network, 0.0), batch)
        return scorer.score(corpus, Generation(sentences, Search(), nullcontext())), scorer


@pytest.mark.parametrize("model", ["probe_decoder", "probe_encoder"])
def test_answers_at_positions_are_the_largest_logits_there(make: Callable[..., Made], model: str) -> None:
    made = make(model, "mqar", vocab=16, test_lengths=[16, 32])
    network, prepared, settings, layout = made
    scores, scorer = score(made, "test")
    correct = {16: [], 32: []}
    for row in range(12):
        batch = layout.batch(prepared.test, [row])
        logits_TV = network(**batch.inputs)[0]
        right = [int(logits_TV[p].argmax() == label) for p, label in enumerate(batch.labels_BT[0]) if label]
        correct[logits_TV.shape[0]].append(right)
    for length, rows in correct.items():
        assert scores[f"accuracy@{length}"] == pytest.approx(np.mean(rows))
        assert scores[f"exact@{length}"] == np.mean([all(row) for row in rows])
    assert scores["accuracy"] == pytest.approx(np.mean([*correct.values()]))
    chance = settings.probe.chance
    assert scores["scaled_accuracy"] == pytest.approx((scores["accuracy"] - chance) / (1 - chance))
    assert "teacher_forced_accuracy" not in scores and len(scorer.outputs) == 12
    statistics = answer_statistics(scorer.outputs, [one[2] for one in scorer.samples])
    assert statistics["accuracy"][:, 0].mean() == pytest.approx(scores["accuracy"])


def decode(network: Network, prepared: Prepared, row: int, longest: int) -> list[int]:
    """Decode greedily, running the whole network for each token."""
    source = [*prepared.test.ids("src", row).tolist(), EOS]
    before, answer = ([BOS] if network.spec.sources else [*source, BOS]), []
    while len(answer) < longest:
        inputs = {"tgt": torch.tensor([before + answer])}
        if network.spec.sources:
            inputs["src"] = torch.tensor([source])
        logits_V = network(**inputs)[0, -1].clone()
        logits_V[: BOS + 1] = -torch.inf
        if (token := int(logits_V.argmax())) == EOS:
            break
        answer.append(token)
    return answer


@pytest.mark.grid
@pytest.mark.parametrize("model", ["probe_decoder", "probe_seq2seq"])
def test_generated_answers_match_a_naive_decoder_and_the_teacher_forced_score_is_another(
    make: Callable[..., Made], model: str
) -> None:
    made = make(model, "reverse", symbols=3, test_lengths=[4, 7])
    network, prepared, _, layout = made
    scores, scorer = score(made, "test")
    fractions, forced = [], []
    for row in range(12):
        correct = prepared.test.ids("tgt", row).tolist()
        answer = decode(network, prepared, row, 8)
        assert scorer.answers[row] == answer
        equal = sum(one == right for one, right in zip(answer, correct, strict=False))
        fractions.append(equal / max(len(answer), len(correct)))
        batch = layout.batch(prepared.test, [row])
        logits_TV = network(**batch.inputs)[0]
        due = [(p, int(label)) for p, label in enumerate(batch.labels_BT[0]) if label not in (0, EOS)]
        forced.append(np.mean([int(logits_TV[p].argmax()) == label for p, label in due]))
    assert scores["accuracy@4"] == pytest.approx(np.mean(fractions[:6]))
    assert scores["accuracy@7"] == pytest.approx(np.mean(fractions[6:]))
    assert scores["exact"] == np.mean([fraction == 1 for fraction in fractions])
    assert scores["teacher_forced_accuracy"] == pytest.approx(np.mean(forced))
    assert scores["teacher_forced_accuracy@7"] == pytest.approx(np.mean(forced[6:]))


def test_only_the_first_answers_of_a_validation_are_generated(make: Callable[..., Made]) -> None:
    scores, scorer = score(make("probe_seq2seq", "reverse", val=9), "val", sentences=2)
    assert len(scorer.outputs) == len(scorer.samples) == 2 and 0 <= scores["accuracy"] <= 1


def test_an_answer_with_extra_or_missing_tokens_is_not_exact() -> None:
    counts_R2 = np.array([[3, 3], [3, 4], [0, 0], [1, 2]], np.float64)  # the third row was not scored
    scores = answer_scores(counts_R2, ["5", "5", "9", "9"], 0.25)
    assert scores["accuracy"] == pytest.approx((1 + 0.75 + 0.5) / 3)
    assert scores["exact"] == pytest.approx(1 / 3) and scores["exact@5"] == 0.5
    assert scores["scaled_accuracy@9"] == pytest.approx((0.5 - 0.25) / 0.75)
    assert answer_scores(np.zeros((4, 2)), [], 0.5) == {}  # a validation that generates no answers
    assert answer_statistics(["a b c", "a b"], ["a b", "a b"])["accuracy"].tolist() == [[2 / 3, 1], [1, 1]]


def test_a_rank_without_answers_to_generate_has_the_teacher_forced_scores(make: Callable[..., Made]) -> None:
    """Ranks beyond the number of generated answers have none."""
    scores, scorer = score(make("probe_seq2seq", "reverse", val=9), "val", sentences=0)
    assert scorer.outputs == [] and "accuracy" not in scores and "teacher_forced_accuracy" in scores
