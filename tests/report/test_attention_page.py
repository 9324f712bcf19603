"""Pictures of attention."""

import re
import struct
from dataclasses import replace
from functools import partial
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import tfm_blocks as tfm
from tests.browser import browser, contrast
from tfm_blocks.data.tokenizer import MASK, Tokenizer
from tfm_blocks.errors import ConfigError, DataError
from tfm_blocks.report.attention import GAP, check_path, draw, render_attention, save_attention
from tfm_blocks.translation.encoder import Encoder
from tfm_blocks.translation.fill import Filler
from tfm_blocks.translation.sentence_attention import attention_of
from tfm_blocks.translation.translator import Translator

TEXT = "zwei Kinder spielen"


@pytest.fixture(scope="module")
def attention(translator):
    return attention_of(translator, TEXT)


@pytest.mark.grid
def test_a_target_is_the_greedy_translation_or_the_one_given(translator, attention):
    assert attention.target == translator.translate([TEXT])[0]
    forced = attention_of(translator, TEXT, "am Fluss")
    assert forced.target == "am Fluss"
    assert "".join(forced.tokens["tgt"]) == "<bos>am▁Fluss"
    assert "".join(forced.tokens["src"]) == "zwei▁Kinder▁spielen<eos>"


def test_a_target_beyond_the_positions_is_refused_and_an_output_that_fills_them_is_drawn(translator):
    knobs = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocab": translator.tokenizer.size}
    short = Translator(tfm.build("bart", max_length=12, seed=4, **knobs).eval(), translator.tokenizer)
    assert len(attention_of(short, "am Fluss").tokens["tgt"]) == 12
    with pytest.raises(
        DataError, match=r"--target: has \d+ tokens, bos or eos included, but the model has 12 positions"
    ):
        attention_of(short, "am Fluss", "zwei " * 20)
    with pytest.raises(DataError, match="src: has"):
        attention_of(short, "zwei " * 20, "am Fluss")


def test_every_head_of_every_layer_is_in_the_pictures(attention):
    images = [axes.images[0].get_array() for axes in draw(attention).axes]
    assert len(images) == 3  # encoder, decoder, cross
    T, S = (len(attention.tokens[name]) for name in ("tgt", "src"))
    for layer in range(2):
        for head in range(4):
            top, left = layer * (T + GAP) + GAP, head * (S + GAP)
            shown = images[2][top : top + T, left : left + S]
            expected = attention.weights[f"decoder.{layer}.cross"][head].numpy()
            np.testing.assert_array_equal(np.asarray(shown, dtype=np.float32), expected)


def test_a_page_is_one_file_with_its_labels_as_text(attention):
    text = render_attention(attention)
    assert not re.search(r'(src|href)="(?!data:|#)', text) and "script-src ;" in text
    picture = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    labels = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.count("head 3") == 6 and labels.count("decoder.1.cross") == 1
    assert labels.count(attention.tokens["src"][0]) >= 4


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_a_phone_shows_legible_pictures_in_their_own_box_in_light_and_in_dark(attention, tmp_path, dark):
    save_attention(attention, tmp_path / "out.html")
    with browser(390, 800, dark=dark) as opened:
        opened.get((tmp_path / "out.html").as_uri())
        style = "const style = getComputedStyle(document.querySelector(arguments[0])); return [style.color, style.backgroundColor, style.fill]"
        ink, paper, _ = opened.execute_script(style, "body")
        assert contrast(opened.execute_script(style, "svg text")[2], paper) >= 4.5 <= contrast(ink, paper)
        assert (contrast(paper, "rgb(0, 0, 0)") < 2) == dark
        sizes = "const box = document.querySelector('.scroll'); return [document.documentElement.scrollWidth, innerWidth, box.clientWidth, box.scrollWidth]"
        page_width, screen, box, picture = opened.execute_script(sizes)
        assert page_width <= 390 == screen and box < picture
        shown = Image.open(BytesIO(opened.find_element("css selector", "svg").screenshot_as_png)).convert("RGB")
        colours = [f"rgb{colour}" for _, colour in shown.getcolors(2**24) if colour[2] > colour[0] + 30]  # blue ones
        assert max(contrast(colour, paper) for colour in colours) >= 4.5


@pytest.mark.grid
def test_text_of_other_scripts_and_markup_stays_text(translator, tmp_path):
    attention = attention_of(translator, "<b>$x_1$ 小さな家</b>", "$\\alpha$")
    text = render_attention(attention)
    assert "&lt;b&gt;$x_1$ 小さな家" in text and "<b>" not in text
    tokens = attention.tokens | {"tgt": ["小", *attention.tokens["tgt"][1:]]}
    (warning,) = save_attention(replace(attention, tokens=tokens), tmp_path / "out.png")
    assert "no letters for 小: write a .html" in warning
    assert save_attention(replace(attention, tokens=tokens), tmp_path / "out.html") == []
    assert ">小</text>" in (tmp_path / "out.html").read_text("utf-8")


def test_a_png_has_its_size(attention, tmp_path):
    assert save_attention(attention, tmp_path / "out.png") == []
    data = (tmp_path / "out.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", data[16:24])) > 400


def test_attention_that_cannot_be_drawn_is_an_error(translator, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.html or \.png"):
        check_path(tmp_path / "out.pdf")
    with pytest.raises(ConfigError, match="no folder"):
        check_path(tmp_path / "missing" / "out.png")
    (tmp_path / "out.png").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_path(tmp_path / "out.png")
    with pytest.raises(DataError, match="src has"):
        draw(attention_of(translator, "Haus " * 200, "Haus"))


def test_a_sentence_may_be_empty(translator):
    assert torch.isfinite(attention_of(translator, "").weights["decoder.0.cross"]).all()


@pytest.mark.parametrize(
    ("make", "text", "tokens"),
    [
        (Encoder, "am Fluss", {"src": "am▁Fluss<eos>"}),
        (Filler, "am <mask>", {"src": "am<mask><eos>"}),
        (partial(Translator, columns=["tgt"]), "am Fluss", {"tgt": "<bos>am▁Fluss"}),
    ],
)
def test_an_encoder_and_a_language_model_read_the_sentence_alone(make, text, tokens):
    tokenizer = Tokenizer.train(["am Fluss"] * 3, 300, special=[MASK])
    sizes = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "vocab": tokenizer.size}
    network = tfm.build("decoder_only" if "tgt" in tokens else "encoder_only", **sizes)
    attention = attention_of(make(network, tokenizer), text)
    assert {name: "".join(pieces) for name, pieces in attention.tokens.items()} == tokens
    assert (attention.source, attention.target) == (text, "")
    for w_HTS in attention.weights.values():
        assert w_HTS.shape[1:] == (len(next(iter(attention.tokens.values()))),) * 2
        torch.testing.assert_close(w_HTS.sum(2), torch.ones(w_HTS.shape[:2]))
