"""The tensors of a published folder: names of earlier versions, copies of tied matrices, and the conversion to ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from tfm_blocks.errors import run_error
from tfm_blocks.exchange.config import Published
from tfm_blocks.exchange.family import Family
from tfm_blocks.exchange.folder import PublishedFolder, StoredTensor
from tfm_blocks.exchange.weights import Conversion, Row, format_name, names_pattern

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
            raise run_error(str(stored.path), f"has the tensor {name} also as {written}", "remove one")
        tensors[name] = tensor
    return replace(stored, tensors=tensors)


OWN_MODEL = "describe a model with separate matrices by a family of your own: --family FILE.yaml"


def separate_copies(published: Published) -> dict[str, str]:
    """Return the copies of tied matrices that transformers unties together with the output, with their originals."""
    family, knobs = published.family, published.sizes
    is_untied = any(knobs[knob] is None for knob in family.output.values())
    return {copy: family.tied[copy] for copy in family.untied if is_untied}


def with_tied(stored: PublishedFolder, published: Published) -> tuple[PublishedFolder, Published]:
    """Return the folder with one tensor for each tied matrix, and the model, untied if its matrices differ.

    Raises RunError if the copies of a matrix that our model has once differ.
    """
    family, tensors = published.family, dict(stored.tensors)
    knobs, separate = published.sizes, separate_copies(published)
    for copy, original in separate.items():
        if copy in tensors:  # the model reads the copy
            tensors.pop(original, None)
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
            rule = f"{copy} differs from {tensors[original].name}, but the model has them as one matrix"
            help = OWN_MODEL if copy in separate else f"remove {copy} if the model does not use it"
            raise run_error(str(stored.path), rule, help)
    untied |= {knob: None for copy, knob in family.output.items() if copy in tensors and copy not in family.tied}
    return replace(stored, tensors=tensors), replace(published, knobs={**published.knobs, **untied})


def rows_of(family: Family, names: Iterable[str]) -> Sequence[Row]:
    """Return the table of weights, with the rows of `also` for the tensors that have their names."""
    known = list(names)
    also = [row for row in family.also if any(map(names_pattern([row]).fullmatch, known))]
    replaced = {address for row in also for address in row.ours}
    return [*(row for row in family.weights if not replaced & set(row.ours)), *also]


def conversion_of(published: Published) -> Conversion:
    """Return the table of weights for the knobs and the vocabulary of a model."""
    return Conversion(published.family.weights, published.sizes, published.vocabulary.front)


def to_published(
    published: Published,
    weights: Mapping[str, Tensor],
    rows: Sequence[Row] | None = None,
    leftovers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return all tensors that transformers loads, by name: of our weights, leftovers, copies and constants."""
    conversion = conversion_of(published)
    tensors = replace(conversion, rows=rows or conversion.rows).to_theirs(weights, leftovers)
    tensors |= {copy: tensors[original].clone() for copy, original in separate_copies(published).items()}
    constants = {name: number for name, number in published.family.computed.items() if not isinstance(number, str)}
    for pattern, number in constants.items():
        for layer in range(published.sizes["layers"]):
            tensors.setdefault(format_name(pattern, {"i": str(layer)}), torch.tensor(float(number)))
    return tensors
