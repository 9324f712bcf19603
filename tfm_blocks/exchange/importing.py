"""Import a folder of a published model as a run folder."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.state import HasComputedValues
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.published_libraries import published_tokenizer
from tfm_blocks.data.published_tokenizer import FAST, TARGET_IDS, PublishedTokenizer, without_code
from tfm_blocks.data.tokenizer_files import expect_usable, read_folder
from tfm_blocks.data.tokenizer_format import refusing_damage
from tfm_blocks.errors import ConfigError, Problem, RunError, run_error
from tfm_blocks.exchange.config import Published, family_of, knob_defaults, read_published, to_json, unstated_ids
from tfm_blocks.exchange.conventions import ignored_settings, read_conventions, special_ids_of
from tfm_blocks.exchange.family import Config, Family, Knobs
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
    metadata_of,
    open_folder,
    read_small_json,
)
from tfm_blocks.exchange.published_tensors import (
    conversion_of,
    rows_of,
    separate_copies,
    to_published,
    with_current_names,
    with_tied,
)
from tfm_blocks.exchange.rope import with_long_factors
from tfm_blocks.exchange.weights import Conversion, format_name, wildcards
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

    The overrides are empty if no command line builds the model.
    removed: keys of the folder that name code, each with its file. ignored: settings of greedy search. bound: the most
    positions of the short list of LongRoPE, or None.
    """

    run: Path
    family: str
    overrides: tuple[str, ...]
    parameters: int
    removed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    bound: int | None = None

    def __str__(self) -> str:
        head = f"{self.run}: {self.family}, {self.parameters:,} parameters"
        overrides = [*self.overrides, f"init_from={self.run}", f"data.tokenizer={self.run}"]
        removed = "".join(f"\nnot kept, because it names code: {key}" for key in self.removed)
        ignored = f"\ngeneration ignores {', '.join(self.ignored)}" if self.ignored else ""
        bound = f"\nreads at most {self.bound} tokens: the short factors of LongRoPE; --long takes the long ones"
        command = f"train it on: tfm train {shlex.join(overrides)} data=…"
        if not self.overrides:
            command = "no command line builds this model; to train it on, write a model file for it (docs/models.md), "
            command += f"and add {shlex.join(overrides)}"
        return f"{head}{removed}{ignored}{bound if self.bound else ''}\n{command}"


def import_folder(folder: Path, run: Path, family: Family | None = None, *, long: bool = False) -> ImportReport:
    """Write the model, the weights and the tokenizer of a folder as a run folder. Raises RunError.

    `family` is the family of the folder if it is not a shipped one. With `long`, a model with LongRoPE has the long
    list of factors at all lengths; ConfigError is raised for other models.
    """
    written = open_folder(folder)
    texts, removed = _texts(folder)
    if long:
        texts[CONFIG] = to_json(with_long_factors(json.loads(texts[CONFIG])))
    where, record = str(folder / CONFIG), PublishedFile(texts=texts)
    config, generation = record.parsed(CONFIG), record.parsed(GENERATION) if GENERATION in texts else {}
    generated = generation or config
    own = family or family_of(config, where)
    named = with_current_names(written, own)
    files, keys = read_folder(folder)
    ids = _ids_of_tokenizer(files, folder, own, unstated_ids(own, config, generation))
    published = read_published(own, config | ids, generation, len(named.tensors), where)
    stored, published = with_tied(named, published)
    composed, spec = _checked(published, folder)
    conversion = replace(conversion_of(published), rows=rows_of(own, stored.tensors))
    with _naming_the_table(own):
        stored, zeros = _expect_tensors(stored, conversion, spec, own)
        tokenizer = _tokenizer(files, folder, published, config, generated)
        weights, leftovers = conversion.to_ours(stored.load() | zeros)
    network = build_network(spec, seed=0)
    expect_weights(network, weights, f"family {own.name}: weights")
    fill(network, weights)
    _expect_computed(leftovers, network, own, folder)
    stored, leftovers = _without_rounded(stored, leftovers, own)
    knobs = composed.knobs
    is_current = stored.tensors == written.tensors and not zeros and not separate_copies(published)
    current = [] if is_current else to_published(published, weights_of(network_without_values(spec)))
    with new_folder(run) as part:
        write_run(network, part, run.name, tokenizer, knobs)
        if family is None:
            _write_record(record, stored, own, part, leftovers, current)
    overrides, ignored = _overrides(own, knobs, spec), tuple(ignored_settings(generated))
    bound = published.knobs.get("max_length") if published.knobs.get("factors") else None
    return ImportReport(run, own.name, overrides, network.parameter_count, (*removed, *keys), ignored, bound)


def _ids_of_tokenizer(
    files: Mapping[str, bytes], folder: Path, family: Family, keys: Collection[str]
) -> dict[str, int]:
    """Return the ids of the tokenizer for these keys of config.json. Raises RunError."""
    if not keys:
        return {}
    if files:
        expect_usable(files, str(folder / next(iter(files))))
    with refusing_damage(str(folder)):
        return {key: id for key, id in special_ids_of(files, encoder=family.encoder).items() if key in keys}


@contextmanager
def _naming_the_table(family: Family) -> Iterator[None]:
    """Raise RunError that names the table of weights for an operation that does not fit the tensors."""
    try:
        yield
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as error:
        rule = f"there is no knob {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        help = "correct the row of weights: docs/families.md describes the operations"
        raise run_error(f"family {family.name}: weights", rule, help) from None


def _checked(published: Published, folder: Path) -> tuple[Composed, Spec]:
    """Return the model with the values of config.json. Raises RunError for values that the check refuses."""
    try:
        composed = published.compose()
        return composed, check_model(composed.model, composed.sources)
    except ConfigError as error:
        problems = [Problem(f"{folder / CONFIG}: {problem.address}", problem.rule) for problem in error.problems]
        raise RunError(problems) from None


def _expect_tensors(
    stored: PublishedFolder, conversion: Conversion, spec: Spec, family: Family
) -> tuple[PublishedFolder, dict[str, Tensor]]:
    """Return the folder without the tensors that the family ignores, and zeros for the tensors that it may lack.

    Raises RunError unless the others have the names and shapes of the model, without allocating the model.
    """
    expected = conversion.to_theirs(weights_of(network_without_values(spec)))
    without = conversion.without_counterpart(stored.tensors)
    lacking = [name for name in expected if name not in stored.tensors]
    problems = [(f"lacks the tensor {name}", INCOMPLETE) for name in lacking if name not in family.zeros]
    ignored = _names_pattern(family.ignored)
    unknown = stored.tensors.keys() - expected.keys() - without
    extra = {name for name in unknown if not ignored.match(name)}
    kept = {name: tensor for name, tensor in stored.tensors.items() if name not in unknown or name in extra}
    problems += [(f"has the tensor {name}, which the model lacks", FOREIGN) for name in extra]
    for name, tensor in kept.items():
        shapes = list(tensor.shape), list(expected.get(name, tensor).shape)
        if shapes[0] != shapes[1]:
            problems.append((f"{name} has the shape {shapes[0]}, but config.json gives {shapes[1]}", INCOMPLETE))
        if tensor.dtype not in DTYPES:
            rule = f"{name} has the type {tensor.dtype}, but only {', '.join(DTYPES)} are read"
            problems.append((rule, "import the weights before their quantisation"))
    if problems:
        rule, help = min(problems)
        others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise run_error(str(stored.path), f"{rule}{others}", help)
    return replace(stored, tensors=kept), {name: torch.zeros(expected[name].shape) for name in lacking}


def _names_pattern(names: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, names)) or "(?!)")


def _without_rounded(
    stored: PublishedFolder, leftovers: Mapping[str, Tensor], family: Family
) -> tuple[PublishedFolder, dict[str, Tensor]]:
    """Return both without the 16-bit tensors that transformers computes more exactly if a folder lacks them."""
    names = _names_pattern(family.recomputed)
    rounded = {name for name, tensor in leftovers.items() if tensor.dtype != torch.float32 and names.match(name)}
    kept = {name: tensor for name, tensor in stored.tensors.items() if name not in rounded}
    return replace(stored, tensors=kept), {name: leftovers[name] for name in leftovers if name not in rounded}


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
                    raise run_error(f"family {family.name}: computed", rule)
                expected = block.computed_values(stored.float()).squeeze()
                computed = f"the values that the model computes at {node}"
            else:
                expected = torch.full(stored.squeeze().shape, float(source), dtype=stored.dtype)
                rounding = abs(source) / 100
                computed = f"{source}, the number of this model"
            stored = stored.squeeze()  # MiniMax stores rates_H11
            if stored.shape != expected.shape or not (stored - expected).abs().max() <= rounding:
                help = "describe a model with other values by a family of your own: --family FILE.yaml"
                raise run_error(str(folder), f"{name} differs from {computed}", help)


def _texts(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the small JSON files without the keys that name code, and these keys. Raises RunError."""
    texts, removed = {}, []
    for name in KEPT:
        path = folder / name
        if (name == CONFIG or path.is_file()) and not (name == INDEX and (folder / SINGLE).is_file()):
            read_small_json(path)  # raises
            content, keys = without_code(read_bytes(path))
            texts[name] = content.decode()
            removed += [f"{name}: {key}" for key in keys]
    return texts, removed


def _tokenizer(
    files: Mapping[str, bytes],
    folder: Path,
    published: Published,
    config: Config,
    generation: Config,
) -> PublishedTokenizer:
    """Return the tokenizer of a folder, with the conventions of its settings. Raises RunError."""
    if not files:
        help = "save it with transformers: tokenizer.save_pretrained(FOLDER) writes tokenizer.json"
        raise run_error(str(folder), f"has no {FAST} and no model of SentencePiece", help)
    where = str(folder / next(iter(files)))
    expect_usable(files, where)
    if TARGET_IDS in files and not published.vocabulary.source:
        rule = "is the vocabulary of the target alone, but config.json has one vocabulary for both sides"
        help = "remove the file, or correct share_encoder_decoder_embeddings"
        raise run_error(str(folder / TARGET_IDS), rule, help)
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


def _overrides(family: Family, knobs: Knobs, spec: Spec) -> tuple[str, ...]:
    """Return the overrides that build the model in a new run, without `vocab`, which the tokenizer determines.

    Return () if the command line refuses them, or if they build another model.
    """
    defaults = {**knob_defaults(family.model, family.config_dir), "vocab": knobs["vocab"]}
    changed = {name: value for name, value in knobs.items() if value != defaults[name]}
    model = Path(family.model)
    folder = model.parents[1] if model.parent.name == "model" else family.config_dir
    own = [f"--config-dir={folder}"] if folder else []
    values = {name: f"{name}={'null' if value is None else value}" for name, value in changed.items()}
    if any(row.layers is not None for row in family.config):  # layers that a pattern may leave out
        composed = compose_model(family.model, [*values.values(), f"vocab={knobs['vocab']}"], family.config_dir)
        if unused := _unused(composed):
            values = {name: value for name, value in values.items() if name not in unused}
            composed = compose_model(family.model, [*values.values(), f"vocab={knobs['vocab']}"], family.config_dir)
        try:
            if check_model(composed.model, composed.sources).nodes != spec.nodes:
                return ()
        except ConfigError:
            return ()
    return (*own, f"model={model.stem}", *values.values())


def _unused(composed: Composed) -> set[str | None]:
    """Return the knobs on the command line that no block takes, such as `heads` if no layer has attention."""
    try:
        check_model(composed.model, composed.sources)
    except ConfigError as error:
        return {composed.sources.knob(tuple(problem.address.split("."))) for problem in error.problems}
    return set()
