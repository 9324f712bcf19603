"""The decorator refuses invalid blocks at import."""

from typing import Any

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


class Anything(nn.Module):
    def __init__(self, D: int, **rest: int) -> None:
        super().__init__()


class InAnyNumber(Fine):
    def __init__(self, D: int, *rest: int) -> None:
        super().__init__(D)


class Complex(Fine):
    def __init__(self, D: int, *, rate: complex = 0j) -> None:
        super().__init__(D)


class Undefined(Fine):
    def __init__(self, D: int, *, rate: "Nowhere" = 0.0) -> None:  # noqa: F821
        super().__init__(D)


class Mistyped(Fine):
    def __init__(self, D: int, *, rate: float = "high") -> None:
        super().__init__(D)


class Clashing(Fine):
    def __init__(self, D: int, *, layer: int = 0) -> None:
        super().__init__(D)


@pytest.mark.parametrize(
    ("cls", "signature", "options", "rule"),
    [
        (Unannotated, "x: B T D -> B T D", {}, "no annotation"),
        (Anything, "x: B T D -> B T D", {}, "must be named"),
        (InAnyNumber, "x: B T D -> B T D", {}, "must be named"),
        (Complex, "x: B T D -> B T D", {}, "'under_test': rate: the annotation .* is not int, float"),
        (Undefined, "x: B T D -> B T D", {}, "'under_test': an annotation cannot be read: name 'Nowhere' is not"),
        (Mistyped, "x: B T D -> B T D", {}, "'under_test': the default of rate must be a float, but is 'high'"),
        (len, "x: B T D -> B T D", {}, "'under_test': @block decorates a subclass of torch.nn.Module, but got <built"),
        (object, "x: B T D -> B T D", {}, "'under_test': @block decorates a subclass of torch.nn.Module, but got <cl"),
        (Fine, "x: B T D -> B T D", {"sees": "past"}, "'under_test': sees must be a mapping, but is 'past'"),
        (Fine, "x: B T D -> B T D", {"where": {"D %": "even"}}, "'under_test': where: 'D %' is neither a number nor"),
        *(
            (
                Fine,
                "x: B T D -> B T D",
                {"where": {rule: "small"}},
                f"where: '{rule}' must be a single comparison: == <",
            )
            for rule in ("2 <= D <= 5", "D != 2", "D", "not D == 2", "D == 2 unless rate unless rate")
        ),
        (Clashing, "x: B T D -> B T D", {}, "are used twice"),
        (Fine, "x: B T D -> B T E", {}, "nothing binds the output letter E"),
        (Fine, "x: B T -> B T", {}, "neither letters"),
        (Fine, "x: B T D", {}, "no output"),
        (Fine, "x?: B T D -> B T D", {}, "cannot be optional|nothing binds"),
        (Fine, "x: B T D -> B T width", {}, "neither letters"),
        (Fine, "x: B T D -> B T D", {"where": {"D % heads == 0": "even"}}, "neither letters"),
        (Fine, "x: B T D -> B T D", {"sees": {"x": "past"}}, "needs start and step"),
        (Fine, "x: B T D -> B T D", {"sees": {"kv": "all"}}, "neither letters"),
        (Fine, "x: B T D -> B T D", {"sees": {"x": "passed"}}, "sees must name one of all, nothing, past"),
    ],
)
def test_a_broken_declaration_fails_at_import(cls, signature, options, rule):
    with pytest.raises(TypeError, match=rule):
        declared(cls, signature, **options)


def test_a_name_taken_by_another_class_fails_at_import():
    with pytest.raises(TypeError, match="already registered"):
        block("attention", "x: B T D -> B T D", source="none")(Fine)


def test_every_shipped_block_has_a_source_and_a_description():
    for info in REGISTRY.blocks.values():
        assert info.source and info.cls.__doc__, info.name


def test_a_class_called_like_a_built_in_ones_does_not_take_its_place():
    """Classes are distinguished by module as well as name."""

    class Attention(nn.Module):
        def forward(self, x_BTD):
            return x_BTD

    Attention.__qualname__ = "Attention"
    with pytest.raises(TypeError, match=r"'attention' is already registered by tfm_blocks.blocks.attention.Attention"):
        block("attention", "x: B T D -> B T D", source="none")(Attention)


def test_the_same_class_of_a_module_that_is_imported_again_takes_its_own_place():
    first, again = (type("Mine", (Fine,), {"__module__": "mine"}) for _ in range(2))
    declared(first)
    declared(again)
    assert REGISTRY.blocks["under_test"].cls is again


def test_a_class_without_a_constructor_takes_nothing():
    class Plain(nn.Module):
        def forward(self, x_BTD):
            return x_BTD

    declared(Plain)
    assert REGISTRY.blocks["under_test"].sizes == () and not REGISTRY.blocks["under_test"].arguments


class Pooling(nn.Module):
    def forward(self, x_BTD, kv_BSE):
        return x_BTD + kv_BSE.mean((1, 2), keepdim=True)


def test_a_sequence_that_is_not_in_the_output_needs_sees():
    signature = "x: B T D, kv: B S E -> B T D"
    with pytest.raises(TypeError, match="the output has no axis S, so sees must list kv"):
        declared(Pooling, signature)
    declared(Pooling, signature, sees={"kv": "all"})


def test_ids_are_a_sequence():
    class Looking(nn.Module):
        def forward(self, x_BTD, ids_BS):
            return x_BTD + ids_BS.sum()

    with pytest.raises(TypeError, match="the output has no axis S, so sees must list ids"):
        declared(Looking, "x: B T D, ids: ids B S -> B T D")


@pytest.mark.parametrize(
    ("forward", "rule"),
    [
        (lambda self, y_BTD: y_BTD, "forward takes y_BTD, but its ports are x"),
        (lambda self: None, "forward takes nothing, but its ports are x"),
        (lambda self, x_BTD, z_BTD: x_BTD, "forward takes x_BTD, z_BTD, but its ports are x"),
        (lambda self, x_BTD, *, trailing_T=True: x_BTD, "forward takes trailing_T, which nothing passes"),
    ],
)
def test_a_forward_that_does_not_name_its_ports_fails_at_import(forward, rule):
    class Unnamed(nn.Module):
        pass

    Unnamed.forward = forward
    with pytest.raises(TypeError, match=rule):
        declared(Unnamed)


@pytest.mark.parametrize(
    ("signature", "rule"),
    [
        ("xs[]: B T D+, y: B T E -> B T D+, E", "the only second output is loss"),
        ("x: B T D+ -> B T D+", "only a port of several tensors"),
        ("X: B T D -> B T D", "is not 'name: AXES'"),
    ],
)
def test_an_invalid_signature_fails_at_import(signature, rule):
    with pytest.raises(TypeError, match=rule):
        declared(Fine, signature)


def test_an_unknown_category_fails_at_import():
    with pytest.raises(TypeError, match="there is no category 'norms'"):
        declared(category="norms")


class Base(nn.Module):
    def __init__(self, D: int, width: int, *, rate: float = 0.0, heads: int) -> None:
        super().__init__()
        self.values = (D, width, rate, heads)

    def forward(self, x_BTD):
        return x_BTD


class Inheriting(Base):
    def __init__(self, D: int, *, size: int = 2, rate: float = 0.5, **options: Any) -> None:
        super().__init__(D, size, rate=rate, **options)


class InheritingTwice(Inheriting):
    def __init__(self, D: int, *, own: bool = True, **options: Any) -> None:
        super().__init__(D, **options)


def test_a_constructor_with_options_has_the_arguments_of_its_bases_and_its_own_defaults():
    declared(InheritingTwice)
    info = REGISTRY.blocks["under_test"]
    assert {name: one.default for name, one in info.arguments.items() if not one.required} == {
        "own": True,
        "size": 2,
        "rate": 0.5,
    }
    assert info.sizes == ("D",) and info.arguments["heads"].required
    assert info.make(8, heads=4, size=3, own=True).values == (8, 3, 0.5, 4)
