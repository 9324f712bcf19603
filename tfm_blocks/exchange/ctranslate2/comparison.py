"""Compare what CTranslate2 computes with the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.exchange.certificate import LogProbabilities, Rows, Translations, compare_with_engine
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.scoring.corpus import metrics, score
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

SEARCH = Search(beam=4, penalty="plain", alpha=1.0, longest=(0.0, 256))
BATCH = 32  # sentences


def compare_log_p(engine: Any, network: Network, subwords: Sequence[str]) -> LogProbabilities:
    """Compare the log probabilities of random sentences; CTranslate2 gives padding and bos the probability 0."""

    def theirs(rows: Rows) -> list[list[float]]:
        return _log_p_of_engine(engine, [[_texts(row, subwords) for row in rows[name]] for name in rows], subwords)

    return compare_with_engine(network, theirs, Tokenizer.EOS)


def compare_translations(
    engine: Any, translator: Translator, subwords: Sequence[str], sources: Sequence[str], references: Sequence[str]
) -> Translations:
    """Compare the output of beam search with that of the run, and its BLEU if there are references."""
    ours = [best.text for best, *_ in translator.search(sources, SEARCH)]
    theirs = _translations_of_engine(engine, translator, subwords, sources)
    settings = {"beam": SEARCH.beam, "length penalty": f"n^{SEARCH.alpha:g}"}
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    if not references:
        return Translations(len(ours), equal, settings)
    bleu = {"BLEU": metrics("13a", tokenised=False)["BLEU"]}
    scores = [score(outputs, references, bleu)[0] for outputs in (theirs, ours)]
    return Translations(len(ours), equal, settings, scores[0].value, scores[1].value, scores[0].signature)


def _translations_of_engine(
    engine: Any, translator: Translator, subwords: Sequence[str], sources: Sequence[str]
) -> list[str]:
    """Translate with the settings of SEARCH; blank lines stay blank, as in the run."""
    ids = {text: id for id, text in enumerate(subwords)}
    results = engine.translate_batch(
        [_texts(row, subwords) for row in translator.tokenizer.encode_batch(list(sources))],
        beam_size=SEARCH.beam,
        length_penalty=SEARCH.alpha,
        max_decoding_length=int(min(SEARCH.longest[1], translator.network.longest(TARGET).tokens)),
        max_batch_size=BATCH,
    )
    outputs = [translator.tokenizer.decode([ids[text] for text in result.hypotheses[0]]) for result in results]
    return [output if source.strip() else "" for source, output in zip(sources, outputs, strict=True)]


def _texts(ids: Sequence[int] | Tensor, subwords: Sequence[str]) -> list[str]:
    return [subwords[int(id)] for id in ids]


def _log_p_of_engine(engine: Any, texts: Sequence[list[list[str]]], subwords: Sequence[str]) -> list[list[float]]:
    """Return the log probability of each token and of eos; the scores of a generator begin after the first token."""
    if len(texts) == 1:
        begin, end = subwords[Tokenizer.BOS], subwords[Tokenizer.EOS]
        texts = [[[begin, *text, end] for text in texts[0]]]
    return [one.log_probs for one in engine.score_batch(*texts)]
