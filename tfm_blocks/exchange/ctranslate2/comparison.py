"""Compare log probabilities and translations of CTranslate2 with the run."""

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

LONGEST_OUTPUT = 256
SEARCH = Search(beam=4, penalty="plain", alpha=1.0, longest=(0.0, LONGEST_OUTPUT))
BATCH = 32  # sentences


def compare_log_p(engine: Any, network: Network, subwords: Sequence[str]) -> LogProbabilities:
    """Compare the log probabilities of random sentences. CTranslate2 assigns probability 0 to padding and bos."""

    def log_p_of_engine(rows: Rows) -> list[list[float]]:
        return _log_p_of_engine(engine, [[_texts(row, subwords) for row in rows[name]] for name in rows], subwords)

    return compare_with_engine(network, log_p_of_engine, Tokenizer.EOS)


def compare_translations(
    engine: Any, translator: Translator, subwords: Sequence[str], sources: Sequence[str], references: Sequence[str]
) -> Translations:
    """Compare the translations of beam search with the run's, and their BLEU if there are references."""
    run_texts = [best.text for best, *_ in translator.search(sources, SEARCH)]
    engine_texts = _translations_of_engine(engine, translator, subwords, sources)
    translator.warn_of_unknown()
    settings = {"beam": SEARCH.beam, "length penalty": f"n^{SEARCH.alpha:g}"}
    equal = sum(a == b for a, b in zip(run_texts, engine_texts, strict=True))
    if not references:
        return Translations(len(run_texts), equal, settings)
    bleu = {"BLEU": metrics("13a", tokenised=False)["BLEU"]}
    scores = [score(outputs, references, bleu)[0] for outputs in (engine_texts, run_texts)]
    return Translations(len(run_texts), equal, settings, scores[0].value, scores[1].value, scores[0].signature)


def _translations_of_engine(
    engine: Any, translator: Translator, subwords: Sequence[str], sources: Sequence[str]
) -> list[str]:
    """Translate with the settings of SEARCH, which allow empty outputs. Blank lines stay blank, as in this project."""
    ids = {text: id for id, text in enumerate(subwords)}
    results = engine.translate_batch(
        [_texts(row, subwords) for row in translator.encode(list(sources))],
        beam_size=SEARCH.beam,
        length_penalty=SEARCH.alpha,
        min_decoding_length=0,
        max_decoding_length=int(min(LONGEST_OUTPUT, translator.network.longest(TARGET).tokens)),
        max_batch_size=BATCH,
    )
    outputs = [translator.tokenizer.decode([ids[text] for text in result.hypotheses[0]]) for result in results]
    return [output if source.strip() else "" for source, output in zip(sources, outputs, strict=True)]


def _texts(ids: Sequence[int] | Tensor, subwords: Sequence[str]) -> list[str]:
    return [subwords[int(id)] for id in ids]


def _log_p_of_engine(engine: Any, texts: Sequence[list[list[str]]], subwords: Sequence[str]) -> list[list[float]]:
    """Return the log probability of each token and of eos. A generator does not score its first token: bos is added."""
    if len(texts) == 1:
        begin, end = subwords[Tokenizer.BOS], subwords[Tokenizer.EOS]
        texts = [[[begin, *text, end] for text in texts[0]]]
    return [result.log_probs for result in engine.score_batch(*texts, max_input_length=0)]
