"""Pass 5: a block behaves as declared, at two lengths, and all its parameters get gradients."""

import pytest
import torch
from torch import Tensor, nn

from tests.network.small import network
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.errors import ConfigError
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


def register(forward, signature="x: B T D -> B T D", init=None):
    """Register a block with this forward; `init` adds modules and parameters."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if init:
                init(self)

    Made.forward = forward
    block("made", signature, source="a test")(Made)


def test_another_output_shape_than_declared_is_refused():
    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.cat([x_BTD, x_BTD], 2)

    register(forward)
    assert problem("made") == "its output has the shape [2, 5, 16], but its signature declares [2, 5, 8]"


def test_a_shape_that_fits_at_one_length_only_is_refused():
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD[:, :5]

    register(forward)
    assert problem("made") == "its output has the shape [3, 5, 8], but its signature declares [3, 7, 8]"


def test_a_parameter_that_does_not_reach_the_output_is_refused():
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.used

    def init(self):
        self.used, self.unused = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    register(forward, init=init)
    assert problem("made") == "the parameter block.unused does not affect the output, so it could not learn"


def test_a_block_of_which_no_parameter_reaches_the_output_is_refused():
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + 1

    def init(self):
        self.unused = nn.Parameter(torch.ones(8))

    register(forward, init=init)
    assert problem("made") == "the parameter block.unused does not affect the output, so it could not learn"


def test_a_parameter_that_only_the_loss_reaches_can_learn():
    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD + 1, (x_BTD * self.share).mean()

    def init(self):
        self.share = nn.Parameter(torch.ones(8))

    register(forward, "x: B T D -> B T D, loss", init)
    check_model({"inputs": {"x": "B T 8"}, "graph": {"node": {"block": "made", "in": "x"}}})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the two halves differ"), "fails when run: the two halves differ"),
        (KeyError(), "fails when run: KeyError"),
    ],
)
def test_a_block_that_fails_is_refused_with_its_reason(error, message):
    def forward(self, x_BTD: Tensor) -> Tensor:
        raise error

    register(forward)
    assert problem("made") == message


def test_a_constructor_that_fails_is_refused_with_its_reason():
    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def init(self):
        raise ValueError("there is no such thing")

    register(forward, init=init)
    assert problem("made") == "there is no such thing"


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
