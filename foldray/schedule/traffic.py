"""What travels when, where it is known what ops cost: by urgency.

A list that starts every collective as soon as what it carries is there makes one wait for another that nobody needs yet. Here
those that may be moved are held until the link is about to be idle, and then the one goes first that is needed first. Gradients
are needed last of all: to move them alone is FlowMoE's priority (section 3.3). FlowMoE polls a flag to keep it; here the choice
is made once, when the list is written, from numbers that all ranks share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from foldray.schedule.op import Op

if TYPE_CHECKING:
    from foldray.schedule.step_graph import StepGraph


class OpCosts(NamedTuple):
    """What ops take, in seconds, as far as the choice goes by it; the same numbers on every rank.

    Args:
        seconds: by kind, direction and part; what is not there takes none.
        startup, per_byte: of a reduction.
    """

    seconds: tuple[tuple[tuple[str, str, int], float], ...]
    startup: float
    per_byte: float


def by_urgency(graph: StepGraph, order: Sequence[Op], costs: OpCosts, free: Callable[[Op], bool]) -> tuple[Op, ...]:
    """The same list, in which what is free to move leaves when the link would be idle before the next op ends.

    So nothing that is started later waits for more than one piece of what is less urgent.

    Args:
        order: a legal list, in which everything that is free stands where it is first ready.
        free: which of the collectives may be moved; all else keeps its order.
    """
    walk = _Walk(graph, costs, _first_uses(graph, order, free))
    for place, op in enumerate(order):
        if free(op):
            walk.hold(place, op)
        else:
            walk.take(op)
    while walk.waiting:
        walk.post()
    return tuple(walk.found)


def _first_uses(graph: StepGraph, order: Sequence[Op], free: Callable[[Op], bool]) -> dict[Op, float]:
    """Collective → place of the first op that needs it, be it through another collective; infinity for gradients."""
    uses: dict[Op, float] = {op: float("inf") for op in order if graph.channel(op) is not None}
    for place in reversed(range(len(order))):
        op = order[place]
        at = uses[op] if free(op) else place
        for need in graph.needs(op):
            if need in uses:
                uses[need] = min(uses[need], at)
    return uses


class _Walk:
    """Through a list on a clock of its own, with one link."""

    def __init__(self, graph: StepGraph, costs: OpCosts, uses: dict[Op, float]):
        self.graph, self.costs, self.uses, self.seconds = graph, costs, uses, dict(costs.seconds)
        self.now = self.link = 0.0  # when what was started is computed; when the link is idle
        self.arrival: dict[Op, float] = {}
        self.waiting: list[tuple[float, int, Op]] = []
        self.held: set[Op] = set()  # the same
        self.found: list[Op] = []

    def hold(self, place: int, op: Op) -> None:
        """A collective that is ready, and may wait."""
        heapq.heappush(self.waiting, (self.uses[op], place, op))
        self.held.add(op)

    def take(self, op: Op) -> None:
        """An op that keeps its place; before one that computes, what it needs and what the link has room for."""
        if self.graph.channel(op) is not None:
            self._travel(op)
            return
        needs = self.graph.needs(op)
        while any(need in self.held for need in needs):
            self.post()
        end = max([self.now, *(self.arrival[need] for need in needs if need in self.arrival)]) + self._takes(op)
        while self.waiting and max(self.link, self.now) < end:
            self.post()
        self.found.append(op)
        self.now = end

    def post(self) -> None:
        """Start the most urgent of what waits."""
        op = heapq.heappop(self.waiting)[2]
        self.held.remove(op)
        self._travel(op)

    def _travel(self, op: Op) -> None:
        self.found.append(op)
        if op.kind != "handover":  # those wait for other positions, of which this clock knows nothing
            self.link = max(self.link, self.now) + self._takes(op)
            self.arrival[op] = self.link

    def _takes(self, op: Op) -> float:
        if op.kind == "reduce":
            return self.costs.startup + self.costs.per_byte * self.graph.chunk(op).bytes
        return self.seconds.get((op.kind, op.direction, op.part), 0.0)
