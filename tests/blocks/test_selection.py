"""Attention to chosen blocks of keys, against loops over queries, blocks and heads in float64, and token by token."""

import pytest
import torch

from tests.blocks import loops
from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.prefix import PrefixAttention
from tfm_blocks.blocks.restricted import RestrictedAttention
from tfm_blocks.blocks.selection import TopBlocks
from tfm_blocks.network.contract import rules
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

B, N, SHORT, D, H, G = 2, 23, 9, 16, 4, 2
BLOCKS = Part("top_blocks", {"block_size": 4, "k": 3})


@pytest.mark.parametrize("padding", ["after", "before"])
@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_each_query_reads_its_own_block_and_the_blocks_with_the_largest_mean_keys(mask, padding):
    own = Attention(D, None, heads=H, kv_heads=G, mask=mask, position=Part("rotary"), selection=BLOCKS)
    own, x_BND = filled(own).double(), 3 * torch.randn(B, N, D).double()
    keep_BN = keep([N, SHORT], N) if padding == "after" else keep([N, SHORT], N).flip(1)
    y_BND = own(x_BND, keep_BT=keep_BN, right_padded_T=padding == "after")
    for y_ND, x_ND, keep_N in zip(y_BND, x_BND, keep_BN, strict=True):
        expected_ND = loops.chosen_blocks(own, x_ND, mask == "causal", keep_N.nonzero().flatten().tolist())
        torch.testing.assert_close(y_ND[keep_N], expected_ND[keep_N], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_as_many_blocks_as_there_are_give_dense_attention(mask):
    options = {"heads": H, "mask": mask}
    dense = filled(Attention(D, None, **options))
    own = Attention(D, None, **options, selection=Part("top_blocks", {"block_size": 4, "k": 6}))
    own.load_state_dict(dense.state_dict())
    x_BND, keep_BN = torch.randn(B, N, D), keep([N, SHORT], N)
    y_BND, expected_BND = own(x_BND, keep_BT=keep_BN), dense(x_BND, keep_BT=keep_BN)
    torch.testing.assert_close(y_BND[keep_BN], expected_BND[keep_BN], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_node_returns_the_mean_of_the_chosen_vectors():
    x_BND = torch.randn(B, N, D).double()
    y_BND = TopBlocks(**BLOCKS.arguments)(x_BND, keep_BT=keep([N, SHORT], N))
    for x_ND, y_ND, length in zip(x_BND, y_BND, (N, SHORT), strict=True):
        for t in range(length):
            torch.testing.assert_close(y_ND[t], x_ND[loops.chosen_keys(x_ND, x_ND, t, range(length), 4, 3)].mean(0))


DECODERS = {
    "attention": {"kv_heads": 2, "position": {"block": "alibi", "heads": 4}, "scores": "softcap"},
    "shared_attention": {"heads": 2, "position": "rotary"},
    "residual_attention": {"gate": "sigmoid_gate"},
    "relative_attention": {"kv_heads": 2},
    "memory_attention": {"memory": 3},
    "talking_heads_attention": {"scores": {"block": "sink", "heads": 4}},
    "differential_attention": {"heads": 2},
    "contextual_attention": {"qk_norm": "rmsnorm"},
}
PLAIN = {"kv_heads": 2, "position": "rotary"}


def decodes_by_the_rules(case):
    assert case.decoder is not None
    rules.sees_no_more_than_declared(case)
    rules.ignores_padding_that_comes_last(case)
    rules.ignores_padding_that_comes_first(case)
    rules.steps_as_it_reads(case)
    rules.steps_in_a_search(case)


@pytest.mark.parametrize("name, options", [("attention", PLAIN), *DECODERS.items()])
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.grid)])
@torch.no_grad()
def test_every_attention_to_all_keys_can_choose_blocks_in_its_steps(name, options, k):
    selection = {"block": "top_blocks", "block_size": 2, "k": k}
    case = next(cases_of(REGISTRY.blocks[name], {"heads": 4, "mask": "causal", **options, "selection": selection}))
    decodes_by_the_rules(case)


@torch.no_grad()
def test_disentangled_attention_chooses_blocks_by_contents_alone():
    info, rows = REGISTRY.blocks["disentangled_attention"], {"heads": 2, "rows": 8}
    few, all_blocks = (
        next(cases_of(info, {**rows, "selection": {"block": "top_blocks", "block_size": 2, "k": k}})) for k in (1, 9)
    )
    dense = next(cases_of(info, rows))
    x = dense.tensors()
    torch.testing.assert_close(all_blocks.network(**x), dense.network(**x))
    assert not torch.allclose(few.network(**x), dense.network(**x), rtol=1e-2)
    rules.ignores_padding_that_comes_last(few)


def test_a_selection_needs_all_keys_of_one_sequence():
    with pytest.raises(ValueError, match="selection compares the positions of one sequence, but kv is another"):
        Attention(D, D, heads=H, selection=BLOCKS)
    with pytest.raises(ValueError, match="selection chooses among all keys, but each query has a window"):
        RestrictedAttention(D, r=3, heads=H, selection=BLOCKS)
    with pytest.raises(
        ValueError, match="selection compares the positions of one sequence, but prefix is another: leave"
    ):
        PrefixAttention(D, heads=H, selection=BLOCKS)
