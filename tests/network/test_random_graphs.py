"""Accepted random models run: finite, trainable, causal, independent of padding, and decoded as read."""

import pytest
import torch
from hypothesis import HealthCheck, event, given, reject, settings
from torch.nn import functional as F

from tests.network.examples import sources_of
from tests.network.random_graphs import models
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.spec import TARGET, Axis
from tfm_blocks.network import incremental
from tfm_blocks.network.build import build_network, check_model

LENGTHS = {"B": 3, "T": 6, "S": 5, "P": 4}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
pytestmark = pytest.mark.usefixtures("plugged")


def inputs_of(network, **lengths):
    generator, sizes, inputs = torch.Generator().manual_seed(0), {**LENGTHS, **lengths}, {}
    for one in network.spec.inputs:
        shape = [sizes[axis.name] if isinstance(axis, Axis) else axis for axis in one.shape]
        highest = 3 if one.name == "seg" else 11
        ids = torch.randint(1, highest, shape, generator=generator)
        inputs[one.name] = ids if one.tokens else torch.randn(shape, generator=generator)
    return inputs


def learns(network, inputs):
    x_BPD, losses = network.train().trunk_with_losses(inputs)
    (network.head(x_BPD).square().sum() + sum(loss.sum() for loss in losses.values())).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    network.eval()


def decodes(network, inputs, first):
    """Decode token by token after a prefill of `first` tokens, then in a beam of 2 whose hypotheses are reordered."""
    whole_BTV, tgt_BT, sources = network(**inputs), inputs[TARGET], sources_of(inputs)
    decoding = incremental.start(network, sources, 6, sentences=3)
    if first:
        x_BPD, decoding = incremental.prefill(network, tgt_BT[:, :first], decoding)
        torch.testing.assert_close(network.head(x_BPD), whole_BTV[:, :first], **CLOSE)
    for position in range(first, 3):
        x_BD, decoding = incremental.step(network, tgt_BT[:, position], decoding)
        torch.testing.assert_close(network.head(x_BD), whole_BTV[:, position], **CLOSE)
    wide = {name: value.repeat_interleave(2, 0) for name, value in sources.items()}
    tgt_BMT = torch.stack([tgt_BT, tgt_BT], 1)
    tgt_BMT[:, 1, 3:] = 1 + (tgt_BMT[:, 1, 3:] + 3) % 10
    decoding = incremental.spread(decoding, 2)
    for position in range(3, 6):
        x_RD, decoding = incremental.step(network, tgt_BMT[:, :, position].flatten(), decoding)
        whole_RTV = network(**wide, tgt=tgt_BMT[:, :, : position + 1].flatten(0, 1))
        torch.testing.assert_close(network.head(x_RD), whole_RTV[:, -1], **CLOSE)
        origin_BM = torch.tensor([[1, 0], [0, 0], [1, 1]])
        incremental.reorder(decoding, origin_BM)
        tgt_BMT[:, :, : position + 1] = tgt_BMT[:, :, : position + 1].take_along_dim(origin_BM[:, :, None], 1)


def sees_no_later_token(network, inputs):
    before, changed = network(**inputs), inputs[TARGET].clone()
    changed[:, 3:] = 1 + (changed[:, 3:] + 4) % 10
    after = network(**{**inputs, TARGET: changed})
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=1e-5)


def ignores_padding(network, inputs):
    padded, keep = {}, {}
    for name, value in inputs.items():
        if value.ndim == 2:
            padded[name] = F.pad(value, (0, 2))
        else:
            padded[name] = F.pad(value, (0, 0, 0, 3), value=50.0)
            keep[name] = torch.arange(value.shape[1] + 3).expand(3, -1) < value.shape[1]
    outputs = network(keep=keep, **padded)
    assert outputs.isfinite().all()
    whole = network(**inputs)
    torch.testing.assert_close(outputs[:, : whole.shape[1]], whole, **CLOSE)


def promise(model, first):
    try:
        spec = check_model(model)
    except ConfigError as error:
        event("refused")
        assert len(str(error)) < 2000 * len(error.problems) and all(one.help for one in error.problems), error
        reject()
    event("accepted")
    network, inputs = build_network(spec, seed=1), None
    inputs = inputs_of(network)
    learns(network, inputs)
    with torch.no_grad():
        assert network(**inputs).isfinite().all()
        ignores_padding(network, inputs)
        if TARGET in inputs:
            sees_no_later_token(network, inputs)
            decodes(network, inputs, first)


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=12, derandomize=True, **COMMON)
@given(models())
def test_accepted_models_keep_every_rule(model):
    promise(model, first=2)


@pytest.mark.grid
@settings(max_examples=60, derandomize=True, **COMMON)
@given(models())
def test_accepted_models_keep_every_rule_in_more_models(model):
    promise(model, first=2)


@pytest.mark.slow
@settings(max_examples=1000, **COMMON)
@given(models())
def test_accepted_models_keep_every_rule_in_many_models(model):
    for first in (0, 1, 3):
        promise(model, first)
