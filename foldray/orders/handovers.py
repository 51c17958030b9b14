"""Handovers, inserted into the orders of computation of all positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from foldray.clock.check import check
from foldray.clock.compiled import COMPUTE
from foldray.clock.times import UNITS, Span, times
from foldray.graph.op import Op, Schedule
from foldray.graph.pipeline_graph import Graph


def with_handovers(graph: Graph, orders: Schedule) -> Schedule:
    """Insert the handovers into the orders in which the positions compute.

    All ops that compute get one common order: the order in which they end on a clock of unit times (`clock.UNITS`). Ties go
    to the lower position. The list of a position is its share of the common order. In the sender's list, a handover follows
    the last op that it needs. In the receiver's list, it comes before the first op that ends later than the sender's op begins,
    because its first piece may leave long before the sender's op ends; but it comes after the handovers whose sender's op ends
    earlier. So every position has its handovers in the common order of the senders' ops. GPUs need that: kernels of several
    communicators, each of which waits for another rank, can block each other. On this clock no transfer waits for its receiver.
    A position waits only before an op that computes, so the positions cannot wait for each other in a circle.

    Args:
        orders: for every position, its ops that compute, without handovers.

    Raises:
        ScheduleError: an order lacks ops or has ops of another position or graph, or the positions wait for each other.
    """
    check(_Computing(graph), orders)
    return place_handovers(graph, orders)


def place_handovers(graph: Graph, orders: Schedule, spans: Mapping[Op, tuple[float, float]] | None = None) -> Schedule:
    """Do the same as `with_handovers`, without a check of the orders.

    Args:
        spans: when each op that computes begins and ends on another clock. The clock must respect the graph and the orders. A
            clock on which messages take time orders the messages of a channel as they become ready.
    """
    computing = _Computing(graph)
    position_of = {op: position for position, ops in enumerate(orders) for op in ops}
    spans = unit_spans(graph, [[(op,) for op in ops] for ops in orders]) if spans is None else spans
    computed = sorted(spans, key=lambda op: (spans[op][1], position_of[op]))
    rank = {op: place for place, op in enumerate(computed)}
    # Entries: when they are in the list (time, whether the op is a handover that the position receives, number), and the op.
    lists: list[list[tuple[tuple[float, bool, int], Op]]] = [
        [((spans[op][1], False, rank[op]), op) for op in ops] for ops in orders
    ]
    last = [(0.0, False, 0)] * len(orders)
    needs = {op: computing.needs(op) for op in graph.ops() if graph.channel(op) is not None}
    sources = {op: max(of_op, key=rank.__getitem__) for op, of_op in needs.items()}
    for op, source in sorted(sources.items(), key=lambda pair: rank[pair[1]]):
        places, (begin, end) = graph.where(op), spans[source]
        for position in places:
            sends = position == places[0] or any(position_of[need] == position for need in needs[op])
            key = (end, False, rank[source]) if sends else (begin, True, rank[source])
            # Sorting is stable, so a receive that comes too early for the common order goes right behind the one before.
            last[position] = max(last[position], key)
            lists[position].append((last[position], op))
    return tuple(tuple(op for _, op in sorted(key, key=lambda entry: entry[0])) for key in lists)


def unit_spans(graph: Graph, orders: Sequence[Sequence[tuple[Op, ...]]]) -> dict[Op, Span]:
    """Return when each op begins and ends. The times are those of `unit_times`, without communication.

    Args:
        orders: for every position, tuples of ops that compute. The ops of a tuple run at once: they begin together when all
            that they need is there, and end together.
    """
    together = {op: ops for order in orders for ops in order for op in ops}
    firsts = tuple(tuple(ops[0] for ops in order) for order in orders)
    spans = times(
        _Computing(graph, together), firsts, lambda op: ((COMPUTE, sum(UNITS[each.direction] for each in together[op])),)
    )
    return {op: spans[ops[0]] for op, ops in together.items()}


@dataclass(frozen=True)
class _Computing:
    """A graph without its handovers. An op that needs a handover in the original graph needs the sender's op here.

    Args:
        together: the ops that run at once with an op, and the op itself. The first of them stands for all.
    """

    graph: Graph
    together: Mapping[Op, tuple[Op, ...]] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        return self.graph.positions

    def ops(self) -> Iterator[Op]:
        return (op for op in self.graph.ops() if self.graph.channel(op) is None)

    def needs(self, op: Op) -> tuple[Op, ...]:
        needs = (need for each in self.together.get(op, (op,)) for need in self.graph.needs(each))
        return tuple(self.together.get(source, (source,))[0] for need in needs for source in self._sources(need))

    def where(self, op: Op) -> tuple[int, ...]:
        return self.graph.where(op)

    def channel(self, op: Op) -> None:
        return None

    def frees(self, op: Op) -> tuple[Op, ...]:
        return self.graph.frees(op)

    def _sources(self, need: Op) -> tuple[Op, ...]:
        return (need,) if self.graph.channel(need) is None else self.needs(need)
