"""The exchange of ranks that own both tokens and experts: all-to-alls over EP."""

from __future__ import annotations

from functools import partial

import torch

from foldray.comm import Groups, Pending
from foldray.moe.contracts import Received, RowCounts, Rows, Sent


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
        coming = self.counts.start_all_gather(counts := sent.counts)
        stream = self._stream_after(counts) if counts.is_cuda else None
        return Received(coming, partial(self._arrange, len(sent.rows_E)), self._slices.index, stream)

    def _stream_after(self, counts: torch.Tensor) -> torch.cuda.Stream:
        """Return a stream of a GPU beside the current one, which waits until the counts are known."""
        self._stream = self._stream or torch.cuda.Stream(counts.device)
        self._stream.wait_stream(torch.cuda.current_stream(counts.device))
        return self._stream

    def equal_counts(self, sent: Sent) -> Received:
        assert sent.known_E is not None, "the host does not know how many rows leave"
        return Received.of(self._arrange(len(sent.known_E), sent.known_E * self.counts.size), self._slices.index)

    def _arrange(self, experts: int, numbers: list[int]) -> RowCounts:
        """Put the counts of all members in order: for each member `Sent.counts`."""
        ranks, each = self.tokens.size, len(numbers) // self.counts.size
        local = experts // ranks

        def by_expert(member: int, rank: int) -> list[int]:
            """Return the rows that a member has for each expert of an EP rank."""
            return numbers[(first := member * each + rank * local) : first + local]

        def travelling(member: int, rank: int) -> int:
            """Return the number of rows that a member sends to an EP rank."""
            return sum(by_expert(member, rank)) if each == experts else numbers[member * each + experts + rank]

        def by_slice(values: list) -> list[list]:
            return [values[x * ranks :][:ranks] for x in range(self._slices.size)]

        here = self.tokens.index
        return RowCounts(
            by_slice([by_expert(member, here) for member in self._etp_then_ep]),
            [travelling(self.counts.index, rank) for rank in range(ranks)],
            by_slice([travelling(member, here) for member in self._etp_then_ep]),
        )

    def start_out(self, rows: Rows, sent: Sent, received: Received) -> Pending:
        def begin() -> Pending:
            leaving = sum(received.leaving_by_rank)
            return Pending.of(
                self.tokens.start_all_to_all(each[:leaving], received.rows_by_rank, received.leaving_by_rank) for each in rows
            )

        return self._line.start(begin, ready=received.are_here, device=rows[0].device)

    def start_back(self, rows: Rows, sent: Sent, received: Received, room: int | None = None) -> Pending:
        def begin() -> Pending:
            return Pending.of(
                self.tokens.start_all_to_all(each, received.leaving_by_rank, received.rows_by_rank, room) for each in rows
            )

        return self._line.start(begin, ready=True, device=rows[0].device)
