"""The exchange of ranks that own both tokens and experts: all-to-alls over EP."""

from __future__ import annotations

import torch

from foldray.comm import Groups, Pending
from foldray.moe.contracts import Received, Sent


class AllToAll:
    """Rows travel in all-to-all-vs over EP. Row counts travel in an all-gather over ETP×EP, on another communicator."""

    def __init__(self, groups: Groups):
        self.tokens, self.counts = groups.tokens, groups.counts
        self._slices = groups.expert_slices
        places = [groups.fold.moe.coordinate(rank) for rank in self.counts.ranks]
        order = sorted(range(len(places)), key=lambda member: (places[member]["etp"], places[member]["ep"]))
        self._etp_then_ep = torch.tensor(order)

    def start_counts(self, sent: Sent) -> Pending:
        return self.counts.start_all_gather(sent.rows_E)

    def finish_counts(self, pending: Pending) -> Received:
        (rows_NE,) = pending.wait()
        return self._received(rows_NE.cpu())

    def equal_counts(self, sent: Sent) -> Received:
        return self._received(sent.rows_E.cpu().repeat(self.counts.size))

    def _received(self, rows_NE: torch.Tensor) -> Received:
        shape = (self._slices.size, self.tokens.size, self.tokens.size, -1)
        rows_XRRE = rows_NE.view(self.counts.size, -1)[self._etp_then_ep].view(shape)
        return Received(rows_XRRE[:, :, self.tokens.index], self._slices.index)

    def start_out(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        return self.tokens.start_all_to_all(rows_NH, received.rows_by_rank, sent.rows_by_rank(self.tokens.size))

    def start_back(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        return self.tokens.start_all_to_all(rows_NH, sent.rows_by_rank(self.tokens.size), received.rows_by_rank)
