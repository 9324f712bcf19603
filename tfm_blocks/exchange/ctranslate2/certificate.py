"""The certificate beside exported weights: the comparisons with the run, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.json_file import JsonFile
from tfm_blocks.scoring.corpus import metrics, score
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator

SENTENCES, LONGEST, SEED = 32, 24, 1
SEARCH = Search(beam=4, penalty="plain", alpha=1.0, longest=(0.0, 256))
BATCH = 32  # sentences
FIRST_SUBWORD = Tokenizer.UNK + 1


@dataclass(frozen=True)
class LogProbabilities:
    """Differences of the log probabilities of the tokens of random sentences, as absolute values."""

    sentences: int
    tokens: int
    seed: int
    largest: float
    mean: float


@dataclass(frozen=True)
class Translations:
    """The translations of a text: how many are equal, and the BLEU of both if references were given."""

    sentences: int
    equal: int
    search: Mapping[str, Any]
    bleu: float | None = None
    bleu_of_run: float | None = None
    signature: str = ""


@dataclass(frozen=True)
class Certificate(JsonFile):
    """The content of certificate.json."""

    FILE = "certificate.json"

    run: str
    format: str
    quantization: str
    versions: Mapping[str, str]
    log_probabilities: LogProbabilities
    translations: Translations | None = field(default=None)

    def __str__(self) -> str:
        log_p = self.log_probabilities
        lines = [f"log probabilities of {log_p.tokens} tokens differ by at most {log_p.largest:.1e}"]
        if one := self.translations:
            lines.append(f"{one.equal} of {one.sentences} translations are equal")
            if one.bleu is not None:
                lines.append(f"BLEU {one.bleu:.2f}, of the run {one.bleu_of_run:.2f}")
        return "\n".join(lines)


def compare_log_p(engine: Any, network: Network, subwords: Sequence[str]) -> LogProbabilities:
    """Compare the log probabilities of random sentences, ids from the first subword on."""
    generator = torch.Generator().manual_seed(SEED)
    rows = {name: _random_rows(network, name, generator) for name in [*_sources(network), TARGET]}
    theirs = _log_p_of_engine(engine, [[_texts(row, subwords) for row in rows[name]] for name in rows], subwords)
    ours = _log_p_of_network(network, rows)
    differences = torch.tensor(
        [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    )
    return LogProbabilities(SENTENCES, len(differences), SEED, differences.max().item(), differences.mean().item())


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


def _sources(network: Network) -> list[str]:
    return [one.name for one in network.spec.sources]


def _random_rows(network: Network, name: str, generator: torch.Generator) -> list[Tensor]:
    """Return sentences of random ids, without bos and eos, that fit the positions of the model."""
    longest = int(min(LONGEST, network.longest(name).tokens - 1))
    vocabulary = int(str(network.spec.sink.shape[-1]))
    lengths = torch.randint(1, longest + 1, (SENTENCES,), generator=generator).tolist()
    return [torch.randint(FIRST_SUBWORD, vocabulary, (length,), generator=generator) for length in lengths]


def _texts(ids: Sequence[int] | Tensor, subwords: Sequence[str]) -> list[str]:
    return [subwords[int(id)] for id in ids]


def _log_p_of_engine(engine: Any, texts: Sequence[list[list[str]]], subwords: Sequence[str]) -> list[list[float]]:
    """Return the log probability of each token and of eos; the scores of a generator begin after the first token."""
    if len(texts) == 1:
        begin, end = subwords[Tokenizer.BOS], subwords[Tokenizer.EOS]
        texts = [[[begin, *text, end] for text in texts[0]]]
    return [one.log_probs for one in engine.score_batch(*texts)]


@torch.inference_mode()
def _log_p_of_network(network: Network, rows: Mapping[str, list[Tensor]]) -> list[list[float]]:
    """Return the log probability of each token and of eos, among the tokens that a search can produce."""
    end, begin = torch.tensor([Tokenizer.EOS]), torch.tensor([Tokenizer.BOS])
    inputs = {name: pad_sequence([torch.cat((row, end)) for row in ids], True) for name, ids in rows.items()}
    inputs[TARGET] = pad_sequence([torch.cat((begin, row)) for row in rows[TARGET]], True)
    logits_BTV = network(**inputs)
    logits_BTV[..., : Tokenizer.EOS] = -torch.inf
    log_p_BTV = logits_BTV.log_softmax(-1)
    return [
        log_p_TV[: len(row) + 1].gather(1, torch.cat((row, end))[:, None])[:, 0].tolist()
        for log_p_TV, row in zip(log_p_BTV, rows[TARGET], strict=True)
    ]
