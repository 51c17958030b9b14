"""The exchange of ranks that own both tokens and experts: all-to-alls over EP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from foldray.comm import Groups, Pending
from foldray.moe.contracts import Received, RowCounts, Rows, Sent
from foldray.moe.wire import Format, Wire, write


class AllToAll:
    """Rows travel in all-to-all-vs over EP, or between nodes. Row counts travel in an all-gather over ETP×EP, on another
    communicator. A dispatch whose counts are still on their way waits in the line of the tokens' communicator, while the caller
    goes on.
    """

    def __init__(self, groups: Groups, wire: Wire | None = None):
        self.tokens, self.counts = groups.tokens, groups.counts
        wire = wire if self.tokens.size > 1 else None
        self._out, self._back = wire.out if wire else None, wire.back if wire else None
        self._slices, self._line = groups.expert_slices, groups.tokens_line
        self._stream: torch.cuda.Stream | None = None
        self._fold, grid = groups.fold, groups.fold.moe
        places = [grid.coordinate(rank) for rank in self.counts.ranks]
        self._member = {(place["etp"], place["ep"]): member for member, place in enumerate(places)}
        self._here = grid.coordinate(groups.rank)["ep"]

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
        ranks, inside, slices = self._fold.ep, self._fold.ep_inside, range(self._slices.size)
        counts, mine, here = _ExchangedCounts(numbers, self._member, experts, ranks), self._slices.index, self._here
        if inside == 1:
            return RowCounts(
                [[counts.of_experts(x, rank, here) for rank in range(ranks)] for x in slices],
                [counts.to_rank(mine, here, to) for to in range(ranks)],
                [[counts.to_rank(x, rank, here) for rank in range(ranks)] for x in slices],
            )
        node, place = divmod(here, inside)
        # A rank passes on the rows of all ranks with its place on their nodes.
        passed = [range(first, ranks, inside) for first in range(inside)]
        within = RowCounts(
            [[_sum_all(counts.of_experts(x, rank, here) for rank in of) for of in passed] for x in slices],
            [sum(counts.to_rank(mine, rank, node * inside + to) for rank in passed[place]) for to in range(inside)],
            [[sum(counts.to_rank(x, rank, here) for rank in of) for of in passed] for x in slices],
        )
        leaving = [counts.to_node(mine, here, to) for to in range(self._fold.ep_across)]
        arriving = [[counts.to_node(x, rank, node) for rank in passed[place]] for x in slices]
        return RowCounts(within.rows_XRE, leaving, arriving, within)

    def start_out(self, rows: Rows, sent: Sent, received: Received) -> Pending:
        def send(x: torch.Tensor) -> Pending:
            leaving = received.leaving_by_rank
            return self.tokens.start_all_to_all(x[: sum(leaving)], received.rows_by_rank, leaving)

        return self._start(rows, self._out, send, received.are_here)

    def start_back(self, rows: Rows, sent: Sent, received: Received, room: int | None = None) -> Pending:
        def send(x: torch.Tensor) -> Pending:
            return self.tokens.start_all_to_all(x, received.leaving_by_rank, received.rows_by_rank, room)

        return self._start(rows, self._back, send, ready=True)

    def _start(self, rows: Rows, form: Format | None, send: Callable[[torch.Tensor], Pending], ready: bool) -> Pending:
        travels, read = write(rows, form)

        def begin() -> Pending:
            return Pending.of(map(send, travels)).then(read)

        return self._line.start(begin, ready, device=travels[0].device)


class _ExchangedCounts(NamedTuple):
    """What all members of a group have sent of their rows: `Sent.counts`, one after another. A member's number is that of its
    places in its ETP group and in its EP group.
    """

    numbers: list[int]
    member: Mapping[tuple[int, int], int]
    experts: int
    ranks: int

    def of_experts(self, x: int, rank: int, of: int) -> list[int]:
        """Return the rows that a rank has for each expert of an EP rank."""
        local = self.experts // self.ranks
        return self.numbers[(first := self._first(x, rank) + of * local) : first + local]

    def to_rank(self, x: int, rank: int, to: int) -> int:
        """Return the number of rows that a rank sends to an EP rank, or that others pass on to it."""
        if self._length == self.experts:
            return sum(self.of_experts(x, rank, to))
        return self.numbers[self._first(x, rank) + self.experts + to]

    def to_node(self, x: int, rank: int, node: int) -> int:
        """Return the number of rows that a rank sends to a node."""
        return self.numbers[self._first(x, rank) + self.experts + self.ranks + node]

    @property
    def _length(self) -> int:
        return len(self.numbers) // len(self.member)

    def _first(self, x: int, rank: int) -> int:
        return self.member[x, rank] * self._length


def _sum_all(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*rows, strict=True)]
