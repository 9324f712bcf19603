"""The layouts of weights that transformers loads: without the prefix, with buffers, with copies of tied weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.exchange.config import Published, knob_defaults
from tfm_blocks.exchange.family import Family
from tfm_blocks.exchange.folder import PublishedFolder, StoredTensor
from tfm_blocks.exchange.weights import Row, names_pattern

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
    for written, tensor in stored.tensors.items():
        options = (written, f"{family.prefix}.{written}", written.removeprefix(f"{family.prefix}."))
        name = next((name for name in options if name in family.tied or known.fullmatch(name)), "")
        if not name and (RECOMPUTED.fullmatch(written) or {*options} & family.ignored):
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
    knobs = {**knob_defaults(family.model, family.config_dir), **published.knobs}
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
