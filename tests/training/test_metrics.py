from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import torch.distributed

from tests.conftest import published_words
from tfm_blocks.data.layout import batch_of
from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.training.data import StepBatches
from tfm_blocks.training.evaluation import text_ids
from tfm_blocks.training.metrics import ExactMatch, LengthRatio, StepSums, Throughput, TokenScores, text_scores

OUTPUTS = ["a man in a blue shirt .", "two dogs run in the snow", "no"]
REFERENCES = ["a man in a blue shirt is standing .", "two dogs run in the snow", "yes"]


def test_token_scores_are_means_over_tokens() -> None:
    scores = TokenScores()
    for part in (10.0, 20.0):
        scores.update(torch.tensor(part), torch.tensor(part * 2 / 3), torch.tensor(2), 5, 5)
    assert scores.compute() == {"loss": 3.0, "perplexity": pytest.approx(math.exp(2.0)), "token_accuracy": 0.4}


def test_a_huge_loss_has_infinite_perplexity_and_no_error() -> None:
    scores = TokenScores()
    scores.update(torch.tensor(1e9), torch.tensor(1e9), torch.tensor(0), 1, 1)
    assert scores.compute()["perplexity"] == math.inf


@pytest.mark.parametrize("tokenizer", ["13a", "none"])
def test_text_scores_match_sacrebleu(tokenizer: str) -> None:
    scores = text_scores(OUTPUTS, REFERENCES, tokenizer)
    assert scores["bleu"] == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize=tokenizer).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score


def test_groups_are_scored_apart() -> None:
    exact = ExactMatch(["en", "de", "fr"])
    exact.update(["a", "b", "c"], ["a", "x", "c"], ["en", "de", "de"])
    assert exact.compute() == {"exact_match": 2 / 3, "exact_match/en": 1.0, "exact_match/de": 0.5}
    plain = ExactMatch()
    plain.update(["a"], ["a"])
    assert plain.compute() == {"exact_match": 1.0}


def test_the_length_ratio_is_below_1_where_translations_are_too_short() -> None:
    ratio = LengthRatio()
    ratio.update([[5, 6], [7]], [[5, 6, 7, 8], [7, 8]])
    assert ratio.compute() == {"length_ratio": 0.5}


@pytest.mark.parametrize("around", [{"before": (10,), "after": (2, 10)}, {"before": (10,), "of_targets": False}])
def test_special_tokens_around_a_target_do_not_count_for_its_length(around: dict[str, Any]) -> None:
    tokenizer = published_words(**around)
    assert text_ids(tokenizer, ["a red boat", ""]) == [[5, 7, 10], []]


def step(tokens: int) -> StepBatches:
    ids_BN = torch.tensor([[5] * tokens + [0]])
    return StepBatches(10, [batch_of({"tgt": ids_BN}, ids_BN)])


def counted(rank: int) -> StepSums:
    """Rank 0 has a step with loss 6 and a skipped step, rank 1 a step with loss 12 and a skipped step."""
    sums = StepSums(["experts"])
    good, bad = torch.tensor(False), torch.tensor(True)
    sums.update(torch.tensor([6.0 * (rank + 1), 4.0, 1.0]), step(2 + rank), torch.tensor(0.5), good)
    sums.update(torch.tensor([math.nan] * 3), step(4), torch.tensor(math.nan), bad)
    return sums


def test_a_skipped_step_counts_as_skipped_and_nowhere_else() -> None:
    sums = counted(0)
    scores = {"loss": 3.0, "perplexity": math.exp(2), "aux_loss/experts": 0.5}
    assert sums.read() == scores | {"gradient_norm": 0.5, "padding": 2 / 8, "skipped": 1.0}
    sums.update(torch.tensor([math.nan] * 3), step(4), torch.tensor(math.nan), torch.tensor(True))
    assert sums.read() == {"gradient_norm": 0.5, "padding": 1 / 5, "skipped": 2.0}


def reduce(ranks: Ranks, folder: Path) -> None:
    """Check the counts over all ranks, also after loading a checkpoint."""
    torch.distributed.init_process_group("gloo")
    sums, pace, exact = counted(ranks.rank), Throughput(), ExactMatch(["en", "de"])
    pace.update(3 + ranks.rank, 0.0)
    exact.update(["a"], ["a" if ranks.rank else "b"], ["de" if ranks.rank else "en"])
    again = StepSums(["experts"])
    again.restore(sums.kept(), ranks.rank)
    scores = {"loss": 3.6, "perplexity": math.exp(8 / 5), "aux_loss/experts": 0.4}
    assert sums.read() == again.read() == scores | {"gradient_norm": 0.5, "padding": 4 / 17, "skipped": 1.0}
    assert pace.compute().tolist() == [7.0, 0.0]
    assert exact.compute() == {"exact_match": 0.5, "exact_match/en": 0.0, "exact_match/de": 1.0}
    (folder / str(ranks.rank)).touch()
    torch.distributed.destroy_process_group()


@pytest.mark.grid
def test_metrics_cover_all_ranks(tmp_path: Path) -> None:
    spawn_ranks(reduce, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
