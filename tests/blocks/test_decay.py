import torch

from tfm_blocks.blocks.linear_attention import CHUNK, by_chunks


def test_products_with_a_float32_memory_are_float32_under_autocast():
    memory_BHKV, q_BHTK = torch.randn(2, 3, 4, 5), torch.randn(2, 3, CHUNK + 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y_BHTV, _ = by_chunks(lambda memory, q: (q @ memory, memory), memory_BHKV, q_BHTK)
    torch.testing.assert_close(y_BHTV, q_BHTK @ memory_BHKV)
