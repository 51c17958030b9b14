"""The exchange of ranks that own both tokens and experts: all-to-alls over EP."""

from __future__ import annotations

import torch

from foldray.comm import Groups, Pending
from foldray.moe.contracts import Received, RowCounts, Sent


class AllToAll:
    """Rows travel in all-to-all-vs over EP. Row counts travel in an all-gather over ETP×EP, on another communicator.

    A dispatch whose counts are still on their way waits in the line of the tokens' communicator, while the caller goes on.
    """

    def __init__(self, groups: Groups):
        self.tokens, self.counts = groups.tokens, groups.counts
        self._slices, self._line = groups.expert_slices, groups.tokens_line
        self._stream: torch.cuda.Stream | None = None
        places = [groups.fold.moe.coordinate(rank) for rank in self.counts.ranks]
        self._etp_then_ep = sorted(range(len(places)), key=lambda member: (places[member]["etp"], places[member]["ep"]))

    def start_counts(self, sent: Sent) -> Received:
        coming = self.counts.start_all_gather(sent.rows_E)
        stream = self._stream_after(sent.rows_E) if sent.rows_E.is_cuda else None
        return Received(coming, self._arrange, self._slices.index, stream)

    def _stream_after(self, rows_E: torch.Tensor) -> torch.cuda.Stream:
        """Return a stream of a GPU beside the current one, which waits until the counts are known."""
        self._stream = self._stream or torch.cuda.Stream(rows_E.device)
        self._stream.wait_stream(torch.cuda.current_stream(rows_E.device))
        return self._stream

    def equal_counts(self, sent: Sent) -> Received:
        assert sent.known_E is not None, "the host does not know how many rows leave"
        return Received.of(self._arrange(sent.known_E * self.counts.size), self._slices.index)

    def _arrange(self, rows: list[int]) -> RowCounts:
        """Put the counts of all members in order: for each member, its rows for every global expert."""
        ranks, experts = self.tokens.size, len(rows) // self.counts.size
        local = experts // ranks

        def between(member: int, rank: int) -> list[int]:
            """Return the rows that a member sends to each expert of an EP rank."""
            return rows[(first := member * experts + rank * local) : first + local]

        here = [between(member, self.tokens.index) for member in self._etp_then_ep]
        leaving_R = [sum(between(self.counts.index, rank)) for rank in range(ranks)]
        return RowCounts([here[x * ranks :][:ranks] for x in range(self._slices.size)], leaving_R)

    def start_out(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        def begin() -> Pending:
            return self.tokens.start_all_to_all(rows_NH, received.rows_by_rank, received.leaving_by_rank)

        return self._line.start(begin, ready=received.are_here, device=rows_NH.device)

    def start_back(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        def begin() -> Pending:
            return self.tokens.start_all_to_all(rows_NH, received.leaving_by_rank, received.rows_by_rank)

        return self._line.start(begin, ready=True, device=rows_NH.device)
