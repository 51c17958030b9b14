"""The two halves of a MoE layer whose experts have ranks of their own, and the exchange of each half.

Rows go from the ranks of attention to those of the experts, and the results go straight to the ranks of the next attention
(DisagMoE, section 4.2.2). Only the ranks of a route take part. A row carries its weights, and the numbers of its experts on
the rank that it goes to (`once.py`).

Legend: T tokens, H hidden, K experts per token, N rows, R ranks of experts that this rank sends to, S ranks that send here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from foldray.blueprint import Ownership
from foldray.comm import Communicator, Groups, Line, Pending, gather_rows, scatter_rows
from foldray.fold.routes import Routes
from foldray.kernels.later import Later
from foldray.moe import once
from foldray.moe.contracts import Rows
from foldray.moe.experts import Experts
from foldray.moe.router import Gate, Router, Routing, TokenPiece


class TokenExchange:
    """The exchange of a rank that owns tokens, with the experts of one position."""

    def __init__(self, groups: Groups, position: int):
        fold = groups.fold
        self._receivers = [rank - fold.offset for rank in Routes(fold).receivers(groups.rank, position)]
        self._up, self._down, self._counts, self._line = groups.rows_up, groups.rows_down, groups.row_counts, groups.rows_line

    def start_counts(self, count_R: torch.Tensor) -> Pending:
        """Start to tell the experts how many rows will come."""
        return self._counts.send_rows([count_R], dict.fromkeys(self._receivers, 1))

    def start_out(self, tensors: Rows, count_R: Sequence[int]) -> Pending:
        """Start to send rows, or the gradients of results."""
        return self._up.send_rows(tensors, dict(zip(self._receivers, count_R, strict=True)))

    def start_back(self, tensors: Callable[[int], Rows], counts: Callable[[], Sequence[int]], ready: bool) -> Pending:
        """Start to receive results, or the gradients of rows, as soon as the numbers of rows are known.

        Args:
            tensors: number of all rows → tensors for them.
            counts: returns the number of rows from each receiver; it may wait.
            ready: whether to start at once: `counts` would not wait, or the rows go to a GPU. There, a receive that another
                thread starts would come out of order, and communicators that share a device need one order on all ranks.
        """

        return _receive(self._line, self._down, self._receivers, tensors, counts, ready)


class ExpertExchange:
    """The exchange of a rank that owns experts, with the attention before them and the attention after them.

    Args:
        groups: the fold's communicators.
        before, after: positions of the attention that sends rows, and of the one that gets the results.
    """

    def __init__(self, groups: Groups, before: int, after: int):
        fold, routes = groups.fold, Routes(groups.fold)
        self._before, self._after = (
            [rank - fold.offset for rank in routes.senders(groups.rank, position)] for position in (before, after)
        )
        self._up, self._down, self._counts, self._line = groups.rows_up, groups.rows_down, groups.row_counts, groups.rows_line

    @property
    def senders(self) -> int:
        return len(self._before)

    def start_counts(self, device: torch.device) -> Pending:
        """Start to receive how many rows will come from each sender: int64 [S]."""
        count_S = torch.empty(self.senders, dtype=torch.int64, device=device)
        return self._counts.receive_rows([count_S], dict.fromkeys(self._before, 1))

    def start_rows(self, tensors: Callable[[int], Rows], counts: Callable[[], Sequence[int]], ready: bool) -> Pending:
        """Start to receive rows, as soon as their numbers are known (`TokenExchange.start_back`)."""
        return _receive(self._line, self._up, self._before, tensors, counts, ready)

    def start_gradients(self, tensors: Callable[[int], Rows], counts: Callable[[], Sequence[int]]) -> Pending:
        """Start to receive the gradients of results."""
        return _receive(self._line, self._up, self._after, tensors, counts, True)

    def start_results(self, tensors: Rows, count_S: Sequence[int]) -> Pending:
        """Start to send results to the attention after the experts."""
        return self._down.send_rows(tensors, dict(zip(self._after, count_S, strict=True)))

    def start_row_gradients(self, tensors: Rows, count_S: Sequence[int]) -> Pending:
        """Start to send the gradients of rows to the attention before the experts."""
        return self._down.send_rows(tensors, dict(zip(self._before, count_S, strict=True)))


def _receive(
    line: Line,
    communicator: Communicator,
    members: Sequence[int],
    tensors: Callable[[int], Rows],
    counts: Callable[[], Sequence[int]],
    ready: bool,
) -> Pending:
    """Start to receive rows from members, in the line, as soon as their numbers are known (`TokenExchange.start_back`)."""

    def begin() -> Pending:
        known = counts()
        return communicator.receive_rows(tensors(sum(known)), dict(zip(members, known, strict=True)))

    return line.start(begin, ready)


class TokenHalf(nn.Module):
    """The half of a MoE layer on a rank that owns tokens: router, shared expert, and the sums of results."""

    def __init__(
        self,
        ownership: Ownership,
        layer: int,
        groups: Groups,
        gate: Gate | None = None,
        shared: nn.Module | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        model = ownership.model
        self.all_experts, self.ranks, self.topk, self.hidden = model.experts, ownership.fold.ep, model.topk, model.hidden
        self.router = Router(model, groups, gate, device, dtype)
        self.shared = shared

    def route(self, h_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        return self.router(h_TH, piece)

    def encode(self, h_TH: torch.Tensor, routing: Routing) -> once.Encoded:
        return once.encode(h_TH, once.Chosen.of(routing), self.all_experts, self.ranks)


class ExpertHalf(nn.Module):
    """The half of a MoE layer on a rank that owns experts."""

    def __init__(
        self,
        ownership: Ownership,
        layer: int,
        groups: Groups,
        kind: Literal["grouped", "loop"] = "grouped",
        later: Later | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        moe, hidden = ownership.share(layer).moe, ownership.model.hidden
        assert moe, f"block {layer} is dense"
        self.hidden, self.topk, self.slices = hidden, ownership.model.topk, groups.expert_slices
        ids = ownership.experts(groups.rank)
        self.experts = Experts(ids, moe.expert, hidden, groups.expert_slices, kind, later, device, dtype)
        self.exchange = ExpertExchange(groups, *ownership.attention_around(layer))

    def run(self, rows_NH: torch.Tensor, weight_NK: torch.Tensor, expert_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts: [N, H] → [N, H].

        With ETP, the ranks that share the experts gather each other's rows, and sum their parts of the results.
        """
        if self.slices.size == 1:
            return self.experts.weighted_sum(rows_NH, weight_NK, expert_NK)
        count = torch.full((1,), len(rows_NH), device=rows_NH.device)
        rows = self.slices.all_gather(count).tolist()
        rows_NH, weight_NK, expert_NK = (gather_rows(each, self.slices, rows) for each in (rows_NH, weight_NK, expert_NK))
        return scatter_rows(self.experts.weighted_sum(rows_NH, weight_NK, expert_NK), self.slices, rows)
