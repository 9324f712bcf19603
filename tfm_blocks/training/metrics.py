"""What is measured: its names, the pace of training, and the scores of translations."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tfm_blocks.translation.evaluate import metrics

TRAIN = ("train/loss", "train/lr", "train/gradient_norm", "train/tokens_per_second")
SCORES = ("loss", "perplexity", "token_accuracy", "bleu", "chrf", "exact_match")
COLUMNS = (*TRAIN, *(f"{split}/{score}" for split in ("val", "test") for score in SCORES))


class Pace:
    """Target tokens a second since the last reading, validation left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted."""
        self.tokens, self.begun = 0, time.perf_counter()

    def count(self, tokens: int) -> None:
        """Adds the tokens of a step, over all ranks."""
        self.tokens += tokens

    def read(self) -> float:
        """Tokens a second, and begins anew."""
        pace = self.tokens / max(time.perf_counter() - self.begun, 1e-9)
        self.restart()
        return pace


def token_scores(loss: float, nll: float, correct: float, tokens: float) -> dict[str, float]:
    """From sums over target tokens, eos included: mean loss, e^(mean nll), and the share that is the likeliest."""
    mean = nll / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return {"loss": loss / tokens, "perplexity": perplexity, "token_accuracy": correct / tokens}


def translation_scores(outputs: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, float]:
    """Corpus BLEU and chrF as sacreBLEU has them, 0 to 100, and the share of equal lines, 0 to 1."""
    equal = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    asked = metrics(tokenizer, tokenised=False)
    return {
        "bleu": asked["BLEU"].corpus_score(outputs, [references]).score,
        "chrf": asked["chrF"].corpus_score(outputs, [references]).score,
        "exact_match": equal / len(outputs),
    }


def exact_match_by_group(outputs: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, float]:
    """The share of equal lines of each group, groups in their order of appearance; empty without groups."""
    equal: dict[str, list[bool]] = {}
    for output, reference, group in zip(outputs, references, groups, strict=False):
        equal.setdefault(group, []).append(output == reference)
    return {group: sum(hits) / len(hits) for group, hits in equal.items()}
