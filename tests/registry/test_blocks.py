"""The decorator refuses at import what the language could not keep."""

import pytest
from torch import nn

import tfm_blocks.blocks  # noqa: F401
from tfm_blocks.registry.blocks import REGISTRY, block


class Fine(nn.Module):
    def __init__(self, D: int, *, rate: float = 0.0) -> None:
        super().__init__()

    def forward(self, x_BTD):
        return x_BTD


def declared(cls=Fine, signature="x: B T D -> B T D", **options):
    return block("under_test", signature, source="none", **options)(cls)


@pytest.fixture(autouse=True)
def _leave_the_registry_as_it_was():
    before = dict(REGISTRY.blocks)
    yield
    REGISTRY.blocks.clear()
    REGISTRY.blocks.update(before)


def test_a_block_is_known_by_its_declaration_alone():
    declared()
    info = REGISTRY.blocks["under_test"]
    assert info.sizes == ("D",)
    assert str(info.arguments["rate"].kind) == "float" and info.arguments["rate"].default == 0.0


class Unannotated(Fine):
    def __init__(self, D: int, *, rate=0.0) -> None:
        super().__init__(D)


class Anything(Fine):
    def __init__(self, D: int, **rest: int) -> None:
        super().__init__(D)


class Complex(Fine):
    def __init__(self, D: int, *, rate: complex = 0j) -> None:
        super().__init__(D)


class Clashing(Fine):
    def __init__(self, D: int, *, layer: int = 0) -> None:
        super().__init__(D)


@pytest.mark.parametrize(
    ("cls", "signature", "options", "rule"),
    [
        (Unannotated, "x: B T D -> B T D", {}, "no annotation"),
        (Anything, "x: B T D -> B T D", {}, "must be named"),
        (Complex, "x: B T D -> B T D", {}, "is not int, float"),
        (Clashing, "x: B T D -> B T D", {}, "two things at once"),
        (Fine, "x: B T D -> B T E", {}, "nothing binds the output letter E"),
        (Fine, "x: B T -> B T", {}, "neither letters"),
        (Fine, "x: B T D", {}, "no output"),
        (Fine, "x?: B T D -> B T D", {}, "cannot be optional|nothing binds"),
        (Fine, "x: B T D -> B T width", {}, "neither letters"),
        (Fine, "x: B T D -> B T D", {"where": {"D % heads == 0": "even"}}, "neither letters"),
        (Fine, "x: B T D -> B T D", {"sees": {"x": "all"}}, "needs start and step"),
        (Fine, "x: B T D -> B T D", {"sees": {"kv": "all"}}, "neither letters"),
    ],
)
def test_a_broken_declaration_fails_at_import(cls, signature, options, rule):
    with pytest.raises(TypeError, match=rule):
        declared(cls, signature, **options)


def test_a_name_taken_by_another_class_fails_at_import():
    with pytest.raises(TypeError, match="registered already"):
        block("attention", "x: B T D -> B T D", source="none")(Fine)


def test_every_shipped_block_has_a_source_and_a_description():
    for info in REGISTRY.blocks.values():
        assert info.source and info.cls.__doc__, info.name
