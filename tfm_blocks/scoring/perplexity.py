"""Perplexity of a language model on a text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tfm_blocks.data.encoding import split_rows
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.errors import DataError, Problem, RunError
from tfm_blocks.language.spec import TARGET
from tfm_blocks.metric_schema import PSEUDO
from tfm_blocks.network.graph import Network, evaluating
from tfm_blocks.runs.records import Score
from tfm_blocks.scoring.labels import Floats
from tfm_blocks.scoring.paired_test import score_with_interval
from tfm_blocks.translation.fill import Filler
from tfm_blocks.translation.translator import Translator

DEFAULT_CONTEXT = 512


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text, from `nll`, the sum of -log p over all tokens, eos of each document included, in nats.

    Words are separated by white space, and each end of a document counts as a word and a byte. Bytes are counted in the
    UTF-8 text. A `pseudo` perplexity leaves the ends out, and `unknown` tokens, which are read but not predicted.
    """

    nll: float
    tokens: int
    words: int
    bytes: int
    pseudo: bool = False
    unknown: int = 0

    @property
    def per_token(self) -> float:
        """Return e^(nll / tokens)."""
        return _exp(self.nll / self.tokens)

    @property
    def per_word(self) -> float:
        """Return e^(nll / words), which does not depend on the tokenizer."""
        return _exp(self.nll / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Return nll / (bytes · ln 2), which does not depend on the tokenizer."""
        return self.nll / self.bytes / math.log(2)


def _exp(x: float) -> float:
    """Return e^x, or infinity if it overflows."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


@torch.inference_mode()
def perplexity(
    translator: Translator, documents: Iterable[str], *, context: int, batch_tokens: int, inside: bool = False
) -> Perplexity:
    """Compute the perplexity of documents, packed as in training: rows of `context` tokens after bos, no blank ones.

    With `inside`, each row has tokens of one document. The bos with which a published tokenizer begins each document
    is read, but does not count.
    Raises RunError for a model that reads sources, and DataError for a text without words.
    """
    network = translator.network
    if translator.inputs:
        rule = f"reads {', '.join(translator.inputs)} besides the target, so it has no perplexity of plain text"
        raise RunError(Problem("model", rule, help="tfm evaluate RUN --src FILE --ref FILE"))
    texts = [text for text in documents if text.strip()]
    if not texts:
        raise DataError(Problem("--text", "has no words", help="name a file with text"))
    documents_ids = [[*ids, EOS] for ids in translator.encode(texts)]
    parts = documents_ids if inside else [list(chain.from_iterable(documents_ids))]
    rows = [torch.tensor(row) for ids in parts for row in split_rows(ids, context)]
    size = max(1, batch_tokens // context)
    batches = (pad_sequence(rows[start : start + size], batch_first=True) for start in range(0, len(rows), size))
    with evaluating(network):
        nll = sum(_nll(network, batch) for batch in batches)
    words, bytes = (sum(map(len, units)) + len(texts) for units in (map(str.split, texts), map(str.encode, texts)))
    tokens = sum(len(ids) - ids.count(BOS) for ids in parts)
    return Perplexity(float(nll), tokens, words, bytes)


def usual_context(trained: object, longest: float) -> int:
    """Return the context in tokens of a run that was `trained` with rows of a fixed length or not (None)."""
    return int(min((type(trained) is int and trained) or DEFAULT_CONTEXT, longest))


def pseudo_perplexity(filler: Filler, documents: Iterable[str], *, context: int, batch_tokens: int) -> Perplexity:
    """Compute the pseudo-perplexity of documents, as `pseudo_losses` does, without blank ones.

    Unknown tokens are counted. Raises DataError for a text without words that the tokenizer knows, and RunError for a
    run on pairs.
    """
    texts = [text for text in documents if text.strip()]
    rows = [filler.tokenizer.encode(text) for text in texts]
    nll, tokens = pseudo_losses(filler, rows, context=context, batch_tokens=batch_tokens).sum(0).tolist()
    if not tokens:
        rule = "has no words that the tokenizer of the run knows" if texts else "has no words"
        raise DataError(Problem("--text", rule, help="name a file with text"))
    words, bytes = (sum(map(len, parts)) for parts in (map(str.split, texts), map(str.encode, texts)))
    unknown = filler.tokenizer.count_unknown(rows)["unknown"]
    return Perplexity(nll, int(tokens), words, bytes, pseudo=True, unknown=unknown)


@torch.inference_mode()
def pseudo_losses(filler: Filler, texts: Sequence[Sequence[int]], *, context: int, batch_tokens: int) -> Floats:
    """Return the sum of -log p and the number of predicted tokens of each text, given by its ids: losses_D2.

    Each token is predicted from all other tokens of its text (Salazar et al. 2020), in a forward pass for each token.
    A text of more than `context` tokens is split into pieces. Special and unknown tokens are not predicted. Raises
    RunError for a run on pairs.
    """
    if filler.sources:
        rule = f"scores documents, but the run predicts each text after {', '.join(filler.sources)}"
        raise RunError(Problem("--text", rule, help="name a run of data=lm"))
    read = filler.tokenizer.conventions.source
    size = max(1, context - len(read([EOS])) + 1)
    losses_D2 = np.zeros((len(texts), 2))
    with evaluating(filler.network):
        for loss_2, ids in zip(losses_D2, texts, strict=True):
            for start in range(0, len(ids), size):
                loss_2 += _pseudo_losses_of_row(filler, read(ids[start : start + size]), batch_tokens)
    return losses_D2


def _pseudo_losses_of_row(filler: Filler, ids: Sequence[int], batch_tokens: int) -> tuple[float, int]:
    network, special, nll = filler.network, filler.tokenizer.special_ids, 0.0
    row_S = torch.tensor(ids, device=network.device)
    places_N = torch.tensor([place for place, id in enumerate(ids) if id not in special], device=row_S.device)
    size = max(1, batch_tokens // len(ids))
    for start in range(0, len(places_N), size):
        part_N = places_N[start : start + size]
        number_N = torch.arange(len(part_N), device=row_S.device)
        masked_NS = row_S.repeat(len(part_N), 1).index_put((number_N, part_N), torch.tensor(filler.mask))
        x_ND = network.trunk_with_losses({filler.input: masked_NS})[0][number_N, part_N]
        nll += float(cross_entropy(network.head(x_ND).float(), row_S[part_N], reduction="sum"))
    return nll, len(places_N)


def pseudo_score(losses_D2: Floats, filler: Filler, *, context: int) -> tuple[Score, Floats] | None:
    """Return the pseudo-perplexity with its interval over the texts with predicted tokens, and their losses.

    The signature names what it depends on. None if no text has predicted tokens.
    """
    losses_D2 = losses_D2[losses_D2[:, 1] > 0]
    if not len(losses_D2):
        return None
    value, half = score_with_interval(PSEUDO, losses_D2)
    tokenizer = hashlib.sha256(filler.tokenizer.text.encode()).hexdigest()[:8]
    return Score(PSEUDO, value, half, f"texts:{len(losses_D2)}|context:{context}|tokenizer:{tokenizer}"), losses_D2


def _nll(network: Network, labels_BT: Tensor) -> float:
    labels_BT = labels_BT.to(network.device)
    tgt_BT = torch.cat((torch.full_like(labels_BT[:, :1], BOS), labels_BT[:, :-1]), 1)
    logits_BTV = network(**{TARGET: tgt_BT}).float()
    labels_BT = labels_BT.masked_fill(labels_BT == BOS, 0)
    return float(cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=0, reduction="sum"))
