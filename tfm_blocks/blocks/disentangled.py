"""Disentangled attention, whose scores relate contents to relative positions and relative positions to contents."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.attention import WHERE
from tfm_blocks.blocks.layers.dot_product import AttentionMask, Span, split_widths, widths
from tfm_blocks.blocks.layers.linear import Dropout, Linear, fill_normal
from tfm_blocks.blocks.layers.multi_head import Bias, Heads, MultiHead, stacked
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Norm, Rate

ROWS = {"rows >= 4": "there are distances to either side", "rows % 2 == 0": "half of the rows are for either side"}


@block(
    "distance_table",
    "x: B N D -> rows D",
    sees={"x": "all"},
    where=ROWS,
    source="He et al. 2021 (DeBERTa), section 3.1; with a norm, He et al. 2023 (DeBERTa-V3)",
)
class DistanceTable(nn.Module):
    """A learned vector for each of `rows` ranges of distances, normalised by `norm`: table_RD.

    Only the width of x counts. `disentangled_attention` of all layers can read the table. The vectors are initialised
    from N(0, 1 / D).

    Use: DeBERTa, whose layers share one table.
    """

    weight_roles: ClassVar = {"weight": "position"}

    def __init__(self, D: int, *, rows: int = 512, norm: Norm | None = None, dropout: Rate = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, D))
        self.norm: nn.Module | None = REGISTRY.make(norm, D)
        self.dropout = Dropout(dropout)

    initialise = fill_normal

    def forward(self, x_BND: Tensor) -> Tensor:
        table_RD = self.weight.to(x_BND.dtype)
        out_RD: Tensor = self.dropout(table_RD if self.norm is None else self.norm(table_RD))
        return out_RD


@block(
    "disentangled_attention",
    "x: B T D, distances?: rows E -> B T D",
    branch=True,
    sees={"x": "all", "distances": "all"},
    where={
        **{rule: sentence for rule, sentence in WHERE.items() if "kv_heads" not in rule and "d_value" not in rule},
        **ROWS,
        "max_distance > rows // 4 + 1": "the ranges grow up to the largest distance",
    },
    source="He et al. 2021 (DeBERTa), section 3.1, equations 3 and 4; ranges of distances: He et al. 2023 (DeBERTa-V3)",
)
class DisentangledAttention(MultiHead):
    """softmax((q_i k_j + q_i a_r + b_r k_j) / √(3K))_j v_j with the range r of the distance i - j: x_BTD -> x_BTD.

    a_r and b_r are a key and a query, projected from row r of a table of distances: `distances`, such as a node
    `distance_table`, or otherwise a table of this attention. With `share_projections` they have the maps of the keys
    and queries of x, otherwise separate ones. Half of the `rows` are for either side. Distances beyond are clipped, or
    with `max_distance` only distances up to rows / 4 have separate rows, and the others ranges that grow up to it.

    Also known as: DeBERTa attention.
    Use: encoders; each position attends to both sides.
    """

    score_terms = 3

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        d_head: int | None = None,
        rows: int = 512,
        max_distance: int | None = None,
        share_projections: bool = True,
        bias: Bias = True,
        **options: Any,
    ) -> None:
        super().__init__(D, None, widths(D, heads, None, d_head), bias=bias, **options)
        if share_projections and E not in (None, D):
            raise ValueError(f"share_projections maps distances of width {D}, but their width is {E}")
        self.rows, self.max_distance = rows, max_distance
        self.table: Any = DistanceTable(D, rows=rows) if E is None else None
        self.of_distances: Linear | None = None
        if not share_projections:
            self.of_distances = stacked(E or D, self.widths.maps[:2], bias, 1, heads=(heads, heads))

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, distances_RE: Tensor | None = None, *, keep_BT: Tensor
    ) -> Tensor:
        return self.finish(self.attend(*self.prepare(x_BTD, distances_RE, keep_BT=keep_BT)), x_BTD)

    def prepare(  # type: ignore[override]
        self, x_BTD: Tensor, distances_RE: Tensor | None = None, *, keep_BT: Tensor
    ) -> Heads:
        T = x_BTD.shape[1]
        q_BHTK, k_BHSK, v_BHSK = self.self_heads(x_BTD, Span(0, T))
        b_HRK, a_HRK = self._of_distances(self.table(x_BTD) if distances_RE is None else distances_RE)
        place_T = torch.arange(T, device=x_BTD.device)
        index_TS = self.row(place_T[:, None] - place_T).expand(*q_BHTK.shape[:2], T, T)
        to_rows_BHTS = (q_BHTK @ a_HRK.mT).gather(3, index_TS)
        from_rows_BHTS = (k_BHSK @ b_HRK.mT).gather(3, index_TS.mT).mT
        bias_BHTS = (to_rows_BHTS + from_rows_BHTS) * self.scores.beta
        masks = AttentionMask(keep_BT[:, None, None], bias=bias_BHTS, distance_TS=place_T - place_T[:, None])
        return self.with_pairs(q_BHTK, k_BHSK, v_BHSK, masks)

    def _of_distances(self, table_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query b_HRK and the key a_HRK of each row of the table."""
        w, linear = self.widths, self.qkv if self.of_distances is None else self.of_distances
        made_1RX = self.clamped(linear(table_RE))[None, :, : sum(w.maps[:2])]
        b_1HRK, a_1HRK = split_widths(made_1RX, (w.heads, w.heads), (w.key, w.key))
        return b_1HRK[0], a_1HRK[0]

    def row(self, distance_TS: Tensor) -> Tensor:
        """Return the row of each distance from key to query, positive if the key precedes the query: row_TS."""
        side = self.rows // 2
        if self.max_distance is not None:
            single = side // 2
            far_TS = distance_TS.abs().clamp(min=single).float()
            largest = torch.full((), (self.max_distance - 1) / single, device=far_TS.device)
            fraction_TS = torch.log(far_TS / single) / torch.log(largest)
            range_TS = torch.ceil(fraction_TS * (single - 1)).long() + single
            distance_TS = torch.where(distance_TS.abs() <= single, distance_TS, range_TS * distance_TS.sign())
        return (distance_TS + side).clamp(0, self.rows - 1)
