"""`tfm blocks` and docs/blocks.md."""

from pathlib import Path

import pytest
import yaml
from torch import nn

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.report.blocks import blocks_page, example, show_block

PAGE = Path(__file__).parents[2] / "docs" / "blocks.md"


def test_the_page_of_blocks_is_the_registry():
    shipped = [info for info in REGISTRY.blocks.values() if info.cls.__module__.startswith("tfm_blocks.")]
    assert PAGE.read_text("utf-8") == blocks_page(shipped), "tfm blocks --markdown > docs/blocks.md"


SHIPPED = [name for name, info in REGISTRY.blocks.items() if info.cls.__module__.startswith("tfm_blocks.")]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_example_of_a_block_is_part_of_a_model(name):
    text = example(REGISTRY.blocks[name])
    for node in ("NODE", "OTHER", "encoder.*"):
        text = text.replace(node, "emb")
    written = yaml.safe_load(f"{{{text}}}")
    node = written.get("node") or ({"block": "ffn"} if "args" in written else written)
    reads_ids = REGISTRY.blocks[name].signature.ports[0].ids
    model = {
        "inputs": {"src": "B S"},
        "args": {"d_model": 16, "d_ff": 16, "heads": 2, "vocab": 30, **written.get("args", {})},
        "add_norm": "none" if name == "concat" else "post",
        "graph": {
            "emb": {"block": "embedding", "in": "src"},
            "here": {**node, **({"in": "src"} if reads_ids else {})},
            "logits": {"block": "linear", "d_out": 30},
        },
    }
    if name == "distance_table":
        model["graph"]["logits"] = {"block": "disentangled_attention", "in": "emb", "distances": "here"}
    if reads_ids:
        del model["graph"]["emb"]
    assert check_model(model).nodes


def test_a_block_is_listed_under_its_usual_name_with_its_cost():
    page = PAGE.read_text("utf-8")
    assert "| [rotary](#rotary) | RoPE, rotary position embedding |" in page
    assert "| [gated_ffn](#gated_ffn) | SwiGLU" in page
    assert "- cost of n positions: n · r · d multiply-adds" in page


def test_arguments_and_rules_of_a_parent_block_are_printed_once():
    own = blocks_page([REGISTRY.blocks["gated_ffn"]])
    assert "It has these arguments of [ffn](#ffn): `" in own
    assert "| d_ff |" not in own
    assert "d_ff >= 1" not in own
    assert "| d_ff | int | required |" in blocks_page([REGISTRY.blocks["ffn"]])


@pytest.fixture
def balanced():
    """Register a plug-in block with a second output."""

    @block("balanced", "x: B T D -> B T D, loss", source="a test", where={"parts >= 1": "there is a part"})
    class Balanced(nn.Module):
        """x and the mean of x²: x_BTD -> x_BTD."""

        def __init__(self, *, parts: int, bias: bool | None = None) -> None:
            super().__init__()

        def forward(self, x_BTD):
            return x_BTD, x_BTD.square().mean()

    yield REGISTRY.blocks["balanced"]
    del REGISTRY.blocks["balanced"]


def test_a_block_is_shown_with_its_whole_declaration(balanced, capsys):
    show_block("balanced")
    shown = capsys.readouterr().out
    for text in (
        "-> B T D, loss",
        "the mean of x²",
        "second output: a loss",
        "parts >= 1: there is a part",
        "required",
    ):
        assert text in shown


def test_a_block_has_a_section_with_its_arguments(balanced):
    page = blocks_page([balanced])
    assert "| [balanced](#balanced) |" in page
    assert "### balanced\n\n`x: B T D -> B T D, loss`" in page
    assert "- second output: a loss" in page
    assert "- rule: parts >= 1: there is a part" in page
    assert "| parts | int | required |\n| bias | bool \\| null | null |" in page


@pytest.mark.parametrize(("name", "kind"), [("rmsnorm", "category norm"), ("gate", "category join"), ("ffn", "branch")])
def test_a_block_is_shown_with_its_kind(name, kind, capsys):
    show_block(name)
    assert f"kind: {kind}" in capsys.readouterr().out
