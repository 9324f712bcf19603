"""Read the table of a family of one's own, and check it against its model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfm_blocks.compose.folders import read_yaml
from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import Problem, expect_none, shown, suggest
from tfm_blocks.exchange.family import CONVERSIONS, ROOT, Family, Knobs, make_family, whole_table
from tfm_blocks.exchange.rope import rope_knobs, rope_types
from tfm_blocks.exchange.weights import BRACES, read_weight_table, wildcards
from tfm_blocks.language.files import read_yaml_file
from tfm_blocks.language.sources import Sources
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.matching import weights_of
from tfm_blocks.registry.expression import names_in

KINDS: dict[str, Any] = {
    **dict.fromkeys(("config", "missing", "fixed", "implied", "output", "tied", "computed", "also", "weights"), dict),
    **dict.fromkeys(("start", "untied", "unused", "ignored", "zeros", "recomputed", "without"), list),
    **dict.fromkeys(("architecture", "model_type", "model", "prefix", "tokenizer", "target_vocab", "parent"), str),
    "encoder": bool,
    "rope": bool | list,
}
NAMES: dict[Any, str] = {
    **{dict: "a mapping", list: "a list", str: "text", bool: "true or false"},
    bool | list: "true, false or a list of types",
}
NEEDED = {
    "model": "the name of a model, or the path of its YAML file from this file: model: my_model.yaml",
    "config": "the keys of config.json, each with its knob: config: {hidden_size: d_model}",
    "weights": "the names of tensors, each with its address: weights: {model.norm.weight: decoder.last.norm.weight}",
}
ROW_KEYS = ("knob", "missing", "values", "is", "layers", "first", "each")
KNOBS = {
    "vocab": "the size of the vocabulary: a root key vocab, and vocab: ${vocab} where the model needs it",
    "first_id": "the number of ids without a row: a root key first_id: 0, and args: {first_id: '${first_id}'}",
}


def read_own_family(path: Path, config_dir: Path | None = None) -> Family:
    """Read a family from a YAML file, whose model may be in `config_dir`.

    Raises ConfigError that names each problem with its line.
    """
    content, sources = read_yaml(path), Sources()
    sources.add_file(read_yaml_file(path))
    check = _Check(content, sources)
    check.keys()
    expect_none(check.problems)
    check.inherit()
    expect_none(check.problems)
    content = check.content = {**check.content, "model": _model_file(check.content["model"], path)}
    composed = compose_model(content["model"], conf=config_dir)
    check.rows(composed.knobs)
    expect_none(check.problems)
    check.addresses(composed)
    expect_none(check.problems)
    return make_family(path.stem, content, config_dir)


def _model_file(model: str, table: Path) -> str:
    """Return the path of the model's file next to the table or in its folder `model`, or a name of a shipped model."""
    file = model if model.endswith((".yaml", ".yml")) else f"{model}.yaml"
    options = [table.parent / file, table.parent / "model" / file]
    return next((str(path) for path in options if path.is_file() and path != table), model)


class _Check:
    """The problems of a table."""

    def __init__(self, content: Mapping[str, Any], sources: Sources) -> None:
        self.content, self.sources = content, sources
        self.problems: list[Problem] = []

    def report(self, path: tuple[str, ...], rule: str, help: str) -> None:
        self.problems.append(self.sources.problem(path, rule, help=help))

    def keys(self) -> None:
        """Check the names of the keys and the types of their values."""
        for key in NEEDED.keys() - self.content.keys() if "parent" not in self.content else ():
            self.report((key,), "is missing in the table of the family", NEEDED[key])
        for key, value in self.content.items():
            if key not in KINDS:
                self.report((str(key),), "is not a key of a family", suggest(str(key), KINDS))
            elif not isinstance(value, KINDS[key]):
                kind = NAMES[KINDS[key]]
                self.report((key,), f"must be {kind}, but is {shown(value)}", NEEDED.get(key, f"write {kind}"))
        for path, value in _names(self.content) if not self.problems else ():
            if not isinstance(value, str):
                rule = f"must name text, but names {shown(value)}"
                self.report(tuple(map(str, path)), rule, "write a name, in quotes if needed")

    def inherit(self) -> None:
        """Add the rows of the table's parent."""
        try:
            self.content = whole_table(self.content)
        except ValueError as error:
            key = "without" if "has no row" in str(error) else "parent"
            self.report((key,), str(error), "docs/families.md describes both keys")

    def rows(self, knobs: Knobs) -> None:
        """Check the rows of `config`, and the knobs that other keys name."""
        for name in KNOBS.keys() - knobs.keys():
            self.report(("model",), f"{self.content['model']} lacks the knob {name}", KNOBS[name])
        rope = self.content.get("rope", False)
        if unknown := [name for name in rope if name not in rope_types()] if isinstance(rope, list) else []:
            self.report(("rope",), f"has the unknown type {shown(unknown[0])}", suggest(str(unknown[0]), rope_types()))
        elif lacking := sorted(rope_knobs(rope) - knobs.keys()):
            rule = f"{self.content['model']} lacks the knobs {', '.join(lacking)} of rotary positions"
            self.report(("rope",), rule, "add them to the model, or write rope: false and the rows that it needs")
        before: set[str] = set()
        for keys, value in self.content["config"].items():
            row = value if isinstance(value, Mapping) else {"knob": value}
            for rule, help in _row_problems(row, knobs, before):
                self.report(("config", str(keys)), rule, help)
            before.add(str(row.get("knob")))
        for key, text in self.content.get("implied", {}).items():
            for rule, help in _unread(str(text), {*before, "vocab_size"}):
                self.report(("implied", str(key)), rule, help)
        for tensor, knob in self.content.get("output", {}).items():
            if knob not in knobs:
                self.report(("output", str(tensor)), f"the model has no knob {shown(knob)}", suggest(str(knob), knobs))

    def addresses(self, composed: Composed) -> None:
        """Check that each address is a weight of the model, and that each weight of the model has an address."""
        knobs = dict.fromkeys(self.content.get("output", {}).values())
        weights = _weights(composed) | (_weights(composed.with_values(knobs)) if knobs else set())
        kinds, covered = {re.sub(r"(?<=\.)\d+(?=\.)", "{i}", weight) for weight in weights}, set()
        for section in ("weights", "also"):
            for theirs, value in self.content.get(section, {}).items():
                try:
                    (row,) = read_weight_table({theirs: value})
                except ValueError as error:
                    self.report((section, theirs), str(error).removeprefix(f"{theirs}: "), "see docs/families.md")
                    continue
                for address in row.ours:
                    try:
                        found = {weight for weight in weights if wildcards(address, weight) is not None}
                    except ValueError:
                        rule = f"has braces that do not contain one name, or arithmetic with it: {address}"
                        self.report((section, theirs), rule, "write a name for each number in braces, such as {i}")
                        continue
                    covered |= found
                    if not found:
                        self.report((section, theirs), f"the model has no weight {address}", suggest(address, kinds))
                    elif lacking := {*BRACES.findall(address)} - {*BRACES.findall(re.sub(r"\d+\*|\+\d+", "", theirs))}:
                        rule = f"{', '.join(sorted(lacking))} stands in the address only"
                        self.report((section, theirs), rule, "write the same braces on both sides")
        if uncovered := sorted(weights - covered):
            more = f" and {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
            rule = f"no row has the weight {uncovered[0]} of the model{more}"
            self.report(
                ("weights",), rule, f"add a row: NAME OF THE TENSOR: {re.sub(r'[.][0-9]+[.]', '.{i}.', uncovered[0])}"
            )


def _names(content: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], object]]:
    """Yield the path and the value of each name of a tensor, key, knob or address in a table with the right kinds."""
    for key in ("start", "untied", "unused", "ignored", "zeros", "recomputed", "without"):
        yield from (((key,), value) for value in content.get(key, ()))
    for tensor, knob in content.get("output", {}).items():
        yield from ((("output", tensor), name) for name in (tensor, knob))
    for section in ("config", "missing", "fixed", "implied", "tied", "computed"):
        yield from (((section, key), key) for key in content.get(section, {}))
    for key, value in content.get("config", {}).items():
        row = value if isinstance(value, Mapping) else {"knob": value}
        yield from ((("config", key), row[option]) for option in ("knob", "is") if option in row)
    for section in ("weights", "also"):
        for tensor, value in content.get(section, {}).items():
            to = value.get("to") if isinstance(value, Mapping) else value
            addresses = to if isinstance(to, list) else [] if to is None else [to]
            yield from (((section, tensor), name) for name in (tensor, *addresses))


def _weights(composed: Composed) -> set[str]:
    return {*weights_of(network_without_values(check_model(composed.model, composed.sources)))}


def _row_problems(row: Mapping[str, Any], knobs: Knobs, before: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the rule and the fix of each problem of a row of `config`; `before` are the knobs of earlier rows."""
    for option in (option for option in row if option not in ROW_KEYS):
        yield f"has the unknown option {shown(option)}", suggest(str(option), ROW_KEYS)
    if row.get("knob") not in knobs:
        yield f"the model has no knob {shown(row.get('knob'))}", suggest(str(row.get("knob")), knobs)
    if row.get("is", ROOT) not in CONVERSIONS:
        yield f"is: {shown(row['is'])} is not a conversion", suggest(str(row["is"]), CONVERSIONS)
    if not isinstance(row.get("layers", []), list) or len(row.get("layers", [])) not in (0, 2):
        yield (
            f"layers must be a list of two kinds or empty, but is {shown(row['layers'])}",
            "layers: [KIND OF THE OTHERS, KIND OF THESE]",
        )
    if ("layers" in row or row.get("each")) and "layers" not in before:
        yield "reads the number of layers, which no earlier row has", "write the row of the knob layers first"
    if type(row.get("first", 0)) is not int:
        yield (
            f"first must be a whole number, but is {shown(row['first'])}",
            "first: 1 if indices of layers count from 1",
        )
    values = row.get("values", {})
    if not isinstance(values, Mapping):
        yield f"values must be a mapping, but is {shown(values)}", "values: {PUBLISHED VALUE: VALUE OF THE KNOB}"
        values = {}
    for value in (row.get("missing"), *values.values()):
        text = str(value)
        if text.startswith(ROOT):
            yield from _unread(text.removeprefix(ROOT), before, text)
        elif text.startswith("="):
            yield from _unread(text[1:], before, text)


def _unread(arithmetic: str, before: set[str], text: str = "") -> Iterator[tuple[str, str]]:
    """Yield a problem for each knob in `arithmetic` that is not in `before`. `text` is the value in the table."""
    try:
        used = names_in(arithmetic)
    except ValueError as error:
        yield str(error), "arithmetic with knobs of earlier rows: = 4*d_model"
        return
    for name in (name for name in used if name not in before):
        yield f"{text or arithmetic} reads {name}, which no earlier row has", suggest(name, before)
