"""Each rule detects the block that breaks it, and no other block."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tfm_blocks.blocks.attention import SEES, SIGNATURE, Attention
from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.network.contract.rules import first_breach, gives_gradients
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Rate

MEASURED = {
    "leaks": "changing x at position 1 changes the output at positions [0] by up to ",
    "leaks_later": "changing x at position 1 changes the output at positions [0] by up to ",
    "forgets_sees": "changing x at position 0 changes the output at positions [1] by up to ",
    "ignores_padding": "the content of padding changes kept positions by up to ",
    "ignores_padding_of_kv": "the content of padding changes kept positions by up to ",
    "steps_otherwise": "step at position 1, after 0 positions read at once, differs from forward by up to ",
    "remembers_on_itself": "in a beam search, step at position 3 differs from forward by up to ",
    "centres_time": "the content of padding changes kept positions by up to ",
    "other_axis": "the content of padding changes kept positions by up to ",
    "time_norm": "changing x at position 0 changes the output at positions [1, 2, 3, 4] by up to ",
    "running_maximum": "changing x at position 0 changes the output at positions [1, 2, 3, 4] by up to ",
    "draws_in_eval": "two calls in eval mode differ by up to ",
    "mixes_rows": "a row changes with the other rows of the batch",
    "divides_by_0": "72 of 192 values of its output are NaN or infinite with padding before the sequences",
    "reads_numbers": "fails when run: Tensor.item() cannot be called on meta tensors (tests/wrong_blocks.py:",
    "learns_nothing": "the parameter block.gain does not affect the output, so it could not learn (on the meta device)",
    "cuts_its_input": "its input x gets no gradient",
    "has_weights": "declares weightless=True, but has gain",
    "starts_anyhow": "its parameter gain has different initial values when built twice with the same seed",
    "breaks": "fails on float32 tensors on the CPU: no kernel for this device",
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_first_broken_rule_is_reported_with_a_measurement_and_a_fix(wrong_blocks, name):
    breach = first_breach(cases_of(wrong_blocks[name]))
    assert breach is not None and breach.measured.startswith(MEASURED[name]) and breach.fix


def test_a_correct_block_breaks_no_rule_and_each_wrong_block_breaks_its_rule(wrong_blocks):
    assert first_breach(cases_of(wrong_blocks["right"])) is None
    assert set(MEASURED) == set(wrong_blocks) - {"right"}


def test_an_input_without_effect_and_ids_need_no_gradient(registry):
    @block("positions_alone", "x: B T D -> B T D", source="a test")
    class PositionsAlone(nn.Module):
        def __init__(self, D: int) -> None:
            super().__init__()

        def forward(self, x_BTD: Tensor) -> Tensor:
            return torch.arange(x_BTD.shape[1], dtype=x_BTD.dtype)[:, None].expand_as(x_BTD)

    @block("one_hot", "x: B T -> B T d_model", source="a test")
    class OneHot(nn.Module):
        def __init__(self, *, d_model: int) -> None:
            super().__init__()
            self.width = d_model

        def forward(self, x_BT: Tensor) -> Tensor:
            return (x_BT[:, :, None] == torch.arange(self.width)).float()

    for name in ("positions_alone", "one_hot"):
        assert first_breach(cases_of(REGISTRY.blocks[name]), [gives_gradients]) is None


def test_sizes_of_the_signature_have_the_defaults_of_their_arguments(registry):
    @block("joins", "x: B N D, y: B N width -> B N D", source="a test")
    class Joins(nn.Module):
        def __init__(self, *, width: int = 12) -> None:
            super().__init__()

        def forward(self, x_BND: Tensor, y_BNE: Tensor) -> Tensor:
            return x_BND + y_BNE.mean(2, keepdim=True)

    @block("drops", "x: B N D -> B N-tokens D", sees={"x": "all"}, source="a test")
    class Drops(nn.Module):
        def __init__(self, *, tokens: int = 1) -> None:
            super().__init__()
            self.tokens = tokens

        def forward(self, x_BND: Tensor) -> Tensor:
            return x_BND[:, self.tokens :]

    assert [case.inputs["y_0"] for case in cases_of(REGISTRY.blocks["joins"])] == ["B N 12"]
    assert first_breach(cases_of(REGISTRY.blocks["joins"])) is None
    assert first_breach(cases_of(REGISTRY.blocks["drops"])) is None


def test_a_block_may_return_a_new_state(registry):
    @block("sums", "x: B T D -> B T D", sees={"x": "past"}, source="a test")
    class Sums(nn.Module):
        def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
            return x_BTD.masked_fill(~keep_BT[:, :, None], 0).cumsum(1)

        def start(self, *, room: CacheShape) -> State:
            return State(moving={"sum": room.like.new_zeros(room.rows, 1, 1)})

        def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
            sum_R1D = state.moving["sum"] + x_R1D
            return sum_R1D, State(moving={"sum": sum_R1D})

    assert first_breach(cases_of(REGISTRY.blocks["sums"])) is None


def test_the_random_state_of_the_caller_does_not_change(wrong_blocks):
    before = torch.get_rng_state()
    assert first_breach(cases_of(wrong_blocks["draws_in_eval"]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_norm_over_the_wrong_axis_is_not_called_an_unused_parameter(registry):
    @block("norms_heads", SIGNATURE, branch=True, sees=SEES, source="none")
    class NormsHeads(Attention):
        """Normalise the heads before they are joined, over the width of the model."""

        def __init__(self, D: int, E: int | None, *, heads: int, mask: Literal["causal"] | None = None) -> None:
            super().__init__(D, E, heads=heads, mask=mask)
            self.norm = nn.LayerNorm(D)

        def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
            return super().finish(self.norm(y_BHTK), x_BTD)

    breach = first_breach(cases_of(REGISTRY.blocks["norms_heads"]))
    assert breach and "fails when run: Given normalized_shape=[" in breach.measured
    assert breach.fix.startswith("compare the axes") and "every parameter" not in breach.fix


def test_a_norm_may_see_no_other_position_whatever_it_declares(registry):
    """Add & norm ignores `sees`, so causality could not be proved."""

    @block("declared_norm", "x: B T D -> B T D", category="norm", sees={"x": "past"}, source="a test")
    class DeclaredNorm(nn.Module):
        def forward(self, x_BTD: Tensor) -> Tensor:
            return x_BTD - x_BTD.cumsum(1)

        def start(self, **options): ...

        def step(self, x_R1D, state): ...

    breach = first_breach(cases_of(REGISTRY.blocks["declared_norm"]))
    assert breach and breach.fix == "compute a norm from the vector of each position alone"


def made(**annotations):
    """Register a block with one required argument."""
    ((name, annotation),) = annotations.items()

    def init(self, D, *, value):
        nn.Module.__init__(self)
        self.value = value

    init.__annotations__ = {"D": int, "value": annotation}
    body = {"__init__": init, "forward": lambda self, x_BTD: x_BTD}
    block(name, "x: B T D -> B T D", source="a test", where={"value > 2": "a test"} if annotation is int else {})(
        type("Made", (nn.Module,), body)
    )
    return REGISTRY.blocks[name]


def test_arguments_that_cannot_be_guessed_are_requested_by_name(registry):
    with pytest.raises(ConfigError, match=r"needs_text: no value can be guessed(?s:.*)needs_text.value=VALUE"):
        list(cases_of(made(needs_text=str)))
    with pytest.raises(ConfigError, match=r"needs_many: cannot be built .* value: 2(?s:.*)needs_many.value=VALUE"):
        list(cases_of(made(needs_many=int)))
    assert first_breach(cases_of(made(needs_rate=Rate))) is None
    for name, value in (("needs_text", "a"), ("needs_many", 3)):
        assert first_breach(cases_of(REGISTRY.blocks[name], {"value": value, "D": 6})) is None
    with pytest.raises(ConfigError, match=r"needs_many.heads: needs_many has no argument or letter 'heads'"):
        list(cases_of(REGISTRY.blocks["needs_many"], {"heads": 3}))
