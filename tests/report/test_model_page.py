"""`tfm view` in headless Chromium, if installed."""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from tests.browser import browser, contrast
from tests.conftest import refused
from tests.report.test_page import complaints, wait
from tfm_blocks.cli import main
from tfm_blocks.cli.view_server import WatchedPage
from tfm_blocks.compose.folders import CONF

HOSTILE = "</script><img onerror='hacked=1' src=x>"
LARGEST = 420_000  # bytes
MODELS = [*sorted(path.stem for path in (CONF / "model").glob("*.yaml")), "base layers=64", "two_sources local_global"]


def show(opened, page):
    opened.get(page if isinstance(page, str) else page.as_uri())
    wait(opened, lambda: opened.execute_script("return document.body.dataset.drawn") is not None)


def boxes(opened, selector=".model"):
    """Return the addresses of the boxes of a figure."""
    return opened.execute_script(f"return [...document.querySelectorAll('{selector} [data-node]:not(.plate)')].map(one => one.dataset.node)")  # fmt: skip


def click(opened, address, kind=":not(.plate)"):
    opened.execute_script(
        f"document.querySelector('[data-node=\"{address}\"]{kind}').dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"
    )


def details(opened):
    return opened.execute_script("return document.getElementById('details').textContent")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of base and of a model with hostile text in its comments and arguments."""
    folder = tmp_path_factory.mktemp("view")
    text = f"# @package _global_\ndefaults: [base, _self_]\nheads: 4\nmodel:\n  graph:\n    encoder:\n      layer:\n        attn:   # {HOSTILE}\n          bias: false\n"  # fmt: skip
    (folder / "mine.yaml").write_text(text)
    main(["view", "base", str(folder / "mine.yaml"), "layers=2", "-o", str(folder / "page.html")])
    return folder / "page.html"


@pytest.mark.grid
def test_two_models_their_marks_and_their_difference_are_on_one_page_without_errors(page):
    with browser() as opened:
        show(opened, page)
        assert complaints(opened) == []
        signs = "return [...document.querySelectorAll('.model[data-model=\"1\"] [data-node]')].filter(one => [...one.querySelectorAll('text')].some(text => text.textContent === '~')).map(one => one.dataset.node)"
        assert set(opened.execute_script(signs)) == {
            "encoder.0.attn",
            "decoder.0.self",
            "decoder.0.cross",
        }
        text = opened.find_element("css selector", "#difference ~ .scroll").text
        assert "argument heads" in text and "encoder.*.attn, decoder.*.self, decoder.*.cross" in text


def test_a_click_selects_a_node_and_shows_its_facts_and_the_lines_that_set_them(page):
    with browser() as opened:
        show(opened, page)
        click(opened, "encoder.0.attn")
        assert "softmax(β q k^T) v" in details(opened) and "Vaswani et al. 2017, section 3.2.2" in details(opened)
        click(opened, "decoder.0.cross")
        rows = opened.execute_script("return [...document.querySelectorAll('#details tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))")  # fmt: skip
        assert ["kv", "encoder", "B S 512"] in rows
        heads = next(row for row in rows if row[0] == "heads")
        assert heads[1] == "8" and re.fullmatch(r".*base\.yaml:12; heads: .*base\.yaml:5", heads[2])
        opened.execute_script("select(views[1], 'encoder.0.attn')")
        rows = opened.execute_script("return [...document.querySelectorAll('#details tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))")  # fmt: skip
        bias = next(row for row in rows if row[0] == "bias")
        assert bias[1] == "false" and bias[2].endswith("mine.yaml:9")


def test_the_weights_of_a_node_have_their_roles_and_symbolic_shapes(page):
    text = page.read_text("utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    model = data["models"][1]
    rows = {address: model["records"][model["nodes"][address]]["own_weights"] for address in model["nodes"]}
    assert rows["encoder.1.attn"] == [
        ["block.qkv.weight", "matrix", "3·d_model × d_model", "uniform ±0.0765"],
        ["block.out.weight", "matrix", "d_model × d_model", "uniform ±0.0765"],
        ["post.norm.weight", "gain", "d_model", "1"],
        ["post.norm.bias", "bias", "d_model", "0"],
    ]
    assert rows["logits"] == rows["src_emb"] and rows["logits"][0][:3] == [
        "block.weight",
        "embedding, head",
        "vocab × d_model",
    ]
    with browser() as opened:
        show(opened, page)
        click(opened, "decoder.0.ffn")
        assert "block.inner.weightmatrixd_ff × d_model" in details(opened)


def test_hostile_text_stays_text(page):
    with browser() as opened:
        show(opened, page)
        opened.execute_script("select(views[1], 'encoder.0.attn')")
        assert HOSTILE in details(opened)
        assert opened.find_elements("css selector", "img") == []
        assert opened.execute_script("return typeof hacked") == "undefined"
        assert complaints(opened) == []


def test_a_click_closes_and_opens_a_stack_and_so_does_the_keyboard(page):
    with browser() as opened:
        show(opened, page)
        first = '.model[data-model="0"]'
        assert "encoder.0.attn" in boxes(opened, first)
        click(opened, "encoder.0", ".plate")
        assert "encoder" in boxes(opened, first) and "encoder.0.attn" not in boxes(opened, first)
        assert opened.execute_script("return document.activeElement.dataset.node") == "encoder"
        key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))"
        opened.execute_script(key)
        assert "encoder.0.attn" in boxes(opened, first) and "encoder" not in boxes(opened, first)
        opened.find_element("css selector", f"{first} .all").click()
        assert {f"encoder.{layer}.attn" for layer in range(6)} <= set(boxes(opened, first))


def test_the_search_finds_nodes_in_closed_stacks(page):
    with browser() as opened:
        show(opened, page)
        opened.find_element("css selector", '.model[data-model="0"] .close').click()
        opened.find_element("id", "search").send_keys("cross kv_heads")
        matches = opened.find_elements("css selector", "#matches button")
        assert matches[0].text == "base: decoder.0.cross" and len(matches) == 2
        matches[0].click()
        assert "decoder.0.cross" in details(opened)
        assert opened.execute_script("return document.querySelectorAll('.selected').length") >= 1


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_it_fits_a_phone_and_is_legible_in_both_colours(page, dark):
    with browser(390, 800, dark=dark) as opened:
        show(opened, page)
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 390
        colours = "const box = document.querySelector('[data-node=\"encoder.0.attn\"]'); return [getComputedStyle(box.querySelector('text')).fill, getComputedStyle(box.querySelector('rect')).fill]"
        assert contrast(*opened.execute_script(colours)) >= 4.5


@pytest.mark.parametrize(
    "name", ["base", *(pytest.param(name, marks=pytest.mark.grid) for name in MODELS if name != "base")]
)
def test_a_page_is_small_and_fetches_nothing(name, tmp_path):
    main(["view", *name.split(), "-o", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text("utf-8")
    assert len(text.encode()) < LARGEST
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "") and "https:" not in text
    assert "default-src &#39;none&#39;" in text and "<link" not in text


@pytest.mark.parametrize("words", [["base", "-o", "page.txt"], ["nosuch", "-o", "page.html"], ["base", "-o", "no/page.html"], ["base", "--watch", "--port", "99999"]], ids=" ".join)  # fmt: skip
def test_wrong_input_is_one_sentence_and_status_2(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("view", *words).count("error:") == 1


@pytest.fixture
def served(tmp_path):
    """Yield a watched model file and the port of its server."""
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny, _self_]\nlayers: 1\n")
    command = [sys.executable, "-m", "tfm_blocks", "view", "--watch", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[0]
        yield file, address
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("error", [RecursionError("too deep"), ValueError("a plug-in failed"), OSError("moved")])
def test_any_error_of_a_changed_file_is_shown_and_the_page_recovers(tmp_path, monkeypatch, error, capsys):
    """The watching thread must not end."""
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [tiny, _self_]\nlayers: 1\n")
    monkeypatch.setattr("tfm_blocks.cli.view_server.render_view", lambda models, version: version)
    models = [SimpleNamespace(sources=SimpleNamespace(files={str(file)}))]
    monkeypatch.setattr("tfm_blocks.cli.view_server.RETRY", 0.01)
    numbers, late, mended = count(), [], threading.Event()

    def read():
        number = next(numbers)
        if number == 1:
            raise error  # before the warnings
        print("warning of another model", file=sys.stderr)
        if number and not mended.is_set():
            print("warning of the changed file", file=sys.stderr)
            late.append(number)
            raise error
        return models

    page = WatchedPage(read)
    threading.Thread(target=page.watch_files, daemon=True).start()
    file.write_text(file.read_text() + "\n")
    until(lambda: len(late) >= 2)
    assert str(error) in page.problems[0].rule and page.version == 1
    mended.set()
    until(lambda: page.version == 2)  # the file of the error may be another
    assert page.problems == ()
    assert capsys.readouterr().err == "warning of another model\nwarning of the changed file\n"


def state(address, host=None, path="/state"):
    connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=300)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def until(holds):
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.grid
def test_a_watched_page_shows_an_error_beside_the_last_figure_and_recovers(served):
    file, address = served
    text = file.read_text()
    with browser() as opened:
        show(opened, address)
        assert complaints(opened) == []
        file.write_text(f"{text}model: {{graph: {{encoder: {{layer: {{attn: {{heads: 7}}}}}}}}}}\n")

        def shown():
            return opened.execute_script("return document.getElementById('problems').textContent")

        until(lambda: "heads" in shown())
        assert "mine.yaml:4" in shown() and "must split evenly into heads" in shown()
        wrong = "return [...document.querySelectorAll('.wrong')].map(one => one.dataset.node)"
        assert set(opened.execute_script(wrong)) == {"encoder.0.attn"}
        file.write_text(text.replace("layers: 1", "layers: 3"))
        until(lambda: opened.execute_script("return document.body.dataset.drawn") and not shown() and "3×" in opened.execute_script("return document.querySelector('.figure').textContent"))  # fmt: skip
        assert complaints(opened) == []


@pytest.mark.grid
def test_the_server_answers_only_this_host(served):
    _, address = served
    port = address.rstrip("/").rpartition(":")[2]
    assert address == f"http://127.0.0.1:{port}/"
    assert json.loads(state(address)[1]) == {"version": "1", "problems": []}
    assert state(address, f"localhost:{port}")[0] == 200
    assert state(address, "evil.example")[0] == state(address, f"evil.example:{port}")[0] == 403
    assert state(address, path="/../../etc/passwd")[0] == 404
    listening = subprocess.run(["ss", "-tln"], capture_output=True, text=True).stdout
    assert f"127.0.0.1:{port} " in listening and f"0.0.0.0:{port} " not in listening and f"*:{port} " not in listening
