"""Embeddings of n-grams of token ids, by hash functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, count, islice
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import fill_normal
from tfm_blocks.blocks.layers.state import Recurrence, RecurrentState, reading_order, restore_order
from tfm_blocks.registry.blocks import block

GAMMA, BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # of the generator SplitMix64
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@block(
    "ngram_embedding",
    "x: ids B N -> B N d_model",
    sees={"x": "past"},
    where={
        "vocab >= 1": "ids are below vocab",
        "rows >= 1": "a table has rows",
        "rows < 2**31": "the number of rows of each table is a prime from here on",
        "ngram >= 2": "an n-gram of one id is an embedding",
        "ngram <= 16": "each length has its own tables",
        "hashes >= 1": "each length has a table",
        "hashes <= 64": "each hash function has its own table",
        "d_model >= 1": "the width is at least 1",
        "d_model % ((ngram - 1) * hashes) == 0": "the width must split evenly into the vectors of the tables",
        "scale > 0": "a vector keeps its direction",
        "reset_id >= 0": "ids are counted from 0",
        "vocab > reset_id": "ids are below vocab",
        "seed >= 0": "the seed of the hash functions",
    },
    source="Cheng et al. 2026 (Engram), arXiv:2601.07372, hashed n-grams, with the hash functions of Qwen4-Exp",
)
class NGramEmbedding(Recurrence):
    """[E_nk[h_nk(x_t, …, x_{t-n+1})] · scale], for each n from 2 to `ngram` and k up to `hashes`: ids_BN -> x_BND.

    h_nk is (m_0 x_t ⊕ m_1 x_{t-1} ⊕ …) modulo a prime, with the bitwise exclusive or ⊕. The odd factors m follow from
    `seed` and `vocab`, and the primes are the next ones from `rows` on, so the hash functions collide at different
    n-grams. Each table E_nk has as many rows as its prime, and the width d_model / ((`ngram` - 1) · `hashes`), whose
    root is the default `scale`. Before the sequence, ids are 0. With a `reset_id`, such as the end of a document, this
    id stands for all ids before its last occurrence among the earlier ids, and before the sequence. Decoding carries
    the last `ngram` - 1 ids.

    Also known as: hashed bigrams, n-gram hash embedding, Engram, conditional memory.
    Use: a sum with the embedding, or the inputs of single layers.
    Cost: no multiply-adds; (`ngram` - 1) · `hashes` rows are looked up at each position.
    Example: rows: 50000
    """

    weight_roles: ClassVar = {"weight": "embedding"}

    def __init__(
        self,
        *,
        vocab: int,
        d_model: int,
        rows: int,
        ngram: int = 2,
        hashes: int = 1,
        scale: float | None = None,
        reset_id: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        primes = list(islice(primes_from(rows), (ngram - 1) * hashes))
        tables = list(zip(primes, accumulate(primes, initial=0), strict=False))  # their rows, and the first of these
        self.tables = [tables[first : first + hashes] for first in range(0, len(tables), hashes)]
        self.factors = random_factors(seed, ngram, vocab)
        width = d_model // len(primes)
        self.weight = nn.Parameter(torch.empty(sum(primes), width))
        self.scale = math.sqrt(width) if scale is None else scale
        self.reset_id, self.before = reset_id, ngram - 1

    initialise = fill_normal

    def match_base(self, base: NGramEmbedding) -> None:
        """Keep the scale of the base, as `embedding` does."""
        self.scale = base.scale

    def forward(  # type: ignore[override]  # the axis is N
        self, x_BN: Tensor, *, keep_BN: Tensor, right_padded_N: bool = True
    ) -> Tensor:
        if right_padded_N:
            return self._read_all(x_BN)
        order_BN = reading_order(keep_BN)
        return restore_order(self._read_all(x_BN.gather(1, order_BN)), order_BN)

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        first = 0 if self.reset_id is None else self.reset_id
        return {"past_RL": torch.full((rows, self.before), first, dtype=torch.long, device=like.device)}

    def read(self, x_RN: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        x_RM = torch.cat((memory["past_RL"], x_RN), 1)
        later_RN, mixed_RN, rows = x_RN, x_RN * self.factors[0], []
        for by in range(1, self.before + 1):
            ids_RN = x_RM[:, self.before - by : x_RM.shape[1] - by]
            if self.reset_id is not None and by > 1:
                ids_RN = ids_RN.where(later_RN != self.reset_id, self.reset_id)
            later_RN = ids_RN
            mixed_RN = torch.bitwise_xor(mixed_RN, ids_RN * self.factors[by])
            rows += [mixed_RN % prime + first for prime, first in self.tables[by - 1]]
        y_RND = F.embedding(torch.stack(rows, 2), self.weight).flatten(2) * self.scale
        return y_RND, {"past_RL": x_RM[:, x_RN.shape[1] :]}


def random_factors(seed: int, length: int, vocab: int) -> list[int]:
    """Return odd pseudo-random factors whose products with ids below `vocab` fit into 63 bits (SplitMix64)."""
    factors = []
    for index in range(length):
        z = seed + GAMMA * (index + 2) & BITS
        for shift, mixer in MIXERS:
            z = (z ^ z >> shift) * mixer & BITS
        factors.append(2 * ((z ^ z >> 31) % max(1, (2**63 - 1) // vocab // 2)) + 1)
    return factors


def primes_from(first: int) -> Iterator[int]:
    """Yield the primes from a number on."""
    for number in count(max(first, 2)):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
