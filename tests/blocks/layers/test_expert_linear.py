"""Products of many experts against a loop over the rows."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tfm_blocks.blocks.layers.expert_linear import (
    ExpertLinear,
    _grouped,
    _grouped_outer,
    grouped_outer,
    grouped_product,
)
from tfm_blocks.blocks.layers.linear import Linear

E, I, O = 4, 7, 5  # noqa: E741
ENDS = torch.tensor([3, 3, 10, 12])  # the second expert has no row


def random(*sizes):
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


def test_each_row_goes_through_its_own_expert():
    x_RI, weight_EOI = random(12, I), random(E, O, I)
    expert_of = [0] * 3 + [2] * 7 + [3] * 2
    expected = torch.stack([weight_EOI[e] @ x_I for e, x_I in zip(expert_of, x_RI, strict=True)])
    torch.testing.assert_close(grouped_product(x_RI, weight_EOI, ENDS), expected)


def test_gradients_equal_finite_differences_and_an_expert_without_rows_gets_0():
    x_RI, weight_EOI = random(12, I).requires_grad_(), random(E, O, I).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, ENDS), (x_RI, weight_EOI))
    grouped_product(x_RI, weight_EOI, ENDS).sum().backward()
    assert bool((weight_EOI.grad[[0, 2, 3]] != 0).all()) and not weight_EOI.grad[1].any()


def test_grouped_products_equal_the_loop():
    """The kernel is for CUDA; this test runs it on the CPU, in bf16, with rows of 16 bytes and a non-contiguous operand."""
    x_RI, weight_EOI, y_OR = (random(*sizes).bfloat16() for sizes in ((12, 8), (E, 16, 8), (16, 12)))
    for weight in (weight_EOI, weight_EOI.mT.contiguous().mT):
        torch.testing.assert_close(_grouped(x_RI, weight, ENDS), grouped_product(x_RI, weight, ENDS))
    torch.testing.assert_close(_grouped_outer(y_OR.mT, x_RI, ENDS), grouped_outer(y_OR.mT, x_RI, ENDS))


def test_torchs_own_checks_of_an_operator_hold():
    torch.library.opcheck(grouped_product, (random(12, I).requires_grad_(), random(E, O, I).requires_grad_(), ENDS))


def test_a_row_costs_one_expert():
    with FlopCounterMode(display=False) as counter:
        grouped_product(random(12, I), random(E, O, I), ENDS)
    assert counter.get_total_flops() == 2 * 12 * I * O


def test_every_expert_starts_by_its_own_fan_and_only_named_parts_shrink():
    experts, alone = (
        ExpertLinear(3, 40, 60, parts=2, depth_scaled=(1,)),
        Linear(40, 60, parts=2, bias=False, depth_scaled=(1,)),
    )
    with torch.no_grad():
        for one in (experts, alone):
            one.initialise("weight", torch.Generator().manual_seed(1))
            one.shrink(0.5)
    assert torch.equal(experts.weight[0], alone.weight)
    assert not torch.equal(experts.weight[0], experts.weight[1])
    assert experts.weight[2, :30].std().item() == pytest.approx(2 * experts.weight[2, 30:].std().item(), rel=0.1)


def test_under_autocast_it_multiplies_in_the_lower_precision():
    experts = ExpertLinear(E, I, O)
    nn.init.normal_(experts.weight)
    with torch.autocast("cpu", torch.bfloat16):
        y_RO = experts(torch.randn(12, I), ENDS)
        y_RO.float().sum().backward()
    assert y_RO.dtype == torch.bfloat16 and experts.weight.grad.dtype == torch.float32
