"""Native sparse attention, against loops over queries, blocks and heads in float64, and token by token."""

import pytest
import torch

from tests.blocks import loops
from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tests.blocks.test_selection import decodes_by_the_rules
from tfm_blocks.blocks.layers.dot_product import Span
from tfm_blocks.blocks.sparse_attention import NativeSparseAttention
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

B, N, SHORT, D, H, G = 2, 27, 10, 16, 4, 2
SIZE, K, R = 4, 4, 3


def made(**options):
    sizes = {"heads": H, "kv_heads": G, "block_size": SIZE, "k": K, "r": R}
    return filled(NativeSparseAttention(D, **sizes, **options)).double()


@pytest.mark.parametrize("padding", ["after", "before"])
@torch.no_grad()
def test_each_head_adds_the_compressed_the_selected_and_the_near_attention(padding):
    own, x_BND = made(position=Part("rotary"), d_value=3), 3 * torch.randn(B, N, D).double()
    keep_BN = keep([N, SHORT], N) if padding == "after" else keep([N, SHORT], N).flip(1)
    y_BND = own(x_BND, keep_BT=keep_BN, right_padded_T=padding == "after")
    for y_ND, x_ND, keep_N in zip(y_BND, x_BND, keep_BN, strict=True):
        expected_ND = loops.native_sparse(own, x_ND, keep_N.nonzero().flatten().tolist())
        torch.testing.assert_close(y_ND[keep_N], expected_ND[keep_N], rtol=0, atol=1e-10)


@torch.no_grad()
def test_the_output_is_the_reported_weights_times_the_values_and_the_sum_of_the_gates():
    own, x_BND, keep_BN = made(), torch.randn(B, N, D).double(), keep([N, N], N)
    gate_BNH3 = torch.sigmoid(x_BND @ own.branches.weight.T).view(B, N, H, 3)
    gate_BNH3[:, : SIZE - 1, :, 0] = 0  # the first block is not complete
    *_, v_BGNK = own.self_heads(x_BND, Span(0, N))
    w_BHNN = own.weights(x_BND, keep_BT=keep_BN)
    y_BHNK = w_BHNN @ v_BGNK.repeat_interleave(H // G, 1) * gate_BNH3.sum(3).transpose(1, 2)[..., None]
    torch.testing.assert_close(own(x_BND, keep_BT=keep_BN), own.out(y_BHNK.transpose(1, 2).flatten(2)))


SMALL = {"heads": 4, "block_size": 1, "k": 3, "r": 2}  # so that a case of a few positions has more blocks than k


@pytest.mark.parametrize(
    "options",
    [
        {"position": "rotary", "kv_heads": 2},
        {"position": {"block": "alibi", "heads": 4}, "scores": "softcap", "block_size": 2},
        pytest.param({"forget_gate": True, "gate": {"block": "headwise_gate", "heads": 4}}, marks=pytest.mark.grid),
        pytest.param({"scores": {"block": "sink", "heads": 4}, "qk_norm": "rmsnorm"}, marks=pytest.mark.grid),
    ],
)
@torch.no_grad()
def test_it_decodes_token_by_token_with_small_blocks(options):
    case = next(cases_of(REGISTRY.blocks["native_sparse_attention"], {**SMALL, **options}))
    decodes_by_the_rules(case)


def test_a_selection_is_refused():
    with pytest.raises(ValueError, match="selection has no effect on blocks that are compressed: set block_size and k"):
        made(selection=Part("top_blocks"))
