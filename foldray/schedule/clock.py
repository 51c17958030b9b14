"""A schedule on a clock: when each op runs, or who waits for whom where it cannot finish.

The rules are the executor's. A position starts its ops in the order of its list. An op that computes waits for all it needs. One
that communicates is started at once and never blocks, but that the host must have what other collectives bring it (row counts)
before it can start; a channel is a queue, what travels on it does so in its order. An op's cost is a sequence of lanes and
seconds: what computes keeps its position busy all along, and whoever needs a lane that another op uses waits for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from foldray.schedule.graph import Channel, Graph
from foldray.schedule.op import Op, Schedule

COMPUTE = "compute"

Cost = Callable[[Op], Sequence[tuple[str, float]]]
"""Op → (lane, seconds) after one another; a lane is `COMPUTE`, or a link that each position has one of."""

UNITS = {"F": 1, "R": 1, "B": 2}


class ScheduleError(ValueError):
    """A schedule that its graph does not allow; the text names the fault in one line."""


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
    run = _Run(graph, schedule, cost)
    run.to_the_end()
    waiting = run.waiting()
    if waiting:
        raise ScheduleError(f"the positions wait for each other: {'; '.join(waiting)}")
    return run.done


class _Run:
    """Where a simulated step stands: events in the order of their time, each made when nothing is missing for it any more."""

    def __init__(self, graph: Graph, schedule: Schedule, cost: Cost):
        self.graph, self.schedule, self.cost = graph, schedule, cost
        self.done: dict[Op, Span] = {}
        self.next = [0] * len(schedule)
        self.free = [0.0] * len(schedule)  # when each position has done what it has started to compute
        self.lanes: dict[tuple[str, int], float] = defaultdict(float)
        self.posted: dict[tuple[Op, int], float] = {}  # what travels, and position → when it was started there
        self.queues: dict[Channel, dict[int, deque[Op]]] = defaultdict(lambda: defaultdict(deque))
        self.quiet: dict[Channel, float] = defaultdict(float)
        self.watched: set[Channel] = set()  # those whose first op is planned, or will be looked at again
        self.waiters: dict[Op, list[Callable[[], None]]] = defaultdict(list)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.made = 0

    def to_the_end(self) -> None:
        for position in range(len(self.schedule)):
            self._look(position)
        while self.events:
            at, _, event = heapq.heappop(self.events)
            event(at)

    def waiting(self) -> list[str]:
        """One clause per position that cannot finish, or per op that nobody waits for and that has not arrived."""
        clauses = []
        for position, (ops, done) in enumerate(zip(self.schedule, self.next, strict=True)):
            if done < len(ops):
                missing = ", ".join(str(need) for need in self.graph.needs(ops[done]) if need not in self.done)
                clauses.append(f"position {position} in {ops[done]} for {missing}")
        return clauses or [f"position {position} for the end of {op}" for op, position in self.posted if op not in self.done]

    def _look(self, position: int) -> None:
        """See whether a position's next op can start."""
        ops, place = self.schedule[position], self.next[position]
        if place == len(ops):
            return
        op, needs = ops[place], self.graph.needs(ops[place])
        travels = self.graph.channel(op) is not None
        first = [need for need in needs if self.graph.channel(need)] if travels else needs
        if self._is_missing(first, lambda: self._look(position)):
            return
        at = max([self.free[position], *(self.done[need].end for need in first)])
        self._plan(at, (lambda at: self._post(op, position, at)) if travels else (lambda at: self._compute(op, position, at)))

    def _compute(self, op: Op, position: int, at: float) -> None:
        end = at
        for lane, seconds in self.cost(op):
            end = self._use(lane, (position,), end, seconds)
        self.free[position] = end
        self.next[position] += 1
        self._finish(op, Span(at, end))
        self._look(position)

    def _post(self, op: Op, position: int, at: float) -> None:
        channel = self.graph.channel(op)
        assert channel is not None
        self.free[position] = at
        self.next[position] += 1
        self.posted[op, position] = at
        self.queues[channel][position].append(op)
        self._look_at(channel)
        self._look(position)

    def _look_at(self, channel: Channel) -> None:
        """See whether what is first on a channel can travel; one look is enough until it has."""
        queues = self.queues[channel]
        op = next((queue[0] for queue in queues.values() if queue), None)
        if channel in self.watched or op is None:
            return
        places = self.graph.where(op)
        if any(not queues[place] or queues[place][0] != op for place in places):
            return
        self.watched.add(channel)
        needs = self.graph.needs(op)
        if not self._is_missing(needs, lambda: self._look_again(channel)):
            ends = (*(self.posted[op, place] for place in places), *(self.done[need].end for need in needs))
            self._plan(max(self.quiet[channel], *ends), lambda at: self._travel(op, channel, at))

    def _look_again(self, channel: Channel) -> None:
        self.watched.discard(channel)
        self._look_at(channel)

    def _travel(self, op: Op, channel: Channel, at: float) -> None:
        places, cost = self.graph.where(op), self.cost(op)
        begin = max([at, *(self.lanes[cost[0][0], place] for place in places if cost[0][0] != COMPUTE)])
        if begin > at:  # the link is busy: in line again, behind what is ready before that
            self._plan(begin, lambda at: self._travel(op, channel, at))
            return
        end = at
        for lane, seconds in cost:
            end = self._use(lane, places, end, seconds)
        for place in places:
            self.queues[channel][place].popleft()
        self.quiet[channel] = end
        self._finish(op, Span(at, end))
        self._look_again(channel)

    def _use(self, lane: str, places: Sequence[int], at: float, seconds: float) -> float:
        """Take a lane at all of these positions once it is free at each; when it is done."""
        if lane == COMPUTE:
            return at + seconds
        end = max([at, *(self.lanes[lane, place] for place in places)]) + seconds
        for place in places:
            self.lanes[lane, place] = end
        return end

    def _finish(self, op: Op, span: Span) -> None:
        self.done[op] = span
        for look in self.waiters.pop(op, ()):
            look()

    def _is_missing(self, needs: Sequence[Op], then: Callable[[], None]) -> bool:
        """Whether one of the needs is not done; if so, look again once it is."""
        for need in needs:
            if need not in self.done:
                self.waiters[need].append(then)
                return True
        return False

    def _plan(self, at: float, event: Callable[[float], None]) -> None:
        self.made += 1
        heapq.heappush(self.events, (at, self.made, event))
