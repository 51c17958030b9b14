"""The two halves of a MoE layer whose experts have ranks of their own, and the exchange of each half.

Rows go from the ranks of attention to those of the experts, and the results go straight to the ranks of the next attention
(DisagMoE, section 4.2.2). Only the ranks of a route take part. A row carries its weights, and the numbers of its experts on
the rank that it goes to (`once.py`). Rows may travel in fewer bytes (`exchange.py`).

If tokens travel once to each node, a rank of experts is one on each node, which passes rows on inside it.

Legend: T tokens, H hidden, K experts per token, N rows, R ranks of experts that this rank sends to, S ranks that send here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from foldray.blueprint import Ownership
from foldray.comm import Communicator, DispatchQueue, Groups, Pending, gather_rows, scatter_rows
from foldray.kernels.autograd import Later
from foldray.kernels.experts import Kind
from foldray.moe import once
from foldray.moe.contracts import Rows, compute_inside
from foldray.moe.exchange import Format, Wire, write
from foldray.moe.layer import Experts
from foldray.moe.router import Gate, Router, Routing, TokenPiece
from foldray.nodes.routes import Routes


class TokenExchange:
    """The exchange of a rank that owns tokens, with the experts of one position."""

    def __init__(self, groups: Groups, position: int, wire: Wire | None = None):
        fold = groups.fold
        self._out, self._back = wire.out if wire else None, wire.back if wire else None
        self._receivers = [rank - fold.offset for rank in Routes(fold).receivers(groups.rank, position)]
        self._up, self._down, self._counts, self._queue = groups.rows_up, groups.rows_down, groups.row_counts, groups.rows_queue

    def start_counts(self, count_R: torch.Tensor) -> Pending:
        """Start to tell the experts how many rows will come."""
        return self._counts.send_rows([count_R], dict.fromkeys(self._receivers, 1))

    def start_out(self, tensors: Rows, count_R: Sequence[int]) -> Pending:
        """Start to send rows, or the gradients of results."""
        return _send(self._up, self._receivers, tensors, count_R, self._out)

    def start_back(self, like: Rows, counts: Callable[[], Sequence[int]], ready: bool) -> Pending:
        """Start to receive results, or the gradients of rows, as soon as the numbers of rows are known.

        `like` are tensors without rows, of the types and widths of what comes. `ready` starts at once: `counts` would not wait,
        or the rows go to a GPU. There, a receive that another thread starts would come out of order, and communicators that
        share a device need one order on all ranks.
        """
        return _receive(self._queue, self._down, self._receivers, like, counts, self._back, ready)


class ExpertExchange:
    """The exchange of a rank that owns experts, with the attention before them, which sends rows, and the one after them."""

    def __init__(self, groups: Groups, before: int, after: int, wire: Wire | None = None):
        fold, routes = groups.fold, Routes(groups.fold)
        self._out, self._back = wire.out if wire else None, wire.back if wire else None
        self._before, self._after = (
            [rank - fold.offset for rank in routes.senders(groups.rank, position)] for position in (before, after)
        )
        self._up, self._down, self._counts, self._queue = groups.rows_up, groups.rows_down, groups.row_counts, groups.rows_queue

    @property
    def senders(self) -> int:
        return len(self._before)

    def start_counts(self, device: torch.device) -> Pending:
        """Start to receive how many rows will come from each sender: int64 [S]."""
        count_S = torch.empty(self.senders, dtype=torch.int64, device=device)
        return self._counts.receive_rows([count_S], dict.fromkeys(self._before, 1))

    def start_rows(self, like: Rows, counts: Callable[[], Sequence[int]], ready: bool) -> Pending:
        """Start to receive rows, as soon as their numbers are known (`TokenExchange.start_back`)."""
        return _receive(self._queue, self._up, self._before, like, counts, self._out, ready)

    def start_gradients(self, like: Rows, counts: Callable[[], Sequence[int]]) -> Pending:
        """Start to receive the gradients of results."""
        return _receive(self._queue, self._up, self._after, like, counts, self._out, True)

    def start_results(self, tensors: Rows, count_S: Sequence[int]) -> Pending:
        """Start to send results to the attention after the experts."""
        return _send(self._down, self._after, tensors, count_S, self._back)

    def start_row_gradients(self, tensors: Rows, count_S: Sequence[int]) -> Pending:
        """Start to send the gradients of rows to the attention before the experts."""
        return _send(self._down, self._before, tensors, count_S, self._back)


def _send(
    communicator: Communicator, members: Sequence[int], tensors: Rows, counts: Sequence[int], form: Format | None
) -> Pending:
    travels, _ = write(tensors, form)
    return communicator.send_rows(travels, dict(zip(members, counts, strict=True)))


def _receive(
    queue: DispatchQueue,
    communicator: Communicator,
    members: Sequence[int],
    like: Rows,
    counts: Callable[[], Sequence[int]],
    form: Format | None,
    ready: bool,
) -> Pending:
    def begin() -> Pending:
        known = counts()
        empty, read = write(like, form)  # as the sender writes them
        into = [tensor.new_empty((sum(known), *tensor.shape[1:])) for tensor in empty]
        return communicator.receive_rows(into, dict(zip(members, known, strict=True))).then(read)

    return queue.start(begin, ready)


class TokenHalf(nn.Module):
    """The half of a MoE layer on a rank that owns tokens: router, shared expert, and the sums of results."""

    def __init__(self, ownership: Ownership, groups: Groups, gate: Gate | None = None, shared: nn.Module | None = None):
        super().__init__()
        model = ownership.model
        self.all_experts, self.ranks, self.topk, self.hidden = model.experts, ownership.fold.ep_across, model.topk, model.hidden
        self.router = Router(model, groups, gate)
        self.shared = shared

    def route(self, h_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        return self.router(h_TH, piece)

    def encode(self, h_TH: torch.Tensor, routing: Routing) -> once.Encoded:
        return once.encode(h_TH, once.Chosen.of(routing), self.all_experts, self.ranks)


class ExpertHalf(nn.Module):
    """The half of a MoE layer on a rank that owns experts."""

    def __init__(self, ownership: Ownership, layer: int, groups: Groups, kind: Kind, wire: Wire | None, later: Later):
        super().__init__()
        moe, hidden = ownership.share(layer).moe, ownership.model.hidden
        assert moe, f"block {layer} is dense"
        self.hidden, self.topk, self.slices = hidden, ownership.model.topk, groups.expert_slices
        ids, inside = ownership.experts(groups.rank), ownership.fold.ep_inside
        self.inside = (groups.tokens_inside, groups.tokens_inside_queue) if inside > 1 else None
        self.experts = Experts(ids, moe.expert, hidden, groups.expert_slices, kind, later)
        self.exchange = ExpertExchange(groups, *ownership.attention_around(layer), wire)

    def run(self, rows_NH: torch.Tensor, weight_NK: torch.Tensor, expert_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts: [N, H] → [N, H].

        If tokens travel once to each node, the numbers of experts are those on this node, whose ranks pass rows on to each other.
        With ETP, the ranks that share the experts gather each other's rows, and sum their parts of the results.
        """
        if self.inside is not None:
            ranks, queue = self.inside
            passed_on = once.count_passed_on(ranks, ranks.size * len(self.experts.ids), expert_NK)
            relay = once.Relay(ranks, queue, rows_NH.device, lambda: passed_on)
            return compute_inside(relay, lambda rows: self._run(*rows), (rows_NH, weight_NK, expert_NK))
        return self._run(rows_NH, weight_NK, expert_NK)

    def _run(self, rows_NH: torch.Tensor, weight_NK: torch.Tensor, expert_NK: torch.Tensor) -> torch.Tensor:
        """Do the same for rows whose experts are on this rank."""
        if self.slices.size == 1:
            return self.experts.weighted_sum(rows_NH, weight_NK, expert_NK)
        count = torch.full((1,), len(rows_NH), device=rows_NH.device)
        rows = self.slices.all_gather(count).tolist()
        rows_NH, weight_NK, expert_NK = (gather_rows(x, self.slices, rows) for x in (rows_NH, weight_NK, expert_NK))
        return scatter_rows(self.experts.weighted_sum(rows_NH, weight_NK, expert_NK), self.slices, rows)
