"""The receiver's side of a MoE layer: this rank's shares of its experts, and the order of their rows.

Legend: N rows, K experts per token, M rows of experts (N, unless a row has several experts), H hidden, F inner width of this
rank's share of an expert, W width of its first product (2F with a gate).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from foldray.blueprint import FeedForwardSpec
from foldray.blueprint.parts import Parts, columns, ffn_columns
from foldray.comm import Communicator, gather_rows, scatter_rows
from foldray.kernels.experts import Biases, Kind, expert_ffn
from foldray.kernels.later import Later
from foldray.kernels.permutation import combine, permute, sort_by_expert
from foldray.moe.contracts import Received, Rows


class Experts(nn.Module):
    """This rank's shares of its experts, stacked: `up` [E_local, H, W] and `down` [E_local, F, H].

    ETP cuts the inner width of every expert. `up_bias` [E_local · W] and `down_bias` [E_local · H] are None without
    biases. They are vectors, which do not decay. The ids of experts are global.
    """

    def __init__(
        self,
        ids: range,
        share: FeedForwardSpec,
        hidden: int,
        slices: Communicator,
        kind: Kind = "grouped",
        later: Later | None = None,
    ):
        super().__init__()
        self.ids, self.share, self.slices, self.kind, self.later = ids, share, slices, kind, later or Later()
        self.up = nn.Parameter(torch.empty(len(ids), hidden, share.width))
        self.down = nn.Parameter(torch.empty(len(ids), share.inner, hidden))
        self.up_bias = nn.Parameter(self.up.new_empty(len(ids) * share.width)) if share.bias else None
        self.down_bias = nn.Parameter(self.up.new_empty(len(ids) * hidden)) if share.bias else None

    def forward(self, rows: Rows, received: Received) -> torch.Tensor:
        """Compute the rows in the order of their arrival; the results are in the order of their return: [N, H] → [N, H].

        Rows are gathered over ETP, and results are summed over ETP.
        """
        rows_NH, *beside = (gather_rows(x, self.slices, received.rows_by_slice) for x in rows)
        if beside:
            weight_NK, expert_NK = beside
            y_NH = self.weighted_sum(rows_NH, weight_NK, expert_NK, received.rows_by_expert)
        else:
            y_NH = combine_preprocess(self.compute(dispatch_postprocess(rows_NH, received), received.rows_by_expert), received)
        return scatter_rows(y_NH, self.slices, received.rows_by_slice)

    def weighted_sum(
        self, rows_NH: torch.Tensor, weight_NK: torch.Tensor, expert_NK: torch.Tensor, counts: list[int] | None = None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts on this rank: [N, H] → [N, H].

        Args:
            expert_NK: the numbers of the experts on this rank; −1 for experts of other ranks.
            counts: number of rows of each local expert, if the host knows it; with None, it waits for the device.
        """
        kept = None if counts is None else sum(counts)
        token_M, position_NK, count_E = sort_by_expert(expert_NK.to(torch.int64), expert_NK >= 0, len(self.ids), kept)
        y_MH = self.compute(permute(rows_NH, token_M, position_NK), count_E.tolist() if counts is None else counts)
        return combine(y_MH, position_NK, weight_NK)

    def compute(self, rows_NH: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Compute each local expert on its rows, which are sorted by expert."""
        leave = self.later.leaver(self.up, self.down)
        biases: Biases = (None, None)
        if self.up_bias is not None and self.down_bias is not None:
            biases = (self.up_bias.view(len(self.ids), -1), self.down_bias.view(len(self.ids), -1))
        return expert_ffn(rows_NH, counts, self.up, self.down, self.share.ffn, self.kind, leave, biases)

    def parts(self) -> Parts:
        names, inner, hidden = self.share.activation.inwards, self.share.inner, self.down.shape[-1]
        parts: Parts = {"up": [], "down": [], "down_bias": []}
        for i, expert in enumerate(self.ids):
            parts["up"] += [(f"{expert}.{part}", index) for part, index in ffn_columns(names, inner, (i, slice(None)))]
            parts["down"].append((f"{expert}.down", (i,)))
            parts["down_bias"].append((f"{expert}.down_bias", (slice(i * hidden, (i + 1) * hidden),)))
        biases = [f"{expert}.{part}_bias" for expert in self.ids for part in names]
        return parts | {"up_bias": columns(dict.fromkeys(biases, inner), before=())}


def dispatch_postprocess(rows_NH: torch.Tensor, received: Received) -> torch.Tensor:
    """Reorder rows from (ETP rank, source rank, local expert) to (local expert, ETP rank, source rank)."""
    return _regroup(rows_NH, received.rows_by_runs)


def combine_preprocess(y_NH: torch.Tensor, received: Received) -> torch.Tensor:
    """Undo `dispatch_postprocess`."""
    return _regroup(y_NH, list(zip(*received.rows_by_runs, strict=True)))


def _regroup(rows_NH: torch.Tensor, counts_AB: Sequence[Sequence[int]]) -> torch.Tensor:
    """Reorder runs of `counts_AB[a][b]` rows from (a, b) order to (b, a) order."""
    A, B = len(counts_AB), len(counts_AB[0])
    if A == 1 or B == 1:
        return rows_NH
    blocks = rows_NH.split([count for counts_B in counts_AB for count in counts_B])
    return torch.cat([blocks[a * B + b] for b in range(B) for a in range(A)])
