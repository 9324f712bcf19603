"""What people read of the registry."""

from pathlib import Path

import pytest
from torch import nn

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.report.blocks import markdown, show_block

PAGE = Path(__file__).parents[2] / "docs" / "blocks.md"


def test_the_page_of_blocks_is_the_registry():
    shipped = [info for info in REGISTRY.blocks.values() if info.cls.__module__.startswith("tfm_blocks.")]
    assert PAGE.read_text("utf-8") == markdown(shipped), "tfm blocks --markdown > docs/blocks.md"


@pytest.fixture
def balanced():
    """A block of somebody's own with a second output."""

    @block("balanced", "x: B T D -> B T D, loss", source="a test", where={"parts >= 1": "there is a part"})
    class Balanced(nn.Module):
        """x and the mean of x²: x_BTD -> x_BTD."""

        def __init__(self, *, parts: int, bias: bool | None = None) -> None:
            super().__init__()

        def forward(self, x_BTD):
            return x_BTD, x_BTD.square().mean()

    yield REGISTRY.blocks["balanced"]
    del REGISTRY.blocks["balanced"]


def test_a_block_is_shown_with_all_that_is_declared_of_it(balanced, capsys):
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
    page = markdown([balanced])
    assert "| [balanced](#balanced) | `x: B T D -> B T D, loss` |" in page
    assert "- second output: a loss" in page
    assert "| parts | int | required |\n| bias | bool \\| null | null |" in page


@pytest.mark.parametrize(("name", "kind"), [("rmsnorm", "category norm"), ("gate", "category join"), ("ffn", "branch")])
def test_a_block_is_shown_with_its_kind(name, kind, capsys):
    show_block(name)
    assert f"kind: {kind}" in capsys.readouterr().out
