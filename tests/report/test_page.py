"""The page of `tfm report`: its charts and its safety as text, and all that moves in headless Chromium, if installed."""

import gzip
import html
import io
import json
import re
import time
from base64 import b64decode, b64encode
from hashlib import sha256
from html.parser import HTMLParser
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from tests.browser import browser, contrast
from tests.conftest import WORDS, refused, save, sentences
from tests.run_folders import change_json, garbled, leave_run
from tfm_blocks.cli import main
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.attention_maps import AttentionMap
from tfm_blocks.report.assets import asset
from tfm_blocks.report.attention import MOST_PICTURES, png, shrink
from tfm_blocks.report.charts import LineChart, line_over
from tfm_blocks.report.drawing import COLOURS, chart_svg
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.runs.model import write_model
from tfm_blocks.translation.sentence_attention import SentenceAttention

REFERENCES = sentences(30, 7)
HOSTILE = "</script><script>hacked=1</script><img src=x onerror='hacked=1'>\"'&"


def show(opened, page):
    """Open the page and wait until the pages of its models have addresses."""
    opened.get(page.as_uri())
    wait(opened, lambda: opened.execute_script("return document.body.dataset.drawn") is not None)


def charts_of(text):
    """Return the SVG elements of a page by the titles of their charts and their axes."""
    figures = re.findall(r"<figure><figcaption>([^<]*?) ?<(.*?)</figure>", text, re.DOTALL)
    drawn = {
        title: re.findall(r'data-axis="([^"]*)"[^>]*>(<svg.*?</svg>)', content, re.DOTALL) for title, content in figures
    }
    return {
        title: {axis: ElementTree.fromstring(svg) for axis, svg in drawings}
        for title, drawings in drawn.items()
        if drawings
    }


def line_of(svg, label):
    """Return the group of the line of a model."""
    groups = [group for group in svg.iter("g") if group.get("class", "").endswith(" line")]
    return next(group for group in groups if group.findtext(".//title").startswith(f"{label}\n"))


def marked_points(svg, label):
    """Return the x, mean, lowest and highest seed of each tooltip of a model, and the places of its markers, as columns."""
    markers = list(line_of(svg, label).iter("use"))
    lines = [marker.findtext("title").replace(",", "").split("\n")[1:] for marker in markers]
    numbers = [re.findall(r"(?<= )-?[\d.]+(?:e-\d+)?(?= to|\n|$)", "\n".join(texts)) for texts in lines]
    values = np.array(
        [[*map(float, found), *map(float, found[1:] * 2)][:4] for found in numbers]
    )  # equal seeds: x, mean
    return values.T, np.array([[float(marker.get(name)) for name in "xy"] for marker in markers]).T


def assert_straight(values, places):
    """Assert that places are a linear function of values, to the precision of a tooltip and a coordinate."""
    slope, start = np.polyfit(values, places, 1)
    assert np.allclose(slope * values + start, places, atol=0.15)


class Elements(HTMLParser):
    """The elements of a page as a browser reads them, and their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def wait(opened, holds):
    until = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < until, opened.get_log("browser")
        time.sleep(0.1)


def complaints(opened):
    return [one for one in opened.get_log("browser") if one["level"] not in ("INFO", "DEBUG")]


def column(opened, name):
    """Return the texts and the button of a column of the first table that has it."""
    heads = opened.find_elements("css selector", "th")
    head = next(one for one in heads if one.text.rstrip(" ▲▼") == name)
    cells = "const body = arguments[0].closest('table').tBodies[0]; return [...body.rows].map(row => row.cells[arguments[0].cellIndex].textContent)"
    return opened.execute_script(cells, head), head.find_element("css selector", "button")


@pytest.fixture(scope="module")
def report(tmp_path_factory, translator):
    """Return the report of five models with two seeds each, hostile text wherever possible, and 2,000 rows of metrics in one run."""
    folder = tmp_path_factory.mktemp("report")
    for number in range(10):
        model, seed = divmod(number, 2)
        name = "<img src=x onerror='hacked=1'>" if number == 9 else f"model{model}-{seed}"
        run = folder / "runs" / name
        run.parent.mkdir(exist_ok=True)
        save(translator, run)
        outputs = garbled(REFERENCES, 0.1 + 0.05 * model, number)
        if number == 9:
            outputs = [HOSTILE, *outputs[1:]]
        leave_run(run, REFERENCES, outputs, seed=seed, changed={"heads": model + 2}, loss=1 + number / 10)
    change_json(run / "status.json", {"reason": HOSTILE, "state": "<b>done"})
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"note: {json.dumps(HOSTILE)}\n")
    rows = (folder / "runs" / "model1-0" / "metrics.csv").open("a")
    with rows:
        rows.writelines(f"{step},{1 + 20 / step},1000,{10 * step},{step / 4},,,\n" for step in range(61, 2061))
    main(["report", str(folder / "runs"), "-o", str(folder / "report.html"), "--baseline", "model0-0"])
    return folder / "report.html"


def base_attention():
    """Return the attention of the paper's base model on a sentence as long as those that the page chooses."""
    random = torch.Generator().manual_seed(1)
    tokens = {"src": ["ein", "Mann", "in", "blau", "em", "Hemd", "steht", "auf", "ein", "er", "Lei", "ter", "<eos>"]}
    tokens["tgt"] = ["<bos>", "a", "man", "in", "a", "blue", "shirt", "stands", "on", "a", "lad", "der", "."]
    looks = {
        f"{stack}.{layer}.{name}": AttentionMap(*sides)
        for stack, name, sides in (
            ("encoder", "attn", ("src", "src")),
            ("decoder", "self", ("tgt", "tgt")),
            ("decoder", "cross", ("tgt", "src")),
        )
        for layer in range(6)
    }
    scores = {
        name: torch.randn(8, len(tokens[look.queries]), len(tokens[look.keys]), generator=random)
        for name, look in looks.items()
    }
    weights = {name: torch.softmax(3 * score_HTS, -1) for name, score_HTS in scores.items()}
    return SentenceAttention(" ".join(tokens["src"]), " ".join(tokens["tgt"]), tokens, looks, weights)


@pytest.mark.grid
def test_ten_runs_of_base_size_with_long_curves_and_six_pictures_take_less_than_2300_kilobytes(tmp_path):
    """The size of one picture, which takes seconds, is multiplied by the number of pictures."""
    random, model = Random(1), compose_model("base", []).model
    references = [" ".join(random.choices(WORDS, k=12)) for _ in range(40)]
    for number in range(10):
        heads, seed = divmod(number, 2)
        changed = {"heads": heads + 2, "model.graph": model["graph"], "data.patterns": [f"'le' d MMMM y {one}" for one in range(50)]}  # fmt: skip
        run = leave_run(tmp_path / f"model{heads}-{seed}", references, garbled(references, 0.2, number), seed=seed, changed=changed)  # fmt: skip
        write_model(run, model, [])
        tokens = seconds = 0.0
        with (run / "metrics.csv").open("w") as file:
            file.write(
                "step,train/loss,train/lr,train/tokens,train/seconds,val/loss,val/bleu,val/chrf,val/exact_match\n"
            )
            for step in range(50, 100_001, 50):
                tokens, seconds = tokens + random.randint(1_200_000, 1_250_000), seconds + random.uniform(20, 30)
                file.write(f"{step},{random.uniform(2, 3)},{step**-0.5},{tokens},{seconds},,,,\n")
                if step % 1000 == 0:
                    file.write(f"{step},,,,,{','.join(str(random.uniform(0, 30)) for _ in range(4))}\n")
    main(["report", str(tmp_path), "-o", str(tmp_path / "report.html"), "--baseline", "model0-0"])
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "<img" not in text and text.count("of up to 4 rows") == 2
    picture = len(b64encode(shrink(png(base_attention()))))
    assert picture > 100_000 and len(text.encode()) + MOST_PICTURES * picture < 2_300_000


@pytest.mark.grid
def test_the_page_and_the_pages_of_its_models_ask_for_nothing(report):
    text = report.read_text("utf-8")
    models = json.loads(gzip.decompress(b64decode(re.search('id="model-pages">([^<]*)<', text)[1])))
    assert len(models) == text.count('class="model" data-number') > 0
    for page in (text, *models):
        written = page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert "http:" not in written and "https:" not in written and "<link" not in written
        assert "default-src 'none'" in html.unescape(written) and "encoder.0.attn" in written
        assert "encoder.i.attn" not in written
    assert text.count('<img src="data:image/png;base64,') == 6


def test_a_page_of_short_runs_takes_less_than_250_kilobytes_besides_its_pictures(report):
    text = re.sub('<img src="data:.*?>', "", report.read_text("utf-8"))
    assert text.count("data-axis=") == 12 and len(text.encode()) < 250_000


def test_text_of_a_run_is_escaped_and_only_our_scripts_may_run(report):
    text = report.read_text("utf-8")
    elements = Elements(text).found
    assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    assert all(attributes["src"].startswith("data:image/png") for tag, attributes in elements if tag == "img")
    policy = next(attributes["content"] for tag, attributes in elements if tag == "meta" and "content" in attributes)
    assert [attributes.get("type") for tag, attributes in elements if tag == "script"] == [
        "application/octet-stream",
        None,
    ]
    own, view = (b64encode(sha256(asset(name).encode()).digest()).decode() for name in ("page.js", "view.js"))
    assert f"script-src 'sha256-{own}' 'sha256-{view}'; connect-src 'none'" in policy
    assert f"<script>{asset('page.js')}</script>" in text


def test_curves_have_the_points_of_metrics_csv(report):
    charts = charts_of(report.read_text("utf-8"))
    both = [read_rows(report.parent / "runs" / f"model0-{seed}" / "metrics.csv") for seed in (0, 1)]
    for key in ("train/loss", "val/loss", "val/bleu"):
        steps = np.array([row["step"] for row in both[0] if key in row])
        values_RN = np.array([[row[key] for row in rows if key in row] for rows in both])
        assert list(charts[key]) == ["steps", "tokens", "seconds"]
        for axis, unit in (("steps", 1), ("tokens", 10), ("seconds", 0.25)):
            columns, (x, y) = marked_points(charts[key][axis], "heads 2")
            expected = [unit * steps, values_RN.mean(0), values_RN.min(0), values_RN.max(0)]
            assert np.allclose(columns, expected, rtol=1e-4)
            assert_straight(unit * steps, x)
            assert_straight(values_RN.mean(0), y)
    bands = [group for group in charts["train/loss"]["steps"].iter("g") if group.get("class", "").endswith(" band")]
    assert len(bands) == 4


def test_a_long_curve_is_drawn_whole_and_some_of_its_points_are_marked(report):
    drawn = charts_of(report.read_text("utf-8"))["train/loss"]["steps"]
    (steps, *_), (x, _) = marked_points(drawn, "heads 3")
    assert steps[0] == 20 and steps[-1] == 2060 and len(steps) == 16
    assert_straight(steps, x)
    assert 15 < line_of(drawn, "heads 3").find("path").get("d").count("L") <= 2 * 501


def test_names_in_a_chart_are_text_and_identifiers_are_unique_in_a_page():
    lines = [line_over("rate", label, {1: [0.5, 0.7], 2: [0.6]}) for label in (HOSTILE, "_b")]
    chart = LineChart(HOSTILE, "task", lines, ["rate"], HOSTILE)
    texts = [chart_svg(chart, "rate", [HOSTILE, "_b"], name) for name in ("0 rate", "1 rate")]
    tags = [tag for tag, _ in Elements("".join(texts)).found]
    assert set(tags) <= {"svg", "g", "path", "use", "title", "defs", "clippath", "rect", "text"}
    svg = ElementTree.fromstring(texts[0])
    first, second = svg.findall(".//g[@class='model-0 line']//title")
    assert first.text == f"{HOSTILE}\nrate 1\n{HOSTILE} 0.6\nseeds from 0.5 to 0.7" and second.text.endswith(
        f"{HOSTILE} 0.6"
    )
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in texts]
    assert ids[0] and not ids[0] & ids[1]
    for text, own in zip(texts, ids, strict=True):
        assert set(re.findall(r"#(\w+)", re.sub("<title>.*?</title>", "", text, flags=re.DOTALL))) >= own


def test_a_browser_shows_it_without_errors_and_its_controls_choose_axes_and_models(report):
    with browser() as opened:
        show(opened, report)
        assert complaints(opened) == []
        fetched = "return performance.getEntriesByType('resource').filter(one => !one.name.startsWith('data:')).length"
        assert opened.execute_script(fetched) == 0
        visible = "return [...document.querySelectorAll('figure [data-axis]')].filter(one => one.checkVisibility()).map(one => one.dataset.axis)"
        before = opened.execute_script(visible)
        assert set(before) == {"steps"}
        opened.find_element("css selector", "input[value=tokens]").click()
        assert opened.execute_script(visible) == ["tokens"] * len(before)
        (chart, *_) = opened.find_elements("css selector", "figure [data-axis=tokens]")

        def pixels():
            picture = Image.open(io.BytesIO(chart.screenshot_as_png)).convert("RGB")
            return (np.abs(np.asarray(picture).astype(int) - tuple(bytes.fromhex(COLOURS[0][1:]))).max(2) < 12).sum()

        assert pixels() > 50
        opened.find_element("css selector", "input[name=model]").click()
        shown = "return [...document.querySelectorAll('[class^=model-]')].filter(one => !one.checkVisibility()).map(one => one.classList[0])"
        assert pixels() == 0
        opened.find_element("css selector", "input[value=steps]").click()
        assert "model-0" in opened.execute_script(shown) and complaints(opened) == []


def test_a_link_opens_the_page_of_each_model_from_the_disk(report):
    with browser() as opened:
        show(opened, report)
        links = opened.find_elements("css selector", "a.model")
        assert len(links) == len(opened.find_elements("css selector", "#models ~ details table"))
        links[0].click()
        opened.switch_to.window(opened.window_handles[-1])
        wait(opened, lambda: opened.execute_script("return document.body.dataset.drawn") == "true")
        opened.execute_script("select(views[0], 'encoder.0.attn')")
        assert "softmax" in opened.execute_script("return document.getElementById('details').textContent")
        assert complaints(opened) == []


def test_a_table_sorts_by_the_column_that_is_clicked_and_back(report):
    with browser() as opened:
        show(opened, report)
        before, button = column(opened, "BLEU")
        values = sorted(float(text.split()[0]) for text in before)
        button.click()
        assert [float(text.split()[0]) for text in column(opened, "BLEU")[0]] == values
        button.click()
        after, button = column(opened, "BLEU")
        assert [float(text.split()[0]) for text in after] == values[::-1] and len(values) == 10
        assert button.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
        names, button = column(opened, "run")
        button.click()
        assert sorted(names) == sorted(column(opened, "run")[0]) and complaints(opened) == []


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_a_phone_shows_it_at_its_width_in_light_and_in_dark(report, dark):
    with browser(390, 800, dark=dark) as opened:
        show(opened, report)
        width, high, screen = opened.execute_script(
            "return [document.documentElement.scrollWidth, document.querySelector('figure svg').clientHeight, innerWidth]"
        )
        assert width <= 390 == screen and high > 200
        style = "const style = getComputedStyle(document.querySelector(arguments[0])); return [style.color, style.backgroundColor]"
        ink, paper = opened.execute_script(style, "body")
        soft, link, gone = (opened.execute_script(style, one)[0] for one in (".hint", "a", "del"))
        _, added = opened.execute_script(style, "ins")
        assert all(
            contrast(*pair) >= 4.5 for pair in ((ink, paper), (soft, paper), (link, paper), (gone, paper), (ink, added))
        )
        assert (contrast(paper, "rgb(0, 0, 0)") < 2) == dark
        fills = "return [...document.querySelectorAll('figure svg text')].map(one => getComputedStyle(one).fill)"
        assert set(opened.execute_script(fills)) == {ink}


def test_text_of_a_run_stays_text(report):
    with browser() as opened:
        show(opened, report)
        assert opened.execute_script("return typeof hacked") == "undefined"
        assert opened.execute_script("return document.scripts.length") == 2
        assert (
            opened.execute_script("return document.querySelectorAll('img:not([src^=\"data:image/png\"])').length") == 0
        )
        said = opened.execute_script("return document.body.textContent")
        assert said.count("<img src=x onerror='hacked=1'>") > 3 and "<b>done" in said
        assert complaints(opened) == []


def test_a_script_that_got_into_the_page_would_not_run(report, tmp_path):
    text = report.read_text("utf-8").replace("<h1>", "<script>hacked=1</script><img src=x onerror='hacked=1'><h1>", 1)
    (tmp_path / "injected.html").write_text(text)
    with browser() as opened:
        show(opened, tmp_path / "injected.html")
        assert opened.execute_script("return typeof hacked") == "undefined"


@pytest.mark.grid
def test_runs_that_are_not_done_and_folders_without_models_have_a_page_too(tmp_path):
    run = leave_run(tmp_path / "runs" / "a", REFERENCES, REFERENCES)
    (leave_run(tmp_path / "runs" / "b", REFERENCES, REFERENCES, seed=2) / "status.json").write_text(
        '{"state": "failed"}'
    )
    for name in ("metrics.csv", "translations.jsonl", "config.yaml"):
        (run / name).unlink()
    main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "out.html"), "--sentence", "ein Haus"])
    text = (tmp_path / "out.html").read_text("utf-8")
    assert "the file is missing" in text and "not done: b" in text
    with browser() as opened:
        show(opened, tmp_path / "out.html")
        assert complaints(opened) == []


def test_a_place_where_no_page_can_be_is_refused(tmp_path):
    for path in (tmp_path / "out.pdf", tmp_path / "none" / "out.html", tmp_path):
        assert "must be a .html file" in refused("report", tmp_path, "-o", path)
