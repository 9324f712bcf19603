"""Routers of mixtures of experts against the routers of Hugging Face's models, and their balancing."""

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV4Config, Ernie4_5_MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock

from tfm_blocks.blocks.experts import ExpertRouter, HashMixture, MixtureOfExperts, hash_to_experts
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import build_network, check_model
from tfm_blocks.registry.blocks import REGISTRY, block
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
    own = MixtureOfExperts(
        D, gated=True, activation=Part("silu"), d_ff=INNER, experts=E, top_k=K, shared=1, router=routing, **arguments
    )
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


@torch.no_grad()
def test_the_softmax_router_with_a_correction_equals_ernies():
    own = mixture(Part("softmax_router", {"correction": True}))
    config = Ernie4_5_MoeConfig(
        hidden_size=D, moe_intermediate_size=INNER, moe_num_experts=E, moe_k=K, moe_num_shared_experts=1, use_bias=False,
    )  # fmt: skip
    correction = own.router.routing.correction
    names = {"gate.moe_statics.e_score_correction_bias": correction[None]}
    theirs = with_weights_of(own, Ernie4_5_MoeSparseMoeBlock(config), names)
    y_BTD = own(INPUTS, keep_BT=WHOLE)[0]
    torch.testing.assert_close(y_BTD, theirs(INPUTS), rtol=1e-4, atol=1e-5)
    correction.zero_()
    assert not torch.allclose(own(INPUTS, keep_BT=WHOLE)[0], y_BTD)


V4 = {**SIZES, "num_local_experts": E, "scoring_func": "sqrtsoftplus", "swiglu_limit": 0.5, "vocab_size": 11}


@torch.no_grad()
def test_the_sqrt_softplus_router_and_the_limit_of_experts_equal_deepseek_v4s():
    own = mixture(Part("sqrt_softplus_router", {"routed_scale": 2.5}), limit=0.5)
    theirs = DeepseekV4SparseMoeBlock(DeepseekV4Config(**V4, mlp_layer_types=["moe"], num_hidden_layers=1), 0)
    with_weights_of(own, theirs, {"gate.e_score_correction_bias": own.router.routing.correction})
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE)[0], theirs(INPUTS), rtol=1e-4, atol=1e-5)


def test_weights_of_the_sqrt_softplus_router_have_finite_gradients_far_below_0():
    z_BTE = torch.full((1, 1, E), -200.0, requires_grad=True)
    REGISTRY.make(Part("sqrt_softplus_router"), E).weights(z_BTE).sum().backward()
    assert z_BTE.grad.isfinite().all()


def hashed(**arguments):
    own = HashMixture(D, vocab=11, d_ff=INNER, experts=E, top_k=K, shared=1, gated=True, **arguments)
    for index, parameter in enumerate(own.parameters()):
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(index))
    return own.eval()


def test_experts_by_token_id_equal_deepseek_v4s_in_output_and_gradients():
    router = Part("sqrt_softplus_router", {"correction": False, "routed_scale": 2.5})
    own = hashed(activation=Part("silu"), router=router, limit=0.5)
    theirs = DeepseekV4SparseMoeBlock(DeepseekV4Config(**V4, mlp_layer_types=["hash_moe"], num_hidden_layers=1), 0)
    with_weights_of(own, theirs, {"gate.tid2eid": own.experts_VK})
    ids_BT = torch.randint(0, 11, (B, T), generator=torch.Generator().manual_seed(3))
    y_BTD, expected = own(INPUTS, ids_BT), theirs(INPUTS, ids_BT)
    torch.testing.assert_close(y_BTD, expected, rtol=1e-4, atol=1e-5)
    y_BTD.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own.router.map.weight.grad, theirs.gate.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (6, 6), (8, 2), (30, 4)])
def test_a_hash_gives_each_id_different_experts_and_each_expert_its_fraction_of_the_ids(experts, top_k):
    chosen_VK = hash_to_experts(5000, experts, top_k, 0)
    assert (chosen_VK.sort(1).values.diff(dim=1) > 0).all()
    counts_E = chosen_VK.flatten().bincount(minlength=experts)
    assert ((counts_E * experts / (5000 * top_k) - 1).abs() < 0.15).all()
    assert experts == top_k or not torch.equal(chosen_VK, hash_to_experts(5000, experts, top_k, 1))


def test_a_hash_has_a_seed_of_any_size():
    assert torch.equal(hash_to_experts(50, 8, 2, 2**70 + 3), hash_to_experts(50, 8, 2, 3))


def test_a_token_id_can_have_a_single_expert_and_a_choice_needs_two():
    hashed = {"block": "hash_moe", "in": "x", "ids": "ids", "vocab": 11, "d_ff": 5, "experts": 6, "top_k": 1}
    check_model({"inputs": {"x": "B T 8", "ids": "B T"}, "graph": {"ffn": hashed}})
    with pytest.raises(ConfigError, match="top_k > renormalise"):
        check_model(model(top_k=1))


@pytest.mark.parametrize("router", [{"block": "sigmoid_router"}, {"block": "softmax_router", "groups": 2}])
def test_a_router_that_chooses_is_refused_if_the_token_id_chooses(router):
    node = {"block": "hash_moe", "in": "x", "ids": "ids", "vocab": 11, "d_ff": 5, "experts": 6, "router": router}
    with pytest.raises((ConfigError, ValueError), match="router of hash_moe chooses nothing: write correction: false"):
        build_network(check_model({"inputs": {"x": "B T 8", "ids": "B T"}, "graph": {"ffn": node}}), seed=1)


@pytest.mark.parametrize("name", ["softmax_router", "sigmoid_router"])
@torch.no_grad()
def test_groups_leave_only_experts_of_the_best_groups(name):
    own = mixture(Part(name, {**GROUPS, "top_groups": 1}))
    assert (own.router(INPUTS).chosen_BTK // (E // 3)).diff(dim=2).eq(0).all()
    free = mixture(Part(name))
    assert (free.router(INPUTS).chosen_BTK // (E // 3)).diff(dim=2).ne(0).any()


CORRECTED = pytest.mark.parametrize("router", [Part("sigmoid_router"), Part("softmax_router", {"correction": True})])


@CORRECTED
@torch.no_grad()
def test_the_correction_changes_the_choice_but_no_weight(router):
    own = mixture(router, renormalise=False)
    own.router.routing.correction.zero_()
    own.router.routing.correction[4] = 10.0
    choice = own.router(INPUTS)
    assert (choice.chosen_BTK[:, :, 0] == 4).all()
    z_BTE = own.router.map(INPUTS)
    p_BTE = z_BTE.sigmoid() if router.block == "sigmoid_router" else z_BTE.softmax(2)
    torch.testing.assert_close(choice.weight_BTK[:, :, 0], p_BTE[:, :, 4])


@CORRECTED
def test_training_the_correction_evens_out_the_load(router):
    own = mixture(router, balance=1.0)
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
def test_the_scale_of_an_expert_multiplies_its_weight_after_renormalising():
    own = mixture(Part("softmax_router", {"expert_scales": True}))
    scales_E = own.router.routing.expert_scales
    choice = own.router(INPUTS)
    scales_E.copy_(torch.arange(1.0, E + 1))
    scaled = own.router(INPUTS)
    plain_BTK = scaled.weight_BTK / (scaled.chosen_BTK + 1)
    assert torch.equal(scaled.chosen_BTK, choice.chosen_BTK)
    torch.testing.assert_close(plain_BTK.sum(2), torch.ones(B, T))


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
    node = {"block": "moe", "gated": True, "in": "x", "d_ff": 5, "experts": 6, **ffn}
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


@pytest.mark.parametrize(
    ("category", "node", "kind"),
    [
        ("router", {"block": "moe", "d_ff": 5, "experts": 6}, "Routing of tfm_blocks.blocks.routing"),
        ("position", {"block": "attention", "heads": 2}, "RotatesHeads or BiasesScores or ComparesPairs of"),
    ],
)
def test_a_part_of_another_kind_is_refused(category, node, kind, monkeypatch):
    monkeypatch.setattr(REGISTRY, "blocks", dict(REGISTRY.blocks))
    block("plain", "x: B T D -> B T D", category=category, source="none")(Plain)
    with pytest.raises(ConfigError, match=f"plain must be a {kind}"):
        check_model({"inputs": {"x": "B T 8"}, "graph": {"node": {"in": "x", category: "plain", **node}}})


class Plain(nn.Module):
    def forward(self, x_BTD):
        return x_BTD


def test_a_biased_router_is_a_linear_map_with_a_bias():
    own = ExpertRouter(D, experts=E, top_k=K, renormalise=True, routing=Part("biased_softmax_router"))
    plain = nn.Linear(D, E)
    with torch.no_grad():
        own.map.weight.copy_(plain.weight)
        own.routing.bias.copy_(plain.bias)
    best = plain(INPUTS).topk(K, 2)
    assert torch.equal(own(INPUTS).chosen_BTK, best.indices)
    torch.testing.assert_close(own(INPUTS).weight_BTK, best.values.softmax(2))
