"""Segments with a memory, against Transformer-XL's loop over segments in float64, and token by token."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.blocks import loops
from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tests.blocks.test_selection import decodes_by_the_rules
from tests.decoding import check_long_prefix
from tfm_blocks.blocks.segments import SegmentAttention
from tfm_blocks.language.check import check
from tfm_blocks.network.build import build_network
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

B, N, SHORT, D, H, LAYERS, INNER = 2, 19, 11, 8, 2, 3, 12
SIZES = [(4, 4), (4, 6), (5, 2), (3, 0), (6, 50), (50, 4)]
sizes = pytest.mark.parametrize(("segment", "memory"), SIZES)


def network(segment, memory, position):
    """Return a stack over vectors, with norms after the branches as in the paper, in float64."""
    attn = {"block": "segment_attention", "segment": segment, "memory": memory, "heads": H, "mask": "causal"}
    layer = {"attn": {**attn, "position": position}, "ffn": {"block": "ffn", "d_ff": INNER}}
    graph = {"map": {"block": "linear", "in": "x", "d_out": D}, "body": {"repeat": LAYERS, "layer": layer}}
    spec = check({"inputs": {"x": f"B N {D}"}, "add_norm": "post", "graph": graph}, REGISTRY)
    return build_network(spec, seed=1).double()


def transformer_xl(model, x_BND, segment, memory, position):
    """Run the segments in turn. Each layer concatenates the detached hidden states of earlier segments with its input.

    The memories are updated as by `_update_mems` of the authors' code: the last `memory` hidden states, detached.
    """
    layers = [model.body[str(number)] for number in range(LAYERS)]
    memories, outputs = [x_BND[:, :0] for _ in layers], []
    for h_BTD in model.map.block(x_BND).split(segment, 1):
        for number, layer in enumerate(layers):
            cat_BSD = torch.cat((memories[number], h_BTD), 1)
            memories[number] = cat_BSD[:, max(0, cat_BSD.shape[1] - memory) :].detach()
            h_BTD = layer.attn.post.norm(h_BTD + loops.continued(layer.attn.block, h_BTD, cat_BSD, position))
            inner_BTF = F.relu(h_BTD @ layer.ffn.block.inner.weight.T + layer.ffn.block.inner.bias)
            out = layer.ffn.block.out
            h_BTD = layer.ffn.post.norm(h_BTD + inner_BTF @ out.weight.T + out.bias)
        outputs.append(h_BTD)
    return torch.cat(outputs, 1)


@sizes
@pytest.mark.parametrize("position", [None, "alibi", "relative_sinusoidal"])
def test_a_row_equals_a_loop_over_its_segments_with_detached_memories(segment, memory, position):
    part = position and {"block": position, "heads": H}
    model, x_BND = network(segment, memory, part), torch.randn(B, N, D, dtype=torch.float64)
    keep_BN, weight_BND = keep([N, SHORT], N), torch.randn(B, N, D, dtype=torch.float64)

    def loop(x_BND):
        rows = zip(x_BND, (N, SHORT), strict=True)
        rows = [transformer_xl(model, x_ND[None, :n], segment, memory, position)[0] for x_ND, n in rows]
        return torch.cat(rows)

    def gradients(y_RD):
        leaves = [x_BND, *model.parameters()]
        return y_RD.detach(), *torch.autograd.grad((y_RD * weight_BND[keep_BN]).sum(), leaves)

    x_BND.requires_grad_()
    ours = gradients(model(x=x_BND, keep={"x": keep_BN})[keep_BN])
    for actual, expected in zip(ours, gradients(loop(x_BND)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(model(x=x_BND, keep={"x": keep_BN})[keep_BN], ours[0], rtol=0, atol=1e-12)


def test_no_gradient_reaches_an_earlier_segment_through_one_layer():
    own, x_BND = filled(SegmentAttention(D, segment=4, memory=6, heads=H, mask="causal")), torch.randn(B, N, D)
    y_BND = own(x_BND.requires_grad_(), keep_BT=keep([N, N], N))
    (gradient_BND,) = torch.autograd.grad(y_BND[:, 9].sum(), x_BND)
    assert gradient_BND.abs().sum((0, 2)).nonzero().flatten().tolist() == [8, 9]


@pytest.mark.parametrize("padding", ["after", "before"])
@sizes
@torch.no_grad()
def test_without_a_mask_a_query_reads_its_whole_segment(segment, memory, padding):
    own = filled(SegmentAttention(D, segment=segment, memory=memory, heads=H)).double()
    x_BND = torch.randn(B, N, D, dtype=torch.float64)
    keep_BN = keep([N, SHORT], N) if padding == "after" else keep([N, SHORT], N).flip(1)
    y_BND, w_BHNN = own(x_BND, keep_BT=keep_BN), own.weights(x_BND, keep_BT=keep_BN)
    for b, t in keep_BN.nonzero().tolist():
        first = t // segment * segment
        seen = [s for s in range(N) if keep_BN[b, s] and first - memory <= s < first + segment]
        q_D, k_SD, v_SD = own.qkv(x_BND[b, t])[:D], *own.qkv(x_BND[b, seen])[:, D:].chunk(2, 1)
        heads = zip(q_D.chunk(H), k_SD.chunk(H, 1), v_SD.chunk(H, 1), w_BHNN[b, :, t], strict=True)
        outputs = []
        for q_K, k_SK, v_SK, w_N in heads:
            weight_S = torch.softmax(k_SK @ q_K / math.sqrt(D / H), 0)
            torch.testing.assert_close(w_N[seen], weight_S, rtol=0, atol=1e-10)
            outputs.append(weight_S @ v_SK)
        torch.testing.assert_close(y_BND[b, t], own.out(torch.cat(outputs)), rtol=0, atol=1e-10)


@sizes
@torch.no_grad()
@pytest.mark.parametrize("position", ["alibi", "relative_sinusoidal"])
def test_steps_equal_the_forward_pass_after_prefixes_of_any_length(segment, memory, position):
    position = Part(position, {"heads": H})
    own = filled(SegmentAttention(D, segment=segment, memory=memory, heads=H, mask="causal", position=position))
    x_BND = torch.randn(B, N, D)
    for first in (1, 4, 7, N):
        check_long_prefix(own, x_BND, first)


@pytest.mark.parametrize("options", [{}, {"position": "rotary", "segment": 3}, {"memory": 0}], ids=str)
@torch.no_grad()
def test_it_decodes_by_the_rules_also_with_hypotheses(options):
    rows = {"D": 16, "heads": 4, "segment": 2, "memory": 1, "mask": "causal", **options}
    decodes_by_the_rules(next(cases_of(REGISTRY.blocks["segment_attention"], rows)))


@pytest.mark.parametrize("options", [{"selection": Part("top_blocks")}, {"forget_gate": True, "mask": "causal"}])
def test_parts_without_a_form_in_segments_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SegmentAttention(D, segment=4, memory=4, heads=H, **options)
