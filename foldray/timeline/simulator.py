"""The lists that training runs, on a clock: what they would take at given costs."""

from __future__ import annotations

from typing import NamedTuple

from foldray.schedule import Cost, Graph, Op, Schedule, Span, times
from foldray.timeline.usage import Usage, usage


class Simulation(NamedTuple):
    """A simulated step.

    Args:
        spans: of every op, in the unit of the costs.
        seconds: from the first op's start to the last one's end.
        usage: of every position.
    """

    spans: dict[Op, Span]
    seconds: float
    usage: tuple[Usage, ...]


def simulate(graph: Graph, schedule: Schedule, cost: Cost) -> Simulation:
    """Run a schedule at given costs.

    Raises:
        ScheduleError: it cannot finish.
    """
    spans = times(graph, schedule, cost)
    own = tuple(usage(graph, {op: spans[op] for op in ops}) for ops in schedule)
    return Simulation(spans, max(span.end for span in spans.values()), own)
