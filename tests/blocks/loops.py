"""Blocks as loops over positions, queries, blocks or segments: readable references for tests and benchmarks.

Each function takes the block, whose weights it uses, and computes its output. Rows have no padding unless `kept` names
the positions without it.
"""

import math

import torch
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import Span


def rotated(x_K, t):
    """Rotate the pairs of elements as complex numbers."""
    angle_I = t * 10000.0 ** (-torch.arange(0, len(x_K), 2, dtype=x_K.dtype) / len(x_K))
    x_I = torch.view_as_complex(x_K.unflatten(0, (-1, 2)).contiguous())
    return torch.view_as_real(x_I * torch.polar(torch.ones_like(angle_I), angle_I)).flatten()


def retention(own, x_TD, slope=None, **options):
    """Compute retention for one sentence, head by head and position by position."""
    qkv = own.qkv(x_TD)
    q, k, v = (F.silu(qkv) if "qkv_activation" in options else qkv).chunk(3, 1)
    H, K, rotate = own.heads, q.shape[1] // own.heads, rotated if "rotate" not in options else lambda x_K, t: x_K
    heads = []
    for head in range(H):
        own_head = slice(head * K, (head + 1) * K)
        rate = 1 - 2.0 ** (-5 - head) if slope is None else math.exp(-slope * 2.0 ** (-8 * (head + 1) / H))
        memory_KK, outputs = x_TD.new_zeros(K, K), []
        for t in range(len(x_TD)):
            memory_KK = rate * memory_KK + torch.outer(rotate(k[t, own_head], t), v[t, own_head]) / K**0.5
            outputs.append(rotate(q[t, own_head], t) @ memory_KK)
        heads.append(torch.stack(outputs))
    if "out_norm" in options:
        y_TX, eps = torch.cat(heads, 1), options["out_norm"].arguments.get("eps", 1e-6)
        normed = own.out_norm.weight * y_TX / (y_TX.square().mean(1, keepdim=True) + eps).sqrt()
    else:
        moments = ((y, y.mean(1, keepdim=True), y.var(1, correction=0, keepdim=True)) for y in heads)
        normed = torch.cat([(y - mean) / (variance + own.eps).sqrt() for y, mean, variance in moments], 1)
    gate = torch.sigmoid if "gate_activation" in options else F.silu
    return own.out(gate(own.gate(x_TD)) * normed)


def convolved(x_BTC, kernel_CK):
    """Convolve each channel over the last K positions."""
    T, K = x_BTC.shape[1], kernel_CK.shape[1]
    return sum(
        F.pad(x_BTC[:, : max(T - back, 0)], (0, 0, min(back, T), 0)) * kernel_CK[:, -1 - back] for back in range(K)
    )


def delta_rule(own, x_BTD):
    """Compute fla's GatedDeltaProduct: the maps of keys, values and β have a block of heads for each step."""
    (B, T, _), H, steps, groups, (K, _, V) = x_BTD.shape, own.memories, own.steps, own.heads[0], own.head_widths
    q, k, v = F.silu(convolved(x_BTD @ own.qkv.weight.T, own.near)).split(own.qkv.parts, 2)
    q, k, v = q.view(B, T, groups, K), k.view(B, T, steps, groups, K), v.view(B, T, steps, H, V)
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one.repeat_interleave(H // groups, -2) for one in (q, k))
    rates = x_BTD @ own.rates.weight.T
    beta = own.beta_max * rates[..., : steps * H].sigmoid().view(B, T, steps, H)
    faded = own.channel_rates(x_BTD) if hasattr(own, "channel_rates") else rates[..., steps * H :]
    alpha = (-own.fade.exp()[:, None] * F.softplus(faded + own.fade_bias).view(B, T, H, -1)).exp()
    memory, outputs = x_BTD.new_zeros(B, H, K, V), []
    for t in range(T):
        memory = memory * alpha[:, t, :, :, None]
        for step in range(steps):
            known = torch.einsum("bhk,bhkv->bhv", k[:, t, step], memory)
            new = beta[:, t, step, :, None] * (v[:, t, step] - known)
            memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, t, step], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory) / K**0.5)
    y = torch.stack(outputs, 1)
    y = y / (y.square().mean(-1, keepdim=True) + own.eps).sqrt() * own.gain
    return (own.activation(own.gate(x_BTD)) * y.flatten(2)) @ own.out.weight.T


def matrix_lstm(own, x_BTD):
    """Compute the layer position by position, with the gates of the paper and without a stabiliser."""
    H, (K, _, V) = own.heads, own.head_widths
    q, k, v = (part.unflatten(2, (H, -1)) for part in own.qkv(x_BTD).split(own.qkv.parts, 2))
    gates = own.rates(x_BTD) + torch.cat((own.input_bias, own.forget_bias))
    if own.gate_cap:
        gates = own.gate_cap * torch.tanh(gates / own.gate_cap)
    put, kept = gates[..., :H].exp(), gates[..., H:].sigmoid()
    memory, total, outputs = x_BTD.new_zeros(len(x_BTD), H, K, V), x_BTD.new_zeros(len(x_BTD), H, K), []
    for t in range(x_BTD.shape[1]):
        memory = kept[:, t, :, None, None] * memory + put[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None]
        total = kept[:, t, :, None] * total + put[:, t, :, None] * k[:, t]
        query = q[:, t] / K**0.5
        norm = (query * total).sum(2).abs().clamp(min=1)
        outputs.append((query[..., None] * memory).sum(2) / norm[..., None])
    y = torch.stack(outputs, 1)
    y = (y - y.mean(3, keepdim=True)) / (y.var(3, correction=0, keepdim=True) + own.eps).sqrt()
    return own.out(own.gate(x_BTD).sigmoid() * y.flatten(2) * own.gain)


def selective_scan(own, x_BTD):
    """Compute Mamba without norms, position by position."""
    v, gate = (x_BTD @ own.maps.weight.T).chunk(2, 2)
    v = F.silu(convolved(v, own.near[:, 0]) + own.near_bias)
    rank, b, c = (v @ own.selected.weight.T).split(own.parts, 2)
    step = F.softplus(rank @ own.steps.weight.T + own.step_bias)
    memory, outputs = x_BTD.new_zeros(len(x_BTD), *own.fade.shape), []
    for t in range(x_BTD.shape[1]):
        decay = torch.exp(-own.fade.exp() * step[:, t, :, None])
        memory = decay * memory + torch.einsum("bi,bn->bin", step[:, t] * v[:, t], b[:, t])
        outputs.append(torch.einsum("bin,bn->bi", memory, c[:, t]) + own.skip * v[:, t])
    return (torch.stack(outputs, 1) * F.silu(gate)) @ own.out.weight.T


def state_space(own, x_BTD):
    """Compute Mamba-2 with its norm after the gate, head by head and position by position."""
    (B, T, _), H, groups = x_BTD.shape, own.heads, own.groups
    V, K = own.widths[0] // H, own.widths[1] // groups
    gate, near, step = (x_BTD @ own.maps.weight.T).split(own.parts, 2)
    v, b, c = F.silu(convolved(near, own.near[:, 0]) + own.near_bias).split(own.widths, 2)
    step = F.softplus(step + own.step_bias).clamp(*own.steps)
    heads = []
    for head in range(H):
        group = slice(head * groups // H * K, (head * groups // H + 1) * K)
        v_BTV, step_BT = v[..., head * V : (head + 1) * V], step[..., head]
        memory, outputs = x_BTD.new_zeros(B, K, V), []
        for t in range(T):
            written = torch.einsum("bk,bv->bkv", b[:, t, group], step_BT[:, t, None] * v_BTV[:, t])
            memory = torch.exp(-own.fade[head].exp() * step_BT[:, t])[:, None, None] * memory + written
            outputs.append(torch.einsum("bk,bkv->bv", c[:, t, group], memory) + own.skip[head] * v_BTV[:, t])
        heads.append(torch.stack(outputs, 1))
    y = (torch.cat(heads, 2) * F.silu(gate)).unflatten(2, (groups, -1))
    y = (y / (y.square().mean(3, keepdim=True) + own.eps).sqrt()).flatten(2) * own.gain
    return y @ own.out.weight.T


def gated_recurrence(own, x_BTD):
    """Compute the RG-LRU position by position."""
    parts = x_BTD.unflatten(2, (len(own.input_gate), -1))
    put, reset = (
        torch.sigmoid(torch.einsum("bthk,hkl->bthl", parts, weight).flatten(2) + bias)
        for weight, bias in ((own.input_gate, own.input_bias), (own.decay_gate, own.decay_bias))
    )
    log_rate = -own.power * F.softplus(own.fade) * reset
    outputs = [put[:, 0] * x_BTD[:, 0]]
    for t in range(1, x_BTD.shape[1]):
        written = (-torch.expm1(2 * log_rate[:, t])).sqrt() * put[:, t] * x_BTD[:, t]
        outputs.append(log_rate[:, t].exp() * outputs[-1] + written)
    return torch.stack(outputs, 1)


def shifted(x_BTD, mix_D):
    return torch.lerp(x_BTD, torch.cat((torch.zeros_like(x_BTD[:, :1]), x_BTD[:, :-1]), 1), mix_D)


def time_mixing(own, x_BTD, v=None):
    """Compute RWKV-7 position by position, with the state of the authors: rows of values, columns of keys."""
    (B, _, D), H = x_BTD.shape, own.heads
    xr, xw, xk, *xv, xa, xg = (shifted(x_BTD, mix_D) for mix_D in own.mix)
    r, k = xr @ own.query.weight.T, xk @ own.key.weight.T
    v = xv[0] @ own.value.weight.T if v is None else v
    w = -F.softplus(-(own.fade_bias + torch.tanh(xw @ own.fade_inner.weight.T) @ own.fade_outer.weight.T)) - 0.5
    a = torch.sigmoid(own.rate_bias + xa @ own.rate_inner.weight.T @ own.rate_outer.weight.T)
    g = torch.sigmoid(xg @ own.gate_inner.weight.T) @ own.gate_outer.weight.T
    kk = (k * own.removed).unflatten(2, (H, -1))
    kk = kk / kk.norm(dim=3, keepdim=True)
    k = k * (1 + (a - 1) * own.damped)
    r, w, k, v, a = (one.unflatten(2, (H, -1)) for one in (r, w, k, v, a))
    state, outputs = x_BTD.new_zeros(B, H, v.shape[3], D // H), []
    for t in range(x_BTD.shape[1]):
        found = torch.einsum("bhvk,bhk->bhv", state, -kk[:, t])
        state = state * torch.exp(-torch.exp(w[:, t]))[:, :, None]
        state = state + torch.einsum("bhv,bhk->bhvk", found, kk[:, t] * a[:, t])
        state = state + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, r[:, t]))
    y = torch.stack(outputs, 1)
    y = F.group_norm(y.flatten(0, 1).flatten(1), H, own.gain, own.bias, own.eps).view(*x_BTD.shape[:2], -1)
    y = y + ((r * k * own.bonus.view(H, -1)).sum(3, keepdim=True) * v).flatten(2)
    return (g * y) @ own.out.weight.T


def attended(q_K, k_MK, v_MV):
    """Return the attention output of a query, and its weights."""
    weights = torch.softmax(k_MK @ q_K / math.sqrt(len(q_K)), 0)
    return weights @ v_MV, weights


def heads_of(own, x_ND):
    """Return the queries of one sequence, and its keys and values, repeated if query heads share them: x_HNK."""
    q_HNK, k_GNK, v_GNV = (heads[0] for heads in own.self_heads(x_ND[None], Span(0, len(x_ND))))
    repeats = len(q_HNK) // len(k_GNK)
    return q_HNK, k_GNK.repeat_interleave(repeats, 0), v_GNV.repeat_interleave(repeats, 0)


def projected(own, outputs, x_ND):
    """Project the outputs of the heads at some positions; the output of the others is 0: y_ND."""
    y_ND = [own.out(outputs[t]) if t in outputs else torch.zeros_like(x_D) for t, x_D in enumerate(x_ND)]
    return torch.stack(y_ND)


def chosen_keys(q_NK, k_NK, t, seen, block_size, k):
    """Return the keys that query t of a head attends to: of its own block, and of the k - 1 best others among `seen`."""
    products = {}
    for block in {s // block_size for s in seen} - {t // block_size}:
        keys = [k_NK[s] for s in seen if s // block_size == block]
        products[block] = (q_NK[t] @ sum(keys) / len(keys)).item()
    best = {t // block_size, *sorted(products, key=products.get, reverse=True)[: k - 1]}
    return [s for s in seen if s // block_size in best]


def chosen_blocks(own, x_ND, causal, kept):
    """Compute attention with `selection: top_blocks` at the positions `kept`, query by query and head by head."""
    made, outputs, chosen = heads_of(own, x_ND), {}, own.selection
    for t in kept:
        seen, heads = [s for s in kept if s <= t or not causal], []
        for q_NK, k_NK, v_NK in zip(*made, strict=True):
            keys = chosen_keys(q_NK, k_NK, t, seen, chosen.block_size, chosen.k)
            heads.append(attended(q_NK[t], k_NK[keys], v_NK[keys])[0])
        outputs[t] = torch.cat(heads)
    return projected(own, outputs, x_ND)


def three_outputs(own, q_XK, k_NK, v_NV, t, seen):
    """Return the compressed, selected and near outputs of the query heads that share keys, at position t."""
    size, blocks = own.block_size, {}
    for s in seen:
        blocks.setdefault(s // size, []).append(s)
    complete = [block for block in blocks if (block + 1) * size - 1 <= t]
    compressed = [torch.zeros_like(v_NV[0]) for _ in q_XK]
    importance = {}
    if complete:
        means = [torch.stack([x[blocks[block]].mean(0) for block in complete]) for x in (k_NK, v_NV)]
        compressed, weights = zip(*(attended(q_K, *means) for q_K in q_XK), strict=True)
        importance = dict(zip(complete, torch.stack(weights).mean(0).tolist(), strict=True))
    forced = {0, t // size, t // size - 1} & blocks.keys()
    others = sorted(importance.keys() - forced, key=importance.get, reverse=True)
    chosen = forced | set(others[: own.k - len(forced)])
    fine = [s for s in seen if s // size in chosen], [s for s in seen if t - own.r < s]
    return [
        (coarse_V, *(attended(q_K, k_NK[keys], v_NV[keys])[0] for keys in fine))
        for q_K, coarse_V in zip(q_XK, compressed, strict=True)
    ]


def native_sparse(own, x_ND, kept):
    """Compute native sparse attention at the positions `kept`, query by query and head by head."""
    q_HNK, k_GNK, v_GNV = (heads[0] for heads in own.self_heads(x_ND[None], Span(0, len(x_ND))))
    outputs = {}
    for t in kept:
        seen, branches = [s for s in kept if s <= t], []
        for q_XK, k_NK, v_NV in zip(q_HNK[:, t].chunk(len(k_GNK)), k_GNK, v_GNV, strict=True):
            branches += three_outputs(own, q_XK, k_NK, v_NV, t, seen)
        gates = torch.sigmoid(own.branches.weight @ x_ND[t]).view(-1, 3)
        outputs[t] = torch.cat([gate_3 @ torch.stack(three) for gate_3, three in zip(gates, branches, strict=True)])
    return projected(own, outputs, x_ND)


def with_memory(own, x_ND):
    """Compute causal attention to a memory and to the past, query by query and head by head."""
    q_HNK, *pair = heads_of(own, x_ND)
    k_HSK, v_HSK = (torch.cat(both, 1) for both in zip((own.memory_k, own.memory_v), pair, strict=True))
    outputs = {}
    for t in range(len(x_ND)):
        seen = own.memory_k.shape[1] + t + 1
        heads = zip(q_HNK[:, t], k_HSK[:, :seen], v_HSK[:, :seen], strict=True)
        outputs[t] = torch.cat([attended(*head)[0] for head in heads])
    return projected(own, outputs, x_ND)


def forgetting(own, x_ND):
    """Compute causal attention with a forget gate, query by query and head by head."""
    q_HNK, k_HNK, v_HNK = heads_of(own, x_ND)
    logs_HN, outputs = F.logsigmoid(own.forget(x_ND)).T, {}
    for t in range(len(x_ND)):
        heads = []
        for q_NK, k_NK, v_NK, logs_N in zip(q_HNK, k_HNK, v_HNK, logs_HN, strict=True):
            passed_S = logs_N[1 : t + 1].flip(0).cumsum(0).flip(0)  # from each key before the query to the query
            scores_S = k_NK[: t + 1] @ q_NK[t] / math.sqrt(len(q_NK[t])) + F.pad(passed_S, (0, 1))
            heads.append(torch.softmax(scores_S, 0) @ v_NK[: t + 1])
        outputs[t] = torch.cat(heads)
    return projected(own, outputs, x_ND)


def contextual(own, x_ND):
    """Compute attention with contextual positions, query by query and head by head."""
    q_HNK, k_HNK, v_HNK = heads_of(own, x_ND)
    last, outputs = len(own.of_positions) - 1, {}
    for t in range(len(x_ND)):
        heads = []
        for q_NK, k_NK, v_NK in zip(q_HNK, k_HNK, v_HNK, strict=True):
            scores_S = k_NK[: t + 1] @ q_NK[t] / math.sqrt(len(q_NK[t]))
            place_S = scores_S.sigmoid().flip(0).cumsum(0).flip(0).clamp(max=last)
            below_S, e_PK = place_S.long().clamp(max=last - 1), own.of_positions
            near_S = e_PK[below_S] @ q_NK[t] * (below_S + 1 - place_S)
            far_S = e_PK[below_S + 1] @ q_NK[t] * (place_S - below_S)
            heads.append(torch.softmax(scores_S + near_S + far_S, 0) @ v_NK[: t + 1])
        outputs[t] = torch.cat(heads)
    return projected(own, outputs, x_ND)


def continued(own, h_BTD, cat_BSD, position=None):
    """Attend from the last T of S positions to all of them up to their own, as in Transformer-XL's attention."""
    H = own.widths.heads
    w_q, w_k, w_v = own.qkv.weight.chunk(3)
    b_q, b_k, b_v = own.qkv.bias.chunk(3)
    T, S, heads = h_BTD.shape[1], cat_BSD.shape[1], []
    made = h_BTD @ w_q.T + b_q, cat_BSD @ w_k.T + b_k, cat_BSD @ w_v.T + b_v
    later_TS = torch.ones(T, S, dtype=torch.bool).triu(1 + S - T)
    far_TS = torch.arange(S - T, S)[:, None] - torch.arange(S)
    for head, (q_BTK, k_BSK, v_BSK) in enumerate(zip(*(x.chunk(H, 2) for x in made), strict=True)):
        scores_BTS = q_BTK @ k_BSK.mT
        if position == "relative_sinusoidal":
            scores_BTS = scores_BTS + relative(own.position, head, q_BTK, k_BSK, far_TS)
        slope = 2 ** (-8 * (head + 1) / H) if position == "alibi" else 0
        scores_BTS = scores_BTS / math.sqrt(q_BTK.shape[2]) - slope * far_TS
        heads.append(scores_BTS.masked_fill(later_TS, -math.inf).softmax(2) @ v_BSK)
    return torch.cat(heads, 2) @ own.out.weight.T + own.out.bias


def relative(encoding, head, q_BTK, k_BSK, far_TS):
    """Return the terms b, c and d of section 3.3 of Transformer-XL, with the sinusoid of each pair's distance."""
    D = encoding.map.in_features
    angle_TSI = far_TS[..., None] * torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
    r_TSD = torch.cat((angle_TSI.sin(), angle_TSI.cos()), 2).to(q_BTK.dtype)
    r_TSK = r_TSD @ encoding.map.weight.chunk(len(encoding.u))[head].T
    return (k_BSK @ encoding.u[head])[:, None] + torch.einsum("btk,tsk->bts", q_BTK + encoding.v[head], r_TSK)


def segments(own, x_BTD):
    """Compute one layer of Transformer-XL, segment by segment, each with the detached inputs before it."""
    outputs = []
    for start in range(0, x_BTD.shape[1], own.segment):
        h_BTD = x_BTD[:, start : start + own.segment]
        before_BMD = x_BTD[:, max(0, start - own.memory) : start].detach()
        outputs.append(continued(own, h_BTD, torch.cat((before_BMD, h_BTD), 1)))
    return torch.cat(outputs, 1)
