"""Pass 5: a block behaves as declared, at two lengths, and all its parameters get gradients."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.network.small import network
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.errors import ConfigError, display_path
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.blocks import block

pytestmark = pytest.mark.usefixtures("registry")


def problem(name, **inputs):
    inputs = inputs or {"x": "B T 8"}
    model = {"inputs": inputs, "graph": {"node": {"block": name, "in": next(iter(inputs))}}}
    with pytest.raises(ConfigError) as caught:
        check_model(model)
    (reported,) = caught.value.problems
    assert reported.address == "model.graph.node" and reported.help == f"tfm blocks {name} shows its signature"
    return reported.rule


def register(forward, signature="x: B T D -> B T D", init=None, branch=False):
    """Register a block with this forward; `init` adds modules and parameters."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if init:
                init(self)

    Made.forward = forward
    block("made", signature, source="a test", branch=branch)(Made)


@pytest.mark.parametrize("used", [("used",), ()])
def test_a_parameter_that_does_not_reach_the_output_is_refused(used):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return math.prod([getattr(self, name) for name in used], start=x_BTD)

    def init(self):
        for name in (*used, "unused"):
            self.register_parameter(name, nn.Parameter(torch.ones(8)))

    register(forward, init=init)
    assert problem("made") == "the parameter block.unused does not affect the output, so it could not learn"


def test_a_parameter_that_only_the_loss_reaches_can_learn():
    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD + 1, (x_BTD * self.share).mean()

    def init(self):
        self.share = nn.Parameter(torch.ones(8))

    register(forward, "x: B T D -> B T D, loss", init)
    check_model({"inputs": {"x": "B T 8"}, "graph": {"node": {"block": "made", "in": "x"}}})


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize(
    ("signature", "result", "rule"),
    [
        ("", lambda x: None, "its forward returns None, but its signature declares a single output"),
        ("", lambda x: (x, x.mean()), "its forward returns a tuple of 2, but its signature declares a single output"),
        ("", lambda x: x.double(), "its output has the dtype torch.float64, but its input has torch.float32"),
        ("", lambda x: x[:, :1], "its output has the shape [2, 1, 8], but its signature declares [2, 5, 8]"),
        (
            "",
            lambda x: torch.cat([x, x], 2),
            "its output has the shape [2, 5, 16], but its signature declares [2, 5, 8]",
        ),
        ("", lambda x: x[:, :5], "its output has the shape [3, 5, 8], but its signature declares [3, 7, 8]"),
        (", loss", lambda x: x, "its forward returns a Tensor, but its signature declares an output and a loss"),
        (", loss", lambda x: (x, 0.5), "its forward returns a tuple of 2, but its signature declares an output and a"),
        (", loss", lambda x: (x, x.mean(2)), "its loss has the shape [2, 5], but it must be a single number, or one"),
        (", loss", lambda x: (x[0], x.mean()), "its output has the shape [5, 8], but its signature declares [2, 5, 8]"),
    ],
)
def test_a_result_of_another_kind_than_declared_is_refused(signature, result, rule, branch):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return result(x_BTD)

    register(forward, f"x: B T D -> B T D{signature}", branch=branch)
    assert problem("made").startswith(rule)


@pytest.mark.parametrize("result", [lambda x: (x, x.mean()), lambda x: (x, x.mean((1, 2)))])
def test_a_loss_of_the_batch_or_of_each_sequence_is_accepted(result):
    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return result(x_BTD)

    register(forward, "x: B T D -> B T D, loss")
    check_model({"inputs": {"x": "B T 8"}, "graph": {"node": {"block": "made", "in": "x"}}})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the two halves differ"), "fails when run: the two halves differ"),
        (KeyError(), "fails when run: KeyError"),
        (SystemExit(0), "fails when run: SystemExit: 0"),
    ],
)
def test_a_block_that_fails_is_refused_with_its_reason_and_its_line(error, message):
    def forward(self, x_BTD: Tensor) -> Tensor:
        raise error

    register(forward)
    line = forward.__code__.co_firstlineno + 1
    assert problem("made") == f"{message} ({display_path(Path(__file__))}:{line})"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("there is no such thing"), "there is no such thing"),
        (KeyError("width"), "its constructor fails: KeyError: 'width'"),
    ],
)
def test_a_constructor_that_fails_is_refused_with_its_reason_and_its_line(error, message):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def init(self):
        raise error

    register(forward, init=init)
    line = init.__code__.co_firstlineno + 1
    assert problem("made") == f"{message} ({display_path(Path(__file__))}:{line})"


def test_a_buffer_has_the_values_that_its_module_gives_it():
    @block("numbered", "x: B T D -> B T D", source="a test")
    class Numbered(nn.Module):
        """x + 0, 1, 2, …"""

        def __init__(self, D: int) -> None:
            super().__init__()
            self.register_buffer("numbers", torch.arange(D))

        def forward(self, x_BTD: Tensor) -> Tensor:
            return x_BTD + self.numbers

    net = network({"x": "B T 8"}, {"node": {"block": "numbered", "in": "x"}})
    assert torch.equal(net(x=torch.zeros(1, 1, 8))[0, 0], torch.arange(8.0))


def test_a_random_block_does_not_change_the_random_state_of_the_caller():
    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.map(x_BTD)

    def init(self):
        self.map = Linear(8, 8)
        torch.rand(3)

    register(forward, init=init)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    network({"x": "B T 8"}, {"node": {"block": "made", "in": "x"}})
    assert torch.equal(torch.rand(2), expected)
