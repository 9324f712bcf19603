"""`tfm figure`: files of four formats with the same bytes each time, and one sentence for wrong input."""

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
from fontTools.ttLib import TTFont
from PIL import Image

from tests.conftest import refused
from tests.figures.test_layout import shipped_spec
from tests.network.examples import SHIPPED
from tests.run_folders import leave_run
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.figures.draw import Content
from tfm_blocks.figures.drawing import THEMES
from tfm_blocks.figures.figure import SPECIAL, Style, mark_nodes, picture_of, svg_of, tikz_of
from tfm_blocks.figures.labels import WIDTHS, text_width
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.report.blocks import FIGURES as BLOCK_FIGURES
from tfm_blocks.runs.model import write_model

ROOT = Path(__file__).parent.parent.parent
FIGURES = ROOT / "docs" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


def groups(svg):
    return {group.get("data-node"): group for group in ET.fromstring(svg).iter(f"{SVG}g") if group.get("data-node")}


@pytest.mark.grid
def test_all_shipped_figures_are_drawn_without_torch_and_match_the_docs(tmp_path):
    names = {path.stem: [path.stem] for path in SHIPPED}
    names |= {model: [f"tests/models/{model}.yaml", "layers=2"] for model, _ in BLOCK_FIGURES.values()}
    code = (
        "import sys\nfrom tfm_blocks.cli import main\n"
        f"for name, model in {names}.items():\n    main(['figure', *model, '-o', f'{tmp_path}/{{name}}.svg'])\n"
        "print(sorted({'torch', 'matplotlib', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert len(names) > 20 and {path.stem for path in FIGURES.iterdir()} == set(names)
    for name in names:
        assert (tmp_path / f"{name}.svg").read_bytes() == (FIGURES / f"{name}.svg").read_bytes(), "docs/generate.py"


@pytest.mark.parametrize("suffix", [".svg", ".tex", ".png", ".pdf"])
def test_a_figure_has_the_same_bytes_each_time(suffix, tmp_path):
    for name in ("one", "two"):
        main(["figure", "t5", "--shapes", "-o", str(tmp_path / f"{name}{suffix}")])
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_png_and_pdf_are_as_large_as_the_picture(tmp_path):
    picture = picture_of(shipped_spec("base"), REGISTRY, Content())
    for suffix in (".png", ".pdf"):
        main(["figure", "base", "-o", str(tmp_path / f"base{suffix}")])
    width, height = Image.open(tmp_path / "base.png").size
    assert (width, height) == (int(picture.width / 72 * 200), int(picture.height / 72 * 200))
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", (tmp_path / "base.pdf").read_bytes())
    assert [float(size) for size in box.groups()] == pytest.approx([picture.width, picture.height], abs=0.1)


def test_every_box_of_the_svg_names_its_node():
    spec = shipped_spec("base")
    svg = svg_of(picture_of(spec, REGISTRY, Content()), Style(title="a < b"))
    known = groups(svg)
    assert {"src", "src_emb", "encoder", "encoder.0", "encoder.0.attn", "decoder.0.cross", "logits"} <= set(known)
    assert known["encoder.0.attn"].get("data-nodes").split() == [f"encoder.{index}.attn" for index in range(6)]
    assert known["encoder.0.attn"].find(f"{SVG}title").text == "encoder.0.attn … encoder.5.attn: attention"
    assert ET.fromstring(svg).find(f"{SVG}title").text == "a < b"


@pytest.mark.parametrize(("mark", "sign"), [("added", "+"), ("removed", "−"), ("changed", "~")])
@pytest.mark.parametrize("theme", THEMES)
def test_a_mark_on_any_layer_is_a_sign_on_the_box_that_stands_for_it(mark, sign, theme):
    picture = picture_of(shipped_spec("base"), REGISTRY, Content())
    signed = mark_nodes(picture, {"encoder.3.ffn": mark})
    marked = groups(svg_of(signed, Style(THEMES[theme])))
    plain = groups(svg_of(picture, Style(THEMES[theme])))
    texts = {node: [text.text for text in group.iter(f"{SVG}text")] for node, group in marked.items()}
    assert sign in texts["encoder.0.ffn"]
    assert {node for node, group in marked.items() if ET.tostring(group) != ET.tostring(plain[node])} == {
        "encoder.0.ffn"
    }
    assert f"{{{SPECIAL.get(sign, sign)}}}" in tikz_of(signed, Style(THEMES[theme]))


@pytest.mark.parametrize("theme", ["paper", "dark"])
def test_text_has_a_contrast_of_at_least_seven_on_every_box(theme):
    """WCAG 2.2 defines the contrast ratio; its strictest level is 7."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    colours = THEMES[theme]
    for fill in (*colours.fills.values(), colours.background, colours.plate):
        darker, lighter = sorted(map(luminance, (fill, colours.ink)))
        assert (lighter + 0.05) / (darker + 0.05) >= 7, fill


def test_widths_of_text_match_the_font():
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    font = TTFont(path)
    names, metrics, em = font.getBestCmap(), font["hmtx"], font["head"].unitsPerEm
    for letter, width in WIDTHS.items():
        assert width == pytest.approx(metrics[names[ord(letter)]][0] * 1000 / em, abs=0.5), letter
    for letter in "×–−…αéß":
        assert text_width(letter, 1000) >= metrics[names[ord(letter)]][0] * 1000 / em, letter


def test_tikz_escapes_text_and_closes_what_it_opens():
    text = tikz_of(picture_of(shipped_spec("base"), REGISTRY, Content(of="encoder.0")), Style(title="a"))
    assert r"src\_pos" in text and text.count("\\begin{tikzpicture}") == text.count("\\end{tikzpicture}") == 1
    for line in text.splitlines():
        assert line.startswith(("%", "\\begin", "\\end")) or line.endswith((";", "}")), line
        assert line.replace(r"\{", "").count("{") == line.replace(r"\}", "").count("}"), line
    used = set(re.findall(r"tfm[0-9a-f]{6}", text))
    assert used == set(re.findall(r"\\definecolor\{(tfm[0-9a-f]{6})\}", text))


@pytest.mark.grid
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="there is no TeX: apt-get install texlive-pictures")
def test_tikz_of_all_shipped_models_compiles_to_pages_of_their_size(tmp_path):
    names = [path.stem for path in SHIPPED]
    page = r"\setbox0\hbox{\input{%s}}\pdfpagewidth\wd0 \pdfpageheight\dimexpr\ht0+\dp0\relax\shipout\box0"
    lines = [r"\documentclass{article}\usepackage{tikz}\pdfcompresslevel0\pdfobjcompresslevel0\begin{document}"]
    for name in names:
        main(["figure", name, "--shapes", "-o", str(tmp_path / f"{name}.tex")])
    (tmp_path / "all.tex").write_text("\n".join([*lines, *(page % name for name in names), r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert not re.search("Missing character|Overfull", done.stdout)
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", (tmp_path / "all.pdf").read_bytes())
    pictures = [picture_of(shipped_spec(name), REGISTRY, Content(shapes=True)) for name in names]
    expected = [(picture.width, picture.height) for picture in pictures]
    assert [tuple(map(float, box)) for box in boxes] == [pytest.approx(size, abs=0.2) for size in expected]


def test_the_figure_of_a_run_matches_its_model(tmp_path):
    run = leave_run(tmp_path / "runs" / "one", ["Haus"], ["Haus"])
    write_model(run, compose_model("prenorm", ["layers=2"]).model, [])
    main(["figure", str(run), "-o", str(tmp_path / "run.tex")])
    main(["figure", "prenorm", "layers=2", "-o", str(tmp_path / "model.tex")])
    lines = [(tmp_path / name).read_text().splitlines()[1:] for name in ("run.tex", "model.tex")]
    assert lines[0] == lines[1]


def test_a_block_of_a_plug_in_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figured_blocks.py").write_text(
        "from torch import nn\nfrom tfm_blocks.registry.blocks import block\n\n\n"
        '@block("figured_block", "x: B T D -> B T D", branch=True, source="none")\n'
        "class Figured(nn.Module):\n    def forward(self, x_BTD):\n        return x_BTD\n"
    )
    override = "model.graph.encoder.layer.ffn.block=figured_block"
    try:
        main(["figure", "base", override, "--plugins", "figured_blocks", "-o", "figure.svg"])
    finally:
        REGISTRY.blocks.pop("figured_block", None)
    assert ">Figured Block<" in (tmp_path / "figure.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bsae", "-o", "figure.svg"], "no model is called 'bsae'"),
        (["runs/one", "-o", "figure.svg"], "no model is called 'runs/one', and there is no such run folder"),
        (["base", "model.add_norm=past", "-o", "figure.svg"], "'past' is not an add & norm preset"),
        (["base", "-o", "figure.gif"], "must be a file .svg, .pdf, .png or .tex, but is 'figure.gif'"),
        (["base", "-o", "figure"], "must be a file .svg, .pdf, .png or .tex, but is 'figure'"),
        (["base", "-o", "missing/figure.svg"], "missing/figure.svg: cannot be written: No such file or directory"),
        (["base", "-o", "missing/figure.png"], "missing/figure.png: cannot be written: No such file or directory"),
        (["base", "--of", "encoder.9", "-o", "figure.svg"], "--of: nothing is called 'encoder.9'"),
    ],
)
def test_wrong_input_is_one_error_with_a_fix_and_status_2(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused("figure", *arguments)
    assert sentence in error and error.count("error:") == 1 and "help:" in error
    assert list(tmp_path.iterdir()) == []


def test_every_shipped_model_has_its_figure_on_the_page_of_models():
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    shown = re.findall(r"!\[(\w+)\]\(figures/(\w+)\.svg\)", page)
    assert sorted(shown) == [(path.stem, path.stem) for path in SHIPPED]


def test_a_stack_whose_layers_begin_with_an_inline_node_is_drawn(tmp_path):
    skip = "{block: linear, d_out: d_model, in: {block: sum, in: [entry, down.(n-1-i)]}}"
    attn = "{attn: {block: attention}}"
    (tmp_path / "unet.yaml").write_text(
        "# @package _global_\ndefaults: [tiny, _self_]\nmodel: {graph: {encoder: null, "
        f"down: {{repeat: 2, before: tgt_emb, layer: {attn}}}, "
        f"up: {{repeat: 2, before: tgt_emb, layer: {{skip: {skip}, attn: {{block: attention}}}}}}, "
        "decoder: {layer: {cross: {kv: up}}}}}\n"
    )
    main(["figure", str(tmp_path / "unet.yaml"), "-o", str(tmp_path / "unet.svg")])
    assert "<svg" in (tmp_path / "unet.svg").read_text()
