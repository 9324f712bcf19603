"""Random sentences of ids, with which an export is compared with its run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.graph import Network

SENTENCES, LONGEST, SEED = 32, 24, 1
MOST_POSITIONS = 2048  # of the longest sentence, if the model stores its positions
UNLIMITED = 512  # tokens of the longest sentence, if it does not
MOST_PRODUCTS = 4 * 10**12  # multiplications with weights, which bound the time of a comparison
Rows = Mapping[str, list[Tensor]]  # ids of sentences by input, without begin and end


def predicted_rows(rows: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
    """Return the rows of the target, or of an encoder the rows of its source, whose tokens it predicts in place."""
    return list(rows[TARGET] if TARGET in rows else next(iter(rows.values())))


def random_sentences(network: Network, positions: float = math.inf, excluded: Collection[int] = ()) -> Iterator[Rows]:
    """Yield sentences of random ids, from the first subword on, that fit the positions of both engines.

    The first batch draws ids. Then follow a sentence of the maximum length, and sentences that contain each id once, in
    random order. If the ids of a large model would need more than MOST_PRODUCTS multiplications, they are a part of all
    ids, evenly spread, with the last id.
    """
    generator = torch.Generator().manual_seed(SEED)
    longest, ids = _longest(network, positions), _ids(network, excluded)
    lengths = {
        name: torch.randint(1, min(most, LONGEST) + 1, (SENTENCES,), generator=generator)
        for name, most in longest.items()
    }
    yield {
        name: [ids[name][torch.randint(len(ids[name]), (length,), generator=generator)] for length in row.tolist()]
        for name, row in lengths.items()
    }
    generator.manual_seed(SEED)
    affordable = max(1, MOST_PRODUCTS // network.parameter_count)
    spread = {name: ids[name].flip(0)[:: math.ceil(len(ids[name]) / affordable)] for name in longest}
    walked = {name: ids_N[torch.randperm(len(ids_N), generator=generator)] for name, ids_N in spread.items()}
    count = max(map(len, walked.values()))
    walked = {name: walk.repeat(math.ceil(count / len(walk)))[:count] for name, walk in walked.items()}
    yield {
        name: [walk.repeat(math.ceil(most / len(walk)))[:most]]
        for (name, most), walk in zip(longest.items(), walked.values(), strict=True)
    }
    width = min(LONGEST, *longest.values())
    rows = {name: torch.split(walk, width) for name, walk in walked.items()}
    for start in range(0, len(predicted_rows(rows)), SENTENCES):
        yield {name: list(sentences[start : start + SENTENCES]) for name, sentences in rows.items()}


def _ids(network: Network, excluded: Collection[int]) -> dict[str, Tensor]:
    """Return the ids of subwords of each input: those with a row in all its tables, or without a table an output."""
    ids: dict[str, Tensor] = {}
    for name in names(network.spec.inputs):
        sizes = [node.arguments["vocab"] for node, read in network.spec.tables if read == name]
        count = min(sizes, default=int(str(network.spec.sink.shape[-1])))
        ids[name] = torch.tensor([id for id in range(Tokenizer.EOS + 1, count) if id not in excluded])
    return ids


def _longest(network: Network, positions: float) -> dict[str, int]:
    """Return the maximum tokens of each input, sources first, without begin or end."""
    inputs = names(network.spec.inputs)
    ordered = [name for name in (*names(network.spec.sources), TARGET) if name in inputs]
    stored = {name: network.longest(name).tokens for name in ordered}
    most = {name: MOST_POSITIONS if math.isfinite(tokens) else UNLIMITED for name, tokens in stored.items()}
    return {name: int(min(positions, stored[name], most[name])) - 1 for name in ordered}


def network_inputs(rows: Rows) -> dict[str, Tensor]:
    """Return the padded inputs of the network: sources with EOS, targets with BOS."""
    end, begin = torch.tensor([Tokenizer.EOS]), torch.tensor([Tokenizer.BOS])
    inputs = {name: pad_sequence([torch.cat((row, end)) for row in ids], True) for name, ids in rows.items()}
    if TARGET in rows:
        inputs[TARGET] = pad_sequence([torch.cat((begin, row)) for row in rows[TARGET]], True)
    return inputs


def pick_judgements(logits_BN: Tensor, rows: list[Tensor]) -> list[list[float]]:
    """Return the log probability that each token of the rows, and eos, was replaced."""
    return [F.logsigmoid(logits_N[: len(row) + 1]).tolist() for logits_N, row in zip(logits_BN, rows, strict=True)]


def pick_log_p(log_p_BTV: Tensor, rows: list[Tensor]) -> list[list[float]]:
    """Return the log probability of each token of the rows and of eos."""
    end = torch.tensor([Tokenizer.EOS])
    return [
        log_p_TV[: len(row) + 1].gather(1, torch.cat((row, end))[:, None])[:, 0].tolist()
        for log_p_TV, row in zip(log_p_BTV, rows, strict=True)
    ]
