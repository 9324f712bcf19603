"""The coverage penalty, which lowers the rank of hypotheses that ignore words of the source."""

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
    network: Network, sources: Mapping[str, Tensor], nbest: Sequence[Sequence[Hypothesis]]
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence with their coverage, Σ over source tokens of log(min(c, 1)).

    c is the attention weight of a source token, summed over all target positions and averaged over the heads of the
    last cross-attention. It is computed in one forward pass after the search. Raises RunError for a model without
    cross-attention. Source: Wu et al. 2016, equation 14.
    """
    cross = [address for address, map in attention_nodes(network).items() if map.queries == TARGET != map.keys]
    if not cross:
        rule = "a coverage penalty needs cross-attention from the target to the source, but this model has none"
        raise RunError(Problem("coverage", rule, help="leave coverage out"))
    source = attention_nodes(network)[cross[-1]].keys
    counts = torch.tensor([len(hypotheses) for hypotheses in nbest], device=sources[source].device)
    rows = {name: value.repeat_interleave(counts, 0) for name, value in sources.items()}
    targets = [
        torch.tensor([BOS, *hypothesis.ids][: hypothesis.length]) for hypotheses in nbest for hypothesis in hypotheses
    ]
    tgt_RT = pad_sequence(targets, batch_first=True).to(counts.device)
    w_RHTS = attention_weights(network, cross[-1:], **rows, **{TARGET: tgt_RT})[cross[-1]]
    covered_RS = (w_RHTS.float().mean(1) * (tgt_RT != 0)[:, :, None]).sum(1)
    log_RS = covered_RS.clamp(torch.finfo(torch.float32).tiny, 1.0).log()
    coverage = iter((log_RS * (rows[source] != 0)).sum(1).tolist())
    return [[replace(hypothesis, coverage=next(coverage)) for hypothesis in hypotheses] for hypotheses in nbest]
