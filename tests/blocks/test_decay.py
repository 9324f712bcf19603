import pytest
import torch

from tfm_blocks.blocks.layers.decay import CHUNK, by_chunks, decayed_sum


def test_products_with_a_float32_memory_are_float32_under_autocast():
    memory_BHKV, q_BHTK = torch.randn(2, 3, 4, 5), torch.randn(2, 3, CHUNK + 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y_BHTV, _ = by_chunks(lambda memory, q: (q @ memory, memory), memory_BHKV, q_BHTK)
    torch.testing.assert_close(y_BHTV, q_BHTK @ memory_BHKV)


@pytest.mark.parametrize("channels", [1, 4])
@torch.no_grad()
def test_decays_after_one_that_erases_the_memory_keep_their_digits(channels):
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 3, CHUNK, 4)
    log_rate = -0.05 * torch.rand(2, 3, CHUNK, channels)
    log_rate[:, :, 2] = -1e6
    y_BHTV, _ = decayed_sum(torch.randn(2, 3, 4, 4), q, k, v, log_rate)
    memory = torch.zeros(2, 3, 4, 4, dtype=torch.float64)
    for t in range(2, CHUNK):
        memory = memory * log_rate[:, :, t, :, None].double().exp() + k[:, :, t, :, None] * v[:, :, t, None]
        expected_BHV = torch.einsum("bhk,bhkv->bhv", q[:, :, t].double(), memory)
        torch.testing.assert_close(y_BHTV[:, :, t].double(), expected_BHV, rtol=1e-4, atol=1e-4)
