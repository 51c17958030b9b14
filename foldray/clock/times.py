"""A schedule on a clock: when each op runs, or, if the schedule cannot finish, which position waits for which op."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from foldray.clock.compiled import COMPUTE, CompiledSchedule, Host, LaneSeconds, Times
from foldray.graph.op import Op, Schedule
from foldray.graph.pipeline_graph import Graph

Cost = Callable[[Op], LaneSeconds]
"""Op → its cost."""


class Issue(NamedTuple):
    """The hosts of a schedule's positions, op by op (`Host`).

    Args:
        seconds: op → the time that a host needs to issue it.
        waits: op → whether the host waits for what the op needs.
    """

    seconds: Callable[[Op], float]
    waits: Callable[[Op], bool]


class OpCosts(NamedTuple):
    """The times of ops, in seconds. They must be the same on every rank of a pipeline position.

    Args:
        seconds: pairs of ((kind, direction, part), seconds). Ops that are not listed take no time.
        startup, per_byte: seconds to start a reduction, and seconds per byte of its chunk.
    """

    seconds: tuple[tuple[tuple[str, str, int], float], ...]
    startup: float
    per_byte: float


UNITS = {"F": 1, "R": 1, "B": 2, "W": 1}


class Span(NamedTuple):
    """Start and end of an op, in the unit of the costs."""

    start: float
    end: float


def unit_times(graph: Graph, schedule: Schedule) -> dict[Op, Span]:
    """Return the span of each op if forward and recomputation take 1, backward takes 2, and communication takes no time.

    Raises:
        ScheduleError: the positions wait for each other.
    """
    return times(graph, schedule, lambda op: ((COMPUTE, 0 if graph.channel(op) else UNITS[op.direction]),))


def times(graph: Graph, schedule: Schedule, cost: Cost, issue: Issue | None = None) -> dict[Op, Span]:
    """Return the span of each op at given costs.

    Args:
        issue: what the hosts need; None is no time.
    """
    compiled = CompiledSchedule(graph, schedule, lambda op: op)
    return spans_of(compiled, run(compiled, cost, issue))


def run(compiled: CompiledSchedule[Op], cost: Cost, issue: Issue | None = None) -> Times:
    """Run lists once whose classes are ops. Other arguments are those of `times`."""
    host = issue and Host([*map(issue.seconds, compiled.classes)], [*map(issue.waits, compiled.classes)])
    return compiled.run_once([*map(cost, compiled.classes)], host)


def spans_of(compiled: CompiledSchedule[Op], ran: Times) -> dict[Op, Span]:
    """Return the span of each op in a run of compiled lists."""
    return dict(zip(compiled.ops, map(Span, ran.starts, ran.ends), strict=True))
