"""Handovers, inserted into the orders of computation of all positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foldray.schedule.check import check
from foldray.schedule.clock import UNITS
from foldray.schedule.graph import Graph
from foldray.schedule.op import Op, Schedule


def weave(graph: Graph, orders: Schedule) -> Schedule:
    """Insert the handovers into the orders in which the positions compute.

    All ops get one common order: the order in which they end on a clock of unit times (`clock.UNITS`). Ties go to the lower
    position. A handover follows the last op that it needs. The list of a position is its share of the common order. So both
    ends of every channel have the same order, and the positions cannot wait for each other in a circle. In the receiver's
    list, a handover comes right before the first op that ends later than the sender's op. So on this clock no transfer waits
    for its receiver, and no receiver holds a buffer longer than that requires.

    Args:
        graph: the graph of the schedule.
        orders: for every position, its ops that compute, without handovers.

    Raises:
        ScheduleError: an order lacks ops or has ops of another position or graph, or the positions wait for each other.
    """
    check(_Computing(graph), orders)
    return woven(graph, orders)


def woven(graph: Graph, orders: Schedule) -> Schedule:
    """Do the same as `weave`, without a check of the orders."""
    computing = _Computing(graph)
    position_of = {op: position for position, ops in enumerate(orders) for op in ops}
    ends = _ends(computing, orders)
    computed = sorted(ends, key=lambda op: (ends[op], position_of[op]))
    rank = {op: place for place, op in enumerate(computed)}
    followers: dict[Op, list[Op]] = {op: [] for op in computed}
    for op in graph.ops():
        if graph.channel(op) is not None:
            followers[max(computing.needs(op), key=rank.__getitem__)].append(op)
    lists: list[list[Op]] = [[] for _ in orders]
    for op in computed:
        for each in (op, *followers[op]):
            for position in graph.where(each):
                lists[position].append(each)
    return tuple(map(tuple, lists))


def _ends(computing: _Computing, orders: Schedule) -> dict[Op, int]:
    """Return when each op ends. The times are those of `unit_times` without communication, but found faster."""
    heads, free, ends = [0] * len(orders), [0] * len(orders), dict[Op, int]()
    moved = True
    while moved:
        moved = False
        for position, ops in enumerate(orders):
            while heads[position] < len(ops):
                op = ops[heads[position]]
                needs = computing.needs(op)
                if any(need not in ends for need in needs):
                    break
                start = max([free[position], *(ends[need] for need in needs)])
                free[position] = ends[op] = start + UNITS[op.direction]
                heads[position] += 1
                moved = True
    return ends


@dataclass(frozen=True)
class _Computing:
    """A graph without its handovers. An op that needs a handover in the original graph needs the sender's op here."""

    graph: Graph

    @property
    def positions(self) -> int:
        return self.graph.positions

    def ops(self) -> Iterator[Op]:
        return (op for op in self.graph.ops() if self.graph.channel(op) is None)

    def needs(self, op: Op) -> tuple[Op, ...]:
        return tuple(source for need in self.graph.needs(op) for source in self._sources(need))

    def where(self, op: Op) -> tuple[int, ...]:
        return self.graph.where(op)

    def channel(self, op: Op) -> None:
        return None

    def frees(self, op: Op) -> tuple[Op, ...]:
        return self.graph.frees(op)

    def _sources(self, need: Op) -> tuple[Op, ...]:
        return (need,) if self.graph.channel(need) is None else self.needs(need)
