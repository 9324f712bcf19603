"""Attention that reads projected keys and values, against a loop in float64 and against `attention` on one input."""

import math

import pytest
import torch

from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tests.network.examples import TESTS, build
from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.norm import RMSNorm
from tfm_blocks.blocks.restricted import RestrictedAttention, RestrictedSharedAttention
from tfm_blocks.blocks.shared_attention import ResidualAttention, SharedAttention
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.values import Part

B, N, D, E, F, H, G = 2, 7, 16, 6, 10, 4, 2


@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_each_query_weighs_the_values_by_the_keys_of_another_node(mask):
    own = filled(SharedAttention(D, E, F, heads=H, kv_heads=G, mask=mask).double())
    x_BND, k_BNE, v_BNF = (torch.randn(B, N, width).double() for width in (D, E, F))
    y_BND = own(x_BND, k_BNE, v_BNF, keep_BT=keep([N, N], N))
    q_width, v_width = E // G, F // G
    for b in range(B):
        queries = x_BND[b] @ own.q.weight.T + own.q.bias
        for t in range(N):
            seen, heads = slice(0, t + 1 if mask else N), []
            for h in range(H):
                g = h // (H // G)
                query = queries[t, h * q_width : (h + 1) * q_width]
                scores = k_BNE[b, seen, g * q_width : (g + 1) * q_width] @ query / math.sqrt(q_width)
                heads.append(torch.softmax(scores, 0) @ v_BNF[b, seen, g * v_width : (g + 1) * v_width])
            torch.testing.assert_close(y_BND[b, t], own.out.weight @ torch.cat(heads) + own.out.bias)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_with_projections_of_its_input_it_is_attention(mask, window):
    options = {"heads": H, "kv_heads": G, "mask": mask, "position": Part("rotary"), "qk_norm": Part("rmsnorm")}
    options |= {"gate": Part("sigmoid_gate"), "clip_qkv": 0.7}
    n = N if window is None else 80  # a window is computed in blocks
    if window is None:
        whole, own = filled(Attention(D, None, **options)), SharedAttention(D, D // 2, D // 2, **options)
    else:
        whole = filled(RestrictedAttention(D, r=window, **options))
        own = RestrictedSharedAttention(D, D // 2, D // 2, r=window, **options)
    state = whole.state_dict()
    weights, biases = (state.pop(f"qkv.{name}").split([D, D // 2, D // 2]) for name in ("weight", "bias"))
    own.load_state_dict({**state, "q.weight": weights[0], "q.bias": biases[0]})
    x_BND, keep_BN = torch.randn(B, n, D), keep([n, n - 3], n)
    k_BNE, v_BNF = (x_BND @ weight.T + bias for weight, bias in zip(weights[1:], biases[1:], strict=True))
    torch.testing.assert_close(own(x_BND, k_BNE, v_BNF, keep_BT=keep_BN), whole(x_BND, keep_BT=keep_BN))
    torch.testing.assert_close(own.weights(x_BND, k_BNE, v_BNF, keep_BT=keep_BN), whole.weights(x_BND, keep_BT=keep_BN))


@torch.no_grad()
def test_keys_may_be_normalised_in_their_node():
    options = {"heads": H, "kv_heads": G, "mask": "causal", "position": Part("rotary"), "qk_norm": Part("rmsnorm")}
    both = filled(SharedAttention(D, 8, F, **options))
    own = SharedAttention(D, 8, F, **options, qk_norm_kind="queries")
    own.load_state_dict({name: value for name, value in both.state_dict().items() if name != "k_norm.weight"})
    before = RMSNorm(8, groups=G)
    before.load_state_dict(both.k_norm.state_dict())
    x_BND, k_BNE, v_BNF = (torch.randn(B, N, width) for width in (D, 8, F))
    keep_BN = keep([N, N], N)
    torch.testing.assert_close(
        own(x_BND, before(k_BNE), v_BNF, keep_BT=keep_BN), both(x_BND, k_BNE, v_BNF, keep_BT=keep_BN)
    )


@torch.no_grad()
def test_a_value_residual_mixes_the_values_of_the_first_layer_into_later_ones():
    network = build(next(path for path in TESTS if path.stem == "value_residual")).eval()
    outputs, reads = {}, {}
    for layer in (0, 1):
        value, attention = (network.get_submodule(f"decoder.{layer}.{name}.block") for name in ("value", "self"))
        value.register_forward_hook(lambda module, inputs, y_BTF, layer=layer: outputs.update({layer: y_BTF}))
        attention.register_forward_pre_hook(
            lambda module, inputs, ports, layer=layer: reads.update({layer: ports["v_BTF"]}), with_kwargs=True
        )
    network.get_parameter("decoder.1.self.in_v.block.weight").copy_(torch.tensor([1.0, 0.0]))
    network(tgt=torch.randint(4, 30, (B, N)))
    own = math.e / (math.e + 1)
    torch.testing.assert_close(reads[0], outputs[0])
    torch.testing.assert_close(reads[1], own * outputs[1] + (1 - own) * outputs[0])


@torch.no_grad()
def test_residual_attention_adds_the_scores_of_all_its_queries_and_keys():
    own = filled(ResidualAttention(D, 3, E, F, heads=2, mask="causal", clip_qkv=0.7).double())
    x_BND, v_BNF = torch.randn(B, N, D).double(), torch.randn(B, N, F).double()
    q, k = ([torch.randn(B, N, E).double() for _ in range(3)] for _ in range(2))
    y_BND = own(x_BND, q, k, v_BNF, keep_BT=keep([N, N], N))
    (q, k), v_BNF = ([x.clamp(-0.7, 0.7) for x in inputs] for inputs in (q, k)), v_BNF.clamp(-0.7, 0.7)
    width, v_width = E // 2, F // 2
    for t in range(N):
        heads = []
        for h in range(2):
            part, scores = slice(h * width, (h + 1) * width), torch.zeros(t + 1).double()
            for q_BNE, k_BNE in zip(q, k, strict=True):
                scores += k_BNE[0, : t + 1, part] @ q_BNE[0, t, part] / math.sqrt(width)
            heads.append(torch.softmax(scores, 0) @ v_BNF[0, : t + 1, h * v_width : (h + 1) * v_width])
        torch.testing.assert_close(y_BND[0, t], own.out.weight @ torch.cat(heads) + own.out.bias)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"q": ["a", "b"], "k": ["a"], "v": "b"}, "each q has a k, but there are 2 of q and 1 of k"),
        (
            {"q": ["a"], "k": ["b"], "v": "b", "position": "relative_sinusoidal"},
            "relative_sinusoidal compares one query with one key, but residual_attention may add several products",
        ),
    ],
)
def test_residual_attention_refuses_what_it_cannot_add(nodes, message):
    graph = {"a": {"block": "linear", "in": "x", "d_out": 8}, "b": {"block": "linear", "in": "x", "d_out": 8}}
    graph["mix"] = {"block": "residual_attention", "in": "x", "heads": 2, **nodes}
    with pytest.raises(ConfigError, match=message):
        check_model({"inputs": {"x": "B N 8"}, "graph": graph})
