"""Write the generated pages, figures and lists of docs/, and the declarations of the shipped blocks."""

import ast
import json
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from generate_reference import COMMANDS, CONFIG, commands, config, table

from tfm_blocks.compose.folders import CONF, FAMILIES
from tfm_blocks.compose.model import compose_model
from tfm_blocks.config.foreign_keys import FOREIGN_NAMES
from tfm_blocks.exchange.family import families
from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.figure import Style, picture_of, svg_of
from tfm_blocks.network.build import read_model
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.declarations import FILE as DECLARATIONS
from tfm_blocks.registry.declarations import write_declarations
from tfm_blocks.report.blocks import FIGURES as BLOCK_FIGURES

FOLDER = Path(__file__).parent / "reference"
FIGURES = Path(__file__).parent / "figures"
COOKBOOK = Path(__file__).parent / "cookbook"
IMAGES = Path(__file__).parent / "images"
COMING_FROM = Path(__file__).parent / "coming-from.md"
README = Path(__file__).parents[1] / "README.md"
HOME = Path(__file__).parent / "index.md"
BENCHMARKS_FILE = Path(__file__).parent / "benchmarks.json"
BENCHMARKS_PAGE = BENCHMARKS_FILE.with_suffix(".md")
BADGES = {"python": ("Python", "3.11.5 or newer"), "licence": ("licence", "Apache 2.0")}
SITE = Path(__file__).parents[1] / "mkdocs.yml"
LISTED = "  - Cookbook:\n"  # begins the sections of mkdocs.yml that list folders
ALL_NAMES = "## All names\n"  # the section of coming-from.md that is made from FOREIGN_NAMES
KEY = re.compile(r"\w+\.[\w.]+(=PATH)?|\w+=\w+(\.\d+)?|--\w+")  # in the sentences of FOREIGN_NAMES
ORACLES = Path(__file__).parents[1] / "tests" / "oracles"
MODELS = ORACLES.with_name("models")
RECIPE = re.compile(r"# (?P<title>[^(]+) \((?P<source>[^)]+)\)(?:, (?P<note>[^:]+))?(?:: (?P<special>.+))?")
RECIPES = """\
# Cookbook

Each page of this cookbook describes a published architecture in one short model file, and is made by
`python docs/generate.py`. Tests compare each model with the class of transformers: both get the same random weights,
their logits differ by less than 1e-5 of the largest logit (for MiniMax: 1e-4), and greedy search finds the same tokens.
[Benchmarks](../benchmarks.md#agreement-with-other-libraries) lists measured differences.

Most files are models of families that tfm-blocks can [import](../importing.md), with published sizes. They are in
`tfm_blocks/exchange/families/model/` and `conf/model/`: `tfm show NAME` and `tfm train model=NAME` find them by name.
The others are in `tests/oracles/`, with the small widths and windows of these tests. Half of all files have at most
{median} lines.

"""
SMALL = " d_model=16 d_ff=28 heads=4 layers=2 vocab=37"
BENCHMARKS = """\
# Benchmarks

This page compares the speed and the numerical outputs of tfm-blocks with other libraries, and the translations of ten
architectures with each other. Speed and agreement were measured with `python tests/benchmarks/peers.py` on {date}:
{machine}, idle, no accelerator; PyTorch {torch}, Transformers {transformers}. No speed was measured on a GPU.

![Bars: speed compared with other libraries. Dots: agreement of logits with Transformers](images/benchmarks.svg)

## Speed

In each row, tfm-blocks and the other implementation were run alternately; the table gives medians. A ratio above 1
means that tfm-blocks is faster. A training step consists of forward pass, loss, backward pass and optimizer, in the
precision of its command below. The other rows are in float32, or in int8 if the row says so. Decoding rows count output
tokens. The scripts set batch sizes and lengths. The last row compares two attention patterns of
tfm-blocks: local and full attention.

{speeds}

These commands measure one row each:

    {commands}

MarianMT and GPT2 are models of Hugging Face Transformers. In the first two rows, the other implementation is the faster
one of `nn.Transformer` and MarianMT. [The notebook](notebook/results.md) has further sizes and machines, including
cases where tfm-blocks is slower: in float32, CTranslate2 is faster for small models and for single sentences, and
[models can be exported](exporting.md) to it.

## Ten architectures on Multi30k

Ten [shipped models](models.md) were trained to translate English to German at equal parameters: `match.like=base`
sets `d_ff` of each model so that it has 1.5 million parameters, within 2 %. Each model was trained with three seeds
for 1,000 steps of 2,048 target tokens, which is 4.1 passes over the 29,000 pairs. All models have the same learning
rate, which was not tuned for any of them. The runs are short: with 2.6 million parameters, 7,000 steps and twice
the tokens per step, the [full experiment](notebook/results.md#multi30k) reaches 40 to 41 BLEU. So this comparison
shows what a small model learns within minutes, and the order may change with longer training.

![BLEU of ten architectures: the mean of three seeds, and each seed](images/multi30k.svg)

| model | `d_ff` | BLEU | perplexity | difference, 95 % over seeds | 95 % over sentences | p, sentences, corrected |
|---|---|---|---|---|---|---|
| conv | 321 | 33.49 ± 0.49 | 7.65 ± 0.02 | +2.15 [+1.06, +3.25] | [+1.36, +2.95] | 0.0009 |
| rotary | 256 | 33.12 ± 0.58 | 7.69 ± 0.21 | +1.79 [+0.47, +3.11] | [+1.12, +2.46] | 0.0009 |
| relative | 248 | 32.95 ± 0.11 | 7.79 ± 0.23 | +1.61 [+1.28, +1.94] | [+1.04, +2.18] | 0.0009 |
| recurrent | 63 | 31.83 ± 0.52 | 7.70 ± 0.03 | +0.50 [-0.68, +1.67] | [-0.26, +1.25] | 0.3886 |
| base | 256 | 31.34 ± 0.16 | 8.79 ± 0.08 | | | |
| swiglu | 258 | 31.33 ± 0.21 | 8.47 ± 0.01 | -0.00 [-0.45, +0.44] | [-0.53, +0.52] | 0.9263 |
| moe | 64 | 30.96 ± 0.34 | 8.94 ± 0.12 | -0.38 [-1.10, +0.35] | [-0.87, +0.12] | 0.3885 |
| gqa | 352 | 30.79 ± 0.04 | 9.15 ± 0.13 | -0.55 [-0.92, -0.18] | [-1.08, -0.02] | 0.2396 |
| decoder_only | 1030 | 30.39 ± 0.70 | 9.30 ± 0.17 | -0.95 [-2.57, +0.68] | [-1.53, -0.36] | 0.0085 |
| macaron | 126 | 29.86 ± 0.32 | 10.24 ± 0.16 | -1.48 [-2.13, -0.82] | [-2.06, -0.89] | 0.0009 |

Scores are means of three seeds with their standard deviation, and differences from the BLEU of base, on the 1,000
sentences of test_2016 (tokenised and lower-cased BLEU). Over the test sentences, `conv`, `rotary` and `relative`
are significantly better than base in BLEU, and `decoder_only` and `macaron` are significantly worse. `recurrent`
and `swiglu` have a significantly lower perplexity (p = 0.0009, corrected), but not a higher BLEU. These tests are
about the trained models. About other seeds, three seeds cannot show significance: the smallest possible p of three
runs against three is 0.1, which is the p of five of the nine differences in BLEU ([tests over
seeds](significance.md#tests-over-seeds)).

Two runs were trained at the same time on two CPU cores. Each took 5 to 16 minutes, while other programs were running.
`PATH` is a folder with the files of [Multi30k](https://github.com/multi30k/dataset):

    tfm train -m experiment=multi30k data.dir=PATH logger=csv d_model=128 d_ff=256 heads=4 layers=3 vocab=4000 \\
      dropout=0.1 data.step_tokens=2048 schedule.warmup=150 trainer.steps=1000 trainer.validate_every=500 \\
      trainer.average=1 trainer.validate_sentences=0 match.like=base 'match.by=[d_ff]' match.within=0.02 \\
      sweep.name=ten sweep.parallel=2 seed=1,2,3 \\
      model=base,rotary,relative,swiglu,macaron,conv,recurrent,moe,decoder_only,gqa
    tfm compare runs/ten --baseline runs/ten/seed-1_model-base --figures figures \\
      --order '[conv, rotary, relative, recurrent, base, swiglu, moe, gqa, decoder_only, macaron]'

## Agreement with other libraries

For {models} architectures of the [cookbook](cookbook/index.md), the same random weights were loaded into tfm-blocks and
into Transformers. The table lists the largest difference of the logits in float32, divided by the largest logit. The
tests of these and of all other architectures of the cookbook allow 1e-5, and greedy search must find the same tokens.
The largest difference in the table is {largest}.

{agreement}

All {families} families of [published weights](importing.md) were measured in a similar way on 2026-11-30: models that
Transformers saved were imported. `python tests/benchmarks/agreement.py` prints the figures of each family. The largest
difference is 8.9e-06 of the largest logit. The absolute differences of four families are above 1e-5. The table compares
them with rounding errors, the largest differences from the logits of Transformers in float64:

| model | absolute difference | Transformers in float32 | tfm-blocks in float32 |
|---|---|---|---|
| marian_separate | 2.8e-05 | 2.4e-05 | 1.4e-05 |
| marian | 1.6e-05 | 2.4e-05 | 1.7e-05 |
| minimax | 1.2e-05 | 6.7e-05 | 7.6e-05 |
| bamba | 1.2e-05 | 4.1e-06 | 1.2e-05 |

In `bamba`, tfm-blocks has a rounding error three times as large as Transformers. In the other three, both have
rounding errors of a similar size. They depend on the processor: on an Intel Xeon with AVX-512, `minimax` differs by
4.8e-05 (1.8e-05 of the largest logit), with rounding errors of 3.5e-05 in Transformers and 2.0e-05 in tfm-blocks.
"""


def pages() -> dict[Path, str]:
    """Return the text of each file."""
    texts = {"commands.md": COMMANDS + "\n\n".join(commands()), "config.md": CONFIG + "\n\n".join(config())}
    figures = {FIGURES / f"{path.stem}.svg": _figure(path.stem, path.stem) for path in (CONF / "model").glob("*.yaml")}
    for model, _ in BLOCK_FIGURES.values():
        path = MODELS / f"{model}.yaml"
        title = f"{path.relative_to(README.parent).as_posix()} layers=2"
        figures[FIGURES / f"{model}.svg"] = _figure(str(path), title, ["layers=2"])
    references = {FOLDER / name: f"{text}\n" for name, text in texts.items()}
    pairs = sorted(
        (f"`{name}`", KEY.sub(r"`\g<0>`", text.removeprefix("it is ")))
        for text, names in FOREIGN_NAMES.items()
        for name in names.split()
    )
    names = table(["name elsewhere", "in tfm-blocks"], pairs)
    names = COMING_FROM.read_text("utf-8").partition(ALL_NAMES)[0] + f"{ALL_NAMES}\n{names}\n"
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
        speeds=table(["operation", "compared with", "tfm-blocks", "other", "ratio"], speeds),
        commands="\n    ".join(row["command"] for row in measured["speed"]),
        agreement=table(["model", "difference"], [(name, f"{value:.1e}") for name, value in worst]),
        models=len(worst),
        families=len(families()),
        largest=f"{worst[-1][1]:.1e}",
    )


def _site(recipes: Iterable[Path]) -> str:
    """Return mkdocs.yml with the pages of the cookbook and the decisions."""
    decisions = sorted(Path(__file__).parent.glob("decisions/*.md"))
    lines = ["  - Cookbook:", "      - cookbook/index.md"]
    lines += [f"      - cookbook/{path.name}" for path in recipes if path.suffix == ".md" and path.stem != "index"]
    lines += ["  - Decisions:", *(f"      - decisions/{path.name}" for path in decisions)]
    return SITE.read_text("utf-8").partition(LISTED)[0] + "\n".join(lines) + "\n"


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
    texts: dict[Path, str] = {}
    rows: dict[str, tuple[str, ...]] = {}
    recipes = _recipes(architectures)
    for path, (lines, recipe) in recipes.items():
        is_oracle = path.parent == ORACLES
        theirs, overrides = (classes[path.stem], sizes) if is_oracle else (architectures[path.stem], {})
        texts[COOKBOOK / f"{path.stem}.md"] = _recipe(path, lines, recipe, theirs, {path.stem for path in recipes})
        texts[COOKBOOK / f"{path.stem}.svg"] = _figure(str(path), path.stem, [f"{k}={v}" for k, v in overrides.items()])
        rows[recipe["title"]] = (
            f"[{recipe['title']}]({path.stem}.md)",
            recipe["special"],
            f"{len(lines)}",
            f"`{theirs}`",
        )
    listed = sorted(rows.values(), key=lambda row: row[0].lower())
    listing = table(["model", "distinguishing features", "lines", "compared with"], listed)
    median = f"{statistics.median(int(row[2]) for row in listed):.0f}"
    return {**texts, COOKBOOK / "index.md": f"{RECIPES.replace('{median}', median)}{listing}\n"}


def _recipes(models: Collection[str]) -> dict[Path, tuple[list[str], re.Match[str]]]:
    """Return the lines and the first comment of the `models` of families, and of the other models of the oracles."""
    of_families = [path for path in (CONF / "model").glob("*.yaml") if path.stem in models]
    of_families += (FAMILIES / "model").glob("*.yaml")
    recipes: dict[Path, tuple[list[str], re.Match[str]]] = {}
    for path in (*sorted(of_families), *sorted(ORACLES.glob("*.yaml"))):
        lines = [line for line in path.read_text("utf-8").splitlines() if "yaml-language-server" not in line]
        recipe = RECIPE.fullmatch(lines[1])
        assert recipe and recipe["special"], f"{path}: the third line must be `# NAME (SOURCE): WHAT IS SPECIAL`"
        titles, stems = {other["title"] for _, other in recipes.values()}, {other.stem for other in recipes}
        if recipe["title"] not in titles and path.stem not in stems:
            recipes[path] = lines, recipe
        else:
            assert path.parent == ORACLES, f"{path}: another page has the title {recipe['title']}"
    return recipes


def _recipe(path: Path, lines: Sequence[str], recipe: re.Match[str], theirs: str, names: Collection[str]) -> str:
    """Return the page of a model: the file, what is special, the blocks and the agreement. `names` have pages."""
    content = yaml.safe_load("\n".join(lines))
    parent = content["defaults"][0]
    link = f"[{parent}]({f'{parent}.md' if parent in names else f'../../conf/model/{parent}.yaml'})"
    if path.parent == ORACLES:
        tests, shown = "tests/oracles", f"tfm show tests/oracles/{path.name}{SMALL}"
        command = f"`{shown}` prints the nodes and shapes in the sizes of this test."
        at_end = path.stem in ast.literal_eval(_assigned(ORACLES / "test_hugging_face.py", "COUNT_NO_PADDING"))
        unlike = f" with padding at {'the end' if at_end else 'either end'}"
    else:
        file = "test_import" if path.parent == CONF / "model" else "test_families"
        tests, shown, unlike = f"tests/exchange/{file}.py", f"tfm show {path.stem}", ""
        command = f"`tfm import FOLDER` reads its published weights, and `{shown}` prints the nodes and shapes."
    blocks = sorted(set(_values(content.get("model", {}))) & REGISTRY.blocks.keys())
    note = f" ({recipe['note']})" if recipe["note"] else ""
    sizes = " The sizes are small, for tests." if path.parent == ORACLES else ""
    return f"""\
# {recipe["title"]} in {len(lines)} lines

{recipe["title"]}{note}, {recipe["source"]}. Distinguishing features: {recipe["special"]}.{sizes}

```yaml
{chr(10).join(lines)}
```

The file is `{path.relative_to(FOLDER.parents[1]).as_posix()}`. It inherits {link}, and contains only the differences.

![Figure of {recipe["title"]}]({path.stem}.svg)

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


def _figure(model: str, title: str, overrides: Sequence[str] = ()) -> str:
    """Return the figure of a model, as `tfm figure` draws it."""
    composed = compose_model(model, overrides)
    picture = picture_of(read_model(composed.model, composed.sources), REGISTRY, Content())
    return svg_of(picture, Style(title=title))


if __name__ == "__main__":
    for page, text in pages().items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, "utf-8")
