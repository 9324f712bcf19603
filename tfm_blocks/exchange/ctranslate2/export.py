"""Export a run as a folder that CTranslate2 loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tfm_blocks import __version__
from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.exchange.certificate import Certificate
from tfm_blocks.exchange.ctranslate2.comparison import compare_log_p, compare_translations
from tfm_blocks.exchange.ctranslate2.rules import read_engine_graph
from tfm_blocks.exchange.exporting import tokenizer_files
from tfm_blocks.network.graph import Network
from tfm_blocks.runs.folder import new_folder
from tfm_blocks.translation.translator import Translator


def export_to_ctranslate2(
    run: Path, folder: Path, quantization: str, sources: Sequence[str] = (), references: Sequence[str] = ()
) -> Certificate:
    """Write a run as a new folder of CTranslate2 with its certificate, and return the certificate.

    Beam search of both is compared on `sources`. Raises RunError if CTranslate2 cannot express the graph or is not
    installed, or if the folder exists.
    """
    translator = Translator.load(run)
    subwords = subwords_of(translator.tokenizer)
    read_engine_graph(translator.network.spec, str(run))  # raises before the folder exists
    if sources and not translator.inputs:
        rule = "compares translations, but the model reads no source"
        raise ConfigError(Problem("--src", rule, help="leave --src and --ref out"))
    library = _library()
    with new_folder(folder) as part:
        write_network(translator.network, subwords, part, quantization, str(run))
        for name, content in tokenizer_files(translator.tokenizer).items():
            (part / name).write_bytes(content)
        engine = (library.Translator if translator.inputs else library.Generator)(str(part), device="cpu")
        certificate = Certificate(
            run.name,
            "ctranslate2",
            quantization,
            {"tfm-blocks": __version__, "ctranslate2": library.__version__, "torch": torch.__version__},
            compare_log_p(engine, translator.network, subwords),
            compare_translations(engine, translator, subwords, sources, references) if sources else None,
        )
        certificate.write(part)
    return certificate


def write_network(network: Network, subwords: list[str], folder: Path, quantization: str, where: str) -> None:
    """Write a network in the format of CTranslate2 to an existing folder. Raises RunError."""
    graph = read_engine_graph(network.spec, where)
    _library()
    from tfm_blocks.exchange.ctranslate2.conversion import convert_network

    spec = convert_network(network, graph, subwords)
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
        raise RunError(Problem("ctranslate2", "the library is not installed", help=help)) from None
    return ctranslate2
