"""A schedule on a clock: when each op runs, or who waits for whom where it cannot finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from foldray.schedule.compiled import COMPUTE, CompiledSchedule, LaneSeconds
from foldray.schedule.graph import Graph
from foldray.schedule.op import Op, Schedule

Cost = Callable[[Op], LaneSeconds]
"""Op → what it costs."""

UNITS = {"F": 1, "R": 1, "B": 2}


class Span(NamedTuple):
    """From when to when an op runs, in the cost's unit."""

    start: float
    end: float


def unit_times(graph: Graph, schedule: Schedule) -> dict[Op, Span]:
    """When each op runs if a forward takes 1, a backward 2, and what travels nothing once all its ends have started it.

    Raises:
        ScheduleError: the positions wait for each other.
    """
    return times(graph, schedule, lambda op: ((COMPUTE, 0 if graph.channel(op) else UNITS[op.direction]),))


def times(graph: Graph, schedule: Schedule, cost: Cost) -> dict[Op, Span]:
    """When each op runs.

    Raises:
        ScheduleError: the positions wait for each other.
    """
    compiled = CompiledSchedule(graph, schedule, lambda op: op)
    found = compiled.run_once([cost(op) for op in compiled.classes])
    return dict(zip(compiled.ops, map(Span, *found), strict=True))
