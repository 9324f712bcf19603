"""Export any graph to transformers as custom code: the ejected file, and an adapter file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import OwnVocabulary, Vocabulary
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.exchange.eject.file import eject
from tfm_blocks.exchange.folder import CONFIG
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network

MODULE = "modeling_tfm_blocks"


def write_custom_code(network: Network, tokenizer: Tokenizer, where: str) -> dict[str, bytes]:
    """Return config.json and the code files, by name. Raises ConfigError for inputs that transformers cannot pass."""
    spec = network.spec
    if TARGET not in names(spec.inputs) or len(spec.sources) > 1 or not all(tensor.tokens for tensor in spec.inputs):
        rule = f"reads {', '.join(names(spec.inputs))}, but transformers passes token ids of a source and of a target"
        raise ConfigError(Problem(where, rule, help="write its graph as one PyTorch file: tfm eject"))
    adapter = (files("tfm_blocks.exchange") / f"{MODULE}.py.txt").read_bytes()
    return {
        CONFIG: to_json(_config(network, vocabulary_of(tokenizer))).encode(),
        "model.py": eject(spec, Sources(), "The graph of a run").encode(),
        f"{MODULE}.py": adapter,
    }


def _config(network: Network, vocabulary: Vocabulary) -> dict[str, Any]:
    sources = names(network.spec.sources)
    task = "Seq2SeqLM" if sources else "CausalLM"
    return {
        "architectures": [f"TfmBlocksFor{task}"],
        "auto_map": {"AutoConfig": f"{MODULE}.TfmBlocksConfig", f"AutoModelFor{task}": f"{MODULE}.TfmBlocksFor{task}"},
        "dtype": "float32",
        "front": list(vocabulary.front),
        "is_encoder_decoder": bool(sources),
        "model_type": "tfm_blocks",
        "source": next(iter(sources), None),
        "tie_word_embeddings": True,  # transformers ties the names of `tied`
        "tied": _tied(network),
        "vocab_size": vocabulary.size,
        **special_ids(vocabulary),
    }


def special_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the keys of config.json and generation_config.json for the ids that begin, end and pad sequences."""
    return {
        "bos_token_id": vocabulary.start,
        "decoder_start_token_id": vocabulary.start,
        "eos_token_id": vocabulary.written_eos,
        "pad_token_id": vocabulary.pad,
    }


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer. The ids of a tokenizer of this project are published unchanged."""
    if isinstance(tokenizer, PublishedTokenizer):
        return tokenizer.vocabulary
    return OwnVocabulary(tokenizer.size, tokenizer.BOS, tokenizer.EOS)


def to_json(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file in the format of transformers."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _tied(network: Network) -> dict[str, str]:
    """Return the names of tied parameters, each with the name under which the weights are stored."""
    first = {id(parameter): name for name, parameter in network.named_parameters()}
    parameters = network.named_parameters(remove_duplicate=False)
    return {f"model.{name}": f"model.{first[id(p)]}" for name, p in parameters if first[id(p)] != name}
