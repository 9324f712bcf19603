"""Export a run as a folder that CTranslate2 loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import config_error, run_error
from tfm_blocks.exchange.certificate import Certificate, LogProbabilities, Translations, compare_with_engine
from tfm_blocks.exchange.ctranslate2.rules import read_engine_graph
from tfm_blocks.exchange.exporting import tokenizer_files, write_files
from tfm_blocks.exchange.random_sentences import Rows
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.files import named_folder
from tfm_blocks.runs.folder import new_folder
from tfm_blocks.scoring.corpus import metrics, score
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.translator import Translator
from tfm_blocks.version import __version__


def export_to_ctranslate2(
    run: Path, folder: Path, quantization: str, sources: Sequence[str] = (), references: Sequence[str] = ()
) -> Certificate:
    """Write a run as a new folder of CTranslate2 with its certificate, and return the certificate.

    Beam search of both is compared on `sources`. Raises RunError if CTranslate2 cannot express the graph or is not
    installed, or if the folder exists.
    """
    translator = Translator.load(run)
    subwords = subwords_of(translator.tokenizer)
    of_source = subwords_of(translator.tokenizer.source) if translator.tokenizer.source else subwords
    read_engine_graph(translator.network.spec, str(run))  # raises before the folder exists
    if sources and not translator.inputs:
        rule = "compares translations, but the model reads no source"
        raise config_error("--src", rule, "leave --src and --ref out")
    library = _library()
    with new_folder(folder) as part:
        write_network(translator.network, subwords, part, quantization, str(run), of_source)
        write_files(part, tokenizer_files(translator.tokenizer))
        engine = (library.Translator if translator.inputs else library.Generator)(str(part), device="cpu")
        certificate = Certificate(
            named_folder(run).name,
            "ctranslate2",
            quantization,
            {"tfm-blocks": __version__, "ctranslate2": library.__version__, "torch": torch.__version__},
            compare_log_p(engine, translator.network, subwords, of_source),
            compare_translations(engine, translator, subwords, of_source, sources, references) if sources else None,
        )
        certificate.write(part)
    return certificate


def write_network(
    network: Network,
    subwords: list[str],
    folder: Path,
    quantization: str,
    where: str,
    of_source: list[str] | None = None,
) -> None:
    """Write a network in the format of CTranslate2 to an existing folder. Raises RunError.

    `of_source` are the subwords of a separate vocabulary of sources.
    """
    sides = read_engine_graph(network.spec, where)
    from tfm_blocks.exchange.ctranslate2.conversion import convert_network

    spec = convert_network(network, sides, subwords, of_source or subwords)
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))


def subwords_of(tokenizer: Tokenizer) -> list[str]:
    """Return the subword of each id. Special ids of a published tokenizer keep their published names."""
    names = {id: name for name, id in tokenizer.ids.items()}
    if isinstance(tokenizer, PublishedTokenizer):
        published = tokenizer.vocabulary.to_here(list(tokenizer.names.values()))
        names |= dict(zip(published, tokenizer.names, strict=True))
    return [names.get(id, f"<id {id}>") for id in range(tokenizer.size)]


def _library() -> Any:
    """Return CTranslate2. Raises RunError if it is not installed."""
    try:
        import ctranslate2
    except ImportError:
        help = "pip install -c constraints.txt 'tfm-blocks[ctranslate2]'"
        raise run_error("ctranslate2", "the library is not installed", help) from None
    return ctranslate2


LONGEST_OUTPUT = 256
SEARCH = Search(beam=4, penalty="plain", alpha=1.0, longest=(0.0, LONGEST_OUTPUT))
BATCH = 32  # sentences


def compare_log_p(
    engine: Any, network: Network, subwords: Sequence[str], of_source: Sequence[str] = ()
) -> LogProbabilities:
    """Compare the log probabilities of random sentences. CTranslate2 assigns probability 0 to padding and bos."""

    def log_p_of_engine(rows: Rows) -> list[list[float]]:
        names = {name: subwords if name == TARGET else of_source or subwords for name in rows}
        texts = [[[names[name][id] for id in row.tolist()] for row in ids] for name, ids in rows.items()]
        if len(texts) == 1:  # a generator does not score its first token: bos is added
            begin, end = subwords[Tokenizer.BOS], subwords[Tokenizer.EOS]
            texts = [[[begin, *text, end] for text in texts[0]]]
        return [result.log_probs for result in engine.score_batch(*texts, max_input_length=0)]

    return compare_with_engine(network, log_p_of_engine, Tokenizer.EOS)


def compare_translations(
    engine: Any,
    translator: Translator,
    subwords: Sequence[str],
    of_source: Sequence[str],
    sources: Sequence[str],
    references: Sequence[str],
) -> Translations:
    """Compare the translations of beam search with the run's, and their BLEU if there are references.

    Outputs may be empty, and blank lines stay blank, as in this project.
    """
    run_texts = [best.text for best, *_ in translator.search(sources, SEARCH)]
    ids = {text: id for id, text in enumerate(subwords)}
    results = engine.translate_batch(
        [[of_source[id] for id in row] for row in translator.encode(list(sources))],
        beam_size=SEARCH.beam,
        length_penalty=SEARCH.alpha,
        min_decoding_length=0,
        max_decoding_length=int(min(LONGEST_OUTPUT, translator.network.longest(TARGET).tokens)),
        max_batch_size=BATCH,
    )
    outputs = [translator.tokenizer.decode([ids[text] for text in result.hypotheses[0]]) for result in results]
    engine_texts = [output if source.strip() else "" for source, output in zip(sources, outputs, strict=True)]
    translator.warn_of_unknown()
    settings = {"beam": SEARCH.beam, "length penalty": f"n^{SEARCH.alpha:g}"}
    equal = sum(a == b for a, b in zip(run_texts, engine_texts, strict=True))
    if not references:
        return Translations(len(run_texts), equal, settings)
    bleu = {"BLEU": metrics("13a", tokenised=False)["BLEU"]}
    scores = [score(outputs, references, bleu)[0] for outputs in (engine_texts, run_texts)]
    return Translations(len(run_texts), equal, settings, scores[0].value, scores[1].value, scores[0].signature)
