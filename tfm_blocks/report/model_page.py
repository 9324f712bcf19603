"""`tfm view`: one self-contained page about one or two models, which needs no server and no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from markupsafe import Markup

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.drawing import THEMES, Mark, Theme
from tfm_blocks.figures.figure import Style, mark_nodes, picture_of, svg_of
from tfm_blocks.language.outline import Outline, write_add_norm, write_references, write_steps, write_value
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path, Spec, format_shape
from tfm_blocks.language.tree import ENTRY
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.assets import asset, content_policy, page_template
from tfm_blocks.report.model_difference import changes_table, compare_models, difference_marks, summary_lines
from tfm_blocks.report.show import ModelSize, measure
from tfm_blocks.report.weights import group_weights

MOST_CLOSED = 3  # stacks and parallels; up to this number, every combination has a figure
UNFOLDED = "*"  # the key of the figure with every layer
MOST_NODES = 100  # of a model whose layers are all drawn
COLOURS = Theme(
    background="var(--paper)",
    ink="var(--ink)",
    faint="var(--soft)",
    plate="var(--plate)",
    fills={kind: f"var(--{kind})" for kind in THEMES["paper"].fills},
    marks={mark: f"var(--{mark})" for mark in THEMES["paper"].marks},
)
Row = tuple[str, str, str]
WeightRow = tuple[str, str, str, str]


def _facts(model: ViewedModel, size: ModelSize) -> Iterator[dict[str, Any]]:
    """Yield the facts of each node for JSON.

    `arguments` are rows of a name, a value and the place that set it. `reads` are rows of a port, a reference and a
    shape. `own_weights` are rows of an address below the node, a role, a symbolic shape and the initial values. `lines`
    are rows of a file, a line number and the lines that write the node there.
    """
    spec, sources = model.spec, model.sources
    outline = Outline(spec, REGISTRY)
    shapes = {one.name: format_shape(one.shape) for one in spec.inputs}
    shapes |= {node.address: format_shape(node.shape) for node in spec.nodes}
    weights = _weight_rows(model)
    for row in size.rows:
        node = row.node
        written = outline.nodes.get(node.address)
        origin = f"of {node.owner}" if node.shares else f"tied to {node.tie}" if node.tie else ""
        files = [(file, file.written[node.path]) for file in sources.by_file() if node.path in file.written]
        yield {
            "block": node.block or "",
            "path": node.key,
            "shape": shapes[node.address],
            "add_norm": write_add_norm(written, REGISTRY) if written else " → ".join(write_steps(node.post, REGISTRY)),
            "weights": "; ".join(
                filter(None, (origin, node.adapter_text and f"adapters: {node.adapter_text}", node.quantized_text))
            ),
            "parameters": row.parameters,
            "multiply_adds": row.multiply_adds,
            "arguments": [
                (name, write_value(node.arguments.get(name), REGISTRY), _origin(node.path, name, sources))
                for name in (REGISTRY.blocks[node.block].arguments if node.block else ())
            ],
            "reads": list(_reads(node, outline, shapes)),
            "own_weights": weights[node.address],
            "lines": [(place.file, str(place.line), file.excerpt(node.path)) for file, place in files],
        }


def _weight_rows(model: ViewedModel) -> dict[str, list[WeightRow]]:
    """Return the rows of the weights of each node by address; a tied weight is at each of its nodes."""
    rows: dict[str, list[WeightRow]] = {node.address: [] for node in model.spec.nodes}
    for group in group_weights(model.spec, model.composed):
        shape, roles = " × ".join(group.symbols) or "1", ", ".join(group.weights[0].roles)
        for name in (name for weight in group.weights for name in weight.names):
            address, below = name, ""
            while address not in rows:
                address, _, part = address.rpartition(".")
                below = f"{part}.{below}" if below else part
            rows[address].append((below, roles, shape, group.initial))
    return rows


def _origin(path: Path, name: str, sources: Sources) -> str:
    """Return the command-line override, or the file and line, that set an argument of the node at `path`."""
    scopes = [(*path[:end], "args", name) for end in range(len(path), 0, -1)]
    for place in ((*path, name), *scopes):
        setting = _setting(place, sources)
        knob = sources.knob(place)
        if setting:
            return f"{setting}; {knob}: {_setting((knob,), sources)}" if knob else setting
    return "default of the block" if sources.files else ""


def _setting(path: Path, sources: Sources) -> str:
    """Return what sets a value, directly or as a part of a mapping on the command line; "" if nothing does."""
    above = (path[:end] for end in range(len(path), 0, -1))
    override = next((sources.overrides[prefix] for prefix in above if prefix in sources.overrides), "")
    if override or path not in sources.written:
        return override and f"command line: {override}"
    place = sources.written[path]
    return f"{place.file}:{place.line}"


def _reads(node: Node, outline: Outline, shapes: Mapping[str, str]) -> Iterator[Row]:
    written = outline.nodes[node.address].reads if node.address in outline.nodes else {}
    stack, _, index = node.address.rpartition(".")[0].rpartition(".")
    previous = f"{stack}.{int(index) - 1}" if index.isdigit() and int(index) else ""  # the layer before this one
    for number, (port, addresses) in enumerate(node.reads.items()):
        name = port if number else "in"
        references = written.get(name, addresses)
        text = ENTRY if references == (previous,) else write_references(references, node.address, outline)
        yield name, text, shapes[addresses[0]]


@dataclass(frozen=True)
class ViewedModel:
    """A model of the page: its name on the command line, its spec, the source of each value, and its config."""

    name: str
    spec: Spec
    sources: Sources
    composed: Composed | None = None


def render_view(models: Sequence[ViewedModel], watch: str = "") -> str:
    """Return the HTML page of one model, or of two with their difference. All text is escaped.

    `watch` is the version of a page that polls its server for a newer one and for the problems of that one.
    """
    a, b = models[0], models[-1]
    difference = compare_models((a.name, b.name), a.spec, b.spec, {}) if len(models) > 1 else None
    marks = difference_marks(a.spec, b.spec, difference) if difference else [{}]
    records = list(map(_model_record, models, marks))
    names = sorted({node.block for model in models for node in model.spec.nodes if node.block})
    blocks = {name: REGISTRY.blocks[name] for name in names}
    data = {
        "models": records,
        "blocks": {name: {"formula": info.description, "source": info.source} for name, info in blocks.items()},
        "watch": watch,
        "problems": [],
    }
    script = asset("view.js")
    return page_template("view.html").render(
        title=" and ".join(model.name for model in models),
        policy=content_policy([script], connect="'self'" if watch else "'none'"),
        style=Markup(asset("view.css") + _colour_rules()),
        script=Markup(script),
        data=Markup(json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")),
        models=models,
        table=changes_table(difference) if difference and difference.changes else None,
        summary=summary_lines(difference, a.spec, b.spec) if difference else [],
    )


def _model_record(model: ViewedModel, marks: Mapping[str, Mark]) -> dict[str, object]:
    """Return a model for JSON. Alike layers share a record of facts; `*` is the number of a layer in `foldable`."""
    size, outline = measure(model.spec, model.sources, {}), Outline(model.spec, REGISTRY)
    texts = [json.dumps(facts) for facts in _facts(model, size)]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    foldable = list(dict.fromkeys(pattern(address) for address in outline.nodes if outline.joins_branches(address)))
    return {
        "name": model.name,
        "figures": dict(_figures(model.spec, foldable, marks, model.name)),
        "foldable": foldable,
        "records": [json.loads(text) for text in numbers],
        "nodes": {row.node.address: numbers[text] for row, text in zip(size.rows, texts, strict=True)},
        "parameters": size.parameters,
        "multiply_adds": size.multiply_adds,
        "condition": size.condition,
    }


def _figures(spec: Spec, foldable: Sequence[str], marks: Mapping[str, Mark], title: str) -> Iterator[tuple[str, str]]:
    """Yield a figure for each choice of closed stacks and parallels, and the figure with every layer."""
    style = Style(COLOURS, title)

    def draw(content: Content) -> str:
        return svg_of(mark_nodes(picture_of(spec, REGISTRY, content), marks), style)

    sizes = range(len(foldable) + 1) if len(foldable) <= MOST_CLOSED else (0, 1)
    for closed in (choice for size in sizes for choice in combinations(foldable, size)):
        yield " ".join(closed), draw(Content(closed=frozenset(closed)))
    if len(spec.nodes) <= MOST_NODES:
        yield UNFOLDED, draw(Content("none"))


def _colour_rules() -> str:
    """Return the colours of figures as CSS variables, for light and dark screens."""
    rules = []
    for theme in (THEMES["paper"], THEMES["dark"]):
        plain = {"paper": theme.background, "ink": theme.ink, "soft": theme.faint, "plate": theme.plate}
        colours = [*plain.items(), *theme.fills.items(), *theme.marks.items()]
        rules.append("".join(f"--{name}: {colour};" for name, colour in colours))
    light, dark = rules
    return f":root {{{light}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"
