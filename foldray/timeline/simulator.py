"""The simulator: it runs the lists of training on a clock, at given costs."""

from __future__ import annotations

from typing import NamedTuple

from foldray.schedule import Cost, Graph, Issue, Op, Schedule, Span, times
from foldray.timeline.usage import Usage, usage


class Simulation(NamedTuple):
    """A simulated step.

    Args:
        spans: the span of every op, in the unit of the costs.
        seconds: time from the start of the step to the end of the last op.
        usage: usage of every position.
    """

    spans: dict[Op, Span]
    seconds: float
    usage: tuple[Usage, ...]


def simulate(graph: Graph, schedule: Schedule, cost: Cost, issue: Issue | None = None) -> Simulation:
    """Run a schedule at given costs, with hosts that need time to issue ops if `issue` says so.

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    spans = times(graph, schedule, cost, issue)
    own = tuple(usage(graph, {op: spans[op] for op in ops}) for ops in schedule)
    return Simulation(spans, max(span.end for span in spans.values()), own)
