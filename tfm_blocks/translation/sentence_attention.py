"""Attention weights of a model while it translates a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from tfm_blocks.data.layout import prompt
from tfm_blocks.data.vocabulary import BOS
from tfm_blocks.errors import DataError, Problem, run_error
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.attention_maps import AttentionMap, attention_nodes, attention_weights, label_positions
from tfm_blocks.network.graph import evaluating
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.fill import Filler
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.tasks import Text, texts_of
from tfm_blocks.translation.translator import Translator


@dataclass(frozen=True)
class SentenceAttention:
    """Labels of the positions of each input and derived axis, and w_HTS of each attention node, in graph order.

    The target begins with bos: a target row predicts the next token.
    """

    source: str
    target: str
    tokens: dict[str, list[str]]
    looks: dict[str, AttentionMap]
    weights: dict[str, Tensor]


def attention_of(reader: Translator | Encoder, sentence: Text, target: str | None = None) -> SentenceAttention:
    """Return the attention for `sentence` and, of a translator, for `target`: by default its greedy translation.

    An encoder, and a decoder without sources, read the sentence alone. Raises RunError for a model without attention,
    and DataError for texts longer than the model's positions.
    """
    network, tokenizer = reader.network, reader.tokenizer
    looks = attention_nodes(network)
    if not looks:
        rule = "none of its nodes has attention weights"
        raise run_error("model.graph", rule, "give your attention blocks a method weights")
    if isinstance(reader, Translator) and reader.sources:
        source, target, ids = _pair(reader, sentence, target)
    else:
        ((source,),) = texts_of([sentence], ("text",))
        target, ids = "", _row(reader, source)
    lengths = {name: len(row) for name, row in ids.items()}
    for name, length in lengths.items():
        bound = network.longest(name, lengths)
        if length > bound.tokens:
            rule = f"has {length} tokens, bos or eos included, but the model has {bound.positions(name, lengths)}"
            address = "--target" if name == TARGET and target else name
            raise DataError(Problem(address, rule, help="shorten it"))
    with evaluating(network):
        weights = attention_weights(
            network, looks, **{name: torch.tensor([row], device=network.device) for name, row in ids.items()}
        )
    tokens = {name: [tokenizer.of(name).piece(id) for id in row] for name, row in ids.items()}
    labels, shown = label_positions(network, tokens), set(chain.from_iterable(looks.values()))
    tokens = {name: labels[name] for name in labels if name in shown}
    return SentenceAttention(
        source, target, tokens, looks, {name: w_BHTS[0].float().cpu() for name, w_BHTS in weights.items()}
    )


def _pair(translator: Translator, sentence: Text, target: str | None) -> tuple[str, str, dict[str, list[int]]]:
    """Return the texts of the sources, the target or the model's translation, and the ids of each input."""
    (texts,) = texts_of([sentence], translator.sources)
    sources = translator.encode(texts)
    read = translator.conventions.source
    ids = {name: read(source) for name, source in zip(translator.inputs, sources, strict=False)}
    before = [BOS] if translator.inputs else prompt(sources).tolist()
    if target is None:
        ((best,),) = translator.search([sentence], Search())
        target, ids[TARGET] = best.text, [*before, *best.ids]
        longest = min(len(ids[TARGET]), translator.network.longest(TARGET).tokens)
        del ids[TARGET][int(longest) :]  # the last token of an output that fills the positions is not an input
    else:
        (encoded,) = translator.encode([target], TARGET)
        ids[TARGET] = [*before, *translator.conventions.prefix(encoded)]
    return " | ".join(texts), target, ids


def _row(reader: Translator | Encoder, text: str) -> dict[str, list[int]]:
    """Return the ids of a text that is the only input."""
    if isinstance(reader, Encoder):
        encode = reader.encode_masked if isinstance(reader, Filler) else reader.encode
        return {reader.input: encode([text], name="SENTENCE")[0]}
    (encoded,) = reader.encode([text], TARGET)
    return {TARGET: reader.conventions.prompt(encoded)}
