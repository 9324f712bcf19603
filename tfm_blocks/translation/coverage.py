"""The coverage penalty: a hypothesis that looks past words of the source comes later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network.attention_maps import attention_nodes, attention_weights
from tfm_blocks.network.graph import Network
from tfm_blocks.translation.search import BOS, Hypothesis


def with_coverage(
    network: Network, sources: Mapping[str, Tensor], found: Sequence[Sequence[Hypothesis]]
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence with their coverage: Σ over source tokens of log(min(c, 1)), where c is how much
    a token was looked at, over all target positions, by the mean head of the last cross-attention.

    All of them are read again at once, so that the search need not know. Raises RunError for a model without
    cross-attention. Source: Wu et al. 2016, equation 14.
    """
    crossing = [address for address, look in attention_nodes(network).items() if look.queries == TARGET != look.keys]
    if not crossing:
        rule = "a coverage penalty needs a node that looks from the target at the source, and this model has none"
        raise RunError(Problem("coverage", rule, help="leave coverage out"))
    source = attention_nodes(network)[crossing[-1]].keys
    counts = torch.tensor([len(one) for one in found], device=sources[source].device)
    rows = {name: value.repeat_interleave(counts, 0) for name, value in sources.items()}
    flat = [one for hypotheses in found for one in hypotheses]
    tgt_RT = pad_sequence([torch.tensor([BOS, *one.ids][: one.length]) for one in flat], batch_first=True).to(
        counts.device
    )
    w_RHTS = attention_weights(network, crossing[-1:], **rows, **{TARGET: tgt_RT})[crossing[-1]]
    looked_RS = (w_RHTS.float().mean(1) * (tgt_RT != 0)[:, :, None]).sum(1)
    log_RS = looked_RS.clamp(torch.finfo(torch.float32).tiny, 1.0).log()
    coverage = iter((log_RS * (rows[source] != 0)).sum(1).tolist())
    return [[replace(one, coverage=next(coverage)) for one in hypotheses] for hypotheses in found]
