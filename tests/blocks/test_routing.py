"""Routers of mixtures of experts against those of Hugging Face's DeepSeek-V3 and DeepSeek-V2, and their balancing."""

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from tfm_blocks.blocks.experts import ExpertRouter, GatedMixtureOfExperts
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.values import Part

B, T, D, INNER, E, K = 3, 6, 7, 5, 6, 2
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
WHOLE = torch.ones(B, T, dtype=torch.bool)
GROUPS = {"groups": 3, "top_groups": 2, "routed_scale": 2.5}
SIZES = {
    "hidden_size": D, "moe_intermediate_size": INNER, "n_routed_experts": E, "n_shared_experts": 1,
    "num_experts_per_tok": K, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip


def mixture(routing, **arguments):
    own = GatedMixtureOfExperts(D, d_ff=INNER, experts=E, top_k=K, shared=1, router=routing, **arguments)
    for index, parameter in enumerate(own.parameters()):
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(index))
    return own.eval()


def with_weights_of(own, theirs, correction):
    gate, up = own.shared.inner.weight.chunk(2)
    weights = {
        "gate.weight": own.router.map.weight,
        "experts.gate_up_proj": own.experts.inner.weight,
        "experts.down_proj": own.experts.out.weight,
        "shared_experts.gate_proj.weight": gate,
        "shared_experts.up_proj.weight": up,
        "shared_experts.down_proj.weight": own.shared.out.weight,
        **correction,
    }
    theirs.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return theirs.eval()


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_sigmoid_router_equals_deepseek_v3s_in_output_and_gradients(renormalise):
    own = mixture(Part("sigmoid_router", GROUPS), renormalise=renormalise)
    theirs = DeepseekV3MoE(DeepseekV3Config(**SIZES, norm_topk_prob=renormalise))
    with_weights_of(own, theirs, {"gate.e_score_correction_bias": own.router.routing.correction})
    y_BTD, expected = own(INPUTS, keep_BT=WHOLE)[0], theirs(INPUTS)
    torch.testing.assert_close(y_BTD, expected, rtol=1e-4, atol=1e-5)
    y_BTD.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own.router.map.weight.grad, theirs.gate.weight.grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_groups_of_the_softmax_router_equal_deepseek_v2s():
    own = mixture(Part("softmax_router", GROUPS), renormalise=False)
    theirs = DeepseekV2Moe(DeepseekV2Config(**SIZES, num_attention_heads=1, topk_method="group_limited_greedy"))
    with_weights_of(own, theirs, {})
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE)[0], theirs(INPUTS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax_router", "sigmoid_router"])
@torch.no_grad()
def test_groups_leave_only_experts_of_the_best_groups(name):
    own = mixture(Part(name, {**GROUPS, "top_groups": 1}))
    assert (own.router(INPUTS).chosen_BTK // (E // 3)).diff(dim=2).eq(0).all()
    free = mixture(Part(name))
    assert (free.router(INPUTS).chosen_BTK // (E // 3)).diff(dim=2).ne(0).any()


@torch.no_grad()
def test_the_correction_changes_the_choice_but_no_weight():
    own = mixture(Part("sigmoid_router"), renormalise=False)
    own.router.routing.correction.zero_()
    own.router.routing.correction[4] = 10.0
    choice = own.router(INPUTS)
    assert (choice.chosen_BTK[:, :, 0] == 4).all()
    torch.testing.assert_close(choice.weight_BTK[:, :, 0], (INPUTS @ own.router.map.weight[4]).sigmoid())


def test_training_the_correction_evens_out_the_load():
    own = mixture(Part("sigmoid_router"), balance=1.0)
    correction = own.router.routing.correction
    with torch.no_grad():
        correction.zero_()
        correction[0] = 2.0  # every position chooses expert 0
    steps = torch.optim.Adam([correction], lr=0.02)
    x_BTD = torch.randn(16, 32, D, generator=torch.Generator().manual_seed(2))
    keep_BT = torch.ones(16, 32, dtype=torch.bool)

    def busiest():
        chosen = own.router(x_BTD).chosen_BTK
        return chosen.flatten().bincount(minlength=E).max().item() / chosen.numel() * E

    before = busiest()
    for _ in range(200):
        steps.zero_grad()
        own(x_BTD, keep_BT=keep_BT)[1].mean().backward()
        steps.step()
    assert before == pytest.approx(E / K) and busiest() < 1.2


@torch.no_grad()
def test_experts_with_underflowing_sigmoids_give_finite_numbers():
    own = mixture(Part("sigmoid_router"))
    own.router.map.weight.fill_(-1000.0)
    y_BTD, loss_B = own(torch.ones(B, T, D), keep_BT=WHOLE)
    assert y_BTD.isfinite().all() and loss_B.isfinite().all()


@torch.no_grad()
def test_the_correction_adds_nothing_to_the_loss():
    own = mixture(Part("sigmoid_router"))
    before = own(INPUTS, keep_BT=WHOLE)[1]
    own.router.routing.correction += 3.0  # the same for all experts: the choice is the same
    assert torch.equal(own(INPUTS, keep_BT=WHOLE)[1], before)


def model(**ffn):
    node = {"block": "gated_moe", "in": "x", "d_ff": 5, "experts": 6, **ffn}
    return {"inputs": {"x": "B T 8"}, "graph": {"ffn": node}}


@pytest.mark.parametrize(
    ("ffn", "rule"),
    [
        ({"router": {"block": "sigmoid_router", "groups": 4}}, "groups must divide the number of experts"),
        ({"top_k": 3, "router": {"block": "softmax_router", "groups": 3}}, "top_k must be at most the 2 experts"),
        ({"router": {"block": "softmax_router", "groups": 2, "top_groups": 3}}, "top_groups <= groups"),
        ({"router": "softmax"}, "no router is called 'softmax'"),
    ],
)
def test_groups_that_do_not_fit_are_refused(ffn, rule):
    with pytest.raises((ConfigError, ValueError), match=rule):
        build_network(check_model(model(**ffn)), seed=1)


def test_a_biased_router_is_a_linear_map_with_a_bias():
    own = ExpertRouter(D, experts=E, top_k=K, renormalise=True, routing=Part("biased_softmax_router"))
    plain = nn.Linear(D, E)
    with torch.no_grad():
        own.map.weight.copy_(plain.weight)
        own.routing.bias.copy_(plain.bias)
    best = plain(INPUTS).topk(K, 2)
    assert torch.equal(own(INPUTS).chosen_BTK, best.indices)
    torch.testing.assert_close(own(INPUTS).weight_BTK, best.values.softmax(2))
