"""Export a run as a folder that transformers loads, if its graph is one of the families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import OwnVocabulary, Vocabulary
from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.exchange.config import Published, knob_defaults, write_published
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.folder import CONFIG, DTYPES, SINGLE
from tfm_blocks.exchange.importing import conversion_of
from tfm_blocks.exchange.record import LEFTOVERS, PublishedFile
from tfm_blocks.language.difference import find_changes
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.config import read_config
from tfm_blocks.runs.folder import TOKENIZER
from tfm_blocks.runs.model import read_network, read_tensors, weights_of, write_tensors


def export_run(run: Path, folder: Path) -> str:
    """Write a run as a new folder of its family, and return the name of the family.

    Raises RunError if the graph is no family's, or the folder exists.
    """
    network, tokenizer = read_network(run), Tokenizer.load(run / TOKENIZER)
    config, record = read_config(run)[1], PublishedFile.read_or_empty(run)
    published = find_published(network.spec, config, _vocabulary(tokenizer), str(run))
    leftovers = read_tensors(run / LEFTOVERS) if (run / LEFTOVERS).is_file() else {}
    tensors = conversion_of(published).to_theirs(weights_of(network), leftovers)
    texts = dict(record.texts) or {CONFIG: _json(write_published(published, "float32"))}
    files = {name: text.encode() for name, text in texts.items()}
    files |= tokenizer_files(tokenizer)
    make_folder(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    _write_weights(folder, tensors, record)
    return published.family.architecture


def make_folder(folder: Path) -> None:
    """Make a new folder. Raises RunError if it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        rule, help = "exists already, and nothing is overwritten", "choose another name, or delete it first"
        raise RunError(Problem(str(folder), rule, help=help)) from None


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, as other libraries read them."""
    return tokenizer.files if isinstance(tokenizer, PublishedTokenizer) else {TOKENIZER: tokenizer.text.encode()}


def find_published(spec: Spec, config: Mapping[str, Any], vocabulary: Vocabulary, where: str) -> Published:
    """Return the family with the graph of `spec` and the knobs of a run's config. Raises RunError."""
    for family in families().values():
        if (defaults := knob_defaults(family.model)).keys() <= config.keys():
            published = Published(family, {name: config[name] for name in defaults}, vocabulary)
            if _is_model(published, spec):
                return published
    known = ", ".join(sorted({family.model for family in families().values()}))
    rule = "its graph is not the graph of a published family, so no config.json describes it"
    raise RunError(Problem(where, rule, help=f"the families are the models {known}"))


def _is_model(published: Published, spec: Spec) -> bool:
    try:
        return not find_changes(check_model(published.compose().model), spec, REGISTRY)
    except ConfigError:
        return False


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer; one that a run learned keeps its ids."""
    if isinstance(tokenizer, PublishedTokenizer):
        return tokenizer.vocabulary
    return OwnVocabulary(tokenizer.size, tokenizer.BOS, tokenizer.EOS)


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], record: PublishedFile) -> None:
    """Write the tensors to the files and in the types of the record, or else to a single file."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        file, dtype = record.tensors.get(name, (SINGLE, "F32"))
        files.setdefault(file, {})[name] = tensor.to(DTYPES[dtype])
    for file, content in files.items():
        write_tensors(folder / file, content, record.metadata.get(file, {"format": "pt"}))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
