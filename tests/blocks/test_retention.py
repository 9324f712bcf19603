"""Retention against a naive recurrence with complex numbers, as the paper writes it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tfm_blocks.blocks.linear_attention import Retention

B, D, H = 2, 24, 3
K = D // H


def started():
    own = Retention(D, heads=H).double()
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=D**-0.5)
    return own


def naive(own, x_TD):
    """Compute retention for one sentence, head by head and position by position."""
    angle_I = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    q_TD, k_TD, v_TD = own.qkv(x_TD).chunk(3, 1)
    heads = []
    for head in range(H):
        own_head = slice(head * K, (head + 1) * K)
        q_TI, k_TI = (
            torch.view_as_complex(one[:, own_head].unflatten(1, (-1, 2)).contiguous()) for one in (q_TD, k_TD)
        )
        memory_IK = torch.zeros(K // 2, K, dtype=torch.complex128)
        outputs = []
        for t in range(len(x_TD)):
            turn_I = torch.polar(torch.ones_like(angle_I), t * angle_I)
            written_IK = (k_TI[t] * turn_I).conj()[:, None] * v_TD[t, own_head] / K**0.5
            memory_IK = (1 - 2.0 ** (-5 - head)) * memory_IK + written_IK
            outputs.append(((q_TI[t] * turn_I) @ memory_IK).real)
        y_TK = torch.stack(outputs)
        mean, variance = y_TK.mean(1, keepdim=True), y_TK.var(1, correction=0, keepdim=True)
        heads.append((y_TK - mean) / (variance + own.eps).sqrt())
    return own.out(F.silu(own.gate(x_TD)) * torch.cat(heads, 1))


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@torch.no_grad()
def test_chunks_equal_the_recurrence(length):
    own = started()
    x_BTD = torch.randn(B, length, D, dtype=torch.float64)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, length, dtype=torch.bool))
    expected = torch.stack([naive(own, x_TD) for x_TD in x_BTD])
    torch.testing.assert_close(y_BTD, expected, rtol=1e-9, atol=1e-9)
