"""Experts that choose positions against a loop over experts."""

import math

import pytest
import torch

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.expert_choice import ExpertChoice
from tfm_blocks.blocks.feedforward import FeedForward, GatedFeedForward
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.values import Part

B, T, D, INNER, E = 3, 8, 7, 5, 4
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
LENGTHS = [8, 5, 1]
KEEP = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
SWIGLU = {"gated": True, "activation": Part("silu"), "bias": True}


def choice(**arguments):
    return with_random_weights(ExpertChoice(D, d_ff=INNER, experts=E, **arguments), std=0.5)


def naive(own, x_TD, capacity):
    """Compute one sequence without padding, expert by expert, with a list of the positions of each."""
    p_TE = own.router(x_TD).softmax(1)
    y_TD = torch.zeros_like(x_TD) if own.shared is None else own.shared(x_TD)
    for e in range(E):
        kind = GatedFeedForward if own.experts.gated else FeedForward
        expert = kind(D, d_ff=INNER, bias=own.experts.gated)
        expert.activation = own.experts.activation
        weights = {"inner.weight": own.experts.inner.weight[e], "out.weight": own.experts.out.weight[e]}
        if own.experts.gated:
            weights["inner.bias"] = own.experts.inner.bias.view(E, -1)[e]
            weights["out.bias"] = own.experts.out.bias.view(E, -1)[e]
        count = math.ceil(capacity * len(x_TD) / E)
        chosen = sorted(range(len(x_TD)), key=lambda t, e=e: -p_TE[t, e].item())[:count]
        outputs = {t: p_TE[t, e] * torch.func.functional_call(expert, weights, x_TD[t]) for t in chosen}
        y_TD = y_TD + torch.stack([outputs.get(t, torch.zeros(D).to(x_TD)) for t in range(len(x_TD))])
    return y_TD


@pytest.mark.parametrize("kind", [{}, {"shared": 1}, SWIGLU])
@pytest.mark.parametrize("capacity", [0.6, 2.0])
def test_each_expert_computes_its_likeliest_positions_of_each_sequence_with_gradients(kind, capacity):
    own = choice(capacity=capacity, **kind).double()
    gradients = []
    expected = [naive(own, x_TD[:length], capacity) for x_TD, length in zip(INPUTS.double(), LENGTHS, strict=True)]
    y_BTD = own(INPUTS.double(), keep_BT=KEEP)
    for outputs in (y_BTD[KEEP], torch.cat(expected)):
        gradients.append(torch.autograd.grad(outputs.square().sum(), [*own.parameters()]))
    torch.testing.assert_close(y_BTD[KEEP], torch.cat(expected), rtol=1e-5, atol=1e-5)  # weights are in float32
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_equal_positions_are_chosen_in_order():
    own = choice(capacity=1.0)
    own.router.weight.zero_()
    y_BTD = own(torch.ones(1, 6, D), keep_BT=torch.ones(1, 6, dtype=torch.bool))
    assert (y_BTD[:, :2] != 0).any(2).all() and (y_BTD[:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("capacity", "length", "count"), [(0.0004, 7, 1), (1e-12, 7, 1), (4 / 3, 3 * 10**6, 10**6), (1.1, 40, 11)]
)
def test_each_expert_chooses_the_capacity_rounded_up(capacity, length, count):
    own = choice(capacity=capacity)
    assert own.count(length) == own.count(torch.tensor(length)) == count


def test_decoders_cannot_use_it():
    graph = {
        "emb": {"block": "embedding", "vocab": 11, "d_model": 8, "in": "tgt"},
        "ffn": {"block": "expert_choice_moe", "d_ff": 5, "experts": 4},
        "logits": {"block": "unembed", "vocab": 11},
    }
    with pytest.raises(ConfigError, match="later"):
        check_model({"inputs": {"tgt": "B T"}, "graph": graph})


@pytest.mark.parametrize(("capacity", "rule"), [(0.0, "experts choose positions"), (5.0, "no position twice")])
def test_a_capacity_out_of_range_is_refused(capacity, rule):
    node = {"block": "expert_choice_moe", "in": "x", "d_ff": 5, "experts": 4, "capacity": capacity}
    with pytest.raises(ConfigError, match=rule):
        check_model({"inputs": {"x": "B T 8"}, "graph": {"ffn": node}})
