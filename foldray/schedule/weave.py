"""From orders of computation to a schedule: where the handovers go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foldray.schedule.check import check
from foldray.schedule.clock import UNITS
from foldray.schedule.graph import Graph
from foldray.schedule.op import Op, Schedule


def weave(graph: Graph, orders: Schedule) -> Schedule:
    """Insert the handovers into the orders in which the positions compute.

    The ops of all positions are put into one order, that in which they end on a clock of unit times; ties go to the lower
    position. A handover follows the last op that it needs, and a position's list is its share of that one order. So both ends of
    every channel agree, and nobody can wait in a circle. A receive stands before the receiver's first op that ends later than
    the sender's: on that clock no transfer waits for its receiver, and no buffer is held for longer than this takes.

    Args:
        graph: what has to be done.
        orders: for every position its ops that compute, and no handover.

    Raises:
        ScheduleError: the orders are not those of this graph, or they make the positions wait for each other.
    """
    check(_Computing(graph), orders)
    return woven(graph, orders)


def woven(graph: Graph, orders: Schedule) -> Schedule:
    """What `weave` makes of orders that are known to be right."""
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
    """When each op ends: what `unit_times` finds where nothing travels, in one pass for those that plan."""
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
    """A graph without its handovers: who needs one needs what the handover needs."""

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
