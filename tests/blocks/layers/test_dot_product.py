"""Attention in bfloat16 with a float32 bias whose lowest value bfloat16 cannot represent, and attention of few queries."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tfm_blocks.blocks.attention_parts import Softmax
from tfm_blocks.blocks.layers.dot_product import (
    AttentionMask,
    dot_product_attention,
    few_queries,
    repeat_kv,
    weighed_attention,
)

B, H, T, K, S = 2, 3, 4, 8, 5


def q_k_v():
    return [torch.randn(B, H, length, K, dtype=torch.bfloat16) for length in (T, S, S)]


def hidden():
    """Return a mask whose first sequence is only padding."""
    keep_BS = torch.arange(S).expand(B, S) < torch.tensor([[0], [3]])
    return AttentionMask(keep_BS[:, None, None], bias=torch.randn(1, H, T, S) - 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_number_that_hides_a_key_is_finite_in_the_dtypes_of_bias_and_queries(dtype):
    q_BHTK, k_BHSK, _ = q_k_v()
    added_BHTS = hidden().masked_bias(q_BHTK, k_BHSK)
    assert added_BHTS.to(dtype).isfinite().all()
    assert (added_BHTS.to(dtype)[:, :, :, 3:] < -3e38).all()


def test_bfloat16_attention_to_padding_alone_weighs_all_keys_alike():
    q_BHTK, k_BHSK, v_BHSK = q_k_v()
    y_BHTK = weighed_attention(q_BHTK, k_BHSK, v_BHSK, hidden(), Softmax(K))
    mean_HK = v_BHSK[0].float().mean(1)
    torch.testing.assert_close(y_BHTK[0].float(), mean_HK[:, None].expand(H, T, K), rtol=0, atol=0.02)


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("masked", ["beams", "padding", None])
def test_few_grouped_queries_attend_as_to_repeated_keys_without_repeating_them(groups, masked):
    heads, M, N = 6, 3, 50
    q_BHMK, k_BGSK, v_BGSK = (torch.randn(B, *shape, K) for shape in ((heads, M), (groups, N), (groups, N)))
    masks = {"beams": torch.rand(B, 1, M, N) < 0.5, "padding": torch.rand(B, 1, 1, N) < 0.5, None: None}
    mask = masks[masked]
    expected = dot_product_attention(q_BHMK, repeat_kv(k_BGSK, heads), repeat_kv(v_BGSK, heads), mask)
    with LargestTensor() as largest:
        y_BHMK = few_queries(q_BHMK, k_BGSK, v_BGSK, mask, K**-0.5)
    torch.testing.assert_close(y_BHMK, expected, rtol=1e-5, atol=1e-6)
    assert largest.elements <= max(k_BGSK.numel(), B * heads * M * N)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", ["padding", "causal", "bias", None])
def test_grouped_keys_are_attended_to_as_repeated_keys_without_repeating_them(groups, masked):
    heads, T, S = 6, 5, 50
    tensors = [torch.randn(B, *shape, K) for shape in ((heads, T), (groups, S), (groups, S))]
    tensors = [x.requires_grad_() for x in tensors]
    masks = {"padding": torch.rand(B, 1, 1, S) < 0.5, "bias": torch.randn(1, heads, T, S)}
    mask, causal = masks.get(masked), masked == "causal"
    q_BHTK, k_BGSK, v_BGSK = tensors
    expected = dot_product_attention(q_BHTK, repeat_kv(k_BGSK, heads), repeat_kv(v_BGSK, heads), mask, causal=causal)
    with LargestTensor() as largest:
        y_BHTK = dot_product_attention(q_BHTK, k_BGSK, v_BGSK, mask, causal=causal)
    assert largest.elements <= B * heads * T * S
    torch.testing.assert_close(y_BHTK, expected)
    grads = (torch.autograd.grad(y.square().sum(), tensors) for y in (y_BHTK, expected))
    for grad, repeated in zip(*grads, strict=True):
        torch.testing.assert_close(grad, repeated, rtol=1e-4, atol=1e-5)
