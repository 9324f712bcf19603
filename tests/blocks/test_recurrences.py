"""Rules of all recurrences: padding in the middle is skipped, steps follow a long prefix, bfloat16 stays near float32."""

from functools import partial

import pytest
import torch

from tests.blocks import (
    test_convolution,
    test_delta,
    test_diagonal,
    test_matrix_lstm,
    test_retention,
    test_state_space,
    test_time_mixing,
)
from tests.decoding import check_long_prefix
from tfm_blocks.blocks.diagonal import RGLRU, Mamba
from tfm_blocks.blocks.recurrent import GRU, LSTM, RNN
from tfm_blocks.blocks.time_mixing import LearnedShift

D = 24
CHUNKED = {
    "gated_delta_rule": test_delta.started,
    "gated_delta_rule of widths": partial(test_delta.started, **test_delta.WIDTHS),
    "gated_delta_rule of channels": partial(test_delta.started, **test_delta.KIMI),
    "gated_delta_rule of steps": partial(test_delta.started, **test_delta.STEPS),
    "retention": test_retention.started,
    "retention, lightning": partial(test_retention.started, **test_retention.LIGHTNING),
    "mlstm": test_matrix_lstm.started,
    "rwkv7": test_time_mixing.started,
    "learned_shift": lambda: test_diagonal.filled(LearnedShift(D)),
    "mamba2": partial(test_state_space.started, groups=2),
    "mamba": lambda: test_diagonal.filled(Mamba(D, d_inner=2 * D, d_state=6)),
    "rg_lru": lambda: test_diagonal.filled(RGLRU(D, heads=4)),
}
MASKED = {
    **{kind.__name__: lambda mask, kind=kind: test_diagonal.filled(kind(D, mask=mask)) for kind in (RNN, GRU, LSTM)},
    "convolution": lambda mask: test_convolution.started(3, 1, mask, D),
}
LAYERS = CHUNKED | {
    f"{name}, mask={mask}": partial(make, mask) for name, make in MASKED.items() for mask in ("causal", None)
}


@pytest.mark.parametrize("make", CHUNKED.values(), ids=CHUNKED)
@torch.no_grad()
def test_steps_after_a_long_prefix_equal_the_forward(make):
    check_long_prefix(make().double(), torch.randn(2, 140, D, dtype=torch.float64), first=130)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@torch.no_grad()
def test_padding_in_the_middle_is_skipped(make):
    own = make().double()
    x_BTD, keep_BT = torch.randn(1, 5, D).double(), torch.tensor([[True, False, True, False, True]])
    y_BTD = own(x_BTD, keep_BT=keep_BT, right_padded_T=False)
    torch.testing.assert_close(y_BTD[:, ::2], own(x_BTD[:, ::2], keep_BT=torch.ones(1, 3, dtype=torch.bool)))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", ["gated_delta_rule", "retention", "retention, lightning", "mlstm", "rwkv7"])
def test_bfloat16_stays_near_float32(name, autocast):
    own = CHUNKED[name]().float()
    x_BTD, keep_BT = torch.randn(2, 100, D), torch.ones(2, 100, dtype=torch.bool)
    expected = own(x_BTD, keep_BT=keep_BT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model, x = (own, x_BTD) if autocast else (own.bfloat16(), x_BTD.bfloat16())
        y_BTD = model(x, keep_BT=keep_BT)
    y_BTD.float().sum().backward()
    assert y_BTD.dtype == torch.bfloat16 and (y_BTD - expected).norm() < 0.05 * expected.norm()
