"""Initialise a network from the weights of another run: to fine-tune, grow a model, or swap a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.data.layout import SOURCE
from tfm_blocks.data.objectives import DistilSettings, ObjectiveSettings
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.errors import Problem, RunError, TfmError, config_error, listed, suggest
from tfm_blocks.language.difference import find_changes
from tfm_blocks.language.parametrisation import WHERE
from tfm_blocks.language.spec import TARGET, Spec, format_shape, names
from tfm_blocks.network.adapters import without_adapters
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import (
    NGRAMS,
    WeightMatch,
    expect_weights,
    match_weights,
    rehashed_weights,
    weights_of,
)
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.folder import MODEL, TOKENIZER, WEIGHTS, expect_folder, kept_weights
from tfm_blocks.runs.model import find_base, has_base, read_network, read_spec, read_tensors, without_generator
from tfm_blocks.runs.records import Base, SavedModel
from tfm_blocks.runs.saved_run import SavedRun

# changes of a model that keep its function in evaluation mode; the tokenizers of a run and its base are compared
KEPT_BY_ADAPTERS = {"dropout", "droppath", "balance", "ponder", "align", "initial weights", "vocab"}
NAMED = 3  # changes that an error lists; the others are counted


def find_weights(run: Path) -> Path:
    """Return the file of a run's final weights, or of its last validation if it has none. Raises RunError."""
    expect_folder(run)
    return run / WEIGHTS if (run / WEIGHTS).is_file() else kept_weights(run, "last")


def expect_source(spec: Spec, run: Path) -> None:
    """Raise TfmError unless the weights of the run can initialise a model, before anything starts."""
    if not run.is_dir():
        raise config_error("init_from", f"there is no run folder {run}", "tfm runs lists all runs")
    final = find_weights(run) == run / WEIGHTS
    if not (run / MODEL).is_file():
        return
    own, other = map(_parametrisation, (spec.mapping, SavedModel.read(run).model))
    if own != other:
        rule = f"is {run}, whose weights have the scales of {other}, but this model has {own}"
        help = "set model.parametrisation and model.base as in that run, or leave init_from out"
        raise RunError(Problem("init_from", rule, help=help))
    if has_base(run):
        read_network(run, checkpoint=None if final else "last")  # its base may be missing
    elif final:
        SavedRun(run).expect_finished()


def _parametrisation(model: Mapping[str, Any]) -> str:
    """Describe what the scales of the weights of a model depend on, besides the model itself."""
    name, base = model.get("parametrisation") or "standard", model.get("base") or {}
    sizes = [f"{knob}={value}" for knob, value in sorted(base.items()) if knob != WHERE and value is not None]
    return f"parametrisation={name}" + (f" with the base {' '.join(sizes)}" if sizes and name != "standard" else "")


def expect_base(spec: Spec, tokenizer: Tokenizer, init_from: str | None) -> Base:
    """Return the base of the model's adapters; an empty one if it has none. Raises RunError if it is another model."""
    if not spec.adapted:
        return Base()
    run = Path(init_from or "")
    if has_base(run):
        rule = f"is {run}, which has adapters itself, but adapters change the weights of a run without them"
        raise RunError(Problem("init_from", rule, help=f"tfm merge {run} -o RUN, then init_from=RUN"))
    if (run / MODEL).is_file():
        _expect_same_model(spec, run)
    base = find_base(spec, run)
    if not _have_same_ids(load_tokenizer(run / TOKENIZER), tokenizer):
        rule = f"is {run}, whose tokenizer has other ids, but adapters change the weights of the same vocabulary"
        raise RunError(Problem("init_from", rule, help=f"data.tokenizer={run}"))
    return base


def _expect_same_model(spec: Spec, run: Path) -> None:
    """Raise RunError if the model of the run is not the model without its adapters."""
    ngrams = {node.address for node in spec.nodes if node.block == NGRAMS}  # hash functions follow from their vocab
    changes = [
        f"{change.key and f'{change.key} of '}{change.where}: {change.before} → {change.after}"
        for change in find_changes(read_spec(run), without_adapters(spec), REGISTRY)
        if change.key.rpartition(".")[2].removeprefix("attention_").removeprefix("activation_") not in KEPT_BY_ADAPTERS
        or (change.key == "vocab" and ngrams.intersection(change.new.addresses))
    ]
    if changes:
        rule = f"is {run}, whose model is different ({listed(changes, NAMED, '; ')}), but adapters need the same model"
        help = "set the model as in that run, or first train this model without adapters from it, with its nodes frozen"
        raise RunError(Problem("init_from", rule, help=help))


def _have_same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    return all(one.of(column).ids == other.of(column).ids for column in (SOURCE, TARGET))


def expect_teacher(spec: Spec, tokenizer: Tokenizer, objective: ObjectiveSettings) -> None:
    """Raise RunError unless the teacher of objective=distil reads the inputs and the vocabulary of the model."""
    if not isinstance(objective, DistilSettings):
        return
    run = Path(objective.teacher)
    teacher = read_spec(run)
    SavedRun(run).expect_finished()
    problem = None
    if names(teacher.inputs) != names(spec.inputs):
        own, other = (", ".join(names(one.inputs)) for one in (spec, teacher))
        rule = f"is {run}, which reads {other}, but the model reads {own}"
        problem = Problem("objective.teacher", rule, help="name a run with the same inputs")
    elif not _have_same_ids(load_tokenizer(run / TOKENIZER), tokenizer):
        rule = f"is {run}, whose tokenizer has other ids, but a distribution is over the ids of one vocabulary"
        problem = Problem("objective.teacher", rule, help=f"data.tokenizer={run}")
    elif teacher.sink.shape[-1] != spec.sink.shape[-1]:
        rule = f"is {run}, which has {teacher.sink.shape[-1]} logits, but the model has {spec.sink.shape[-1]}"
        problem = Problem("objective.teacher", rule, help="name a run with an output for each id of the vocabulary")
    else:
        problem = next(_hidden_problems(spec, teacher, objective.hidden or {}), None)
    if problem:
        raise RunError(problem)
    expect_weights(network_without_values(teacher), read_tensors(run / WEIGHTS), str(run / WEIGHTS))


def _hidden_problems(spec: Spec, teacher: Spec, hidden: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each pair of nodes that do not exist, or whose outputs have different shapes."""
    own, other = (
        {node.address: node for node in one.nodes[: len(one.nodes) - one.head] if len(node.shape) == 3}
        for one in (spec, teacher)
    )
    for pair in hidden.items():
        for address, nodes, owner in zip(pair, (own, other), ("model", "teacher"), strict=True):
            if address not in nodes:
                rule = f"names {address}, which is not a node before the output of the {owner}"
                yield Problem("objective.hidden", rule, help=suggest(address, nodes))
        if pair[0] in own and pair[1] in other and own[pair[0]].shape != other[pair[1]].shape:
            shapes = [format_shape(nodes[address].shape) for nodes, address in zip((own, other), pair, strict=True)]
            rule = f"pairs {pair[0]} of the shape {shapes[0]} with {pair[1]} of the shape {shapes[1]}"
            yield Problem("objective.hidden", rule, help="pair nodes of the same shape")


def blocks_of_teacher(objective: ObjectiveSettings) -> set[str]:
    """Return the blocks of the teacher, whose plug-ins a run needs; none if the teacher cannot be read."""
    with suppress(TfmError):
        return read_spec(Path(objective.teacher)).blocks if isinstance(objective, DistilSettings) else set()
    return set()


@torch.no_grad()
def load_matching_weights(network: Network, tokenizer: Tokenizer, run: Path) -> WeightMatch:
    """Copy every weight of the run whose address and shape match into `network`.

    Weights with a row for each subword take the rows of the subwords that both vocabularies have, even if the ids
    differ. Tables of n-grams are new unless ids and hash functions are equal. The adapters of the run are added to its
    weights. Raises RunError if the run is damaged.
    """
    path = find_weights(run)
    merged = has_base(run) and read_network(run, checkpoint=None if path == run / WEIGHTS else "last")
    saved = weights_of(merged) if merged else without_generator(run, read_tensors(path))
    before = load_tokenizer(run / TOKENIZER)
    ids = {column: (tokenizer.of(column).ids, before.of(column).ids) for column in (SOURCE, TARGET)}
    pairs = {
        column: [[own[name], other[name]] for name in own if name in other] for column, (own, other) in ids.items()
    }
    sizes, saved_sizes = ({column: len(pair[side]) for column, pair in ids.items()} for side in (0, 1))
    has_hashes = NGRAMS in network.spec.blocks and _have_same_ids(tokenizer, before) and (run / MODEL).is_file()
    rehashed = rehashed_weights(network, read_spec(run) if has_hashes else None)
    match = match_weights(network, sizes, {name: tensor.shape for name, tensor in saved.items()}, saved_sizes, rehashed)
    weights = weights_of(network)
    for name in match.loaded:
        if column := match.tables.get(name):
            own, other = ids[column]
            pairs_N2 = torch.tensor(pairs[column])
            without_row = torch.tensor([len(own) - len(weights[name]), len(other) - len(saved[name])])
            rows_N2 = (pairs_N2 - without_row)[(pairs_N2 >= without_row).all(1)]
            weights[name][rows_N2[:, 0]] = saved[name][rows_N2[:, 1]].to(weights[name].dtype)
        else:
            weights[name].copy_(saved[name])
    is_separate = tokenizer.source is not None or before.source is not None
    return replace(match, subwords=len(pairs[TARGET]) + is_separate * len(pairs[SOURCE]))
