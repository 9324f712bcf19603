"""Write the generated pages, figures and lists of docs/, and the declarations of the shipped blocks."""

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import itemgetter, or_
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from tfm_blocks.cli import command_parser
from tfm_blocks.compose.comments import Comment, read_comments
from tfm_blocks.compose.folders import CONF, FAMILIES
from tfm_blocks.compose.help import TEXT, flow
from tfm_blocks.compose.model import compose_model
from tfm_blocks.config.foreign_keys import FOREIGN_NAMES
from tfm_blocks.config.settings import implementation, names_of
from tfm_blocks.errors import cut
from tfm_blocks.exchange.family import families
from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.figure import Style, picture_of, svg_of
from tfm_blocks.language.files import read_yaml_file
from tfm_blocks.network.build import read_model
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.declarations import FILE as DECLARATIONS
from tfm_blocks.registry.declarations import write_declarations
from tfm_blocks.sweep.launcher import PACKAGE
from tfm_blocks.sweep.settings import SweepSettings
from tfm_blocks.training.settings import run_settings

FOLDER = Path(__file__).parent / "reference"
FIGURES = Path(__file__).parent / "figures"
COOKBOOK = Path(__file__).parent / "cookbook"
IMAGES = Path(__file__).parent / "images"
COMING_FROM = Path(__file__).parent / "coming-from.md"
README = Path(__file__).parents[1] / "README.md"
HOME = Path(__file__).parent / "index.md"
BENCHMARKS_FILE = Path(__file__).parent / "benchmarks.json"
BENCHMARKS_PAGE = BENCHMARKS_FILE.with_suffix(".md")
BADGES = {"python": ("Python", "3.11 or newer"), "licence": ("licence", "Apache 2.0")}
SITE = Path(__file__).parents[1] / "mkdocs.yml"
LISTED = "  - Cookbook:\n"  # begins the sections of mkdocs.yml that list folders
ALL_NAMES = "## All names\n"  # the section of coming-from.md that is made from FOREIGN_NAMES
ORACLES = Path(__file__).parents[1] / "tests" / "oracles"
RECIPE = re.compile(r"# (?P<title>[^(]+) \((?P<source>[^)]+)\)(?:, (?P<note>[^:]+))?(?:: (?P<special>.+))?")
RECIPES = """\
# Cookbook

Each page of this cookbook describes a published architecture in one short model file, and is made by
`python docs/generate.py`. Tests compare each model with the class of transformers: both get the same random weights,
their logits differ by less than 1e-5 of the largest logit, and greedy search finds the same tokens.
[Benchmarks](../benchmarks.md#agreement-with-other-libraries) lists measured differences.

The files are in `tests/oracles/`, with the small widths and windows of these tests, or in
`tfm_blocks/exchange/families/model/`, with published sizes. The latter are models of families that tfm-blocks can
[import](../importing.md): `tfm show NAME` and `tfm train model=NAME` find them by name.

"""
SMALL = " d_model=16 d_ff=28 heads=4 layers=2 vocab=37"
BENCHMARKS = """\
# Benchmarks

This page compares the speed and the values of tfm-blocks with other libraries. `python tests/benchmarks/peers.py`
measured everything on {date}: {machine}, idle, no accelerator; torch {torch}, transformers {transformers}.

![Bars: speed compared with other libraries. Dots: agreement of logits with transformers](images/benchmarks.svg)

## Speed

Each row runs both sides in turn and takes the medians. A ratio above 1 means that tfm-blocks is faster. A training step
consists of forward pass, loss, backward pass and optimizer; searches and prompts count output tokens.

{speeds}

These commands measure one row each:

    {commands}

In the first two rows, the other library is the faster one of `nn.Transformer` and MarianMT. [The
notebook](notebook/results.md) has further sizes and machines, also those where tfm-blocks is slower: a single sentence
with a small model is faster in CTranslate2, to which [models can be exported](exporting.md).

## Agreement with other libraries

For {models} architectures of the [cookbook](cookbook/index.md), the same random weights were loaded into tfm-blocks and
into transformers. The table lists the largest difference of the logits in float32, divided by the largest logit. The
tests of these and of all other architectures of the cookbook allow 1e-5, and greedy search must find the same tokens.
The largest difference in the table is {largest}.

{agreement}
"""
COMMANDS = """\
# Commands

This page lists every command with its arguments. It is made by `python docs/generate.py`.
The pages under How-to show the commands at work.

## tfm train

`tfm train [GROUP=NAME]... [KEY=VALUE]...` trains a run. `python train.py` is the same command in a checkout.
`--help` also lists all [config keys](config.md) with the values that the rest of the command line gives them.

"""
CONFIG = """\
# Config keys

This page lists the keys of a run's config with types, defaults and meanings. It is made by `python docs/generate.py`.
`GROUP=NAME` chooses a file of a group, such as `data=text`. `KEY=VALUE` sets a key, such as `trainer.steps=2000`.
`python train.py --help` lists the keys with the values that a command line gives them.
There is no key `lr`: the [schedule](#schedule) sets the learning rate, by `schedule.peak`, or by `schedule.scale` of
`schedule=noam`.
The keys below `model` are in [language.md](../language.md) and [blocks.md](../blocks.md).

"""
GROUPS = ("data", "objective", "optimizer", "schedule", "trainer", "logger", "sweep", "launcher")
PRESETS = ("experiment", "debug")  # their files set keys of other groups
Schema = Mapping[str, Any]


def pages() -> dict[Path, str]:
    """Return the text of each file."""
    texts = {"commands.md": COMMANDS + "\n\n".join(_commands()), "config.md": CONFIG + "\n\n".join(_config())}
    figures = {FIGURES / f"{path.stem}.svg": _figure(path.stem, path.stem) for path in (CONF / "model").glob("*.yaml")}
    references = {FOLDER / name: f"{text}\n" for name, text in texts.items()}
    names = COMING_FROM.read_text("utf-8").partition(ALL_NAMES)[0] + f"{ALL_NAMES}\n{_foreign_names()}\n"
    recipes = _cookbook()
    files = {**references, **figures, **recipes, COMING_FROM: names, SITE: _site(recipes)}
    badges = {IMAGES / f"{name}.svg": _badge(*words) for name, words in BADGES.items()}
    texts = {HOME: _home(), BENCHMARKS_PAGE: _benchmarks()}
    return {**files, **badges, **texts, DECLARATIONS: write_declarations(REGISTRY)}


def _home() -> str:
    """Return README.md as a page of the site: links begin in docs/, and files outside of it are named, not linked."""
    text = README.read_text("utf-8").replace("](docs/", "](").replace('"docs/', '"')
    return re.sub(r"\[[^]]+\]\(([A-Z][\w.]+)\)", r"`\1`", text)


def _badge(label: str, value: str) -> str:
    """Return a badge of two words as an SVG."""
    left, right = (round(6.3 * len(word) + 12) for word in (label, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{label}: {value}</title>"
        f'<rect width="{left + right}" height="20" rx="3" fill="#555"/>'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1 -3 3h-{right - 3}z" fill="#0b65c2"/>'
        '<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{label}</text><text x="{left + right / 2}" y="14">{value}</text></g></svg>\n'
    )


def _benchmarks() -> str:
    """Return the page of benchmarks from the measured figures."""
    measured = json.loads(BENCHMARKS_FILE.read_text("utf-8"))
    speeds = [
        (
            row["what"],
            row["peer"],
            *(f"{row[key]:,.0f} {row['unit']}" for key in ("ours", "theirs")),
            f"{row['ratio']:.2f}",
        )
        for row in measured["speed"]
    ]
    worst = sorted(measured["agreement"].items(), key=itemgetter(1))
    facts = {"date": measured["date"], "machine": measured["machine"], **measured["versions"]}
    return BENCHMARKS.format(
        **facts,
        speeds=_table(["operation", "other library", "tfm-blocks", "other library", "ratio"], speeds),
        commands="\n    ".join(row["command"] for row in measured["speed"]),
        agreement=_table(["model", "difference"], [(name, f"{value:.1e}") for name, value in worst]),
        models=len(worst),
        largest=f"{worst[-1][1]:.1e}",
    )


def _site(recipes: Iterable[Path]) -> str:
    """Return mkdocs.yml with the pages of the cookbook and the decisions."""
    decisions = sorted(Path(__file__).parent.glob("decisions/*.md"))
    lines = ["  - Cookbook:", "      - cookbook/index.md"]
    lines += [f"      - cookbook/{path.name}" for path in recipes if path.suffix == ".md" and path.stem != "index"]
    lines += ["  - Decisions:", *(f"      - decisions/{path.name}" for path in decisions)]
    return SITE.read_text("utf-8").partition(LISTED)[0] + "\n".join(lines) + "\n"


def _foreign_names() -> str:
    rows = sorted((f"`{name}`", advice) for advice, names in FOREIGN_NAMES.items() for name in names.split())
    return _table(["name elsewhere", "in tfm-blocks"], rows)


def _assigned(path: Path, name: str) -> ast.expr:
    """Return the value of a module's variable, without importing the module."""
    assignments = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Assign))
    return next(node.value for node in assignments if ast.unparse(node.targets[0]) == name)


def _cookbook() -> dict[Path, str]:
    """Return a page and a figure for each model of another library, and the page that lists them."""
    references = ast.unparse(_assigned(ORACLES / "references.py", "REFERENCES"))
    classes = dict(re.findall(r"'(\w+)': \((\w+), \w+Config", references))
    sizes = ast.literal_eval(_assigned(ORACLES / "references.py", "SIZES"))
    architectures = {family.model: family.architecture for family in families().values()}
    texts, rows = {}, {}
    for path in (*sorted(ORACLES.glob("*.yaml")), *sorted((FAMILIES / "model").glob("*.yaml"))):
        lines = [line for line in path.read_text("utf-8").splitlines() if "yaml-language-server" not in line]
        recipe = RECIPE.fullmatch(lines[1])
        assert recipe and recipe["special"], f"{path}: the third line must be `# NAME (SOURCE): WHAT IS SPECIAL`"
        if recipe["title"] in rows or COOKBOOK / f"{path.stem}.md" in texts:
            continue  # the oracle describes the same model
        is_oracle = path.parent == ORACLES
        theirs, overrides = (classes[path.stem], sizes) if is_oracle else (architectures[path.stem], {})
        texts[COOKBOOK / f"{path.stem}.md"] = _recipe(path, lines, recipe, theirs)
        texts[COOKBOOK / f"{path.stem}.svg"] = _figure(str(path), path.stem, [f"{k}={v}" for k, v in overrides.items()])
        rows[recipe["title"]] = (
            f"[{recipe['title']}]({path.stem}.md)",
            recipe["special"],
            f"{len(lines)}",
            f"`{theirs}`",
        )
    listed = sorted(rows.values(), key=lambda row: row[0].lower())
    table = _table(["model", "special", "lines", "compared with"], listed)
    return {**texts, COOKBOOK / "index.md": f"{RECIPES}{table}\n"}


def _recipe(path: Path, lines: Sequence[str], recipe: re.Match[str], theirs: str) -> str:
    """Return the page of a model: the file, what is special, the blocks and the agreement."""
    content = yaml.safe_load("\n".join(lines))
    parent, beside = content["defaults"][0], path.parent / f"{content['defaults'][0]}.yaml"
    link = f"[{parent}](../../conf/model/{parent}.yaml)"
    if beside.is_file():
        link = f"[{parent}]({parent}.md)"
    if path.parent == ORACLES:
        tests, command = (
            "tests/oracles",
            f"`tfm show tests/oracles/{path.name}{SMALL}` prints the nodes and shapes in the sizes of this test.",
        )
    else:
        tests = "tests/exchange/test_families.py"
        command = (
            f"`tfm import FOLDER` reads its published weights, and `tfm show {path.stem}` prints the nodes and shapes."
        )
    blocks = sorted(set(_values(content.get("model", {}))) & REGISTRY.blocks.keys())
    note = f" ({recipe['note']})" if recipe["note"] else ""
    unlike = " with padding at the end" if path.stem in _right_padded() else " with padding at either end"
    unlike = unlike if path.parent == ORACLES else ""
    return f"""\
# {recipe["title"]} in {len(lines)} lines

{recipe["title"]}{note}, {recipe["source"]}. Special: {recipe["special"]}.

```yaml
{chr(10).join(lines)}
```

The file is `{path.relative_to(FOLDER.parents[1]).as_posix()}`. It inherits {link}, and contains only the differences.

![Figure of {recipe["title"]} with two layers]({path.stem}.svg)

**Blocks:** {", ".join(f"[{name}](../blocks.md#{name})" for name in blocks) or "the same as in the parent"}.

**Agreement:** with the same random weights, the logits differ from `{theirs}` of transformers by less
than 1e-5 of the largest logit{unlike},
and greedy search finds the same tokens (`pytest -m "" {tests} -k {path.stem}`).

{command}
"""


def _values(content: Any) -> Iterator[str]:
    """Yield the texts of a mapping or list, without the keys."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping | list):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from _values(value)


def _right_padded() -> Sequence[str]:
    names: Sequence[str] = ast.literal_eval(_assigned(ORACLES / "test_hugging_face.py", "COUNT_NO_PADDING"))
    return names


def _figure(model: str, title: str, overrides: Sequence[str] = ()) -> str:
    """Return the figure of a model, as `tfm figure` draws it."""
    composed = compose_model(model, overrides)
    picture = picture_of(read_model(composed.model, composed.sources), REGISTRY, Content())
    return svg_of(picture, Style(title=title))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([text.replace("|", "\\|") for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def _commands() -> Iterator[str]:
    options = TEXT.partition("\nOptions\n")[2].partition("\n\n")[0].replace("{{", "{").replace("}}", "}")
    pairs = (line.strip().partition("  ") for line in options.splitlines())
    yield _table(["argument", "meaning"], [(f"`{names}`", text.strip()) for names, _, text in pairs])
    yield from _subcommands(command_parser(), "tfm")


def _subcommands(parser: argparse.ArgumentParser, prefix: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if command.description:  # not train, whose options are Hydra's
                    yield f"## {prefix} {name}"
                    yield f"{command.description[0].upper()}{command.description[1:]}."
                    yield from [table] if (table := _arguments(command)) else []
                    yield from _subcommands(command, f"{prefix} {name}")


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and not isinstance(
            action, argparse._HelpAction | argparse._SubParsersAction
        ):
            value = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
            value = " ".join(value) if isinstance(value, tuple) else value
            names = " ".join([", ".join(action.option_strings), "" if action.nargs == 0 else value]).strip()
            rows.append((f"`{names}`", (action.help or "") % vars(action)))
    return _table(["argument", "meaning"], rows) if rows else ""


def _config() -> Iterator[str]:
    yield "## Top level"
    yield _keys(CONF / "train.yaml", SCHEMA)
    for group in GROUPS:
        yield f"## {group}"
        for path in _files(group):
            yield f"### {_title(group, path.stem)}"
            yield from _about(path)
            yield from _inherited(path, group)
            yield _keys(path, SCHEMA["properties"][group])
    yield "## Presets"
    yield "These files set keys of other groups. Each file lists its values with reasons."
    for path in [path for group in PRESETS for path in _files(group)]:
        name = path.relative_to(CONF)
        yield f"### {name.parent}={path.stem}"
        yield from _about(path)
        yield f"File: [conf/{name}](../../conf/{name})"


def _title(group: str, name: str) -> str:
    """Return the option of a command line, or the name of a file that is only inherited."""
    return "every probe task" if name == "_probe" else f"{group}={name}"


def _files(group: str) -> list[Path]:
    return sorted((CONF / group).glob("*.yaml"))


def _about(path: Path) -> Iterator[str]:
    """Yield the comment that a file begins with."""
    if lines := read_comments(read_yaml_file(path))[()].above:
        yield "\n".join(lines)


def _inherited(path: Path, group: str) -> Iterator[str]:
    """Yield a sentence that names the files whose keys a file inherits."""
    defaults = yaml.safe_load(path.read_text("utf-8")).get("defaults", [])
    titles = [_title(group, name) for name in defaults if name != "_self_"]
    if parents := [f"`{title}`" if "=" in title else title for title in titles]:
        yield f"It inherits the keys of {' and '.join(parents)}."


def _keys(path: Path, schema: Schema) -> str:
    """Return the table of the keys of a file."""
    file = read_yaml_file(path)
    values = yaml.safe_load(file.text)  # 1e-9 as text, as the file has it
    mapping = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    rows = list(_rows(mapping, (), schema, read_comments(file)))
    return _table(["key", "default", "type", "meaning"], rows) if rows else "It has no keys."


def _rows(
    mapping: Schema, path: tuple[str, ...], schema: Schema, comments: Mapping[tuple[str, ...], Comment]
) -> Iterator[tuple[str, ...]]:
    properties = _properties(schema, mapping)
    for name, value in mapping.items():
        own, comment = properties.get(name, {}), comments.get((*path, name), Comment())
        if isinstance(value, dict) and _properties(own, value):
            yield from _rows(value, (*path, name), own, comments)
        elif "const" not in own:
            default = "required" if value == "???" else f"`{cut(flow(value))}`"
            meaning = " ".join([*comment.above, comment.beside]).strip()
            yield f"`{'.'.join((*path, name))}`", default, _type(_resolved(own)), meaning


def _properties(schema: Schema, mapping: Schema) -> Schema:
    """Return the properties of a schema; of a union, those of the member that a file's constants choose."""
    members = [_resolved(one) for one in schema.get("oneOf", schema.get("anyOf", [schema]))]
    found = [one["properties"] for one in members if "properties" in one]
    fitting = (
        one for one in found if all(mapping.get(key) == own["const"] for key, own in one.items() if "const" in own)
    )
    return next(fitting, {})


def _resolved(schema: Schema) -> Schema:
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    resolved: Schema = SCHEMA["$defs"][name] if name else schema
    return resolved


def _type(schema: Schema) -> str:
    """Return a type with its bounds, such as `int ≥ 1 or null`."""
    if "anyOf" in schema:
        return " or ".join(_type(_resolved(one)) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    names = {
        "integer": "int",
        "number": "float",
        "boolean": "bool",
        "string": "text",
        "array": "list",
        "object": "mapping",
    }
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    kind = schema.get("type", "")
    limits = ", ".join(f"{sign} {schema[name]:g}" for name, sign in bounds.items() if name in schema)
    return f"{names.get(kind, kind)} {limits}".strip()


def _schema() -> Schema:
    """Return the JSON schema of all settings of a run and a sweep, without the model."""
    launchers = [implementation(PACKAGE, name, "LAUNCHER") for name in names_of(PACKAGE)]
    whole = run_settings().model_json_schema()
    for name, settings in (("sweep", SweepSettings), ("launcher", reduce(or_, launchers))):
        group = TypeAdapter(settings).json_schema()
        whole["$defs"] |= group.pop("$defs")
        whole["properties"][name] = group
    return whole


SCHEMA = _schema()

if __name__ == "__main__":
    for page, text in pages().items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, "utf-8")
