"""When gradients travel, where it is known what ops cost: in the gaps that all-to-alls leave.

A list that starts every reduction as soon as its gradients are there makes all-to-alls wait behind what nobody needs yet. Here
reductions are held until the link is about to be idle: FlowMoE's priority (section 3.3). FlowMoE polls a flag to keep it; here
the choice is made once, when the list is written, from numbers that all ranks share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from foldray.kinds import HANDOVER, REDUCE
from foldray.schedule.op import Op
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


def by_urgency(graph: StepGraph, order: Sequence[Op], costs: OpCosts) -> tuple[Op, ...]:
    """The same list, in which reductions leave when the link would be idle before the next op ends.

    So no all-to-all waits for more than one chunk. All else keeps its order.

    Args:
        order: a legal list, in which every reduction stands where it is first ready.
    """
    walk = _Walk(graph, costs)
    for op in order:
        if op.kind == REDUCE:
            walk.waiting.append(op)
        else:
            walk.take(op)
    while walk.waiting:
        walk.post()
    return tuple(walk.found)


class _Walk:
    """Through a list on a clock of its own, with one link."""

    def __init__(self, graph: StepGraph, costs: OpCosts):
        self.graph, self.costs, self.seconds = graph, costs, dict(costs.seconds)
        self.now = self.link = 0.0  # when what was started is computed; when the link is idle
        self.arrival: dict[Op, float] = {}
        self.waiting: deque[Op] = deque()  # reductions that are ready
        self.found: list[Op] = []

    def take(self, op: Op) -> None:
        """An op that keeps its place; before one that computes, as many reductions as the link has room for."""
        if self.graph.channel(op) is not None:
            self._travel(op)
            return
        end = max([self.now, *(self.arrival[need] for need in self.graph.needs(op) if need in self.arrival)]) + self._takes(op)
        while self.waiting and max(self.link, self.now) < end:
            self.post()
        self.found.append(op)
        self.now = end

    def post(self) -> None:
        """Start the first of what waits."""
        self._travel(self.waiting.popleft())

    def _travel(self, op: Op) -> None:
        self.found.append(op)
        if op.kind != HANDOVER:  # those wait for other positions, of which this clock knows nothing
            self.link = max(self.link, self.now) + self._takes(op)
            self.arrival[op] = self.link

    def _takes(self, op: Op) -> float:
        if op.kind == REDUCE:
            return self.costs.startup + self.costs.per_byte * self.graph.chunk(op).bytes
        return self.seconds.get((op.kind, op.direction, op.part), 0.0)
