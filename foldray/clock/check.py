"""Checks that a graph allows a schedule."""

from __future__ import annotations

from foldray.clock.compiled import ScheduleError
from foldray.clock.times import unit_times
from foldray.graph.op import Op, Schedule
from foldray.graph.pipeline_graph import Channel, Graph

_Places = tuple[dict[Op, int], ...]  # for every position: op → its index in the list


def check(graph: Graph, schedule: Schedule) -> None:
    """Accept a schedule that runs to its end, or raise an error for its first fault.

    The rules are:

    - Every op is in the list of every position that takes part in it, exactly once.
    - In a list, no op comes before an op that it needs, or after an op that frees what it needs.
    - Both ends of a channel have the same order.
    - A run in which every position follows its list finishes.

    Raises:
        ScheduleError: the schedule breaks a rule. The message is one line with the fault, its position and its ops.
    """
    if len(schedule) != graph.positions:
        raise ScheduleError(f"{len(schedule)} lists for {graph.positions} positions")
    _check_places(graph, schedule)
    places = tuple({op: place for place, op in enumerate(ops)} for ops in schedule)
    for position in range(graph.positions):
        _check_needs(graph, position, places)
        _check_frees(graph, position, places)
    _check_channels(graph, schedule)
    unit_times(graph, schedule)


def _check_places(graph: Graph, schedule: Schedule) -> None:
    belongs = {op: graph.where(op) for op in graph.ops()}
    expected: list[list[Op]] = [[] for _ in schedule]
    for op, positions in belongs.items():
        for position in positions:
            expected[position].append(op)
    for position, ops in enumerate(schedule):
        seen: set[Op] = set()
        for op in ops:
            if op not in belongs:
                raise ScheduleError(f"position {position} has {op}, which the graph does not know")
            if position not in belongs[op]:
                places = " and ".join(map(str, belongs[op]))
                raise ScheduleError(f"position {position} has {op}, which belongs at position {places}")
            if op in seen:
                raise ScheduleError(f"position {position} has {op} twice")
            seen.add(op)
        for op in expected[position]:
            if op not in seen:
                raise ScheduleError(f"position {position} lacks {op}")


def _check_needs(graph: Graph, position: int, places: _Places) -> None:
    place_of = places[position]
    for op in place_of:
        for need in graph.needs(op):
            if place_of.get(need, -1) > place_of[op]:
                raise ScheduleError(f"position {position} has {op} before {need}, which it needs")


def _check_frees(graph: Graph, position: int, places: _Places) -> None:
    freed_by: dict[Op, Op] = {}
    for op in places[position]:  # a dict keeps the order of the list
        for need in graph.needs(op):
            if need in freed_by:
                raise ScheduleError(f"position {position} has {op} after {freed_by[need]}, which frees {need} that it uses")
        freed_by.update(dict.fromkeys(graph.frees(op), op))


def _check_channels(graph: Graph, schedule: Schedule) -> None:
    queues: dict[Channel, dict[int, list[Op]]] = {}
    for position, ops in enumerate(schedule):
        for op in ops:
            channel = graph.channel(op)
            if channel is not None:
                queues.setdefault(channel, {}).setdefault(position, []).append(op)
    for (name, low, high), ends in queues.items():
        for ops_at_ends in zip(*ends.values(), strict=True):
            if len(set(ops_at_ends)) > 1:
                rule = " where ".join(f"position {end} has {op}" for end, op in zip(ends, ops_at_ends, strict=True))
                raise ScheduleError(f"the channel of {name} between positions {low} and {high} has two orders: {rule}")
