"""Attention in bfloat16 with a float32 bias, whose least number bfloat16 cannot represent."""

import pytest
import torch

from tfm_blocks.blocks.attention_parts import Softmax
from tfm_blocks.layers.dot_product import AttentionMask, weighed_attention

B, H, T, K, S = 2, 3, 4, 8, 5


def q_k_v():
    return [torch.randn(B, H, length, K, dtype=torch.bfloat16) for length in (T, S, S)]


def hidden():
    """The first sequence is padding alone."""
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
