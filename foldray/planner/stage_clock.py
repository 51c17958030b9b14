"""One stage's list by itself, on a clock: looked at once for all costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from foldray.schedule import COMPUTE, Op, Overlap, Slicing, Span, StepGraph, stage_order


class Piece(NamedTuple):
    """An op, as far as its cost depends on it."""

    kind: str
    back: bool
    tokens: range


class Alone:
    """A list of one position, of which nothing else is looked at; what travels does so on one channel.

    Args:
        graph: what the ops are of.
        order: the list.
    """

    def __init__(self, graph: StepGraph, order: Iterable[Op]):
        order = tuple(order)
        number = {op: i for i, op in enumerate(order)}
        self.pieces = [Piece(op.kind, op.direction == "B", graph.tokens(op)) for op in order]
        self.needs = [tuple(number[need] for need in graph.needs(op) if need in number) for op in order]
        self.travels = [graph.channel(op) is not None for op in order]
        # What computes waits for all it needs; what travels is started without waiting for what is computed, which is behind it.
        self.waits = [
            tuple(need for need in needs if self.travels[need]) if travels else needs
            for needs, travels in zip(self.needs, self.travels, strict=True)
        ]

    def spans(self, costs: Sequence[Sequence[tuple[str, float]]]) -> list[Span]:
        """When each op runs: what the clock (`times`) finds.

        Args:
            costs: lanes and seconds of every op.
        """
        return _Run(self, costs).to_the_end()


class _Run:
    """Two take turns, whoever's next op is earlier, or was seen to be next earlier: who computes, and who carries."""

    def __init__(self, alone: Alone, costs: Sequence[Sequence[tuple[str, float]]]):
        self.alone, self.costs = alone, costs
        self.found: list[Span | None] = [None] * len(costs)
        self.free = self.quiet = 0.0
        self.lanes: dict[str, float] = {}
        self.carried: deque[tuple[int, float]] = deque()  # with when they were started
        self.place = self.looks = 0
        self.computes: tuple[float, int] | None = None
        self.carries: tuple[float, int] | None = None

    def to_the_end(self) -> list[Span]:
        self._look()
        while self.computes or self.carries:
            if self.carries is None or (self.computes is not None and self.computes < self.carries):
                self._start()
            else:
                self._carry()
        assert self.place == len(self.found), "a list that waits for what is behind it"
        return self.found  # type: ignore[return-value]

    def _look(self) -> None:
        """See when the next op of the list can start."""
        self.computes = None
        if self.place < len(self.found):
            ends = [self.found[need] for need in self.alone.waits[self.place]]
            if all(ends):
                self.computes = self._seen(max([self.free, *(span.end for span in ends if span)]))

    def _seen(self, at: float) -> tuple[float, int]:
        self.looks += 1
        return at, self.looks

    def _start(self) -> None:
        assert self.computes
        at, op = self.computes[0], self.place
        self.place += 1
        if self.alone.travels[op]:
            self.free = at
            self.carried.append((op, at))
            if self.carries is None:
                self._look_at_first()
        else:
            self.free = self._use(op, at)
            self.found[op] = Span(at, self.free)
        self._look()

    def _look_at_first(self) -> None:
        """See when what is first in line can travel."""
        self.carries = None
        if self.carried:
            op, at = self.carried[0]
            ends = (span.end for need in self.alone.needs[op] if (span := self.found[need]))
            self.carries = self._seen(max([self.quiet, at, *ends]))

    def _carry(self) -> None:
        assert self.carries
        (op, _), (at, _) = self.carried[0], self.carries
        begin = max(at, self.lanes.get(self.costs[op][0][0], 0.0))
        if begin > at:  # the link is busy: in line again, behind what is ready before that
            self.carries = self._seen(begin)
            return
        self.carried.popleft()
        self.quiet = self._use(op, at)
        self.found[op] = Span(at, self.quiet)
        if self.computes is None:
            self._look()
        self._look_at_first()

    def _use(self, op: int, at: float) -> float:
        """Take an op's lanes one after another, each once it is free; when the last one is done."""
        for lane, seconds in self.costs[op]:
            if lane == COMPUTE:
                at += seconds
            else:
                at = self.lanes[lane] = max(at, self.lanes.get(lane, 0.0)) + seconds
        return at


@lru_cache(maxsize=2048)
def stage_alone(
    stages: tuple[tuple[str, ...], ...],
    number: int,
    direction: str,
    overlap: Overlap,
    slicing: Slicing,
    recompute: tuple[str, ...],
    batch_degree: int,
) -> Alone:
    """One direction of one stage among these, for the micro-batches that go together."""
    graph = StepGraph(stages, slicing, len(stages), batch_degree, False, recompute, batch_degree=batch_degree)  # type: ignore[arg-type]
    return Alone(graph, stage_order(graph, number, direction, overlap))


def piece_alone(graph: StepGraph, kind: str, direction: str, layer: int) -> Alone:
    """All pieces of the embedding, or of the head."""
    again = direction == "B" and kind in graph.recompute
    return Alone(graph, (
        op._replace(direction=each, micro_batch=m)
        for m in range(graph.batch_degree)
        for op in graph.pieces(kind, layer)
        for each in (("R", "B") if again else (direction,))
    ))  # fmt: skip
