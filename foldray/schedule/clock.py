"""A schedule on a clock of unit times: when each op runs, or who waits for whom where it cannot finish.

The rules are the executor's. A position starts its ops in the order of its list. Starting a handover never blocks, at either
end; an op that computes waits for all it needs. A channel is a queue: what travels on it does so in its order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from foldray.schedule.graph import Channel, Graph
from foldray.schedule.op import Op, Schedule

UNITS = {"F": 1, "R": 1, "B": 2}


class ScheduleError(ValueError):
    """A schedule that its graph does not allow; the text names the fault in one line."""


class Span(NamedTuple):
    """From when to when an op runs, in units of a stage's forward."""

    start: int
    end: int


def unit_times(graph: Graph, schedule: Schedule) -> dict[Op, Span]:
    """When each op runs if a forward takes 1, a backward 2, and a handover nothing once both ends have started it.

    Raises:
        ScheduleError: the positions wait for each other.
    """
    run = _Run(graph, schedule)
    while run.compute() | run.travel():
        pass
    waiting = run.waiting()
    if waiting:
        raise ScheduleError(f"the positions wait for each other: {'; '.join(waiting)}")
    return run.done


class _Run:
    """Where a simulated step stands."""

    def __init__(self, graph: Graph, schedule: Schedule):
        self.graph, self.schedule = graph, schedule
        self.done: dict[Op, Span] = {}
        self.next = [0] * len(schedule)
        self.free = [0] * len(schedule)
        self.posted: dict[tuple[Op, int], int] = {}  # handover and position → when it was started there
        self.queues: dict[Channel, dict[int, deque[Op]]] = defaultdict(lambda: defaultdict(deque))

    def compute(self) -> bool:
        """Every position goes on as far as it can; whether any did."""
        moved = [self._go_on(position) for position in range(len(self.schedule))]
        return any(moved)

    def travel(self) -> bool:
        """Every handover travels that is first in its channel's queue at all its ends; whether any did."""
        moved = [self._drain(channel) for channel in self.queues]
        return any(moved)

    def waiting(self) -> list[str]:
        """One clause per position that cannot finish, or per handover that nobody waits for and that has not arrived."""
        clauses = []
        for position, (ops, done) in enumerate(zip(self.schedule, self.next, strict=True)):
            if done < len(ops):
                missing = ", ".join(str(need) for need in self.graph.needs(ops[done]) if need not in self.done)
                clauses.append(f"position {position} in {ops[done]} for {missing}")
        return clauses or [f"position {position} for the end of {op}" for op, position in self.posted if op not in self.done]

    def _go_on(self, position: int) -> bool:
        ops, before = self.schedule[position], self.next[position]
        while self.next[position] < len(ops) and self._start(ops[self.next[position]], position):
            self.next[position] += 1
        return self.next[position] > before

    def _start(self, op: Op, position: int) -> bool:
        channel = self.graph.channel(op)
        if channel is not None:
            self.posted[op, position] = self.free[position]
            self.queues[channel][position].append(op)
        elif self._ready(op):
            start = max([self.free[position], *self._ends(op)])
            self.free[position] = start + UNITS[op.direction]
            self.done[op] = Span(start, self.free[position])
        return channel is not None or op in self.done

    def _drain(self, channel: Channel) -> bool:
        queues, moved = self.queues[channel], False
        for queue in list(queues.values()):
            while queue and self._ready(queue[0]) and self._first_everywhere(queue[0], queues):
                self._arrive(queue[0], queues)
                moved = True
        return moved

    def _arrive(self, op: Op, queues: dict[int, deque[Op]]) -> None:
        ends = self.graph.where(op)
        at = max([*self._ends(op), *(self.posted[op, end] for end in ends)])
        self.done[op] = Span(at, at)
        for end in ends:
            queues[end].popleft()

    def _first_everywhere(self, op: Op, queues: dict[int, deque[Op]]) -> bool:
        return all(queues[end] and queues[end][0] == op for end in self.graph.where(op))

    def _ready(self, op: Op) -> bool:
        return all(need in self.done for need in self.graph.needs(op))

    def _ends(self, op: Op) -> list[int]:
        return [self.done[need].end for need in self.graph.needs(op)]
