"""The exchange of ranks that own both tokens and experts: all-to-alls over EP."""

from __future__ import annotations

import torch

from foldray.comm import Groups, Pending
from foldray.moe.contracts import Received, Sent


class AllToAll:
    """Rows travel in all-to-all-vs over EP. Row counts travel in an all-gather over ETP×EP, on another communicator.

    A dispatch whose counts are still on their way waits in the line of the tokens' communicator, while the caller goes on.
    """

    def __init__(self, groups: Groups):
        self.tokens, self.counts = groups.tokens, groups.counts
        self._slices, self._line = groups.expert_slices, groups.tokens_line
        places = [groups.fold.moe.coordinate(rank) for rank in self.counts.ranks]
        order = sorted(range(len(places)), key=lambda member: (places[member]["etp"], places[member]["ep"]))
        self._etp_then_ep = torch.tensor(order)

    def start_counts(self, sent: Sent) -> Received:
        return Received(self.counts.start_all_gather(sent.rows_E), self._arrange, self._slices.index)

    def equal_counts(self, sent: Sent) -> Received:
        return Received.of(self._arrange(sent.rows_E.cpu().repeat(self.counts.size)), self._slices.index)

    def _arrange(self, rows_NE: torch.Tensor) -> torch.Tensor:
        shape = (self._slices.size, self.tokens.size, self.tokens.size, -1)
        rows_XRRE = rows_NE.view(self.counts.size, -1)[self._etp_then_ep].view(shape)
        return rows_XRRE[:, :, self.tokens.index]

    def start_out(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        def begin() -> Pending:
            return self.tokens.start_all_to_all(rows_NH, received.rows_by_rank, sent.rows_by_rank(self.tokens.size))

        # On a GPU, an operation that another thread starts would wait for all kernels that are in the queue by then.
        return self._line.start(begin, ready=rows_NH.is_cuda or not received.coming.is_running)

    def start_back(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        def begin() -> Pending:
            return self.tokens.start_all_to_all(rows_NH, sent.rows_by_rank(self.tokens.size), received.rows_by_rank)

        return self._line.start(begin, ready=True)
