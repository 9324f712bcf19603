"""Dropout against its definition and torch's."""

import pytest
import torch
from torch.nn import functional as F

import tfm_blocks as tfm
from tfm_blocks.blocks.layers.linear import Dropout
from tfm_blocks.errors import ConfigError

SHAPE = (7, 501, 33)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_the_share_and_the_scale_match_torch(rate):
    torch.manual_seed(1)
    x = torch.ones(SHAPE)
    own, torchs = Dropout(rate)(x), F.dropout(x, rate)
    for out in (own, torchs):
        assert (out == 0).float().mean().item() == pytest.approx(rate, abs=0.01)
    assert own.unique().tolist() == pytest.approx(torchs.unique().tolist(), rel=1e-4)
    assert own.mean().item() == pytest.approx(1, abs=0.03)


def test_dropped_positions_are_independent():
    torch.manual_seed(1)
    kept = (Dropout(0.5)(torch.ones(100_000)) != 0).float() - 0.5
    for lag in (1, 2, 3, 4, 8, 33):
        assert abs((kept[lag:] * kept[:-lag]).mean().item()) < 0.003


def test_gradients_pass_where_values_passed():
    x = torch.randn(SHAPE, requires_grad=True)
    out = Dropout(0.3)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad * x, out)


def test_the_same_seed_drops_the_same():
    first, second = (torch.manual_seed(5) and Dropout(0.3)(torch.ones(SHAPE)) for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x = torch.randn(SHAPE)
    assert Dropout(0.3).eval()(x) is x
    assert Dropout(0.0)(x) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="dropout must be from 0 to below 1"):
        tfm.build("tiny", layers=1, vocab=9, dropout=rate)


def test_the_largest_rate_below_1_keeps_the_output_finite():
    assert Dropout(1 - 1e-7)(torch.ones(1000)).isfinite().all()
