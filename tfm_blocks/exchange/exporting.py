"""Export a run as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Pieces
from tokenizers.processors import TemplateProcessing

from tfm_blocks.data.published_libraries import SentencePieceTokenizer
from tfm_blocks.data.published_tokenizer import CONFIG as TOKENIZER_CONFIG
from tfm_blocks.data.published_tokenizer import FAST, PAIR, PublishedTokenizer
from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.data.vocabulary import Conventions, Vocabulary
from tfm_blocks.errors import ConfigError, config_error
from tfm_blocks.exchange.certificate import TARGET_FOLDER, Certificate, certify
from tfm_blocks.exchange.config import (
    LARGEST,
    Published,
    knob_defaults,
    read_published,
    to_json,
    unstated_ids,
    vocabulary_of,
    with_knobs,
    write_published,
)
from tfm_blocks.exchange.eject.file import eject
from tfm_blocks.exchange.family import Config, families, is_shipped
from tfm_blocks.exchange.fast_tokenizer import to_fast
from tfm_blocks.exchange.folder import CONFIG, DTYPES, GENERATION, LEFTOVERS, SINGLE, PublishedFile
from tfm_blocks.exchange.published_tensors import rows_of, to_published
from tfm_blocks.language.difference import find_changes
from tfm_blocks.language.parametrisation import expect_standard
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.network.build import check_model
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import weights_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.files import damaged
from tfm_blocks.runs.folder import TOKENIZER, new_folder
from tfm_blocks.runs.model import read_network, read_tensors, write_tensors
from tfm_blocks.runs.records import SavedModel
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.translator import Translator


def export_run(run: Path, folder: Path) -> tuple[str, Certificate | None]:
    """Write a run as a new folder, in the format of its family, or else with its graph as custom code.

    Returns the name of the architecture, and the certificate if transformers is installed. Raises RunError if the
    folder exists. Raises ConfigError if no family has the graph and transformers cannot pass its inputs.
    """
    network, tokenizer = read_network(run), load_tokenizer(run / TOKENIZER)
    expect_standard(network.spec, "a folder of transformers")
    imported = PublishedFile.read_or_empty(run).family
    published = find_published(network.spec, SavedRun(run).config, vocabulary_of(tokenizer), imported)
    if published and published.family.name != imported and _skips_positions(published, tokenizer):
        published = None
    if published is None:
        files = write_custom_code(network, tokenizer, str(run))
        record, tensors = PublishedFile(), {f"model.{name}": tensor for name, tensor in weights_of(network).items()}
        architecture = "custom code"
    else:
        record, architecture = _record(run, published), published.family.architecture
        leftovers = read_tensors(run / LEFTOVERS) if (run / LEFTOVERS).is_file() else {}
        rows = rows_of(published.family, record.tensors)
        tensors = to_published(published, weights_of(network), rows, leftovers)
        files = {name: text.encode() for name, text in record.texts.items()}
        files = files or {CONFIG: to_json(write_published(published)).encode()}
    columns, inputs = SavedModel.read(run).columns, names(network.spec.sources)
    translator = Translator(network, tokenizer, columns) if TARGET in names(network.spec.inputs) else None
    translates = bool(inputs) or len(columns) > 1
    if translator and not record.texts:
        files[GENERATION] = _generation(translator, translates, use_cache=published is not None)
    with new_folder(folder) as part:
        usable = tokenizer_files(tokenizer) if record.texts else _usable_tokenizer(tokenizer, inputs, translates)
        write_files(part, usable | files)
        _write_weights(part, tensors, record)
        compared = translator or Encoder(network, tokenizer)
        certificate = certify(compared, translates, run, part, own_code=published is None)
    return architecture, certificate


def _skips_positions(published: Published, tokenizer: Tokenizer) -> bool:
    """Return True if the positions of the family skip a token of texts, because it has the id of padding."""
    pad, vocabulary = published.family.fixed.get("pad_token_id"), published.vocabulary
    special = tokenizer.published_special if isinstance(tokenizer, PublishedTokenizer) else ()
    return pad is not None and (pad in (vocabulary.start, vocabulary.eos) or pad not in special)


def _generation(translator: Translator, translates: bool, *, use_cache: bool) -> bytes:
    """Return generation_config.json of a model trained here: greedy search, as `tfm translate` and `generate` do."""
    vocabulary, refused = vocabulary_of(translator.tokenizer), list(translator.conventions.refused)
    most = min(256, translator.network.longest(TARGET).tokens)
    search = {
        "do_sample": False,
        "max_new_tokens": int(most if translates else max(1, min(64, most // 2))),
        "suppress_tokens": vocabulary.to_published(refused[vocabulary.first :]),
        "use_cache": use_cache,
    }
    return to_json(special_ids(vocabulary) | search).encode()


def _usable_tokenizer(tokenizer: Tokenizer, inputs: Sequence[str], translates: bool) -> dict[str, bytes]:
    """Return the files with which AutoTokenizer adds the special tokens that the model reads.

    A tokenizer.json of an import keeps its post-processor. In other files, the post-processor adds the special tokens:
    a model that was trained here reads BOS before a prompt and EOS after a source, whatever tokenizer it has.
    SentencePiece models get a tokenizer.json, except for the pair of Marian, which only its own class reads.
    """
    if tokenizer.source:
        source, target = (_usable_tokenizer(side, inputs, translates) for side in sides_of(tokenizer))
        return joined_sides(source, target)
    files = tokenizer_files(tokenizer)
    pieces = Pieces.from_str(files[FAST].decode()) if FAST in files else None
    if isinstance(tokenizer, SentencePieceTokenizer) and not (pieces := to_fast(tokenizer)):
        return files | ({TOKENIZER_CONFIG: _pair_settings(tokenizer)} if PAIR[0] in files else {})
    assert pieces
    if FAST in files and tokenizer.conventions != Conventions():
        return files if TOKENIZER_CONFIG in files else files | {TOKENIZER_CONFIG: _settings(tokenizer, inputs, pieces)}
    vocabulary = vocabulary_of(tokenizer)
    pieces.no_padding()
    pieces.no_truncation()
    for name, id in sorted(
        zip(SPECIAL[1:3], (vocabulary.start, vocabulary.eos), strict=True), key=lambda pair: pair[1]
    ):
        if pieces.id_to_token(id) is None:  # a token that the tokenizer lacked
            pieces.add_special_tokens([name if pieces.token_to_id(name) is None else f"<id {id}>"])
    added = _added_ids(tokenizer, inputs, translates)
    names = {id: str(pieces.id_to_token(id)) for ids in added for id in ids}
    before, after = ([names[id] for id in ids] for ids in added)
    pieces.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", "$B", *after],
        special_tokens=[(name, id) for id, name in names.items()],
    )
    return files | {FAST: pieces.to_str().encode(), TOKENIZER_CONFIG: _settings(tokenizer, inputs, pieces)}


def _added_ids(tokenizer: Tokenizer, inputs: Sequence[str], translates: bool) -> tuple[list[int], list[int]]:
    """Return the published ids that precede and follow a text: in front of an encoder, or of the output to continue."""
    vocabulary, conventions = vocabulary_of(tokenizer), tokenizer.conventions
    before, after = (vocabulary.to_published(ids) for ids in (conventions.before, conventions.after))
    if translates:
        after += [vocabulary.eos] * conventions.adds_eos + [vocabulary.start] * (not inputs)
    elif conventions.adds_bos:
        before = [vocabulary.start, *before]
    elif conventions.adds_eos:
        after += [vocabulary.eos]
    return before, after


def _settings(tokenizer: Tokenizer, inputs: Sequence[str], pieces: Pieces) -> bytes:
    """Return tokenizer_config.json for a tokenizer.json."""
    vocabulary = vocabulary_of(tokenizer)
    settings: dict[str, Any] = {
        "bos_token": pieces.id_to_token(vocabulary.start),
        "clean_up_tokenization_spaces": False,
        "eos_token": pieces.id_to_token(vocabulary.eos),
        "pad_token": pieces.id_to_token(vocabulary.pad),
        "padding_side": "right" if inputs else "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if tokenizer.mask is not None:
        settings["mask_token"] = tokenizer.piece(tokenizer.mask)
    if isinstance(tokenizer, PublishedTokenizer):
        kept = {key: value for key, value in tokenizer.config.items() if key not in ("add_bos_token", "add_eos_token")}
        return to_json(kept | settings).encode()  # the post-processor adds the tokens
    return to_json(settings | {"unk_token": SPECIAL[tokenizer.UNK], "split_special_tokens": True}).encode()


def _pair_settings(tokenizer: SentencePieceTokenizer) -> bytes:
    """Return tokenizer_config.json for the pair of Marian, whose class adds EOS. BOS may have a new id."""
    settings, start = {"tokenizer_class": "MarianTokenizer", **tokenizer.config}, tokenizer.vocabulary.start
    settings |= {} if PAIR[1] in tokenizer.files else {"separate_vocabs": True}
    if start not in tokenizer.names.values():
        token = {"content": SPECIAL[tokenizer.BOS], "special": True}
        settings["added_tokens_decoder"] = {**settings.get("added_tokens_decoder", {}), str(start): token}
        settings["bos_token"] = token["content"]
    return to_json(settings).encode()


def _record(run: Path, published: Published) -> PublishedFile:
    """Return published.json, or an empty record if it does not exist. Raises RunError if it is of another model.

    In a run that was trained further, the knobs may differ, and a record of another family or vocabulary is ignored.
    """
    record, where = PublishedFile.read_if_exists(run), run / PublishedFile.FILE
    if record == PublishedFile():
        return record
    try:
        config, generation = record.parsed(CONFIG), record.parsed(GENERATION) if GENERATION in record.texts else {}
        ids = {"bos_token_id": published.vocabulary.start, "eos_token_id": published.vocabulary.eos}
        known = config | {key: ids[key] for key in unstated_ids(published.family, config, generation)}
        stated = read_published(published.family, known, generation, len(record.tensors) or LARGEST, str(where))
    except (KeyError, ValueError) as error:
        raise damaged(where, error) from None
    untied = {knob: None for knob in published.family.output.values() if published.knobs[knob] is None}
    knobs = {**stated.knobs, **untied}  # transformers does not tie matrices that differ, whatever config.json says
    is_fitting = published.family.fits(config) and stated.vocabulary == published.vocabulary
    if not record.tensors:
        if not is_fitting:
            return PublishedFile()
        text = to_json(with_knobs(config, replace(stated, knobs=knobs), published))
        return replace(record, texts={**record.texts, CONFIG: text})
    if not (is_fitting and knobs.items() <= published.knobs.items()):
        raise damaged(where, f"its {CONFIG} is of another model")
    return record


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, as other libraries read them."""
    if tokenizer.source:
        return joined_sides(*map(tokenizer_files, sides_of(tokenizer)))
    return tokenizer.files if isinstance(tokenizer, PublishedTokenizer) else {TOKENIZER: tokenizer.text.encode()}


def sides_of(tokenizer: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    """Return separate tokenizers of sources and of targets."""
    alone = copy(tokenizer)
    alone.source = None
    return tokenizer.source or alone, alone


def joined_sides(source: dict[str, bytes], target: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of two tokenizers. The files of the target are in the folder target/, except for Marian's."""
    if source == target or (PAIR[0] in source and PAIR[1] in target):
        return target | source
    return source | {f"{TARGET_FOLDER}/{name}": content for name, content in target.items()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name, which may be in the folder of the target's tokenizer."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def find_published(spec: Spec, config: Config, vocabulary: Vocabulary, imported: str = "") -> Published | None:
    """Return the run as a model of a family that has its graph, or None.

    The family of its import comes first, then families with a shipped model.
    """
    front = (vocabulary.source or vocabulary).front
    for family in sorted(families().values(), key=lambda one: (one.name != imported, not is_shipped(one))):
        if vocabulary.source and not (family.target_vocab and front == vocabulary.front):
            continue  # config.json states the ids of BOS and EOS once
        if (defaults := knob_defaults(family.model, family.config_dir)).keys() <= config.keys():
            published = Published(family, {name: config[name] for name in defaults}, vocabulary)
            with suppress(ConfigError):  # of knobs without a counterpart in config.json
                write_published(published)
                stated = {row.knob for row in published.rows}  # the others have the values of the model file
                knobs = {key: config[key] for key in defaults if key in stated or key.endswith("dropout")}
                composed = replace(published, knobs=knobs).compose()
                if not find_changes(check_model(composed.model, composed.sources), spec, REGISTRY):
                    return published
    return None


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], record: PublishedFile) -> None:
    """Write each tensor to the file and with the dtype in the record, else to a single file as float32."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        file, dtype = record.tensors.get(name, (SINGLE, "F32"))
        files.setdefault(file, {})[name] = tensor.to(DTYPES[dtype])
    for file, content in files.items():
        write_tensors(folder / file, content, record.metadata.get(file, {"format": "pt"}))


MODULE = "modeling_tfm_blocks"


def write_custom_code(network: Network, tokenizer: Tokenizer, where: str) -> dict[str, bytes]:
    """Return config.json and the code files, by name. Raises ConfigError for inputs that transformers cannot pass."""
    spec = network.spec
    if TARGET not in names(spec.inputs) or len(spec.sources) > 1 or not all(tensor.tokens for tensor in spec.inputs):
        rule = f"reads {', '.join(names(spec.inputs))}, but the custom code for transformers covers only models that "
        rule += "predict tgt, with at most one source of token ids"
        raise config_error(where, rule, "write its graph: tfm eject, or tfm export --to onnx")
    adapter = (files("tfm_blocks.exchange") / f"{MODULE}.py.txt").read_bytes()
    return {
        CONFIG: to_json(_config(network, vocabulary_of(tokenizer))).encode(),
        "model.py": eject(spec, Sources(), "The graph of a run").encode(),
        f"{MODULE}.py": adapter,
    }


def _config(network: Network, vocabulary: Vocabulary) -> dict[str, Any]:
    sources = names(network.spec.sources)
    stored = {id(parameter): name for name, parameter in network.named_parameters()}
    parameters = network.named_parameters(remove_duplicate=False)
    task = "Seq2SeqLM" if sources else "CausalLM"
    return {
        "architectures": [f"TfmBlocksFor{task}"],
        "auto_map": {"AutoConfig": f"{MODULE}.TfmBlocksConfig", f"AutoModelFor{task}": f"{MODULE}.TfmBlocksFor{task}"},
        "dtype": "float32",
        "front": list(vocabulary.front),
        "front_of_source": list((vocabulary.source or vocabulary).front),
        "is_encoder_decoder": bool(sources),
        "model_type": "tfm_blocks",
        "source": next(iter(sources), None),
        "tie_word_embeddings": True,  # transformers ties the names of `tied`
        "tied": {f"model.{name}": f"model.{stored[id(p)]}" for name, p in parameters if stored[id(p)] != name},
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
