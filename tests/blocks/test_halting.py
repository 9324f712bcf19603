"""A Universal Transformer with time steps and adaptive halting, against loops over positions and steps."""

import math

import pytest
import torch
from torch.nn import functional as F

from tfm_blocks.blocks.halting import AdaptiveHalting
from tfm_blocks.blocks.position import Sinusoidal, Timestep
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.network.contract.expectations import expect_steps

B, T, D, HEADS, STEPS, VOCAB = 3, 7, 8, 2, 5, 23
LENGTHS = (7, 4, 6)
EPSILON, PONDER = 0.01, 0.3
MODEL = {
    "inputs": {"tgt": "B T"},
    "args": {"d_model": D, "heads": HEADS, "d_ff": 12, "vocab": VOCAB},
    "add_norm": "post",
    "graph": {
        "emb": {"block": "embedding", "in": "tgt"},
        "body": {
            "repeat": {"times": STEPS, "share": True},
            "layer": {
                "signal": {"block": "sinusoidal"},
                "time": {"block": "timestep", "step": "i+1"},
                "self": {"block": "attention", "mask": "causal"},
                "ffn": {"block": "ffn"},
            },
        },
        "halted": {"block": "adaptive_halting", "in": ["emb", "body.*"], "ponder": PONDER, "epsilon": EPSILON},
        "logits": {"block": "unembed"},
    },
}


@pytest.fixture
def network():
    network = build_network(check_model(MODEL), seed=1).eval()
    with torch.no_grad():
        network["halted"].block.bias.fill_(-0.7)  # so that positions halt after different numbers of steps
        network["halted"].block.weight.normal_(generator=torch.Generator().manual_seed(3))
    return network


@pytest.fixture
def ids_BT():
    drawn_BT = torch.randint(4, VOCAB, (B, T), generator=torch.Generator().manual_seed(2))
    return drawn_BT.masked_fill(torch.arange(T) >= torch.tensor(LENGTHS)[:, None], 0)


def signal(number):
    """Return the sinusoidal vector of a position or a time step, entry by entry."""
    vector = []
    for i in range(D // 2):
        angle = number / 10000 ** (2 * i / D)
        vector += [math.sin(angle), math.cos(angle)]
    return torch.tensor(vector)


def apply_layer(w, s_TD, step):
    """Compute the layer for one sequence, head by head and position by position."""
    x_TD = torch.stack([s_D + signal(position) + signal(step) for position, s_D in enumerate(s_TD)])
    q_TD, k_TD, v_TD = F.linear(x_TD, w["self.block.qkv.weight"], w["self.block.qkv.bias"]).chunk(3, 1)
    rows = []
    for t in range(len(x_TD)):
        heads = []
        for one in torch.arange(D).chunk(HEADS):
            a_S = torch.softmax(k_TD[: t + 1, one] @ q_TD[t, one] / math.sqrt(len(one)), 0)
            heads.append(a_S @ v_TD[: t + 1, one])
        rows.append(torch.cat(heads))
    y_TD = x_TD + F.linear(torch.stack(rows), w["self.block.out.weight"], w["self.block.out.bias"])
    y_TD = F.layer_norm(y_TD, (D,), w["self.post.norm.weight"], w["self.post.norm.bias"])
    f_TF = torch.relu(F.linear(y_TD, w["ffn.block.inner.weight"], w["ffn.block.inner.bias"]))
    z_TD = y_TD + F.linear(f_TF, w["ffn.block.out.weight"], w["ffn.block.out.bias"])
    return F.layer_norm(z_TD, (D,), w["ffn.post.norm.weight"], w["ffn.post.norm.bias"])


def halt(w, s_D, after):
    """Return the output, number of steps and remainder of one position from its states after each step, `after`."""
    total, y_D = 0.0, torch.zeros(D)
    for step, next_D in enumerate(after, 1):
        p = 1 / (1 + math.exp(-float(w["weight"] @ s_D + w["bias"])))
        if total + p > 1 - EPSILON or step == STEPS:
            return y_D + (1 - total) * next_D, step, 1 - total
        total, y_D, s_D = total + p, y_D + p * next_D, next_D
    raise AssertionError


def reference(network, ids_BT):
    """Return the logits, ponder cost and step counts of each sequence."""
    state = {name: value.detach() for name, value in network.state_dict().items()}
    layer = {name.removeprefix("body.0."): value for name, value in state.items()}
    own = {name.removeprefix("halted.block."): value for name, value in state.items()}
    logits, costs, steps = [], [], []
    for ids_T, length in zip(ids_BT, LENGTHS, strict=True):
        states = [F.embedding(ids_T[:length], state["emb.block.weight"]) * math.sqrt(D)]
        for step in range(1, STEPS + 1):
            states.append(apply_layer(layer, states[-1], step))
        halted = [halt(own, states[0][t], [one[t] for one in states[1:]]) for t in range(length)]
        logits.append(F.linear(torch.stack([y_D for y_D, _, _ in halted]), state["logits.block.weight"]))
        costs.append(PONDER * sum(count + rest for _, count, rest in halted) / length)
        steps.append([count for _, count, _ in halted])
    return logits, torch.tensor(costs), steps


@torch.no_grad()
def test_logits_and_ponder_cost_match_a_loop_over_steps_and_positions(network, ids_BT):
    expected, costs_B, steps = reference(network, ids_BT)
    x_BTD, losses = network.trunk_with_losses({"tgt": ids_BT})
    for logits_TV, expected_TV in zip(network.head(x_BTD), expected, strict=True):
        assert (logits_TV[: len(expected_TV)] - expected_TV).abs().max() <= 1e-5
    torch.testing.assert_close(losses["halted"], costs_B, rtol=1e-5, atol=1e-6)
    assert len({count for row in steps for count in row}) >= 3


def test_a_step_of_decoding_equals_the_whole_pass(network, ids_BT):
    with torch.no_grad():
        expect_steps(network, {"tgt": ids_BT.clamp(min=4)}, range(T))


def test_a_smaller_ponder_cost_is_learned_by_halting_earlier():
    torch.manual_seed(1)
    block = AdaptiveHalting(D, ponder=1.0)
    for name, _ in block.named_parameters():
        block.initialise(name, torch.Generator().manual_seed(1))
    states, keep_BN = [torch.randn(B, T, D) for _ in range(STEPS + 1)], torch.ones(B, T, dtype=torch.bool)
    optimizer, costs = torch.optim.SGD(block.parameters(), 0.3), []
    for _ in range(60):
        cost = block(states, keep_BN=keep_BN)[1].mean()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        costs.append(cost.item())
    assert costs[-1] < costs[0] - 0.1


def test_weights_of_the_steps_add_up_to_one_at_every_position():
    probabilities = [torch.rand(B, T) * 0.6 for _ in range(STEPS)]
    weights, _ = AdaptiveHalting(D).halt(probabilities)
    torch.testing.assert_close(sum(weights), torch.ones(B, T))
    assert all((weight_BN >= 0).all() for weight_BN in weights)


def test_a_timestep_adds_the_same_vector_everywhere_which_is_the_one_of_that_position():
    x_BND = torch.randn(B, T, D)
    table_ND = Sinusoidal(D)(torch.zeros(1, 4, D))[0]
    torch.testing.assert_close(Timestep(D, step=3)(x_BND), x_BND + table_ND[3])


def test_shared_layers_differ_by_their_timestep_and_share_all_weights():
    spec = check_model(MODEL)
    steps = [node.arguments["step"] for node in spec.nodes if node.block == "timestep"]
    assert steps == [1, 2, 3, 4, 5]
    assert all(node.owner.startswith("body.0.") for node in spec.nodes if node.block in ("attention", "ffn"))
    assert not any(name.startswith("body.1") for name in build_network(spec, seed=1).state_dict())
