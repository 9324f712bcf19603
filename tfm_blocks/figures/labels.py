"""The boxes of a node with their texts: titles, kinds, notes on arguments and weights, and the widths of texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfm_blocks.figures.drawing import Box, Glyph, Kind
from tfm_blocks.language.spec import TARGET, Input, Node, Step
from tfm_blocks.registry.blocks import BlockInfo, Registry

TITLE, NOTE, LABEL = 11.0, 8.0, 14.0  # sizes of text
LEADING = 1.25  # from line to line, in sizes
# Widths of letters in DejaVu Sans, the widest of the fonts that a reader is likely to have, in thousandths of an em.
_ASCII = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636 636 337
337 838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732
684 989 685 611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278 278 579 278 974 634 612 635
635 411 521 392 634 592 818 592 592 525 636 337 636 838
"""
WIDTHS = {chr(code): width for code, width in enumerate(map(int, _ASCII.split()), ord(" "))}
WIDEST = 1900  # of the other letters, whatever font draws them
Lines = list[tuple[str, float]]  # texts with their sizes

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
    "mlstm": "mLSTM",
    "rwkv7": "RWKV-7",
    "mamba2": "Mamba-2",
    "xielu": "xIELU",
    "silu": "SiLU",
}
NAMES = {
    "attention": "Multi-Head Attention",
    "unembed": "Linear",
    "sinusoidal": "Positional Encoding",
    "fairseq_sinusoidal": "Positional Encoding",
    "learned_position": "Learned Positions",
    "timestep": "Step Encoding",
    "none": "Identity",
    "rg_lru": "RG-LRU",
}
SIGNALS = ("sinusoidal", "fairseq_sinusoidal", "learned_position", "timestep")  # add a signal to every position
RECURRENT = ("rnn", "gru", "lstm")


def node_boxes(
    node: Node, info: BlockInfo | None, notes: Sequence[str], inputs: Mapping[str, tuple[str, ...]]
) -> tuple[list[Box], Box, Box | None]:
    """Return the boxes of a node from below to above, the box that other ports enter, and the box of the residual.

    `notes` are the lines of small text in the box of the block, and `inputs` the titles of inputs.
    """
    before = [_operation(steps) for steps in _grouped(node.pre)]
    groups = _grouped(node.post)
    after = [_operation(steps) for steps in groups]
    adding = next((box for box, steps in zip(after, groups, strict=True) if steps[0].kind == "add"), None)
    middle = [_block(node, info, notes, inputs)] if info else []
    one_sum = middle and middle[0].glyph == "plus" and after and after[0] is adding  # of branches and the residual
    if one_sum or (node.block == "none" and (before or after)):
        middle = []
    drawn = [*before, *middle, *after] or [Box((), "other", ("Identity",))]
    return drawn, drawn[len(before)], adding


def _grouped(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the operations by box: a norm that follows `add` shares its box, and dropout is not drawn."""
    groups: list[list[Step]] = []
    for step in steps:
        if step.kind == "norm" and groups and groups[-1][-1].kind == "add":
            groups[-1].append(step)
        elif step.kind != "dropout":
            groups.append([step])
    return groups


def _block(node: Node, info: BlockInfo, notes: Sequence[str], inputs: Mapping[str, tuple[str, ...]]) -> Box:
    if node.block == "sum" and not notes:
        return Box((), "other", (), glyph="plus")
    forked = "attention" in info.name and node.reads.keys().isdisjoint(("kv", "k"))
    glyph: Glyph = "wave" if node.block in SIGNALS else "box"
    block, causal = node.block or "", node.arguments.get("mask") == "causal"
    name = NAMES.get(block) or " ".join(WORDS.get(word, word.capitalize()) for word in block.split("_"))
    if block == "embedding":
        name = f"{inputs[TARGET][0].removesuffix('s') if node.entry == TARGET else 'Input'} {name}"
    if block in RECURRENT:
        name = name if causal else f"Bidirectional {name}"
    elif causal:
        name = f"{'Masked' if 'attention' in block else 'Causal'} {name}"
    return Box((), _kind(info), wrap(name.split(), LETTERS), tuple(notes), glyph, forked=forked)


def input_titles(inputs: Sequence[Input]) -> dict[str, tuple[str, ...]]:
    """Return the text below each input: as in Vaswani et al. 2017, or tokens for a decoder without an encoder."""
    titles = {model_input.name: (model_input.name,) for model_input in inputs}
    target = ("Tokens",) if list(titles) == [TARGET] else ("Outputs", "(shifted right)")
    return titles | {"src": ("Inputs",), TARGET: target}


def _kind(info: BlockInfo) -> Kind:
    """Return the kind of a block, which sets its colour."""
    if info.category == "norm":
        return "norm"
    if info.signature.ports[0].ids:
        return "embedding"
    if info.name in ("unembed", "linear"):
        return "linear"
    if info.branch:
        return "attention" if info.mixes_positions else "ffn"
    return "other"


def _operation(steps: Sequence[Step]) -> Box:
    """Draw consecutive operations of add & norm, with a note on the unusual ones."""
    words, notes = [], []
    for step in steps:
        if step.kind == "norm":
            words.append("Norm")
            notes += [step.block] if step.block != "layernorm" else []
        elif step.kind == "add":
            words.append("Add")
            learned = ["residual × learned gains"] if step.per_channel else []
            notes += learned or ([f"residual × {step.value:.3g}"] if step.value != 1 else [])
        elif step.kind in ("scale", "depth"):
            words.append(f"× {step.value:g}")
        elif step.kind == "gain":
            words.append("× gain")
            notes.append("learned per channel" if step.per_channel else "learned")
        else:
            words.append("DropPath")
    if words == ["Add"] and not notes:
        return Box((), "other", (), glyph="plus")
    return Box((), "norm", (" & ".join(words),), (", ".join(notes),) if notes else ())


def argument_notes(alike: Sequence[Node], registry: Registry, varied: Collection[str]) -> tuple[str, ...]:
    """Return lines with the arguments that differ from their defaults, or that are `varied` from layer to layer.

    Other arguments that most blocks have are left out.
    """
    node, notes, hidden = alike[0], [], COMMON.difference(varied)
    for name, argument in registry.blocks[node.block or ""].arguments.items():
        value = node.arguments.get(name)
        if any(other.arguments.get(name) != value for other in alike):
            notes.append(f"{name} by layer")
        elif name not in hidden and value != registry.complete(argument.default) and value is not None:
            notes.append(f"{name} {_text(value)}" if argument.kind.category == "" else _text(value))
    lines = wrap(notes, NOTE_LETTERS, ", ")
    return (*lines[:3], "…") if len(lines) > 4 else lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def weight_notes(node: Node, *, shared: bool) -> tuple[str, ...]:
    """Return notes on weights of other nodes. `shared` layers say so on their plate."""
    if node.tie:
        return (f"tied to {node.tie}",)
    return (f"weights of {node.owner}",) if node.shares and not shared else ()


def map_notes(node: Node) -> tuple[str, ...]:
    """Return lines with the adapted maps of a node, the ranks of their adapters, and the quantised maps."""
    ranks: dict[int, list[str]] = {}
    for adapter in node.adapters.values():
        ranks.setdefault(adapter.rank, []).extend(adapter.maps)
    texts = [f"rank {rank} on {', '.join(maps)}" for rank, maps in ranks.items()]
    texts += dict.fromkeys(f"{one.weights} weights" for one in node.quantized.values())
    return tuple(line for text in texts for line in wrap(text.split(), NOTE_LETTERS))


def layer_note(stack: str, count: int, readers: Sequence[str], layers: Sequence[Sequence[int]]) -> str:
    """Return a note on the layers of another stack that alike nodes read; "" if all read the last one.

    `readers` are the addresses of the nodes, and `i` in the note is the layer of a reader in its own stack.
    """
    first = layers[0]
    if all(list(read) == [count - 1] for read in layers):
        return ""
    if len(first) == count > 1:
        return f"reads all layers of {stack}"
    if all(read == first for read in layers):
        return f"reads {stack} layer {', '.join(map(str, first))}"
    varying = [parts for parts in zip(*(reader.split(".") for reader in readers), strict=True) if len(set(parts)) > 1]
    if len(varying) == 1 and all(part.isdecimal() for part in varying[0]) and all(len(read) == 1 for read in layers):
        pairs = [(read[0], int(own)) for read, own in zip(layers, varying[0], strict=True)]
        offsets, sums = {read - own for read, own in pairs}, {read + own for read, own in pairs}
        if len(offsets) == 1:
            offset = offsets.pop()
            return f"reads {stack} layer i{f'{offset:+d}'.replace('-', '−') if offset else ''}"
        if len(sums) == 1:
            return f"reads {stack} layer {sums.pop()}−i"
    return f"reads {stack} layers {', '.join(map(str, sorted({index for read in layers for index in read})))}"


def cost_notes(parameters: int, multiply_adds: int) -> list[str]:
    """Return lines with the cost of one call of a node."""
    costs = {"parameters": parameters, "multiply-adds": multiply_adds}
    return [f"{_rounded(number)} {noun}" for noun, number in costs.items() if number]


def _rounded(number: int) -> str:
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:  # 999.5 of the next smaller unit would be rounded to 1e+03
            return f"{number / 10**power:.3g}{letter}"
    return str(number)


def text_height(lines: Lines) -> float:
    return sum(size * LEADING for _, size in lines)


def widest(lines: Lines) -> float:
    """Return the width of the longest line."""
    return max((text_width(text, size) for text, size in lines), default=0.0)


def box_lines(box: Box) -> Lines:
    """Return the lines of text of a box."""
    return [*((text, TITLE) for text in box.title), *((text, NOTE) for text in box.notes)]


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in points; letters that are not ASCII count as the widest ones."""
    return sum(WIDTHS.get(letter, WIDEST if ord(letter) > 0x24F else 1000) for letter in text) * size / 1000


def wrap(words: Sequence[str], letters: int, separator: str = " ") -> tuple[str, ...]:
    """Join words into lines of at most `letters` letters where the words allow it."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= letters:
            lines[-1] += separator + word
        else:
            lines.append(word)
    return tuple(lines)
