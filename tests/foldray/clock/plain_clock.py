"""A plain and slow version of the clock, directly on ops and graphs. It is the reference for the compiled clock."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from foldray.clock import COMPUTE, Cost, Span
from foldray.graph import Graph, Op, Schedule


def plain_times(graph: Graph, schedule: Schedule, cost: Cost) -> dict[Op, Span]:
    """Return the span of each op. Ops that never run are left out."""
    run = PlainRun(graph, schedule, cost)
    for position in range(len(schedule)):
        run.look_at_position(position)
    while run.events:
        at, _, event = heapq.heappop(run.events)
        event(at)
    return run.done


class PlainRun:
    """A simulation by events. They run in the order of their times, and events of equal time in the order of planning.
    An op that travels counts as planned when it was posted.

    An event is planned once everything that it needs is done.
    """

    def __init__(self, graph: Graph, schedule: Schedule, cost: Cost):
        self.graph, self.schedule, self.cost = graph, schedule, cost
        self.done: dict[Op, Span] = {}
        self.next = [0] * len(schedule)
        self.free = [0.0] * len(schedule)
        self.lanes: dict[tuple[str, int], float] = defaultdict(float)
        self.posted: dict[tuple[Op, int], float] = {}
        self.numbers: dict[Op, int] = {}  # of the last posting
        self.queues: dict[object, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
        self.quiet: dict[object, float] = defaultdict(float)
        self.planned: set[object] = set()  # channels whose first op has an event, or waits for another op
        self.waiting: dict[Op, list[Callable[[], None]]] = defaultdict(list)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    def plan(self, at: float, event: Callable[[float], None], number: int | None = None) -> None:
        if number is None:
            self.count += 1
        heapq.heappush(self.events, (at, self.count if number is None else number, event))

    def misses(self, needs: list[Op], again: Callable[[], None]) -> bool:
        for need in needs:
            if need not in self.done:
                self.waiting[need].append(again)
                return True
        return False

    def look_at_position(self, position: int) -> None:
        if self.next[position] == len(self.schedule[position]):
            return
        op = self.schedule[position][self.next[position]]
        travels = self.graph.channel(op) is not None
        needs = [] if travels else list(self.graph.needs(op))  # a collective is posted before it can travel
        if not self.misses(needs, lambda: self.look_at_position(position)):
            at = max([self.free[position], *(self.done[need].end for need in needs)])
            self.plan(at, lambda at: (self.post if travels else self.compute)(op, position, at))

    def compute(self, op: Op, position: int, at: float) -> None:
        self.next[position] += 1
        self.free[position] = self.use(op, (position,), at)
        self.finish(op, at, self.free[position])
        self.look_at_position(position)

    def post(self, op: Op, position: int, at: float) -> None:
        self.next[position] += 1
        self.free[position] = self.posted[op, position] = at
        self.count += 1
        self.numbers[op] = self.count
        self.queues[self.graph.channel(op)][position].append(op)
        self.look_at_channel(self.graph.channel(op))
        self.look_at_position(position)

    def look_at_channel(self, channel: object) -> None:
        queues = self.queues[channel]
        op = next((queue[0] for queue in queues.values() if queue), None)
        if op is None or channel in self.planned or any(queues[place][:1] != [op] for place in self.graph.where(op)):
            return
        self.planned.add(channel)
        needs = list(self.graph.needs(op))

        def again() -> None:
            self.planned.discard(channel)
            self.look_at_channel(channel)

        if not self.misses(needs, again):
            posted = [self.posted[op, place] for place in self.graph.where(op)]
            at = max([self.quiet[channel], *posted, *(self.done[need].end for need in needs)])
            self.plan(at, lambda at: self.travel(op, channel, at), self.numbers[op])

    def travel(self, op: Op, channel: object, at: float) -> None:
        first, places = self.cost(op)[0][0], self.graph.where(op)
        free = max([at, *(self.lanes[first, place] for place in places if first != COMPUTE)])
        if free > at:  # the link is busy; try again when it is free
            self.plan(free, lambda at: self.travel(op, channel, at), self.numbers[op])
            return
        self.quiet[channel] = self.use(op, places, at)
        for place in places:
            self.queues[channel][place].pop(0)
        self.finish(op, at, self.quiet[channel])
        self.planned.discard(channel)
        self.look_at_channel(channel)

    def use(self, op: Op, places: tuple[int, ...], at: float) -> float:
        for lane, seconds in self.cost(op):
            if lane != COMPUTE:
                at = max([at, *(self.lanes[lane, place] for place in places)])
            at += seconds
            if lane != COMPUTE:
                self.lanes.update({(lane, place): at for place in places})
        return at

    def finish(self, op: Op, start: float, end: float) -> None:
        self.done[op] = Span(start, end)
        for again in self.waiting.pop(op, ()):
            again()
