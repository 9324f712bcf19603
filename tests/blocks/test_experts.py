"""Mixtures of experts against a loop over the tokens and against Hugging Face's Mixtral."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GptOssConfig, MixtralConfig, Qwen2MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.experts import (
    ClampedMixtureOfExperts,
    GatedMixtureOfExperts,
    MixtureOfExperts,
    SharedGateMixtureOfExperts,
)
from tfm_blocks.blocks.feedforward import FeedForward, GatedFeedForward

B, T, D, INNER, E, K = 3, 6, 7, 5, 4, 2
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
WHOLE = torch.ones(B, T, dtype=torch.bool)
KEEP = torch.arange(T) < torch.tensor([6, 4, 1])[:, None]


def expert(mixture, number):
    """Return one expert as a separate feed-forward network."""
    kind = GatedFeedForward if isinstance(mixture, GatedMixtureOfExperts) else FeedForward
    one = kind(D, d_ff=INNER, bias=False)
    one.inner.weight = nn.Parameter(mixture.experts.inner.weight[number])
    one.out.weight = nn.Parameter(mixture.experts.out.weight[number])
    return one


@pytest.mark.parametrize("block", [MixtureOfExperts, GatedMixtureOfExperts])
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
@torch.no_grad()
def test_a_mixture_is_a_loop_over_tokens_and_their_likeliest_experts(block, top_k, renormalise, shared):
    own = with_random_weights(block(D, d_ff=INNER, experts=E, top_k=top_k, renormalise=renormalise, shared=shared))
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
    own = with_random_weights(GatedMixtureOfExperts(D, d_ff=INNER, experts=E, shared=2))
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


def test_gated_moe_equals_mixtral_in_output_and_gradients():
    own = with_random_weights(GatedMixtureOfExperts(D, d_ff=INNER, experts=E, top_k=K)).double()
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
    own = with_random_weights(GatedMixtureOfExperts(D, d_ff=INNER, experts=E, top_k=K, balance=0.5))
    _, loss = own(INPUTS, keep_BT=KEEP)
    of_sequences = [
        load_balancing_loss_func((own.router.map(x_TD),), E, K, keep_T[None]) / K
        for x_TD, keep_T in zip(INPUTS, KEEP, strict=True)
    ]
    torch.testing.assert_close(loss, 0.5 * torch.stack(of_sequences))


@torch.no_grad()
def test_the_loss_is_balance_when_all_are_equal_and_experts_times_that_when_one_takes_all():
    own = with_random_weights(MixtureOfExperts(D, d_ff=INNER, experts=E, top_k=1, renormalise=False, balance=0.1))
    own.router.map.weight.zero_()
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE)[1], torch.full((B,), 0.1))
    own.router.map.weight[2] = 100.0
    ones_BTD = torch.ones(B, T, D)
    torch.testing.assert_close(own(ones_BTD, keep_BT=WHOLE)[1], torch.full((B,), 0.1 * E))


@torch.no_grad()
def test_padding_does_not_count_and_changes_no_other_position():
    own = with_random_weights(GatedMixtureOfExperts(D, d_ff=INNER, experts=E))
    y_BTD, loss = own(INPUTS, keep_BT=KEEP)
    changed = torch.where(KEEP[:, :, None], INPUTS, 5 * INPUTS.flip(2))
    longer = F.pad(changed, (0, 0, 0, 3), value=9.0)
    again, same_loss = own(longer, keep_BT=F.pad(KEEP, (0, 3)))
    torch.testing.assert_close(again[:, :T][KEEP], y_BTD[KEEP])
    torch.testing.assert_close(same_loss, loss)


@torch.no_grad()
def test_the_loss_of_a_sequence_does_not_depend_on_its_batch():
    own = with_random_weights(GatedMixtureOfExperts(D, d_ff=INNER, experts=E))
    whole = own(INPUTS, keep_BT=KEEP)[1]
    parts = [own(INPUTS[rows], keep_BT=KEEP[rows])[1] for rows in (slice(1), slice(1, 3))]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_it_compiles_without_a_break_and_gradients_are_the_same():
    torch.compiler.reset()
    own = with_random_weights(GatedMixtureOfExperts(D, d_ff=INNER, experts=E, shared=1))
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
def test_clamped_moe_equals_gpt_oss_in_output_and_gradients(limit):
    own = with_random_weights(ClampedMixtureOfExperts(D, d_ff=INNER, experts=E, top_k=K, limit=limit)).double()
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
def test_shared_gate_moe_equals_qwen2_moe():
    own = with_random_weights(SharedGateMixtureOfExperts(D, d_ff=INNER, experts=E, top_k=K, shared=2))
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
        "shared_expert_gate.weight": own.shared.gate.weight,
    }
    theirs.load_state_dict(weights)
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE)[0], theirs(INPUTS), rtol=1e-4, atol=1e-4)
