"""Parts of attention and joins from x-transformers' list, against slow loops in float64, and torch's GRU cell."""

import math

import pytest
import torch

from tests.blocks import loops
from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tfm_blocks.blocks.attention_parts import Forgetful, GLUGate, SigmoidScores, TopScores
from tfm_blocks.blocks.convolution import TokenShift
from tfm_blocks.blocks.mixing import GRUGate
from tfm_blocks.blocks.norm import L2Norm
from tfm_blocks.blocks.rotary import Rotary, XPos
from tfm_blocks.blocks.score_bias import DynamicBias
from tfm_blocks.network.build import build_network, check_model

B, N, D, H = 2, 7, 12, 3


def built(**arguments):
    node = {"in": "x", "heads": H, "mask": "causal", **arguments}
    network = build_network(check_model({"inputs": {"x": f"B N {D}"}, "graph": {"node": node}}), seed=1)
    return filled(network.double()).eval().get_submodule("node.block")


@torch.no_grad()
def test_memory_is_more_keys_and_values_that_every_query_sees():
    own, x_BND = built(block="memory_attention", memory=2), torch.randn(B, N, D).double()
    y_BND = own(x_BND, keep_BT=keep([N, N], N))
    torch.testing.assert_close(y_BND, torch.stack([loops.with_memory(own, x_ND) for x_ND in x_BND]))
    w_BHTS = own.weights(x_BND, keep_BT=keep([N, N], N))
    torch.testing.assert_close(w_BHTS.sum(3), torch.ones(B, H, N).double())


@pytest.mark.parametrize("k", [1, 3, 9])
def test_top_scores_are_a_softmax_over_the_largest(k):
    scores = torch.randn(5, 6).double()
    for own, row in zip(TopScores(6, k=k).normalize(scores), scores, strict=True):
        chosen = row.argsort(descending=True)[:k]
        expected = torch.zeros(6).double()
        expected[chosen] = torch.softmax(row[chosen], 0)
        torch.testing.assert_close(own, expected)


def test_sigmoid_scores_of_a_masked_key_are_0():
    scores = torch.tensor([[0.5, torch.finfo(torch.float32).min]])
    assert SigmoidScores(4, offset=-1.0).normalize(scores)[0, 1] == 0
    assert SigmoidScores(4, offset=-1.0).normalize(scores)[0, 0].item() == pytest.approx(1 / (1 + math.exp(0.5)))


def test_forgotten_keys_are_those_of_all_queries_and_never_the_first():
    torch.manual_seed(1)
    scores, own = torch.zeros(40, 2, 3, 50), Forgetful(4, forget=0.3)
    weights = own.normalize(scores)
    forgotten = weights == 0
    assert (forgotten == forgotten[:, :1, :1]).all()
    assert not forgotten[..., 0].any()
    assert 0.25 < forgotten[..., 1:].float().mean() < 0.35
    assert (own.eval().normalize(scores) > 0).all()


def test_a_query_whose_keys_are_all_forgotten_does_not_read_masked_ones():
    scores = torch.randn(64, 2, 1, 9).index_fill(3, torch.tensor([0, 1, 2, 6, 7, 8]), torch.finfo(torch.float32).min)
    weights = Forgetful(4, forget=0.9).normalize(scores)
    assert (weights[..., [0, 1, 2, 6, 7, 8]] == 0).all()
    torch.testing.assert_close(weights.sum(3), torch.ones(64, 2, 1))


def test_l2norm_normalises_groups_separately():
    x = torch.randn(B, N, D).double()
    expected = torch.cat([part / part.norm(dim=2, keepdim=True) for part in x.split(4, 2)], 2)
    torch.testing.assert_close(L2Norm(groups=3)(x), expected)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_xpos_multiplies_the_products_of_pairs_by_a_decay_of_the_distance(layout):
    q, k = torch.randn(2, D).double()
    own, plain = XPos(D, scale_base=8.0, layout=layout), Rotary(D, layout=layout)
    for i, j in ((0, 0), (5, 2), (9, 1)):
        at_i, at_j = torch.tensor([i]), torch.tensor([j])
        products = plain.rotate(q[None], at_i)[0] * plain.rotate(k[None], at_j)[0]
        pairs = products.view(-1, 2).sum(1) if layout == "pairs" else products.view(2, -1).sum(0)
        zeta = (torch.arange(0, D, 2).double() + 0.4 * D) / (1.4 * D)
        expected = (pairs * zeta ** ((i - j) / 8)).sum()
        score = own.rotate(q[None], at_i)[0] @ own.rotate_keys(k[None], at_j)[0]
        torch.testing.assert_close(score, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distances", ["linear", "log"])
@torch.no_grad()
def test_a_dynamic_bias_is_a_network_of_the_distance(distances):
    own = filled(DynamicBias(heads=H, d_bias=4, depth=2, distances=distances).double())
    bias_HNN = own(torch.zeros(1, N, D).double())
    for i in range(N):
        for j in range(N):
            x = float(i - j) if distances == "linear" else math.copysign(math.log(1 + abs(i - j)), i - j)
            y = torch.tensor([x]).double()
            for layer in list(own.maps)[:-1]:
                y = layer.weight @ y + layer.bias
                y = y / (1 + torch.exp(-y))
            torch.testing.assert_close(bias_HNN[:, i, j], own.maps[-1].weight @ y + own.maps[-1].bias)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_token_shift_takes_parts_of_the_width_from_near_positions(mask):
    x_BND, length = torch.randn(1, N, 11), 5
    y_BND = TokenShift(11, shifts=2, mask=mask)(x_BND, keep_BT=keep([length], N))
    places = [0, 1, 2] if mask else [-2, -1, 0, 1, 2]
    size = 11 // len(places)
    for t in range(length):
        for d in range(11):
            place = places[d // size] if d // size < len(places) else 0
            expected = x_BND[0, t - place, d] if 0 <= t - place < length else 0.0
            assert y_BND[0, t, d] == expected


@torch.no_grad()
def test_the_gru_gate_without_carry_is_torchs_cell():
    own, cell = GRUGate(D, 2, carry=0.0).double(), torch.nn.GRUCell(D, D).double()
    for ours, theirs in ((own.of_y, "ih"), (own.of_x, "hh")):
        ours.weight.copy_(getattr(cell, f"weight_{theirs}"))
        ours.bias.copy_(getattr(cell, f"bias_{theirs}"))
    x, *ys = torch.randn(3, N, D).double()
    torch.testing.assert_close(own(x[None], [y[None] for y in ys])[0], cell(ys[0] + ys[1], x))


@torch.no_grad()
def test_the_glu_gate_is_attention_on_attention():
    """AoA: a map of the result and the query, times the sigmoid of another map of both."""
    own, x_BND, y_BNE = filled(GLUGate(D, 5).double()), torch.randn(B, N, D).double(), torch.randn(B, N, 5).double()
    (w, v), (b, c) = own.map.weight.split(5), own.map.bias.split(5)
    for n in range(N):
        both = torch.cat((x_BND[0, n], y_BNE[0, n]))
        torch.testing.assert_close(own(x_BND, y_BNE)[0, n], (w @ both + b) / (1 + torch.exp(-(v @ both + c))))


@torch.no_grad()
def test_a_norm_comes_before_the_output_projection():
    own, x_BND = built(block="attention", out_norm="l2norm"), torch.randn(B, N, D).double()
    plain = built(block="attention")
    plain.load_state_dict(own.state_dict())
    heads_BNX = plain.out.weight.inverse() @ (plain(x_BND, keep_BT=keep([N, N], N)) - plain.out.bias)[..., None]
    length_BN1 = heads_BNX[..., 0].square().sum(2, keepdim=True).sqrt()
    expected = own.out(heads_BNX[..., 0] / length_BN1)
    torch.testing.assert_close(own(x_BND, keep_BT=keep([N, N], N)), expected)


@torch.no_grad()
def test_a_contextual_position_is_the_sum_of_gates_from_the_key_to_the_query():
    own, x_BND = built(block="contextual_attention", positions=4), 2 * torch.randn(B, N, D).double()
    y_BND = own(x_BND, keep_BT=keep([N, N], N))
    expected_BND = torch.stack([loops.contextual(own, x_ND) for x_ND in x_BND])
    torch.testing.assert_close(y_BND, expected_BND, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_score_decays_by_the_gates_from_the_key_to_the_query():
    own, x_BND = built(block="attention", forget_gate=True), torch.randn(B, N, D).double()
    y_BND = own(x_BND, keep_BT=keep([N, N], N))
    torch.testing.assert_close(y_BND, torch.stack([loops.forgetting(own, x_ND) for x_ND in x_BND]))


@torch.no_grad()
def test_head_gain_multiplies_the_output_of_each_head():
    own, x_BND = built(block="attention", gate={"block": "head_gain", "heads": H}), torch.randn(B, N, D).double()
    plain = built(block="attention")
    plain.load_state_dict({name: value for name, value in own.state_dict().items() if name != "gate.weight"})
    plain.out.weight.mul_(own.gate.weight.repeat_interleave(D // H))
    whole = keep([N, N], N)
    torch.testing.assert_close(own(x_BND, keep_BT=whole), plain(x_BND, keep_BT=whole))
