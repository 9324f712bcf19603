"""Export a run as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.data.published_tokenizer import PublishedTokenizer
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import ConfigError
from tfm_blocks.exchange.certificate import Certificate
from tfm_blocks.exchange.config import LARGEST, Published, knob_defaults, read_published, with_knobs, write_published
from tfm_blocks.exchange.custom_code import to_json, vocabulary_of, write_custom_code
from tfm_blocks.exchange.family import families
from tfm_blocks.exchange.folder import CONFIG, DTYPES, SINGLE
from tfm_blocks.exchange.importing import conversion_of
from tfm_blocks.exchange.record import GENERATION, LEFTOVERS, PublishedFile
from tfm_blocks.exchange.reload import certify
from tfm_blocks.language.difference import find_changes
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import check_model
from tfm_blocks.network.matching import weights_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.files import damaged
from tfm_blocks.runs.folder import TOKENIZER, new_folder
from tfm_blocks.runs.model import read_network, read_tensors, write_tensors
from tfm_blocks.runs.saved_run import SavedRun


def export_run(run: Path, folder: Path) -> tuple[str, Certificate | None]:
    """Write a run as a new folder, in the format of its family, or else with its graph as custom code.

    Returns the name of the architecture, and the certificate if transformers is installed. Raises RunError if the
    folder exists. Raises ConfigError if no family has the graph and transformers cannot pass its inputs.
    """
    network, tokenizer = read_network(run), load_tokenizer(run / TOKENIZER)
    published = find_published(network.spec, SavedRun(run).config, vocabulary_of(tokenizer))
    if published is None:
        files = write_custom_code(network, tokenizer, str(run))
        record, tensors = PublishedFile(), {f"model.{name}": tensor for name, tensor in weights_of(network).items()}
        architecture = "custom code"
    else:
        record, architecture = _record(run, published), published.family.architecture
        leftovers = read_tensors(run / LEFTOVERS) if (run / LEFTOVERS).is_file() else {}
        tensors = conversion_of(published).to_theirs(weights_of(network), leftovers)
        files = {name: text.encode() for name, text in record.texts.items()}
        files = files or {CONFIG: to_json(write_published(published, "float32")).encode()}
    with new_folder(folder) as part:
        for name, content in (tokenizer_files(tokenizer) | files).items():
            (part / name).write_bytes(content)
        _write_weights(part, tensors, record)
        certificate = certify(network, tokenizer, run, part, own_code=published is None)
    return architecture, certificate


def _record(run: Path, published: Published) -> PublishedFile:
    """Return published.json, or an empty record if it does not exist. Raises RunError if it is of another model.

    In a run that was trained further, the knobs may differ, and a record of another family or vocabulary is ignored.
    """
    record, where = PublishedFile.read_if_exists(run), run / PublishedFile.FILE
    if record == PublishedFile():
        return record
    try:
        config, generation = record.parsed(CONFIG), record.parsed(GENERATION) if GENERATION in record.texts else {}
        stated = read_published(published.family, config, generation, len(record.tensors) or LARGEST, str(where))
    except (KeyError, ValueError) as error:
        raise damaged(where, error) from None
    untied = {knob: None for knob in published.family.output.values() if published.knobs[knob] is None}
    knobs = {**stated.knobs, **untied}  # transformers does not tie matrices that differ, whatever config.json says
    is_fitting = published.family.fits(config) and stated.vocabulary == published.vocabulary
    if not record.tensors:
        if not is_fitting:
            return PublishedFile()
        text = to_json(with_knobs(config, replace(stated, knobs=knobs), published, "float32"))
        return replace(record, texts={**record.texts, CONFIG: text})
    if not (is_fitting and knobs.items() <= published.knobs.items()):
        raise damaged(where, f"its {CONFIG} is of another model")
    return record


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, as other libraries read them."""
    return tokenizer.files if isinstance(tokenizer, PublishedTokenizer) else {TOKENIZER: tokenizer.text.encode()}


def find_published(spec: Spec, config: Mapping[str, Any], vocabulary: Vocabulary) -> Published | None:
    """Return the run as a model of the family that has its graph, or None."""
    for family in families().values():
        if (defaults := knob_defaults(family.model, family.config_dir)).keys() <= config.keys():
            published = Published(family, {name: config[name] for name in defaults}, vocabulary)
            if _has_graph(published, spec):
                return published
    return None


def _has_graph(published: Published, spec: Spec) -> bool:
    """Return True if the family has the graph, and a config.json for the knobs."""
    try:
        write_published(published, "float32")
        composed = published.compose()
        return not find_changes(check_model(composed.model, composed.sources), spec, REGISTRY)
    except ConfigError:
        return False


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], record: PublishedFile) -> None:
    """Write each tensor to the file and with the dtype in the record, else to a single file as float32."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        file, dtype = record.tensors.get(name, (SINGLE, "F32"))
        files.setdefault(file, {})[name] = tensor.to(DTYPES[dtype])
    for file, content in files.items():
        write_tensors(folder / file, content, record.metadata.get(file, {"format": "pt"}))
