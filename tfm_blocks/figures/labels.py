"""What a box says: its title, its kind, and notes on arguments and weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfm_blocks.figures.drawing import Kind
from tfm_blocks.figures.text import wrap
from tfm_blocks.language.spec import TARGET, Input, Node, Step
from tfm_blocks.registry.blocks import BlockInfo, Registry

LETTERS = 14  # of a line of a title, if its words are shorter
NOTE_LETTERS = 24
COMMON = {"d_model", "d_ff", "heads", "vocab", "mask", "bias", "dropout", "attention_dropout", "activation_dropout"}
WORDS = {
    "ffn": "Feed Forward",
    "moe": "Mixture of Experts",
    "rnn": "RNN",
    "gru": "GRU",
    "lstm": "LSTM",
    "conv": "Convolution",
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "scalenorm": "ScaleNorm",
    "l2norm": "L2 Norm",
    "relu": "ReLU",
    "gelu": "GELU",
    "dyt": "DyT",
    "alibi": "ALiBi",
}
NAMES = {
    "attention": "Multi-Head Attention",
    "unembed": "Linear",
    "sinusoidal": "Positional Encoding",
    "fairseq_sinusoidal": "Positional Encoding",
    "learned_position": "Learned Positions",
    "timestep": "Step Encoding",
    "none": "Identity",
}
SIGNALS = ("sinusoidal", "fairseq_sinusoidal", "learned_position", "timestep")  # add a signal to every position
RECURRENT = ("rnn", "gru", "lstm")


@dataclass(frozen=True)
class InputWords:
    """How a figure calls an input: the text below its arrow, and the first word of its embedding."""

    title: tuple[str, ...]
    noun: str = "Input"


def input_words(inputs: Sequence[Input]) -> dict[str, InputWords]:
    """Return the words for each input: as in Vaswani et al. 2017, or tokens for a decoder without an encoder."""
    words = {model_input.name: InputWords((model_input.name,)) for model_input in inputs}
    words |= {"src": InputWords(("Inputs",)), TARGET: InputWords(("Outputs", "(shifted right)"), "Output")}
    if [model_input.name for model_input in inputs] == [TARGET]:
        words[TARGET] = InputWords(("Tokens",), "Token")
    return words


def title_of(node: Node, words: Mapping[str, InputWords]) -> tuple[str, ...]:
    """Return the lines of a block's title."""
    block = node.block or ""
    name = NAMES.get(block) or " ".join(WORDS.get(word, word.capitalize()) for word in block.split("_"))
    if block == "embedding":
        name = f"{words[node.entry].noun if node.entry in words else 'Input'} {name}"
    return wrap(f"{_direction(node)} {name}".split(), LETTERS)


def _direction(node: Node) -> str:
    """Return the word for the positions that a block sees, if the field has one."""
    causal, block = node.arguments.get("mask") == "causal", node.block or ""
    if block in RECURRENT:
        return "" if causal else "Bidirectional"
    return ("Masked" if "attention" in block else "Causal") if causal else ""


def box_kind(info: BlockInfo) -> Kind:
    """Return the kind of a block, which sets its colour."""
    if info.category == "norm":
        return "norm"
    if info.signature.ports[0].ids:
        return "embedding"
    if info.name in ("unembed", "linear"):
        return "linear"
    if info.branch:
        return "attention" if info.sees else "ffn"
    return "other"


def step_label(steps: Sequence[Step]) -> tuple[str, str]:
    """Return the title of consecutive operations of add & norm, and a note on the unusual ones."""
    words, notes = [], []
    for step in steps:
        if step.kind == "norm":
            words.append("Norm")
            notes += [step.block] if step.block != "layernorm" else []
        elif step.kind == "add":
            words.append("Add")
            notes += [f"residual × {step.value:.3g}"] if step.value != 1 else []
        elif step.kind == "scale":
            words.append(f"× {step.value:g}")
        elif step.kind == "gain":
            words.append("× gain")
            notes.append("learned per channel" if step.per_channel else "learned")
        else:
            words.append("DropPath")
    return " & ".join(words), ", ".join(notes)


def argument_notes(node: Node, registry: Registry, varied: Collection[str]) -> tuple[str, ...]:
    """Return lines with the arguments that differ from their defaults, or that are `varied` from layer to layer.

    Other arguments that most blocks have are left out.
    """
    notes = list(_arguments(node, registry, COMMON.difference(varied)))
    lines = wrap(notes, NOTE_LETTERS, ", ")
    return (*lines[:3], "…") if len(lines) > 4 else lines


def _arguments(node: Node, registry: Registry, hidden: Collection[str]) -> Iterator[str]:
    for name, argument in registry.blocks[node.block or ""].arguments.items():
        value = node.arguments.get(name)
        if name in hidden or value == registry.complete(argument.default) or value is None:
            continue
        yield f"{name} {_text(value)}" if argument.kind.category == "" else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def weight_notes(node: Node, *, shared: bool) -> tuple[str, ...]:
    """Return notes on weights of other nodes. `shared` layers say so on their plate."""
    if node.tie:
        return (f"tied to {node.tie}",)
    return (f"weights of {node.owner}",) if node.shares and not shared else ()


def layer_note(stack: str, count: int, layers: Sequence[Sequence[int]]) -> str:
    """Return a note on the layers of another stack that alike nodes read; "" if all read the last one."""
    first = layers[0]
    if all(list(read) == [count - 1] for read in layers):
        return ""
    if len(first) == count > 1:
        return f"reads all layers of {stack}"
    if all(read == first for read in layers):
        return f"reads {stack} layer {', '.join(map(str, first))}"
    return f"reads {stack} layer {'i' if first[0] < layers[-1][0] else 'n−1−i'}"


def cost_notes(parameters: int, multiply_adds: int) -> tuple[str, ...]:
    """Return lines with the cost of one call of a node."""
    return tuple(
        f"{_rounded(number)} {noun}"
        for number, noun in ((parameters, "parameters"), (multiply_adds, "multiply-adds"))
        if number
    )


def _rounded(number: int) -> str:
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:  # 999.5 of the next smaller unit would be rounded to 1e+03
            return f"{number / 10**power:.3g}{letter}"
    return str(number)
