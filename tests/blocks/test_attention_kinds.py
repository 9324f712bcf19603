"""Attention blocks against Hugging Face's, or against loops if it has no such block."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    DeepseekV2Config,
    DiffLlamaConfig,
    Gemma2Config,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import tfm_blocks.blocks  # noqa: F401
from tests.blocks.naive import NaiveAttention
from tests.blocks.test_attention import keep, started
from tfm_blocks.blocks.attention import Attention, DifferentialAttention, TalkingHeadsAttention
from tfm_blocks.blocks.latent import LatentAttention, LatentQueryAttention, SparseLatentAttention
from tfm_blocks.blocks.position_vectors import RelativeAttention
from tfm_blocks.blocks.prefix import PrefixAttention
from tfm_blocks.blocks.restricted import DilatedAttention, RestrictedAttention, RestrictedGlobalAttention
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.contract import rules
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

B, T, S, D, E, H = 2, 9, 7, 16, 12, 4
WHOLE_BT = torch.ones(B, T, dtype=torch.bool)
SIZES = {
    "hidden_size": D,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "attn_implementation": "eager",
}
RMSNORM = Part("rmsnorm")
HF = {"heads": H, "kv_heads": 2, "d_head": 6, "mask": "causal", "bias": False, "position": Part("rotary")}


def filled(module):
    """Draw every parameter from a normal distribution, then initialise linear maps as usual."""
    for number, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return started(module)


def copy_maps(own, reference):
    """Copy our linear maps into a Hugging Face attention."""
    for name, part in zip("qkv", own.qkv.weight.split(own.qkv.parts), strict=True):
        getattr(reference, f"{name}_proj").weight.copy_(part)
    reference.o_proj.weight.copy_(own.out.weight)
    return reference.eval()


def past(radius=T):
    distance_TT = torch.arange(T) - torch.arange(T)[:, None]
    hidden_TT = (distance_TT > 0) | (distance_TT <= -radius)
    return torch.zeros(T, T).masked_fill(hidden_TT, -torch.inf)[None, None]


def of_reference(reference, x_BTD, radius=T):
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    turns = LlamaRotaryEmbedding(config)(x_BTD, torch.arange(T)[None])
    return reference(x_BTD, position_embeddings=turns, attention_mask=past(radius))[0]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_grouped_heads_with_rotary_positions_are_llamas():
    own = started(Attention(D, None, **HF))
    x_BTD = torch.randn(B, T, D)
    reference = copy_maps(own, LlamaAttention(LlamaConfig(**SIZES), 0))
    close(own(x_BTD, keep_BT=WHOLE_BT), of_reference(reference, x_BTD))


@pytest.mark.parametrize("r", [None, 3])
@torch.no_grad()
def test_capped_scores_are_gemmas_in_whole_and_in_windows(r):
    config = Gemma2Config(**SIZES, query_pre_attn_scalar=2, attn_logit_softcapping=0.5)
    scores = Part("softcap", {"cap": 0.5, "beta": 2**-0.5})
    own = started(RestrictedAttention(D, r=r, **HF, scores=scores) if r else Attention(D, None, **HF, scores=scores))
    x_BTD = 3 * torch.randn(B, T, D)
    reference = copy_maps(own, Gemma2Attention(config, 0))
    close(own(x_BTD, keep_BT=WHOLE_BT), of_reference(reference, x_BTD, r or T))


@pytest.mark.parametrize(
    ("layer", "config", "kind"),
    [(Qwen3Attention, Qwen3Config, "head"), (Olmo2Attention, Olmo2Config, "joint")],
    ids=["qwen", "olmo"],
)
@torch.no_grad()
def test_normed_queries_and_keys_match_those_normed_after_and_before_the_split(layer, config, kind):
    own = filled(Attention(D, None, **HF, qk_norm=RMSNORM, qk_norm_kind=kind))
    reference = copy_maps(own, layer(config(**SIZES), 0))
    for name in ("q_norm", "k_norm"):
        getattr(reference, name).weight.copy_(getattr(own, name).weight)
    x_BTD = torch.randn(B, T, D)
    close(own(x_BTD, keep_BT=WHOLE_BT), of_reference(reference, x_BTD))


@torch.no_grad()
def test_a_sink_matches_gpt_oss():
    own = filled(Attention(D, None, heads=H, kv_heads=2, mask="causal", scores=Part("sink")))
    x_BTD = torch.randn(B, T, D)
    q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in own.qkv(x_BTD).split(own.qkv.parts, 2))
    module = SimpleNamespace(sinks=own.scores.weight, num_key_value_groups=2, training=False)
    y_BTHK, w_BHTT = eager_attention_forward(module, q, k, v, past(), 0.5)
    close(own(x_BTD, keep_BT=WHOLE_BT), own.out(y_BTHK.flatten(2)))
    close(own.weights(x_BTD, keep_BT=WHOLE_BT), w_BHTT / w_BHTT.sum(3, keepdim=True))


@torch.no_grad()
def test_differential_attention_matches_hugging_face():
    config = DiffLlamaConfig(hidden_size=D, num_attention_heads=H, num_key_value_heads=H, attn_implementation="eager")
    own = filled(DifferentialAttention(D, heads=H // 2, lambda_start=0.2, mask="causal", bias=False))
    reference = copy_maps(own, DiffLlamaAttention(config, 0))
    for name, vector_K in zip(("q1", "k1", "q2", "k2"), own.lambdas, strict=True):
        getattr(reference, f"lambda_{name}").copy_(vector_K)
    x_BTD = torch.randn(B, T, D)
    still = torch.ones(1, T, 4), torch.zeros(1, T, 4)
    expected = reference(x_BTD, position_embeddings=still, attention_mask=past())[0]
    assert reference.groupnorm.eps == config.rms_norm_eps == 1e-5
    close(own(x_BTD, keep_BT=WHOLE_BT), expected)


@pytest.mark.parametrize("d_query", [None, 10])
@torch.no_grad()
def test_latent_attention_matches_deepseek(d_query):
    config = DeepseekV2Config(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=d_query,
        kv_lora_rank=6,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=3,
        attn_implementation="eager",
    )
    reference = DeepseekV2Attention(config, 0).eval()
    widths = {"d_latent": 6, "d_head": 8, "d_turned": 4, "d_value": 3}
    kind, query_width = (LatentQueryAttention, {"d_query": d_query}) if d_query else (LatentAttention, {})
    own = filled(kind(D, heads=H, mask="causal", **widths, **query_width))
    names = {"down": "kv_a_proj_with_mqa", "norm": "kv_a_layernorm", "up": "kv_b_proj", "out": "o_proj", "q": "q_proj"}
    if d_query:
        names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q": "q_b_proj"}
    for ours, theirs in names.items():
        getattr(reference, theirs).weight.copy_(getattr(own, ours).weight)
    x_BTD = torch.randn(B, T, D)
    turns = DeepseekV2RotaryEmbedding(config)(x_BTD, torch.arange(T)[None])
    expected = reference(x_BTD, attention_mask=past(), position_embeddings=turns)[0]
    close(own(x_BTD, keep_BT=WHOLE_BT), expected)


@torch.no_grad()
def test_a_gate_multiplies_the_outputs_of_the_heads():
    own, plain = started(Attention(D, None, heads=H, gate=Part("sigmoid_gate"))), Attention(D, None, heads=H)
    plain.load_state_dict({name: value for name, value in own.state_dict().items() if "gate" not in name})
    x_BTD, keep_BT = torch.randn(B, T, D), keep([9, 4], T)
    out_inputs = []
    plain.out.register_forward_pre_hook(lambda _, args: out_inputs.append(args[0]))
    plain(x_BTD, keep_BT=keep_BT)
    close(
        own(x_BTD, keep_BT=keep_BT), own.out(out_inputs[0] * torch.sigmoid(x_BTD @ own.gate.weight.T + own.gate.bias))
    )


@torch.no_grad()
def test_widths_of_keys_and_of_values_match_columns():
    """Compare with H = V A, A = softargmax_β(Kᵀ Q): one head, vectors as columns."""
    own = started(Attention(D, E, heads=1, d_head=5, d_value=3, scores=Part("softmax", {"beta": 0.7})))
    x_BTD, kv_BSE = torch.randn(B, T, D), torch.randn(B, S, E)
    Q, (K, V) = own.q(x_BTD).mT, (part.mT for part in own.kv(kv_BSE).split((5, 3), 2))
    assert K.shape == (B, 5, S) and V.shape == (B, 3, S)
    expected = V @ torch.softmax(0.7 * K.mT @ Q, 1)
    y_BTD = own(x_BTD, kv_BSE, keep_BT=WHOLE_BT, keep_BS=torch.ones(B, S, dtype=torch.bool))
    close(y_BTD, own.out(expected.mT))


@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_the_naive_loop_equals_attention(mask):
    fast = started(Attention(D, None, heads=H, mask=mask))
    slow = NaiveAttention(D, None, heads=H, mask=mask)
    slow.load_state_dict(fast.state_dict())
    x_BTD, keep_BT = torch.randn(B, T, D), keep([9, 4], T)
    for of in ("forward", "weights"):
        actual, expected = (getattr(one, of)(x_BTD, keep_BT=keep_BT) for one in (slow, fast))
        close(actual[keep_BT] if of == "forward" else actual, expected[keep_BT] if of == "forward" else expected)


@torch.no_grad()
def test_talking_heads_mix_scores_and_weights():
    own = filled(TalkingHeadsAttention(D, E, heads=H))
    x_BTD, kv_BSE, keep_BS = torch.randn(B, T, D), torch.randn(B, S, E), keep([7, 3], S)
    heads = slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)
    q_BTD, (k_BSD, v_BSD) = own.q(x_BTD), own.kv(kv_BSE).chunk(2, 2)
    scores = [q_BTD[..., one] @ k_BSD[..., one].mT / 2 for one in heads]
    mixed = [sum(own.mix_scores[to, of] * scores[of] for of in range(H)) for to in range(H)]
    weights = [one.masked_fill(~keep_BS[:, None], -torch.inf).softmax(2) for one in mixed]
    again = [sum(own.mix_weights[to, of] * weights[of] for of in range(H)) for to in range(H)]
    expected = torch.cat([w_BTS @ v_BSD[..., one] for w_BTS, one in zip(again, heads, strict=True)], 2)
    close(own(x_BTD, kv_BSE, keep_BT=WHOLE_BT, keep_BS=keep_BS), own.out(expected))


@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_relative_positions_are_added_to_keys_and_values_of_each_pair(mask):
    own = filled(RelativeAttention(D, heads=H, radius=2, mask=mask))
    x_BTD = torch.randn(B, T, D)
    q, k, v = (part.unflatten(2, (H, 4)) for part in own.qkv(x_BTD).chunk(3, 2))
    expected = torch.zeros(B, T, H, 4)
    for i in range(T):
        near = [max(-2, min(2, j - i)) + 2 for j in range(i + 1 if mask else T)]
        scores = [(q[:, i] * (k[:, j] + own.of_keys[one])).sum(2) / 2 for j, one in enumerate(near)]
        shares = torch.stack(scores).softmax(0)
        expected[:, i] = sum(
            share[..., None] * (v[:, j] + own.of_values[one])
            for j, (share, one) in enumerate(zip(shares, near, strict=True))
        )
    close(own(x_BTD, keep_BT=WHOLE_BT), own.out(expected.flatten(2)))


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("position", ["alibi", "relative_bias", "relative_sinusoidal"])
@pytest.mark.parametrize("scores", ["softmax", "softcap", "sink"])
@torch.no_grad()
def test_a_window_has_the_scores_that_attention_has_there(mask, position, scores):
    heads = {"heads": H}
    arguments = {
        "position": Part(position, heads),
        "scores": Part(scores, heads if scores == "sink" else {}),
        "kv_heads": 2,
        "mask": mask,
    }
    dense, near = Attention(D, None, heads=H, **arguments), RestrictedAttention(D, heads=H, r=4, **arguments)
    filled(dense)
    for parameter in dense.position.parameters():
        nn.init.normal_(parameter)
    near.load_state_dict(dense.state_dict())
    x_BTD, keep_BT = torch.randn(B, 150, D), keep([150, 60], 150)
    distance_TT = torch.arange(150) - torch.arange(150)[:, None]
    before, after = (3, 0) if mask else (2, 1)
    far_TT = (distance_TT < -before) | (distance_TT > after)
    hidden = torch.zeros(H, 150, 150).masked_fill(far_TT, -torch.inf)
    expected = dense.eval()(x_BTD, None, hidden, keep_BT=keep_BT)
    close(near.eval()(x_BTD, keep_BT=keep_BT)[keep_BT], expected[keep_BT])


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@torch.no_grad()
@pytest.mark.parametrize("position", ["alibi", "relative_sinusoidal"])
def test_dilated_neighbours_lie_apart(mask, dilation, position):
    position = Part(position, {"heads": H})
    near = filled(DilatedAttention(D, heads=H, r=4, dilation=dilation, mask=mask, position=position))
    dense = Attention(D, None, heads=H, mask=mask, position=position).eval()
    dense.load_state_dict(near.state_dict())
    x_BTD, keep_BT = torch.randn(B, 151, D), keep([151, 60], 151)
    before, after = (3, 0) if mask else (2, 1)
    seen = torch.tensor([dilation * step for step in range(-before, after + 1)])
    distance_TT = torch.arange(151) - torch.arange(151)[:, None]
    hidden = torch.zeros(H, 151, 151).masked_fill(~torch.isin(distance_TT, seen), -torch.inf)
    expected = dense(x_BTD, None, hidden, keep_BT=keep_BT)
    close(near(x_BTD, keep_BT=keep_BT)[keep_BT], expected[keep_BT])


@torch.no_grad()
def test_biases_of_only_queries_keys_and_values_match_qwen_2():
    own = started(Attention(D, None, **{**HF, "bias": "qkv"}))
    reference = copy_maps(own, Qwen2Attention(Qwen2Config(**SIZES), 0))
    for name, part in zip("qkv", own.qkv.bias.split(own.qkv.parts), strict=True):
        getattr(reference, f"{name}_proj").bias.copy_(part)
    x_BTD = torch.randn(B, T, D)
    assert own.out.bias is None and own.qkv.bias.abs().min() > 0
    close(own(x_BTD, keep_BT=WHOLE_BT), of_reference(reference, x_BTD))


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize(("n", "first", "r"), [(9, 2, 4), (9, 20, 3), (150, 3, 7), (150, 1, 80)])
@pytest.mark.parametrize("position", ["rotary", "alibi", "relative_sinusoidal"])
@torch.no_grad()
def test_the_first_positions_see_all_and_are_seen_by_all(mask, n, first, r, position):
    position = Part(position, {} if position == "rotary" else {"heads": H})
    near = filled(RestrictedGlobalAttention(D, heads=H, r=r, first=first, mask=mask, position=position))
    dense = Attention(D, None, heads=H, mask=mask, position=position).eval()
    dense.load_state_dict(near.state_dict())
    x_BTD, keep_BT = torch.randn(B, n, D), keep([n, n // 2], n)
    place_T = torch.arange(n)
    distance_TT = place_T - place_T[:, None]
    before, after = (r - 1, 0) if mask else (r // 2, (r - 1) // 2)
    seen_TT = (distance_TT >= -before) & (distance_TT <= after) | (place_T < first) | (place_T < first)[:, None]
    hidden = torch.zeros(H, n, n).masked_fill(~seen_TT, -torch.inf)
    expected = dense(x_BTD, None, hidden, keep_BT=keep_BT)
    close(near(x_BTD, keep_BT=keep_BT)[keep_BT], expected[keep_BT])
    w_BHTT = near.weights(x_BTD, keep_BT=keep_BT)
    close(w_BHTT[0], dense.weights(x_BTD, None, hidden, keep_BT=keep_BT)[0])


@torch.no_grad()
def test_a_prefix_is_visible_to_all_later_positions():
    """Compare with one sequence whose mask is full over the prefix and causal after it."""
    own = started(PrefixAttention(D, heads=H, kv_heads=2))
    whole = Attention(D, None, heads=H, kv_heads=2).eval()
    whole.qkv.weight.copy_(torch.cat((own.q.weight, own.kv.weight)))
    whole.qkv.bias.copy_(torch.cat((own.q.bias, own.kv.bias)))
    whole.out.load_state_dict(own.out.state_dict())
    x_BTD, prefix_BSD, keep_BS = torch.randn(B, T, D), torch.randn(B, S, D), keep([7, 4], S)
    hidden = torch.zeros(S + T, S + T).masked_fill(torch.ones(S + T, S + T).triu(1) > 0, -torch.inf)
    hidden[:, :S] = 0
    both_BN = torch.cat((keep_BS, WHOLE_BT), 1)
    inputs = torch.cat((prefix_BSD, x_BTD), 1), None, hidden.expand(H, -1, -1)
    y_BTD = own(x_BTD, prefix_BSD, keep_BT=WHOLE_BT, keep_BS=keep_BS)
    close(y_BTD, whole(*inputs, keep_BT=both_BN)[:, S:])
    w_BHTN = own.weights(x_BTD, prefix_BSD, keep_BT=WHOLE_BT, keep_BS=keep_BS)
    close(w_BHTN, whole.weights(*inputs, keep_BT=both_BN)[:, :, S:])


LOOKING = sorted(
    name
    for name, info in REGISTRY.blocks.items()
    if hasattr(info.cls, "weights") and not info.category and len(info.sizes) <= 2 and name != "prefix_attention"
)
WIDE = {
    "heads": 2, "r": 3, "d_head": 5, "d_value": 7, "d_latent": 6, "d_turned": 4, "d_query": 3,
    "top_k": 2, "index_heads": 3, "d_index": 4, "segment": 3, "memory": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKING)
@torch.no_grad()
def test_the_rows_of_weights_add_up_to_one_and_leave_padding_out(name):
    info = REGISTRY.blocks[name]
    required = {one.name: WIDE[one.name] for one in info.arguments.values() if one.required}
    own = filled(info.make(*([D, None][: len(info.sizes)]), **required)).eval()
    w_BHTT = own.weights(torch.randn(B, T, D), keep_BT=keep([9, 4], T))
    torch.testing.assert_close(w_BHTT[0].sum(2), torch.ones(w_BHTT.shape[1:3]))
    assert not w_BHTT[1, :, :4, 4:].any()


@pytest.mark.parametrize("scores", ["sink", "sigmoid_scores"])
@pytest.mark.parametrize("name", [name for name in LOOKING if "scores" in REGISTRY.blocks[name].arguments])
def test_the_weights_of_a_sequence_of_padding_are_finite(name, scores):
    info = REGISTRY.blocks[name]
    required = {one.name: WIDE[one.name] for one in info.arguments.values() if one.required}
    own = filled(info.make(*([D, None][: len(info.sizes)]), scores=Part(scores), **required)).eval()
    assert own.weights(torch.randn(B, T, D), keep_BT=keep([9, 0], T)).isfinite().all()


def test_attention_to_few_keys_by_many_heads_is_scaled_dot_product_attention_of_repeated_keys():
    own = started(Attention(D, E, heads=H, kv_heads=1))
    x_BTD, kv_BSE = torch.randn(B, T, D), torch.randn(B, S, E)
    q_BHTK = own.q(x_BTD).unflatten(2, (H, 4)).transpose(1, 2)
    k_BHSK, v_BHSK = (part[:, None].repeat(1, H, 1, 1) for part in own.kv(kv_BSE).chunk(2, 2))
    expected = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK).transpose(1, 2).flatten(2)
    close(own(x_BTD, kv_BSE, keep_BT=WHOLE_BT, keep_BS=torch.ones(B, S, dtype=torch.bool)), own.out(expected))


def test_heads_whose_width_is_given_need_not_divide_the_models():
    model = {"inputs": {"x": "B T 16"}, "graph": {"node": {"block": "attention", "in": "x", "heads": 3}}}
    with pytest.raises(ConfigError, match="the width must split evenly into heads"):
        check_model(model)
    model["graph"]["node"]["d_head"] = 5
    assert check_model(model).sink.shape[2] == 16


SPARSE = {"top_k": 3, "index_heads": 5, "d_index": 8, "index_position": Part("rotary", {"share": 0.5})}
LATENT = {"heads": H, "d_latent": 8, "d_query": 10, "d_head": 6, "d_turned": 4, "d_value": 3, "mask": "causal"}


def sparse(**arguments):
    return filled(SparseLatentAttention(D, **{**LATENT, **SPARSE, **arguments})).double()


def index_scores(indexer, x_TD, r_TQ, share):
    """Return the scores of the indexer by loops over queries, keys and heads."""
    heads, K = indexer.weights.out_features, indexer.k.out_features
    k_TK = F.layer_norm(indexer.k(x_TD), (K,), indexer.norm.weight, indexer.norm.bias, 1e-6)
    q_THK, w_TH = indexer.q(r_TQ).view(-1, heads, K), indexer.weights(x_TD)

    def turned(x_K, place):
        y_K, R = x_K.clone(), int(K * share)
        for i in range(R // 2):
            angle = torch.tensor(place * 10000.0 ** (-2 * i / R), dtype=x_K.dtype)
            a, b = x_K[i], x_K[i + R // 2]
            y_K[i], y_K[i + R // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return y_K

    score_TS = torch.zeros(len(x_TD), len(x_TD), dtype=x_TD.dtype)
    for t in range(len(x_TD)):
        for s in range(t + 1):
            for h in range(heads):
                score_TS[t, s] += w_TH[t, h] * F.relu(turned(q_THK[t, h], t) @ turned(k_TK[s], s)) / (heads * K) ** 0.5
    return score_TS


def test_sparse_latent_attention_reads_the_keys_that_score_highest_and_its_indexer_follows_the_weights():
    own = sparse(align=0.7)
    x_BTD = torch.randn(B, T, D, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    y_BTD, loss_B = own(x_BTD, keep_BT=WHOLE_BT)
    w_BHTS = own.weights(x_BTD, keep_BT=WHOLE_BT)
    q_BHTK, k_BHSK, v_BHSK, _ = LatentQueryAttention.prepare(own, x_BTD, keep_BT=WHOLE_BT)
    for b in range(B):
        score_TS = index_scores(own.indexer, x_BTD[b], own.q_norm(own.q_down(x_BTD[b])), share=0.5)
        divergence = 0.0
        for t in range(T):
            chosen = score_TS[t, : t + 1].topk(min(3, t + 1)).indices
            w_HC = torch.softmax(q_BHTK[b, :, t, None] @ k_BHSK[b, :, chosen].mT / 10**0.5, -1)[:, 0]
            close(w_BHTS[b, :, t, chosen], w_HC)
            close(y_BTD[b, t], own.out((w_HC[:, None] @ v_BHSK[b, :, chosen])[:, 0].flatten()))
            p_C, log_q_C = w_HC.mean(0), torch.log_softmax(score_TS[t, chosen], 0)
            divergence += (p_C * (p_C.log() - log_q_C)).sum().item()
        assert loss_B[b].item() == pytest.approx(0.7 * divergence / T, rel=1e-4)


def test_positions_of_an_indexer_rotate():
    with pytest.raises(ValueError, match="index_position must rotate queries and keys, as rotary does, but is"):
        sparse(index_position=Part("alibi", {"heads": 5}))


def test_the_loss_of_sparse_latent_attention_reaches_its_indexer_alone():
    own = sparse()
    x_BTD = torch.randn(B, T, D, dtype=torch.double, requires_grad=True)
    y_BTD, loss_B = own(x_BTD, keep_BT=WHOLE_BT)
    loss_B.sum().backward()
    reached = {name.partition(".")[0] for name, parameter in own.named_parameters() if parameter.grad is not None}
    assert reached == {"indexer"} and x_BTD.grad is None
    own.zero_grad()
    y_BTD.sum().backward()
    assert all((parameter.grad is None) == name.startswith("indexer") for name, parameter in own.named_parameters())


@torch.no_grad()
def test_sparse_latent_attention_to_all_keys_is_latent_query_attention():
    own = sparse(top_k=T)
    dense = LatentQueryAttention(D, **LATENT).double()
    dense.load_state_dict(own.state_dict(), strict=False)
    x_BTD = torch.randn(B, T, D, dtype=torch.double)
    close(own(x_BTD, keep_BT=WHOLE_BT)[0], dense(x_BTD, keep_BT=WHOLE_BT))


@pytest.mark.parametrize("mask", ["causal", None])
def test_sparse_latent_attention_decodes_with_few_keys(mask):
    for case in cases_of(REGISTRY.blocks["sparse_latent_attention"], {"mask": mask, "top_k": 2}):
        rules.ignores_padding_that_comes_last(case)
        rules.ignores_padding_that_comes_first(case)
        if case.decoder:
            rules.steps_as_it_reads(case)
            rules.steps_in_a_search(case)


@pytest.mark.parametrize("kind", ["latent_attention", "latent_query_attention"])
@pytest.mark.parametrize(
    "scores", [{"block": "softmax", "beta": 0.9}, {"block": "softcap", "cap": 0.5}, {"block": "sink", "heads": 2}]
)
def test_latent_attention_decodes_with_any_scores(kind, scores):
    plain, *_ = cases_of(REGISTRY.blocks[kind], {"mask": "causal"})
    case, *_ = cases_of(REGISTRY.blocks[kind], {"mask": "causal", "scores": scores})
    assert case.decoder is not None
    rules.steps_as_it_reads(case)
    rules.steps_in_a_search(case)
    with torch.no_grad():
        assert not torch.allclose(case.network(**case.tensors()), plain.network(**plain.tensors()), rtol=1e-3)


def network(**arguments):
    node = {"block": "attention", "in": "x", "heads": 4, "mask": "causal", **arguments}
    return build_network(check_model({"inputs": {"x": "B N 16"}, "graph": {"node": node}}), seed=1)


def test_a_kind_of_norm_without_a_norm_is_refused():
    with pytest.raises((ConfigError, ValueError), match="there is no norm: write qk_norm: rmsnorm"):
        network(qk_norm_kind="joint")


@pytest.mark.parametrize(("bias", "maps"), [(True, {"qkv", "out"}), (False, set()), ("qkv", {"qkv"}), ("out", {"out"})])
def test_biases_match_the_maps_that_bias_names(bias, maps):
    names = {name.removeprefix("node.block.") for name in network(bias=bias).state_dict()}
    assert names == {"qkv.weight", "out.weight"} | {f"{name}.bias" for name in maps}


@pytest.mark.parametrize("bias", ["yes", 1])
def test_another_value_of_bias_is_refused(bias):
    with pytest.raises(ConfigError, match=f"bias must be one of true, false, qkv, out, except_keys, but is {bias!r}"):
        network(bias=bias)
