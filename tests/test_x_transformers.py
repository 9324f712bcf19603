"""The table of x-transformers' features in docs/coming-from.md: each row is built, runs forward and decodes."""

import re
from pathlib import Path

import pytest
import torch

from tests.network.examples import SHIPPED
from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.contract.expectations import expect_steps

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text()
SECTION = PAGE.partition("## x-transformers")[2].partition("\n## ")[0]
TABLES = re.findall(r"^\|---\|---\|\n((?:\|.*\n)+)", SECTION, re.MULTILINE)
ROWS, MISSING = (dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table, re.MULTILINE)) for table in TABLES)
SIZES = ["d_model=32", "d_ff=24", "heads=4", "vocab=30"]
MODELS = {path.stem for path in SHIPPED}


def overrides_of(row):
    """Return the overrides of a row, with the addresses of nodes written out."""
    words = [word for word in re.findall("`([^`]+)`", ROWS[row]) if "=" in word]
    return [re.sub(r"^(self|ffn)(?=[.=])", r"model.graph.decoder.layer.\1", word) for word in words]


OF_ENCODERS = ("continuous embeddings", "memory tokens")
OVERRIDDEN = [row for row in ROWS if "=" in ROWS[row] and row not in OF_ENCODERS]


def test_the_tables_name_the_46_features_of_the_readme():
    assert len(ROWS.keys() - {"CoPE"}) == 44 and len(MISSING) == 2


@pytest.mark.grid
@pytest.mark.parametrize("row", OVERRIDDEN)
@torch.no_grad()
def test_each_feature_builds_and_decodes_as_it_reads(row):
    config = compose_model("decoder_only", [*SIZES, *overrides_of(row)])
    network = build_network(check_model(config.model, config.sources), seed=1).eval()
    tgt_BT = torch.randint(1, 30, (2, 9))
    assert network(tgt=tgt_BT).isfinite().all()
    expect_steps(network, {"tgt": tgt_BT}, [0, 4])


@torch.no_grad()
def test_an_encoder_has_memory_tokens():
    config = compose_model("encoder_only", [*SIZES, *overrides_of("memory tokens")])
    network = build_network(check_model(config.model, config.sources), seed=1).eval()
    assert network(src=torch.randint(1, 30, (2, 9))).shape == (2, 13, 30)


@torch.no_grad()
def test_an_encoder_reads_continuous_embeddings():
    config = compose_model("encoder_only", [*SIZES, *overrides_of("continuous embeddings")])
    network = build_network(check_model(config.model, config.sources), seed=1).eval()
    assert network(img=torch.randn(2, 9, 48)).shape == (2, 9, 30)


@pytest.mark.parametrize("row", ["flash attention", "macaron", "cross attention"])
def test_the_other_rows_name_shipped_models(row):
    assert MODELS & set(re.findall("`([^`]+)`", ROWS[row]))
