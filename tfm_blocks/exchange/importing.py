"""Import a folder of a published model as a run folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.published_tokenizer import FAST, PublishedTokenizer, published_tokenizer, without_code
from tfm_blocks.data.tokenizer_files import read_folder
from tfm_blocks.data.tokenizer_trial import expect_usable
from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.exchange.config import Published, knob_defaults, read_published
from tfm_blocks.exchange.folder import CONFIG, INDEX, SINGLE, PublishedFolder, metadata_of, open_folder, read_small_json
from tfm_blocks.exchange.record import KEPT, LEFTOVERS, PublishedFile
from tfm_blocks.exchange.weights import Conversion
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import build_network, check_model, network_without_values
from tfm_blocks.runs.files import read_bytes
from tfm_blocks.runs.folder import new_folder
from tfm_blocks.runs.model import fill, weights_of, write_tensors
from tfm_blocks.translation.save import write_run


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
        return f"{head}{removed}\ntrain it on: python train.py {shlex.join(overrides)} data=…"


def import_folder(folder: Path, run: Path) -> ImportReport:
    """Write the model, the weights and the tokenizer of a folder as a run folder. Raises RunError."""
    stored = open_folder(folder)
    texts, removed = _texts(folder)
    tensors = {name: (tensor.file, tensor.dtype) for name, tensor in stored.tensors.items()}
    record = PublishedFile(texts=texts, tensors=tensors, metadata=metadata_of(stored))
    published = read_published(record.parsed(CONFIG), stored.tensors, str(folder / CONFIG))
    composed, spec = _checked(published, folder)
    conversion = conversion_of(published)
    _expect_tensors(stored, conversion, spec)
    tokenizer = _tokenizer(folder, published, removed)
    weights, leftovers = conversion.present(stored.tensors).to_ours(stored.load())
    network = build_network(spec, seed=0)
    fill(network, weights)
    knobs = {name: value for name, value in composed.mapping.items() if name != "model"}
    with new_folder(run) as part:
        write_run(network, part, run.name, tokenizer, knobs)
        if leftovers:
            write_tensors(part / LEFTOVERS, leftovers)
        replace(record, family=published.family.name).write(part)
    count = sum(parameter.numel() for parameter in network.parameters())
    overrides = _overrides(published.family.model, knobs)
    return ImportReport(run, published.family.name, overrides, count, tuple(removed))


def conversion_of(published: Published) -> Conversion:
    """Return the table of weights for the knobs and the vocabulary of a model."""
    return Conversion(published.family.weights, published.knobs, published.vocabulary.front)


def _checked(published: Published, folder: Path) -> tuple[Composed, Spec]:
    """Return the model with the values of config.json. Raises RunError for values that the check refuses."""
    try:
        composed = published.compose()
        return composed, check_model(composed.model)
    except ConfigError as error:
        problems = [Problem(f"{folder / CONFIG}: {problem.address}", problem.rule) for problem in error.problems]
        raise RunError(problems) from None


def _expect_tensors(stored: PublishedFolder, conversion: Conversion, spec: Spec) -> None:
    """Raise RunError unless the tensors have the names and shapes of the model, without allocating the model."""
    expected = conversion.to_theirs(weights_of(network_without_values(spec)))
    without = conversion.without_counterpart(stored.tensors)
    problems = [f"lacks the tensor {name}" for name in expected if name not in stored.tensors]
    extra = stored.tensors.keys() - expected.keys() - without
    problems += [f"has the tensor {name}, which the model lacks" for name in extra]
    for name in expected.keys() & stored.tensors.keys():
        shapes = list(stored.tensors[name].shape), list(expected[name].shape)
        if shapes[0] != shapes[1]:
            problems.append(f"{name} has the shape {shapes[0]}, but config.json gives {shapes[1]}")
    if problems:
        others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise RunError(Problem(str(stored.path), f"{min(problems)}{others}"))


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


def _tokenizer(folder: Path, published: Published, removed: list[str]) -> PublishedTokenizer:
    """Return the tokenizer of a folder. The keys that name code are added to `removed`. Raises RunError."""
    files, keys = read_folder(folder)
    removed += keys
    if files:
        where = str(folder / next(iter(files)))
        expect_usable(files, where)
        return published_tokenizer(published.vocabulary, files, where)
    help = "save it with transformers: tokenizer.save_pretrained(FOLDER) writes tokenizer.json"
    raise RunError(Problem(str(folder), f"has no {FAST} and no model of SentencePiece", help=help))


def _overrides(model: str, knobs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that build the model in a new run, without `vocab`, which the tokenizer determines."""
    defaults = {**knob_defaults(model), "vocab": knobs["vocab"]}
    changed = {name: value for name, value in knobs.items() if value != defaults[name]}
    return (f"model={model}", *(f"{name}={'null' if value is None else value}" for name, value in changed.items()))
