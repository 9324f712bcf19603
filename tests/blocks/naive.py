"""Random weights, and attention as a loop over queries and keys: a readable reference for tests."""

import torch
from torch import nn

from tfm_blocks.blocks.attention import Attention


def with_random_weights(block, std=1.0):
    """Return the block in evaluation mode with weights from a normal distribution."""
    for index, parameter in enumerate(block.parameters()):
        nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(index))
    return block.eval()


class NaiveAttention(Attention):
    """A(q, k, v) = Σ_i exp(q·k_i / √K) v_i / Σ_j exp(q·k_j / √K), for one query at a time."""

    def attend(self, q_BHTK, k_BGSK, v_BGSK, look):
        B, H, T, K = q_BHTK.shape
        S = k_BGSK.shape[2]
        added = look.masked_bias(q_BHTK, k_BGSK)
        hidden_BHTS = q_BHTK.new_zeros(B, H, T, S) if added is None else added.expand(B, H, T, S)
        keys, values = k_BGSK.unbind(2), v_BGSK.unbind(2)
        outputs = []
        for query_BHK, hidden_BHS in zip((q_BHTK / K**0.5).unbind(2), hidden_BHTS.unbind(2), strict=True):
            products = [(query_BHK * key_BHK).sum(2) for key_BHK in keys]
            scores = [one + hidden_BH for one, hidden_BH in zip(products, hidden_BHS.unbind(2), strict=True)]
            largest_BH = torch.stack(scores).amax(0)
            parts = [torch.exp(score_BH - largest_BH) for score_BH in scores]
            weighed = [part_BH[..., None] * value_BHK for part_BH, value_BHK in zip(parts, values, strict=True)]
            outputs.append(torch.stack(weighed).sum(0) / torch.stack(parts).sum(0)[..., None])
        return torch.stack(outputs, 2)
