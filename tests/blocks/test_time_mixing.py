"""RWKV-7, its time mixing and its other parts against loops that follow the authors' code."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.blocks import loops
from tests.blocks.test_diagonal import whole
from tests.network.examples import TESTS, build
from tfm_blocks.blocks.layers import decay
from tfm_blocks.blocks.layers.decay import by_chunks
from tfm_blocks.blocks.mixing import Interpolate
from tfm_blocks.blocks.time_mixing import FASTEST, RWKV7, generalised_delta_rule

B, D, H, K, V = 2, 24, 3, 8, 5


def started(E=None):
    own = RWKV7(D, E, heads=H, rank=3, gate_rank=5)
    for index, parameter in enumerate(own.parameters()):
        nn.init.normal_(
            parameter, std=D**-0.5 if parameter.ndim > 1 else 1, generator=torch.Generator().manual_seed(index)
        )
    return own


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
@pytest.mark.parametrize("E", [None, 15])
def test_outputs_and_gradients_equal_those_of_a_loop(E, chunk, monkeypatch):
    monkeypatch.setattr(decay, "CHUNK", chunk)
    own, x_BTD, weight = started(E).double(), torch.randn(B, 100, D).double(), torch.randn(B, 100, D).double()
    v_BTE, results = E and torch.randn(B, 100, E).double().requires_grad_(), []
    for y_BTD in (own(x_BTD, v_BTE, keep_BT=whole(100)), loops.time_mixing(own, x_BTD, v_BTE)):
        inputs = [*own.parameters(), *([] if E is None else [v_BTE])]
        results.append([y_BTD, *torch.autograd.grad((y_BTD * weight).sum(), inputs)])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("sizes", "factor"), [({"D": D // 2}, 0.5), ({"D": D // H, "heads": 1}, 1.0)])
@torch.no_grad()
def test_the_bonus_is_divided_by_the_growth_of_the_width_of_a_head(sizes, factor):
    own, scaled, x_BTD = started().double(), started().double(), torch.randn(B, 9, D).double()
    own.match_base(RWKV7(**{"E": None, "heads": H, **sizes}))
    scaled.bonus.mul_(factor)
    torch.testing.assert_close(own(x_BTD, keep_BT=whole(9)), scaled(x_BTD, keep_BT=whole(9)))


@torch.no_grad()
def test_values_of_padding_in_the_middle_are_skipped():
    own, x_BTD, v_BTE = started(15).double(), torch.randn(1, 5, D).double(), torch.randn(1, 5, 15).double()
    keep_BT = torch.tensor([[True, False, True, False, True]])
    y_BTD = own(x_BTD, v_BTE, keep_BT=keep_BT, right_padded_T=False)
    torch.testing.assert_close(y_BTD[:, ::2], own(x_BTD[:, ::2], v_BTE[:, ::2], keep_BT=torch.ones(1, 3).bool()))


@pytest.mark.parametrize("rank", [None, 3])
@torch.no_grad()
def test_each_channel_is_interpolated_by_its_own_gate(rank):
    own, x_BND = Interpolate(D, V, rank=rank).double(), torch.randn(B, 7, D).double()
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    start, end = torch.randn(2, B, 7, V).double()
    low = x_BND if rank is None else x_BND @ own.inner.weight.T
    gate = torch.sigmoid(low @ own.outer.weight.T + own.outer.bias)
    torch.testing.assert_close(own(x_BND, start, end), torch.lerp(start, end, gate))


def published(network, ids_BT):
    """Compute the logits of RWKV-7 with the weights of the model `rwkv7_values`, layer by layer."""
    w = dict(network.named_parameters())

    def normed(x, name):
        return F.layer_norm(x, x.shape[2:], w[f"{name}.weight"], w[f"{name}.bias"])

    x, first = normed(w["emb.block.weight"][ids_BT] * 4, "pos.block"), None
    for layer in (f"decoder.{index}" for index in range(4)):
        z = normed(x, f"{layer}.normed.block")
        xv = loops.shifted(z, w[f"{layer}.shifted.block.mix"])
        v = xv @ w[f"{layer}.value.block.weight"].T
        if first is None:
            first = v
        else:
            gate = f"{layer}.self.in_v.block"
            low = xv @ w[f"{gate}.inner.weight"].T @ w[f"{gate}.outer.weight"].T
            v = v + (first - v) * torch.sigmoid(w[f"{gate}.outer.bias"] + low)
        x = x + loops.time_mixing(network.get_submodule(f"{layer}.self.block"), z, v)
        k = loops.shifted(normed(x, f"{layer}.ffn.in_x.in_x.block"), w[f"{layer}.ffn.in_x.block.mix"])
        x = x + torch.relu(k @ w[f"{layer}.ffn.block.inner.weight"].T) ** 2 @ w[f"{layer}.ffn.block.out.weight"].T
    return normed(x, "decoder.last.norm") @ w["logits.block.weight"].T


@torch.no_grad()
def test_a_model_with_mixed_values_equals_the_published_rwkv7():
    network = build(next(path for path in TESTS if path.stem == "rwkv7_values")).double().eval()
    for index, parameter in enumerate(network.parameters()):
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(index))
    ids_BT = torch.randint(4, 30, (B, 40))
    torch.testing.assert_close(network(tgt=ids_BT), published(network, ids_BT), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strongest", [0.0, FASTEST])
@torch.no_grad()
def test_chunks_equal_the_rule_one_position_at_a_time_in_float32(strongest):
    """The strongest decays of all channels do not overflow."""
    q, k, sought = torch.randn(3, B, H, 150, K).double()
    v, sought = torch.randn(B, H, 150, V).double(), F.normalize(sought, dim=3)
    removed, log_rate = sought * torch.rand(B, H, 150, K).double(), torch.full((B, H, 150, K), -strongest).double()
    memory = torch.randn(B, H, K, V).double()
    parts = (memory, q, k, v, sought, removed, log_rate)
    y_BHTV, after = by_chunks(generalised_delta_rule, *(part.float() for part in parts))
    for t in range(150):
        known = torch.einsum("bhk,bhkv->bhv", sought[:, :, t], memory)
        memory = memory * log_rate[:, :, t, :, None].exp() - removed[:, :, t, :, None] * known[:, :, None]
        memory = memory + k[:, :, t, :, None] * v[:, :, t, None]
        expected = torch.einsum("bhk,bhkv->bhv", q[:, :, t], memory)
        torch.testing.assert_close(y_BHTV[:, :, t].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.double(), memory, rtol=1e-4, atol=1e-4)


def test_a_trace_of_more_positions_than_a_chunk_can_have_is_refused():
    own = started()
    with pytest.raises(Exception, match="traces at most 128 positions, but got 150"):
        torch.export.export(own, (torch.randn(B, 150, D),), {"keep_BT": whole(150)})
