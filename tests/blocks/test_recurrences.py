"""Rules of all recurrences.

Padding in the middle is skipped, chunks of any size have the outputs and gradients of single positions, steps follow a
long prefix, and bfloat16 stays near float32.
"""

from functools import partial

import pytest
import torch

from tests.blocks import (
    loops,
    test_convolution,
    test_delta,
    test_matrix_lstm,
    test_retention,
    test_state_space,
    test_time_mixing,
)
from tests.blocks.naive import with_random_weights
from tests.decoding import check_long_prefix
from tfm_blocks.blocks.diagonal import RGLRU, Mamba
from tfm_blocks.blocks.layers import decay
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
    "learned_shift": lambda: with_random_weights(LearnedShift(D), 0.3),
    "mamba2": partial(test_state_space.started, groups=2),
    "mamba3": test_state_space.started_3,
    "mamba": lambda: with_random_weights(Mamba(D, d_inner=2 * D, d_state=6), 0.3),
    "rg_lru": lambda: with_random_weights(RGLRU(D, heads=4), 0.3),
}

WITHOUT_CHUNKS = {"learned_shift", "mamba", "rg_lru"}


def recurrent(kind, mask):
    return with_random_weights(kind(D, mask=mask), 0.3)


MASKED = {
    **{kind.__name__: partial(recurrent, kind) for kind in (RNN, GRU, LSTM)},
    "convolution": lambda mask: test_convolution.started(3, 1, mask, D),
}
LAYERS = CHUNKED | {
    f"{name}, mask={mask}": partial(make, mask) for name, make in MASKED.items() for mask in ("causal", None)
}


@pytest.mark.parametrize("make", CHUNKED.values(), ids=CHUNKED)
@torch.no_grad()
def test_steps_after_a_long_prefix_equal_the_forward(make):
    check_long_prefix(make().double(), torch.randn(2, 140, D, dtype=torch.float64), first=130)


def one_by_one(own, x_BTD):
    memory, outputs = own.empty(len(x_BTD), x_BTD), []
    for t in range(x_BTD.shape[1]):
        y_B1D, memory = own.read(x_BTD[:, t : t + 1], memory, t)
        outputs.append(y_B1D)
    return torch.cat(outputs, 1)


ROWS = [(name, chunk) for name in CHUNKED for chunk in (1, 7, 32, 150) if name not in WITHOUT_CHUNKS or chunk == 32]


@pytest.mark.parametrize(
    ("name", "chunk"),
    [pytest.param(*row, marks=[pytest.mark.grid] * (row != ("mamba2", 7))) for row in ROWS],
)
def test_outputs_and_gradients_equal_those_of_one_position_at_a_time(name, chunk, monkeypatch):
    monkeypatch.setattr(decay, "CHUNK", chunk)
    own, T = CHUNKED[name]().double(), 20 if chunk < 32 else 150
    x_BTD, weight_BTD = torch.randn(2, T, D).double().requires_grad_(), torch.randn(2, T, D).double()
    results = []
    for y_BTD in (own(x_BTD, keep_BT=torch.ones(2, T, dtype=torch.bool)), one_by_one(own, x_BTD)):
        results.append([y_BTD, *torch.autograd.grad((y_BTD * weight_BTD).sum(), [x_BTD, *own.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "loop"),
    [("mamba", loops.selective_scan), ("mamba2", loops.state_space), ("rg_lru", loops.gated_recurrence)],
)
def test_outputs_and_gradients_equal_those_of_a_loop(name, loop):
    own, (x_BTD, weight_BTD) = CHUNKED[name]().double(), torch.randn(2, 2, 40, D).double()
    results = []
    for y_BTD in (own(x_BTD, keep_BT=torch.ones(2, 40, dtype=torch.bool)), loop(own, x_BTD)):
        results.append([y_BTD, *torch.autograd.grad((y_BTD * weight_BTD).sum(), list(own.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@torch.no_grad()
def test_padding_in_the_middle_is_skipped(make):
    own = make().double()
    x_BTD, keep_BT = torch.randn(1, 5, D).double(), torch.tensor([[True, False, True, False, True]])
    y_BTD = own(x_BTD, keep_BT=keep_BT, right_padded_T=False)
    torch.testing.assert_close(y_BTD[:, ::2], own(x_BTD[:, ::2], keep_BT=torch.ones(1, 3, dtype=torch.bool)))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", [name for name in CHUNKED if name != "learned_shift"])
def test_bfloat16_stays_near_float32(name, autocast):
    own = CHUNKED[name]().float()
    x_BTD, keep_BT = torch.randn(2, 100, D), torch.ones(2, 100, dtype=torch.bool)
    expected = own(x_BTD, keep_BT=keep_BT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model, x = (own, x_BTD) if autocast else (own.bfloat16(), x_BTD.bfloat16())
        y_BTD = model(x, keep_BT=keep_BT)
    y_BTD.float().sum().backward()
    maps_its_output = name != "rg_lru"  # without a last map, autocast keeps the type of the input
    assert y_BTD.dtype == (torch.bfloat16 if maps_its_output or not autocast else torch.float32)
    assert (y_BTD - expected).norm() < 0.05 * expected.norm()
