"""Folders in the layouts of hubs and of earlier versions are imported with the logits of transformers."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import tfm_blocks as tfm
from tests.exchange.layouts import LAYOUTS, change_config
from tests.exchange.published import FAMILIES, publish
from tests.exchange.test_import import far_apart, logits_of_both
from tfm_blocks.exchange.exporting import export_run
from tfm_blocks.exchange.importing import import_folder

PAIRS = [*itertools.product(FAMILIES, LAYOUTS)]
QUICK = [(FAMILIES[number % len(FAMILIES)], layout) for number, layout in enumerate(LAYOUTS)]


def load_theirs(folder, theirs):
    """Return the model that transformers reads from a folder."""
    load = AutoModelForSeq2SeqLM if theirs.config.is_encoder_decoder else AutoModelForCausalLM
    return load.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.grid]) for pair in PAIRS],
)
def test_every_layout_of_every_family_has_the_logits_of_transformers(name, layout, tmp_path):
    saved = publish(name, tmp_path / "theirs")
    LAYOUTS[layout](tmp_path / "theirs", saved)
    theirs = load_theirs(tmp_path / "theirs", saved)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = tfm.load(tmp_path / "run")
    assert far_apart(*logits_of_both(theirs, ours)) < 2e-5
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_theirs(tmp_path / "back", saved)
    wide = 1e-2 if layout in ("in_halves", "in_brain_floats") else 2e-5
    assert far_apart(*(logits_of_both(model, ours)[1] for model in (back, theirs))) < wide
