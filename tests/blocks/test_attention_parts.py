"""The parts and arguments of attention combine, in windows too: against loops in float64, and token by token."""

import itertools
import math
import random

import pytest
import torch

import tfm_blocks.blocks  # noqa: F401
from tests.blocks.test_attention import keep
from tests.blocks.test_attention_kinds import filled
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.call import module_of
from tfm_blocks.network.contract import rules
from tfm_blocks.network.contract.case import cases_of
from tfm_blocks.registry.blocks import REGISTRY

D, H, R, FIRST, N, SHORT = 16, 4, 5, 2, 66, 9  # a window of R is computed in blocks of N
WINDOWS = {
    "attention": {},
    "restricted_attention": {"r": R},
    "dilated_attention": {"r": R, "dilation": 2},
    "restricted_global_attention": {"r": R, "first": FIRST},
    "segment_attention": {"segment": R, "memory": R + 2},
}
FACTORS = {
    "block": list(WINDOWS),
    "mask": [None, "causal"],
    "qk_norm_kind": [None, "head", "head_gains", "joint", "post_position", "queries"],
    "gate": [None, "sigmoid_gate", "headwise_gate"],
    "clip_qkv": [None, 0.5],
    "bias": [True, False, "qkv", "out", "except_keys"],
    "v_norm": [None, "rmsnorm"],
    "scores": ["softmax", "softcap", "sink"],
    "position": [None, "none", "rotary", "alibi", "relative_sinusoidal"],
    "kv_heads": [None, 2],
    "d_value": [None, 3],
    "forget_gate": [None, True],
}


def possible(row):
    """Return True unless the row, or a part of it, has a forget gate outside of causal attention to all keys."""
    causal = row.get("mask", "causal") == "causal" and row.get("block", "attention") == "attention"
    return causal or not row.get("forget_gate")


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def pairwise():
    """Return rows such that every pair of values of two factors occurs in a row."""
    draw = random.Random(0)
    missing = {
        pair
        for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2)
        for pair in itertools.product([(a, one) for one in first], [(b, one) for one in second])
        if possible(dict(pair))
    }
    rows = []
    while missing:
        drawn = ({name: draw.choice(values) for name, values in FACTORS.items()} for _ in range(100))
        rows.append(max(filter(possible, drawn), key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


def written(row):
    """Return the arguments of a row as a model file has them."""
    arguments = {key: value for key, value in row.items() if value is not None and key != "block"}
    norm = {"qk_norm": "rmsnorm"} if row["qk_norm_kind"] else {}
    kind = {} if row["qk_norm_kind"] else {"qk_norm_kind": "head"}
    heads = {
        key: {"block": row[key], "heads": H}
        for key, names in (
            ("gate", ["headwise_gate"]),
            ("scores", ["sink"]),
            ("position", ["alibi", "relative_sinusoidal"]),
        )
        if row[key] in names
    }
    capped = {"scores": {"block": "softcap", "cap": 0.7}} if row["scores"] == "softcap" else {}
    return {**arguments, **norm, **kind, **heads, **capped, **WINDOWS[row["block"]], "heads": H}


ROWS = pairwise()
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))


def sees(row, i, length):
    """Return the positions that position i sees."""
    causal, block = row["mask"] == "causal", row["block"]
    apart = 2 if block == "dilated_attention" else 1
    before, after = (R - 1, 0) if causal else (R // 2, (R - 1) // 2)
    near = {i + apart * step for step in range(-before, after + 1)} if block != "attention" else set(range(length))
    if block == "segment_attention":
        near = set(range(i // R * R - R - 2, (i // R + 1) * R))
    if block == "restricted_global_attention":
        near |= set(range(FIRST)) | (set(range(length)) if i < FIRST else set())
    return sorted(j for j in near if 0 <= j < length and not (causal and j > i))


def rms(x, gain=1.0):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def rotated(x_HK, position):
    K = x_HK.shape[1]
    angle_I = position * (1.0 / 10000.0 ** (torch.arange(0, K, 2, dtype=torch.float32) / K))  # rotary's are float32 too
    cos, sin = angle_I.cos().double(), angle_I.sin().double()
    a, b = x_HK.chunk(2, 1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)


def normalised(x_HK, row, position, gain, gain_HK):
    kind = row["qk_norm_kind"]
    if kind == "joint":
        x_HK = rms(x_HK.flatten(), gain).view_as(x_HK)
    elif kind in ("head", "head_gains") or (kind == "queries" and isinstance(gain, torch.Tensor)):
        x_HK = rms(x_HK, gain) * (gain_HK if kind == "head_gains" else 1.0)
    x_HK = rotated(x_HK, position) if row["position"] == "rotary" else x_HK
    return rms(x_HK, gain) if kind == "post_position" else x_HK


def by_transformer_xl(q_HK, k_SHK, before_S, state):
    """Return the terms b to d of the scores of a query, for keys at the distances `before_S` before it."""
    u_HK, v_HK, w_DD = (state[f"position.{name}"] for name in ("u", "v", "map.weight"))
    angle_SI = before_S[:, None] * torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
    r_SHK = (torch.cat((angle_SI.sin(), angle_SI.cos()), 1).double() @ w_DD.T).unflatten(1, q_HK.shape)
    return ((u_HK * k_SHK).sum(2) + ((q_HK + v_HK) * r_SHK).sum(2)) / math.sqrt(D // H)


def gated(y_HV, x_D, row, state):
    if row["gate"] is None:
        return y_HV
    factor = torch.sigmoid(state["gate.weight"] @ x_D + state.get("gate.bias", 0.0))
    return y_HV * (factor[:, None] if row["gate"] == "headwise_gate" else factor.view_as(y_HV))


def heads_of(x_D, row, state, position):
    """Return queries, keys and values of one position; each query head has its own keys and values."""
    G, K = row["kv_heads"] or H, D // H
    V = row["d_value"] or K
    bias = state.get("qkv.bias", 0.0)
    if row["bias"] == "except_keys":
        of_queries, of_values = state["qkv.part_bias"].split((H * K, G * V))
        bias = torch.cat((of_queries, torch.zeros(G * K).double(), of_values))
    qkv = state["qkv.weight"] @ x_D + bias
    qkv = qkv.clamp(-row["clip_qkv"], row["clip_qkv"]) if row["clip_qkv"] else qkv
    q, k, v = qkv.split((H * K, G * K, G * V))
    gains = ((state.get(f"{one}_norm.weight", 1.0), state.get(f"{one}_gain", 1.0)) for one in "qk")
    q_HK, k_GK = (normalised(one.view(-1, K), row, position, *gain) for one, gain in zip((q, k), gains, strict=True))
    v_GV = rms(v.view(G, V), state["v_norm.weight"]) if row["v_norm"] else v.view(G, V)
    return q_HK, *(one.repeat_interleave(H // G, 0) for one in (k_GK, v_GV))


def looped(row, state, x_ND):
    """Compute the block for one sequence without padding, position by position."""
    made = [heads_of(x_D, row, state, position) for position, x_D in enumerate(x_ND)]
    q_NHK, k_NHK, v_NHV = (torch.stack(one) for one in zip(*made, strict=True))
    slope_H = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)]).double()
    outputs = []
    for i, x_D in enumerate(x_ND):
        seen = sees(row, i, len(x_ND))
        scores = (q_NHK[i] * k_NHK[seen]).sum(2) / math.sqrt(D // H)
        scores = 0.7 * torch.tanh(scores / 0.7) if row["scores"] == "softcap" else scores
        if row["position"] == "alibi":
            scores = scores - (i - torch.tensor(seen)).abs()[:, None] * slope_H
        if row["position"] == "relative_sinusoidal":
            scores = scores + by_transformer_xl(q_NHK[i], k_NHK[seen], i - torch.tensor(seen), state)
        if row["forget_gate"]:
            gates_NH = torch.sigmoid(x_ND @ state["forget.weight"].T + state["forget.bias"])
            scores = scores + torch.stack([gates_NH[j + 1 : i + 1].log().sum(0) for j in seen])
        sink = state["scores.weight"].exp() if row["scores"] == "sink" else 0.0
        weights = scores.exp() / (scores.exp().sum(0) + sink)
        y_HV = (weights[..., None] * v_NHV[seen]).sum(0)
        y = gated(y_HV, x_D, row, state).flatten()
        outputs.append(state["out.weight"] @ y + state.get("out.bias", 0.0))
    return torch.stack(outputs)


def alone(row):
    """Build the block of a row in float64, with parameters that all have an effect."""
    graph = {"node": {"block": row["block"], "in": "x", **written(row)}}
    network = build_network(check_model({"inputs": {"x": f"B N {D}"}, "graph": graph}), seed=1)
    return filled(network.double()).eval().get_submodule("node.block")


@rows
@torch.no_grad()
def test_every_two_features_of_attention_combine_as_in_a_naive_loop(row):
    own, x_BND, keep_BN = alone(row), torch.randn(2, N, D, dtype=torch.float64), keep([N, SHORT], N)
    state, y_BND = own.state_dict(), own(x_BND, keep_BT=keep_BN)
    for y_ND, x_ND, length in zip(y_BND, x_BND, (N, SHORT), strict=True):
        torch.testing.assert_close(y_ND[:length], looped(row, state, x_ND[:length]), rtol=0, atol=1e-10)


@rows
@torch.no_grad()
def test_steps_equal_the_whole_sequence_with_every_two_features(row):
    near = {size: 3 for size in WINDOWS[row["block"]] if size in ("r", "memory")}
    case = next(cases_of(REGISTRY.blocks[row["block"]], {**written(row), **near, "mask": "causal", "D": D}))
    assert case.decoder is not None
    rules.steps_as_it_reads(case)
    rules.steps_in_a_search(case)


EXTENDED = {
    "talking_heads_attention": 4,
    "differential_attention": 2,  # with two maps a head
    "relative_attention": 4,
    "prefix_attention": 4,
}
FEATURES = {
    "d_value": 3,
    "qk_norm": "rmsnorm",
    "gate": {"block": "headwise_gate", "heads": H},
    "clip_qkv": 0.5,
    "bias": "qkv",
    "scores": {"block": "sink", "heads": H},
}


@pytest.mark.parametrize("parts", [{}, {"heads": 2}, {"heads": 4}], ids=str)
def test_parts_of_differential_attention_have_two_maps_for_each_head(parts):
    node = {"block": "differential_attention", "in": "x", "heads": 2, "gate": {"block": "headwise_gate", **parts}}
    network = build_network(check_model({"inputs": {"x": f"B N {D}"}, "graph": {"node": node}}), seed=1)
    assert network.get_submodule("node.block.gate").out_features == 4


def position_of(name):
    """Return a position that the attention takes."""
    return {"block": "alibi", "heads": H} if name == "relative_attention" else "rotary"


@pytest.mark.parametrize(("name", "heads"), EXTENDED.items())
@torch.no_grad()
def test_other_kinds_of_attention_decode_with_these_features(name, heads):
    arguments = {"heads": heads, "kv_heads": 2, "d_head": 4, "D": D, **FEATURES}
    order = {} if name == "prefix_attention" else {"mask": "causal", "position": position_of(name)}
    case = next(cases_of(REGISTRY.blocks[name], {**arguments, **order}))
    assert case.decoder is not None
    rules.steps_as_it_reads(case)
    rules.steps_in_a_search(case)


@pytest.mark.parametrize(("name", "heads"), list(EXTENDED.items())[:3])
@torch.no_grad()
def test_heads_that_share_keys_and_values_equal_heads_with_copies_of_them(name, heads):
    def made(**arguments):
        node = {"block": name, "in": "x", "heads": heads, "d_head": 4, **FEATURES, **arguments}
        node["position"] = position_of(name)
        network = build_network(check_model({"inputs": {"x": f"B N {D}"}, "graph": {"node": node}}), seed=1)
        return filled(network.double()).eval().get_submodule("node.block")

    shared, copied = made(kv_heads=2), made()
    state = shared.state_dict()
    for which in ("qkv.weight", "qkv.bias"):
        q, k, v = state[which].split(shared.qkv.parts)
        k, v = (one.unflatten(0, (2, -1)).repeat_interleave(H // 2, 0).flatten(0, 1) for one in (k, v))
        state[which] = torch.cat((q, k, v))
    copied.load_state_dict(state)
    x_BND, keep_BN = torch.randn(2, 9, D, dtype=torch.float64), keep([9, 5], 9)
    torch.testing.assert_close(shared(x_BND, keep_BT=keep_BN), copied(x_BND, keep_BT=keep_BN), rtol=0, atol=1e-10)


@pytest.mark.parametrize("selection", [None, {"block": "top_blocks", "block_size": 2, "k": 1}], ids=["all", "blocks"])
@pytest.mark.parametrize("name", ["attention", "differential_attention", "memory_attention", "relative_attention"])
def test_attention_with_a_forget_gate_keeps_every_rule_of_blocks(name, selection):
    arguments = {"heads": 2, "forget_gate": True, "mask": "causal", "selection": selection}
    breach = rules.first_breach([next(cases_of(REGISTRY.blocks[name], arguments))])
    assert breach is None, breach and breach.measured


@pytest.mark.parametrize("name", ["attention", "relative_attention", "talking_heads_attention"])
def test_attention_in_bfloat16_takes_a_bias_in_float32(name):
    graph = {"node": {"block": name, "in": "x", "heads": H, "mask": "causal", "position": "alibi"}}
    network = build_network(check_model({"inputs": {"x": f"B N {D}"}, "graph": graph}), seed=1).eval()
    x_BND = torch.randn(2, SHORT, D)
    expected_BND = network(x=x_BND)
    y_BND = network.bfloat16()(x=x_BND.bfloat16())
    assert y_BND.dtype == torch.bfloat16
    torch.testing.assert_close(y_BND.float(), expected_BND, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"block": "attention"}, "forget_gate reads the positions from key to query: add mask: causal"),
        ({"block": "restricted_attention", "r": 3, "mask": "causal"}, "forget_gate has no form in windows"),
        ({"block": "attention", "kv": "y", "mask": "causal"}, "kv is another"),
        (
            {"block": "attention", "kv": "y"},
            "forget_gate reads the positions of one sequence, but kv is another: leave it out",
        ),
    ],
)
def test_a_forget_gate_without_a_past_or_in_a_window_is_refused(node, message):
    inputs = {"x": f"B N {D}"} | ({"y": f"B S {D}"} if "kv" in node else {})
    graph = {"node": {"in": "x", "heads": H, "forget_gate": True, **node}}
    with pytest.raises(ConfigError, match=rf"graph\.node.*{message}"):
        check_model({"inputs": inputs, "graph": graph})


def test_a_part_keeps_its_bias_and_has_the_heads_of_its_attention():
    def checked(**parts):
        node = {"block": "attention", "in": "x", "heads": H, **parts}
        return check_model({"inputs": {"x": f"B N {D}"}, "graph": {"node": node}})

    gate = build_network(checked(gate={"block": "headwise_gate", "bias": False}), seed=1).get_submodule(
        "node.block.gate"
    )
    assert (gate.bias, gate.out_features) == (None, H)
    for key, part in (("scores", "sink"), ("gate", "headwise_gate"), ("position", "alibi")):
        with pytest.raises(ConfigError, match=f"{part} has heads: 1, but its attention has {H}: leave its heads out"):
            checked(**{key: {"block": part, "heads": 1}})


@pytest.mark.parametrize("gate", ["sigmoid_gate", "headwise_gate", "glu_gate"])
@pytest.mark.parametrize("written", [None, True, False])
@pytest.mark.parametrize("bias", FACTORS["bias"])
def test_a_gate_without_a_written_bias_has_one_if_queries_have_one(bias, written, gate):
    node = {"block": "attention", "in": "x", "heads": H, "bias": bias, "gate": {"block": gate, "bias": written}}
    (checked,) = check_model({"inputs": {"x": f"B N {D}"}, "graph": {"node": node}}).nodes
    gate = module_of(checked).block.gate
    biased = any(name.endswith("bias") for name, _ in gate.named_parameters())
    assert biased is (bias not in (False, "out") if written is None else written)


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "none", "alibi"])
@pytest.mark.parametrize("name", ["relative_attention", "contextual_attention"])
def test_queries_that_learned_vectors_multiply_are_not_rotated(name, position):
    graph = {"node": {"block": name, "in": "x", "heads": H, "position": position}}
    model = {"inputs": {"x": f"B N {D}"}, "graph": graph}
    if position in ("none", "alibi"):
        check_model(model)
    else:
        with pytest.raises(ConfigError, match=r"graph\.node.*learned vectors that are not rotated multiply them too"):
            check_model(model)
