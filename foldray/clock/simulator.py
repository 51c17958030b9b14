"""The simulator, which runs the lists of training on a clock at given costs, and the use of a step's time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from foldray.clock.compiled import CompiledSchedule, Times
from foldray.clock.times import Cost, Issue, Span, run, spans_of
from foldray.graph import Graph, Op, Schedule


class Usage(NamedTuple):
    """The use of one rank's time, in seconds.

    Args:
        compute: time in which an op computed.
        communication: time in which a collective or a handover was in flight.
        exposed: time in which a collective or a handover was in flight and no op computed.
    """

    compute: float
    communication: float
    exposed: float


def usage(graph: Graph, spans: Mapping[Op, Span]) -> Usage:
    """Return the use of time by the ops of one rank."""
    return _usage((graph.channel(op) is not None, span) for op, span in spans.items())


def usages(compiled: CompiledSchedule, ran: Times) -> tuple[Usage, ...]:
    """Return the use of time by the ops of each position in a run of its lists."""
    return tuple(_usage((compiled.channel_of[i] >= 0, Span(ran.starts[i], ran.ends[i])) for i in ops) for ops in compiled.lists)


def _usage(spans: Iterable[tuple[bool, Span]]) -> Usage:
    """Return the use of time by spans, each with whether something travels in it."""
    by_use: tuple[list[Span], list[Span]] = [], []
    for travels, span in spans:
        by_use[travels].append(span)
    computing, talking = map(merged, by_use)
    both = length(merged([*computing, *talking]))
    return Usage(length(computing), length(talking), both - length(computing))


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return sorted spans that do not touch and cover the same time."""
    covered: list[Span] = []
    for span in sorted(spans):
        if covered and span.start <= covered[-1].end:
            covered[-1] = Span(covered[-1].start, max(covered[-1].end, span.end))
        else:
            covered.append(span)
    return covered


def length(spans: Iterable[Span]) -> float:
    return sum(span.end - span.start for span in spans)


class Simulation(NamedTuple):
    """A simulated step.

    Args:
        spans: the span of every op, in the unit of the costs.
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
    compiled = CompiledSchedule(graph, schedule, lambda op: op)
    ran = run(compiled, cost, issue)
    return Simulation(spans_of(compiled, ran), max(ran.ends), usages(compiled, ran))
