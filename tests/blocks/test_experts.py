"""Mixtures of experts against a loop over the tokens and against Hugging Face's Mixtral."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Gemma4TextConfig, GptOssConfig, MixtralConfig, NllbMoeConfig, Qwen2MoeConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.experts import MixtureOfExperts
from tfm_blocks.blocks.feedforward import FeedForward, GatedFeedForward
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.build import check_model
from tfm_blocks.registry.values import Part

B, T, D, INNER, E, K = 3, 6, 7, 5, 4, 2
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
WHOLE = torch.ones(B, T, dtype=torch.bool)
KEEP = torch.arange(T) < torch.tensor([6, 4, 1])[:, None]
SWIGLU = {"gated": True, "activation": Part("silu")}


def mixture(**arguments):
    return with_random_weights(MixtureOfExperts(D, d_ff=INNER, experts=E, **arguments))


def expert(mixture, number):
    """Return one expert as a separate feed-forward network."""
    kind = GatedFeedForward if mixture.experts.gated else FeedForward
    bias = hasattr(mixture.experts.inner, "bias")
    one = kind(D, d_ff=INNER, bias=bias)
    one.activation = mixture.experts.activation
    for name in ("inner", "out"):
        maps, own = getattr(mixture.experts, name), getattr(one, name)
        own.weight = nn.Parameter(maps.weight[number])
        if bias:
            own.bias = nn.Parameter(maps.bias.view(E, -1)[number])
    return one


@pytest.mark.parametrize("kind", [{}, SWIGLU, {"bias": True}, {"bias": True, **SWIGLU}])
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
@torch.no_grad()
def test_a_mixture_is_a_loop_over_tokens_and_their_likeliest_experts(kind, top_k, renormalise, shared):
    own = mixture(top_k=top_k, renormalise=renormalise, shared=shared, **kind)
    y_BTD, _ = own(INPUTS, keep_BT=WHOLE)
    for b in range(B):
        for t in range(T):
            x_D = INPUTS[b, t]
            scores_E = own.router.map.weight @ x_D
            chosen = scores_E.argsort(descending=True)[:top_k].tolist()
            before_E = scores_E.softmax(0)
            after_K = scores_E[chosen].softmax(0)  # softmax after the choice of experts, which renormalises
            y_D = sum(
                (after_K[place] if renormalise else before_E[e]) * expert(own, e)(x_D[None, None])[0, 0]
                for place, e in enumerate(chosen)
            )
            if shared:
                y_D = y_D + own.shared(x_D[None, None])[0, 0]
            torch.testing.assert_close(y_BTD[b, t], y_D, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_shared_expert_of_twice_the_width_is_the_sum_of_two():
    own = mixture(shared=2, **SWIGLU)
    halves = [GatedFeedForward(D, d_ff=INNER, bias=False) for _ in range(2)]
    for number, half in enumerate(halves):
        parts = [part.chunk(2)[number] for part in own.shared.inner.weight.chunk(2)]
        half.inner.weight.copy_(torch.cat(parts))
        half.out.weight.copy_(own.shared.out.weight.chunk(2, 1)[number])
    torch.testing.assert_close(own.shared(INPUTS), halves[0](INPUTS) + halves[1](INPUTS), rtol=1e-4, atol=1e-4)


def mixtral(own):
    config = MixtralConfig(
        hidden_size=D, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=K,
        num_attention_heads=1, num_key_value_heads=1, head_dim=2, router_jitter_noise=0.0,
    )  # fmt: skip
    theirs = MixtralSparseMoeBlock(config).eval()
    weights = {
        "gate.weight": own.router.map.weight,
        "experts.gate_up_proj": own.experts.inner.weight,
        "experts.down_proj": own.experts.out.weight,
    }
    theirs.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return theirs


def test_gated_experts_equal_mixtral_in_output_and_gradients():
    own = mixture(top_k=K, **SWIGLU).double()
    theirs = mixtral(own).double()
    x_BTD = INPUTS.double()
    y_BTD, expected = own(x_BTD, keep_BT=WHOLE)[0], theirs(x_BTD)
    torch.testing.assert_close(y_BTD, expected, rtol=1e-5, atol=1e-5)  # both route in float32
    y_BTD.square().sum().backward()
    expected.square().sum().backward()
    for one, other in (
        (own.router.map.weight, theirs.gate.weight),
        (own.experts.inner.weight, theirs.experts.gate_up_proj),
        (own.experts.out.weight, theirs.experts.down_proj),
    ):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_loss_matches_mixtral_for_each_choice_and_sequence():
    own = mixture(top_k=K, balance=0.5, **SWIGLU)
    _, loss = own(INPUTS, keep_BT=KEEP)
    of_sequences = [
        load_balancing_loss_func((own.router.map(x_TD),), E, K, keep_T[None]) / K
        for x_TD, keep_T in zip(INPUTS, KEEP, strict=True)
    ]
    torch.testing.assert_close(loss, 0.5 * torch.stack(of_sequences))


@torch.no_grad()
def test_the_loss_is_balance_when_all_are_equal_and_experts_times_that_when_one_takes_all():
    own = mixture(top_k=1, renormalise=False, balance=0.1)
    own.router.map.weight.zero_()
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE)[1], torch.full((B,), 0.1))
    own.router.map.weight[2] = 100.0
    ones_BTD = torch.ones(B, T, D)
    torch.testing.assert_close(own(ones_BTD, keep_BT=WHOLE)[1], torch.full((B,), 0.1 * E))


@torch.no_grad()
def test_padding_does_not_count_and_changes_no_other_position():
    own = mixture(**SWIGLU)
    y_BTD, loss = own(INPUTS, keep_BT=KEEP)
    changed = torch.where(KEEP[:, :, None], INPUTS, 5 * INPUTS.flip(2))
    longer = F.pad(changed, (0, 0, 0, 3), value=9.0)
    again, same_loss = own(longer, keep_BT=F.pad(KEEP, (0, 3)))
    torch.testing.assert_close(again[:, :T][KEEP], y_BTD[KEEP])
    torch.testing.assert_close(same_loss, loss)


@torch.no_grad()
def test_the_loss_of_a_sequence_does_not_depend_on_its_batch():
    own = mixture(**SWIGLU)
    whole = own(INPUTS, keep_BT=KEEP)[1]
    parts = [own(INPUTS[rows], keep_BT=KEEP[rows])[1] for rows in (slice(1), slice(1, 3))]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.grid
def test_it_compiles_without_a_break_and_gradients_are_the_same():
    torch.compiler.reset()
    own = mixture(shared=1, **SWIGLU)
    results = []
    for run in (own, torch.compile(own, fullgraph=True, backend="aot_eager")):
        y_BTD, loss = run(INPUTS, keep_BT=KEEP)
        own.zero_grad()
        (y_BTD.sum() + loss.sum()).backward()
        results.append([y_BTD, loss, *(parameter.grad.clone() for parameter in own.parameters())])
    torch.testing.assert_close(results[0], results[1])


def gpt_oss(own, limit):
    config = GptOssConfig(
        hidden_size=D, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=K, swiglu_limit=limit,
    )  # fmt: skip
    theirs = GptOssMLP(config).eval()
    alternate = torch.arange(2 * INNER).view(2, INNER).T.flatten()  # their gate and value maps are interleaved
    inner, out = own.experts.inner, own.experts.out
    weights = {
        "router.weight": own.router.map.weight,
        "router.bias": own.router.routing.bias,
        "experts.gate_up_proj": inner.weight[:, alternate].transpose(1, 2),
        "experts.gate_up_proj_bias": inner.bias.view(E, -1)[:, alternate],
        "experts.down_proj": out.weight.transpose(1, 2),
        "experts.down_proj_bias": out.bias.view(E, -1),
    }
    theirs.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return theirs


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_clamped_experts_with_biases_equal_gpt_oss_in_output_and_gradients(limit):
    parts = {"activation": Part("quick_gelu"), "router": Part("biased_softmax_router")}
    own = mixture(top_k=K, gated=True, bias=True, limit=limit, offset=1.0, **parts).double()
    theirs = gpt_oss(own, limit).double()
    x_BTD = INPUTS.double()
    y_BTD, expected = own(x_BTD, keep_BT=WHOLE)[0], theirs(x_BTD)[0]
    torch.testing.assert_close(y_BTD, expected, rtol=1e-5, atol=1e-5)  # ours computes the weights in float32
    y_BTD.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own.router.routing.bias.grad, theirs.router.bias.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.experts.out.weight.grad, theirs.experts.down_proj.grad.mT, rtol=1e-4, atol=1e-4)
    bias_grad_ED = own.experts.out.bias.grad.view(E, D)
    torch.testing.assert_close(bias_grad_ED, theirs.experts.down_proj_bias.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gate_on_the_shared_expert_equals_qwen2_moe():
    own = mixture(top_k=K, shared=2, shared_gate=True, **SWIGLU)
    config = Qwen2MoeConfig(
        hidden_size=D, moe_intermediate_size=INNER, shared_expert_intermediate_size=2 * INNER, num_experts=E,
        num_experts_per_tok=K, norm_topk_prob=True,
    )  # fmt: skip
    theirs = Qwen2MoeSparseMoeBlock(config).eval()
    gate, up = own.shared.inner.weight.chunk(2)
    weights = {
        "gate.weight": own.router.map.weight,
        "experts.gate_up_proj": own.experts.inner.weight,
        "experts.down_proj": own.experts.out.weight,
        "shared_expert.gate_proj.weight": gate,
        "shared_expert.up_proj.weight": up,
        "shared_expert.down_proj.weight": own.shared.out.weight,
        "shared_expert_gate.weight": own.shared_gate.weight,
    }
    theirs.load_state_dict(weights)
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE)[0], theirs(INPUTS), rtol=1e-4, atol=1e-4)


def nllb(own, **options):
    """Return the router and the experts of NLLB-MoE, with the weights of `own`."""
    config = NllbMoeConfig(d_model=D, num_experts=E, activation_function="relu", **options)
    theirs = NllbMoeSparseMLP(config, INNER).eval()
    weights = {"router.classifier.weight": own.router.map.weight}
    if config.router_bias:
        weights["router.classifier.bias"] = own.router.routing.bias
    for number in range(E):
        for name, maps in (("fc1", own.experts.inner), ("fc2", own.experts.out)):
            weights[f"experts.expert_{number}.{name}.weight"] = maps.weight[number]
            weights[f"experts.expert_{number}.{name}.bias"] = maps.bias.view(E, -1)[number]
    theirs.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return theirs.double()


@pytest.mark.parametrize("router", [Part("softmax_router"), Part("biased_softmax_router")])
def test_experts_with_biases_equal_nllb_moes_in_output_and_gradients(router):
    own = mixture(top_k=2, bias=True, router=router).double()
    theirs = nllb(own, router_bias=router.block == "biased_softmax_router", router_dtype="float32")
    x_ND = INPUTS.double().view(-1, D)
    # transformers 5.14 passes a mask of experts to NllbMoeExperts, which takes it for their indices
    _, weight_NE, _ = theirs.router(x_ND)
    expected = sum(weight_NE[:, e, None] * theirs.experts[f"expert_{e}"](x_ND) for e in range(E))
    y_BTD = own(INPUTS.double(), keep_BT=WHOLE)[0]
    torch.testing.assert_close(y_BTD.view(-1, D), expected, rtol=1e-5, atol=1e-5)  # both route in float32
    y_BTD.square().sum().backward()
    expected.square().sum().backward()
    for number in range(E):
        other = theirs.experts[f"expert_{number}"]
        for maps, linear in ((own.experts.inner, other.fc1), (own.experts.out, other.fc2)):
            bias_grad_EO = maps.bias.grad.view(E, -1)
            torch.testing.assert_close(bias_grad_EO[number], linear.bias.grad, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(maps.weight.grad[number], linear.weight.grad, rtol=1e-4, atol=1e-4)


def test_scales_of_experts_and_a_norm_of_the_routers_input_equal_gemma_4s_in_output_and_gradients():
    routing = {"router": Part("softmax_router", {"expert_scales": True}), "router_norm": Part("rmsnorm", {"eps": 1e-6})}
    own = mixture(top_k=K, gated=True, activation=Part("gelu_tanh"), **routing).double()
    config = Gemma4TextConfig(hidden_size=D, moe_intermediate_size=INNER, num_experts=E, top_k_experts=K)
    router, experts = Gemma4TextRouter(config), Gemma4TextExperts(config)
    weights = {
        "proj.weight": own.router.map.weight,
        "scale": own.router.norm.weight * D**0.5,  # their router divides its input by √D
        "per_expert_scale": own.router.routing.expert_scales,
    }
    router.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    weights = {"gate_up_proj": own.experts.inner.weight, "down_proj": own.experts.out.weight}
    experts.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    router, experts = router.double(), experts.double()
    x_ND = INPUTS.double().view(-1, D)
    _, weight_NK, chosen_NK = router(x_ND)
    y_BTD, expected = own(INPUTS.double(), keep_BT=WHOLE)[0], experts(x_ND, chosen_NK, weight_NK)
    torch.testing.assert_close(y_BTD.view(-1, D), expected, rtol=1e-5, atol=1e-5)  # both route in float32
    y_BTD.square().sum().backward()
    expected.square().sum().backward()
    for one, other in (
        (own.router.routing.expert_scales, router.per_expert_scale),
        (own.router.map.weight, router.proj.weight),
        (own.experts.out.weight, experts.down_proj),
    ):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_router_reads_another_vector_of_another_width():
    own = with_random_weights(MixtureOfExperts(D, 9, d_ff=INNER, experts=E))
    other_BTE = torch.randn(B, T, 9, generator=torch.Generator().manual_seed(2))
    y_BTD = own(INPUTS, other_BTE, keep_BT=WHOLE)[0]
    choice = own.router(other_BTE)
    weight_BTE = torch.zeros(B, T, E).scatter(2, choice.chosen_BTK, choice.weight_BTK)
    expected = sum(weight_BTE[:, :, e, None] * expert(own, e)(INPUTS) for e in range(E))
    torch.testing.assert_close(y_BTD, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_limit_and_the_offset_hold_for_shared_experts_too():
    own = mixture(shared=1, limit=0.5, offset=1.0, **SWIGLU)
    shared = own.shared
    gate_BTF, x_BTF = shared.inner(INPUTS).chunk(2, -1)
    expected = shared.out(F.silu(gate_BTF.clamp(max=0.5)) * (x_BTF.clamp(-0.5, 0.5) + 1))
    torch.testing.assert_close(shared(INPUTS), expected)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"shared_gate": True}, "the gate needs a shared expert"),
        ({"limit": 2.0}, "both halves of gated experts"),
        ({"limit": -2.0, "gated": True}, "clamped to a range around 0"),
        ({"offset": 1.0}, "second half of gated experts"),
    ],
)
def test_arguments_that_need_another_are_refused(arguments, rule):
    node = {"block": "moe", "in": "x", "d_ff": 5, "experts": 4, **arguments}
    with pytest.raises(ConfigError, match=rule):
        check_model({"inputs": {"x": "B T 8"}, "graph": {"ffn": node}})
