from __future__ import annotations

import math

import pytest
import sacrebleu

from tfm_blocks.training.metrics import exact_match_by_group, token_scores, translation_scores

OUTPUTS = ["a man in a blue shirt .", "two dogs run in the snow", "no"]
REFERENCES = ["a man in a blue shirt is standing .", "two dogs run in the snow", "yes"]


def test_token_scores_are_means_over_tokens() -> None:
    scores = token_scores(loss=30.0, nll=20.0, correct=4.0, tokens=10.0)
    assert scores == {"loss": 3.0, "perplexity": pytest.approx(math.exp(2.0)), "token_accuracy": 0.4}


def test_a_huge_loss_has_infinite_perplexity_and_no_error() -> None:
    assert token_scores(1e9, 1e9, 0.0, 1.0)["perplexity"] == math.inf


@pytest.mark.parametrize("tokenizer", ["13a", "none"])
def test_translation_scores_are_those_of_sacrebleu(tokenizer: str) -> None:
    scores = translation_scores(OUTPUTS, REFERENCES, tokenizer)
    assert scores["bleu"] == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize=tokenizer).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    assert scores["exact_match"] == pytest.approx(1 / 3)


def test_groups_are_scored_apart() -> None:
    assert exact_match_by_group(["a", "b", "c"], ["a", "x", "c"], ["en", "de", "de"]) == {"en": 1.0, "de": 0.5}
    assert exact_match_by_group(["a"], ["a"], []) == {}
