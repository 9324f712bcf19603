"""Import a folder of a published model as a run folder."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.state import HasComputedValues
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.published_tokenizer import FAST, TARGET_IDS, PublishedTokenizer, without_code
from tfm_blocks.data.tokenizer_files import expect_usable, read_folder
from tfm_blocks.data.tokenizer_format import refusing_damage
from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.exchange.config import Published, family_of, knob_defaults, read_published
from tfm_blocks.exchange.conventions import ids_of_encoder, read_conventions
from tfm_blocks.exchange.family import Family
from tfm_blocks.exchange.folder import (
    CONFIG,
    DTYPES,
    GENERATION,
    INDEX,
    KEPT,
    LEFTOVERS,
    SINGLE,
    PublishedFile,
    PublishedFolder,
    StoredTensor,
    metadata_of,
    open_folder,
    read_small_json,
)
from tfm_blocks.exchange.weights import Conversion, Row, format_name, names_pattern, wildcards
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import expect_weights, fill, weights_of
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import new_folder
from tfm_blocks.runs.model import write_tensors
from tfm_blocks.translation.save import write_run

INCOMPLETE = "repeat the download of the folder, or save the model with transformers: model.save_pretrained(FOLDER)"
FOREIGN = "load the folder with transformers and save a copy, which leaves out tensors that its model does not use"


@dataclass(frozen=True)
class ImportReport:
    """The new run, its family and model, the overrides that build this model, and its number of weights.

    removed: keys of the folder that name code, each with its file.
    """

    run: Path
    family: str
    overrides: tuple[str, ...]
    parameters: int
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.run}: {self.family}, {self.parameters:,} parameters"
        overrides = [*self.overrides, f"init_from={self.run}", f"data.tokenizer={self.run}"]
        removed = "".join(f"\nnot kept, because it names code: {key}" for key in self.removed)
        return f"{head}{removed}\ntrain it on: tfm train {shlex.join(overrides)} data=…"


def import_folder(folder: Path, run: Path, family: Family | None = None) -> ImportReport:
    """Write the model, the weights and the tokenizer of a folder as a run folder. Raises RunError.

    `family` is the family of the folder if it is not a shipped one.
    """
    written = open_folder(folder)
    texts, removed = _texts(folder)
    where, record = str(folder / CONFIG), PublishedFile(texts=texts)
    config, generation = record.parsed(CONFIG), record.parsed(GENERATION) if GENERATION in texts else {}
    generated = generation or config
    own = family or family_of(config, where)
    named = with_current_names(written, own)
    files, keys = read_folder(folder)
    ids = _ids_of_tokenizer(files, folder, config) if own.encoder else {}
    published = read_published(own, config | ids, generation, len(named.tensors), where)
    stored, published = with_tied(named, published)
    composed, spec = _checked(published, folder)
    conversion = replace(conversion_of(published), rows=rows_of(own, stored.tensors))
    with _naming_the_table(own):
        zeros = _expect_tensors(stored, conversion, spec, own.zeros)
        tokenizer = _tokenizer(files, folder, published, config, generated)
        tensors = stored.load() | zeros
        weights, leftovers = conversion.to_ours(tensors)
    network = build_network(spec, seed=0)
    expect_weights(network, weights, f"family {own.name}: weights")
    fill(network, weights)
    _expect_computed(leftovers, network, own, folder)
    knobs = {name: value for name, value in composed.mapping.items() if name != "model"}
    is_current = stored.tensors == written.tensors and not zeros
    current = [] if is_current else conversion_of(published).to_theirs(weights_of(network_without_values(spec)))
    with new_folder(run) as part:
        write_run(network, part, run.name, tokenizer, knobs)
        if family is None:
            _write_record(record, stored, own, part, leftovers, current)
    count = sum(parameter.numel() for parameter in network.parameters())
    overrides = _overrides(published.family, knobs)
    return ImportReport(run, published.family.name, overrides, count, (*removed, *keys))


def _ids_of_tokenizer(files: Mapping[str, bytes], folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of BOS and EOS of an encoder's tokenizer that config.json lacks. Raises RunError."""
    if files:
        expect_usable(files, str(folder / next(iter(files))))
    with refusing_damage(str(folder)):
        return {key: id for key, id in ids_of_encoder(files).items() if config.get(key) is None}


def conversion_of(published: Published) -> Conversion:
    """Return the table of weights for the knobs and the vocabulary of a model."""
    return Conversion(published.family.weights, published.sizes, published.vocabulary.front)


@contextmanager
def _naming_the_table(family: Family) -> Iterator[None]:
    """Raise RunError that names the table of weights for an operation that does not fit the tensors."""
    try:
        yield
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as error:
        rule = f"there is no knob {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        help = "correct the row of weights: docs/families.md describes the operations"
        raise RunError(Problem(f"family {family.name}: weights", rule, help=help)) from None


def _checked(published: Published, folder: Path) -> tuple[Composed, Spec]:
    """Return the model with the values of config.json. Raises RunError for values that the check refuses."""
    try:
        composed = published.compose()
        return composed, check_model(composed.model, composed.sources)
    except ConfigError as error:
        problems = [Problem(f"{folder / CONFIG}: {problem.address}", problem.rule) for problem in error.problems]
        raise RunError(problems) from None


def _expect_tensors(
    stored: PublishedFolder, conversion: Conversion, spec: Spec, may_lack: Collection[str]
) -> dict[str, Tensor]:
    """Return zeros for the tensors that the folder may lack.

    Raises RunError unless the others have the names and shapes of the model, without allocating the model.
    """
    expected = conversion.to_theirs(weights_of(network_without_values(spec)))
    without = conversion.without_counterpart(stored.tensors)
    lacking = [name for name in expected if name not in stored.tensors]
    problems = [(f"lacks the tensor {name}", INCOMPLETE) for name in lacking if name not in may_lack]
    extra = stored.tensors.keys() - expected.keys() - without
    problems += [(f"has the tensor {name}, which the model lacks", FOREIGN) for name in extra]
    for name, tensor in stored.tensors.items():
        shapes = list(tensor.shape), list(expected.get(name, tensor).shape)
        if shapes[0] != shapes[1]:
            problems.append((f"{name} has the shape {shapes[0]}, but config.json gives {shapes[1]}", INCOMPLETE))
        if tensor.dtype not in DTYPES:
            rule = f"{name} has the type {tensor.dtype}, but only {', '.join(DTYPES)} are read"
            problems.append((rule, "import the weights before their quantisation"))
    if problems:
        rule, help = min(problems)
        others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise RunError(Problem(str(stored.path), f"{rule}{others}", help=help))
    return {name: torch.zeros(expected[name].shape) for name in lacking}


def _expect_computed(leftovers: Mapping[str, Tensor], network: Network, family: Family, folder: Path) -> None:
    """Raise RunError if a stored tensor differs from the values of a node, or the number, that the model computes."""
    for pattern, source in family.computed.items():
        for name, stored in leftovers.items():
            if (wild := wildcards(pattern, name)) is None:
                continue
            rounding = 1e-3 if stored.dtype == torch.float32 else 1e-2
            if isinstance(source, str):
                node = format_name(source, wild)
                block = getattr(dict(network.named_modules()).get(node), "block", None)
                if not isinstance(block, HasComputedValues):
                    rule = f"the model has no positions or rates at {node}"
                    raise RunError(Problem(f"family {family.name}: computed", rule))
                expected = block.computed_values(stored.float()).squeeze()
                computed = f"the values that the model computes at {node}"
            else:
                expected, rounding = torch.full(stored.squeeze().shape, float(source)), abs(source) / 100
                computed = f"{source}, the number of this model"
            stored = stored.squeeze()  # MiniMax stores rates_H11
            if stored.shape != expected.shape or not (stored - expected).abs().max() <= rounding:
                help = "describe a model with other values by a family of your own: --family FILE.yaml"
                raise RunError(Problem(str(folder), f"{name} differs from {computed}", help=help))


def _texts(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the small JSON files without the keys that name code, and these keys. Raises RunError."""
    texts, removed = {}, []
    has = {name: (folder / name).is_file() for name in (*KEPT, SINGLE)} | {CONFIG: True}
    for name in KEPT:
        if has[name] and not (name == INDEX and has[SINGLE]):
            read_small_json(folder / name)  # raises
            content, keys = without_code(read_bytes(folder / name))
            texts[name] = content.decode()
            removed += [f"{name}: {key}" for key in keys]
    return texts, removed


def _tokenizer(
    files: Mapping[str, bytes],
    folder: Path,
    published: Published,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> PublishedTokenizer:
    """Return the tokenizer of a folder, with the conventions of its settings. Raises RunError."""
    if not files:
        help = "save it with transformers: tokenizer.save_pretrained(FOLDER) writes tokenizer.json"
        raise RunError(Problem(str(folder), f"has no {FAST} and no model of SentencePiece", help=help))
    where = str(folder / next(iter(files)))
    expect_usable(files, where)
    if TARGET_IDS in files and not published.vocabulary.source:
        rule = "is the vocabulary of the target alone, but config.json has one vocabulary for both sides"
        help = "remove the file, or correct share_encoder_decoder_embeddings"
        raise RunError(Problem(str(folder / TARGET_IDS), rule, help=help))
    opened = published_tokenizer(published.vocabulary, files, where)
    conventions = read_conventions(published, opened, config, generation)
    return published_tokenizer(published.vocabulary, files, where, conventions)


def _write_record(
    record: PublishedFile,
    stored: PublishedFolder,
    family: Family,
    run: Path,
    leftovers: Mapping[str, Tensor],
    current: Collection[str],
) -> None:
    """Write the parts of the folder that export restores.

    If the layout of the folder differs from the current one, export writes the `current` names to a single file.
    """
    tensors = {name: (tensor.file, tensor.dtype) for name, tensor in stored.tensors.items()}
    if current:
        usual = Counter(tensor.dtype for tensor in stored.tensors.values()).most_common(1)[0][0]
        tensors = {name: (SINGLE, tensors.get(name, ("", usual))[1]) for name in (*current, *leftovers)}
        record = replace(record, texts={name: text for name, text in record.texts.items() if name != INDEX})
    if leftovers:
        write_tensors(run / LEFTOVERS, leftovers)
    metadata = {} if current else metadata_of(stored)
    replace(record, family=family.name, tensors=tensors, metadata=metadata).write(run)


def _overrides(family: Family, knobs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that build the model in a new run, without `vocab`, which the tokenizer determines."""
    defaults = {**knob_defaults(family.model, family.config_dir), "vocab": knobs["vocab"]}
    changed = {name: value for name, value in knobs.items() if value != defaults[name]}
    model = Path(family.model)
    folder = model.parents[1] if model.parent.name == "model" else family.config_dir
    own = [f"--config-dir={folder}"] if folder else []
    values = [f"{name}={'null' if value is None else value}" for name, value in changed.items()]
    return (*own, f"model={model.stem}", *values)


FORMER = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))  # of BERT's first versions
RECOMPUTED = re.compile(  # buffers of earlier versions, which every version computes
    r"(^|.*\.)((rotary_emb|rotary_pos_emb)\.(original_)?(inv_freq|cos_cached|sin_cached)|position_ids"
    r"|(attn|crossattention)\.(masked_)?bias|(encoder|decoder)\.version)"
)


def with_current_names(stored: PublishedFolder, family: Family) -> PublishedFolder:
    """Return the folder with the names of the family, without the tensors that transformers ignores.

    The prefix of the base model is added or removed. Raises RunError if two tensors get the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    known = names_pattern([*family.weights, *family.also])
    for stored_name, tensor in stored.tensors.items():
        written = reduce(lambda name, former: name.replace(*former), FORMER, stored_name)
        options = (written, f"{family.prefix}.{written}", written.removeprefix(f"{family.prefix}."))
        name = next((name for name in options if name in family.tied or known.fullmatch(name)), "")
        if not name and (RECOMPUTED.fullmatch(written) or {*options}.intersection(family.ignored)):
            continue
        name = name or written
        if name in tensors:
            raise RunError(Problem(str(stored.path), f"has the tensor {name} also as {written}", help="remove one"))
        tensors[name] = tensor
    return replace(stored, tensors=tensors)


def with_tied(stored: PublishedFolder, published: Published) -> tuple[PublishedFolder, Published]:
    """Return the folder with one tensor for each tied matrix, and the model, untied if its matrices differ.

    Raises RunError if the copies of a matrix that our model has once differ.
    """
    family, tensors = published.family, dict(stored.tensors)
    knobs = published.sizes
    untied: dict[str, None] = {}
    for copy, original in family.tied.items():
        knob = family.output.get(copy)
        if copy not in tensors or (knob and knobs[knob] is None):
            continue
        if original not in tensors:
            tensors[original] = tensors.pop(copy)
        elif stored.is_equal(tensors[copy], tensors[original]):
            del tensors[copy]
        elif knob:
            untied[knob] = None
        else:
            rule = f"{copy} differs from {original}, but the model has them as one matrix"
            raise RunError(Problem(str(stored.path), rule, help=f"remove {copy} if the model does not use it"))
    untied |= {knob: None for copy, knob in family.output.items() if copy in tensors and copy not in family.tied}
    return replace(stored, tensors=tensors), replace(published, knobs={**published.knobs, **untied})


def rows_of(family: Family, names: Iterable[str]) -> Sequence[Row]:
    """Return the table of weights, with the rows of `also` for the tensors that have their names."""
    known = list(names)
    also = [row for row in family.also if any(map(names_pattern([row]).fullmatch, known))]
    replaced = {address for row in also for address in row.ours}
    return [*(row for row in family.weights if not replaced & set(row.ours)), *also]
