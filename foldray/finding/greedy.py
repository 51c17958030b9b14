"""List scheduling: a clock runs a step once, and whatever is free takes the best op that is ready.

The run gives the lists of all positions. It follows the rules of the clock (`clock/compiled.py`). The host of a position
computes one op after another, and posts ops that travel in between. An op that travels is posted when its link would idle
before the next computation ends, not earlier, so that a more urgent one may still go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from foldray.finding.problem import Problem
from foldray.graph import Schedule

_COMPUTE = -1  # the lane of a position's computation


class Rule(NamedTuple):
    """The choice between ops that are ready.

    Args:
        priority: for every op, a number. The op with the smallest one goes first.
        keep: for every position, the most blocks that it may keep at once (`Problem.kept`), at least those of one micro-batch.
        alive: for every position, the most micro-batches that may have begun there and not ended.
        left: for every position, the most blocks at once whose backward has left gradients of weights (`Problem.left`).
        held: pairs of ops of one lane, (first, second). The second one waits until the first one has started, even if the lane
            idles meanwhile.
    """

    priority: Sequence[float]
    keep: Sequence[int]
    alive: Sequence[int]
    left: Sequence[int]
    held: tuple[tuple[int, int], ...] = ()


class Walk(NamedTuple):
    """A step that has run.

    Args:
        ahead: for every op, the op before it on its lane; -1 if there is none.
    """

    seconds: float
    lists: list[list[int]]
    starts: list[float]
    ends: list[float]
    ahead: list[int]

    def schedule(self, problem: Problem) -> Schedule:
        return tuple(tuple(map(problem.ops.__getitem__, numbers)) for numbers in self.lists)


def walk(problem: Problem, rule: Rule) -> Walk | None:
    """Run the step. Return None if ops that are held wait for each other."""
    run = _Run(problem, rule)
    run.run()
    if sum(len(position.order) for position in run.positions) < sum(map(len, problem.places)):
        return None
    return Walk(max(run.ends, default=0.0), [position.order for position in run.positions], run.starts, run.ends, run.ahead)


class _Position:
    """The host of a position and what waits there.

    Attributes:
        free: when the computation that it has started ends; `running` is the place of this computation in the list.
        ready: ops that compute and can start, as a heap of (priority, op).
        waiting: ops that travel and can be posted.
        ops: micro-batch and block → number of its ops that compute here and have not ended.
        kept: micro-batch that has begun → its blocks that are kept; `done` counts those that have ended.
        oldest: the first micro-batch that has not ended.
        last: lane → (its last op, when it is free again).
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.free, self.running = 0.0, 0
        self.ready: list[tuple[float, int]] = []
        self.waiting: list[int] = []
        self.ops: dict[tuple[int, int], int] = {}
        self.left: set[tuple[int, int]] = set()
        self.kept: dict[int, set[tuple[int, int]]] = {}
        self.done: dict[int, int] = {}
        self.oldest = 0
        self.last: dict[int, tuple[int, float]] = {}

    def until(self, lane: int) -> float:
        """Return when a lane is free."""
        return self.last[lane][1] if lane in self.last else 0.0


class _Run:
    def __init__(self, problem: Problem, rule: Rule):
        self.problem, self.rule, count = problem, rule, len(problem.ops)
        self.positions = [_Position() for _ in range(problem.positions)]
        self.starts, self.ends, self.ahead = [0.0] * count, [0.0] * count, [-1] * count
        # An op that computes waits for the ends of its needs. One that travels can be posted once those of its needs that compute
        # have ended, and the others are posted; then it waits on the way.
        self.missing = list(map(len, problem.needs))
        self.held: dict[int, list[int]] = {}
        for first, second in rule.held:
            self.held.setdefault(first, []).append(second)
            self.missing[second] += 1
        self.quiet: dict[int, float] = {}  # channel → when its last op has arrived
        self.events: list[tuple[float, int, int]] = []  # heap of (time, op that ends or -1, position that may go on)
        for i in range(count):
            if problem.channel[i] < 0:
                ops, block = self.positions[problem.places[i][0]].ops, problem.block[i]
                ops[block] = ops.get(block, 0) + 1

    def run(self) -> None:
        problem = self.problem
        for i, count in enumerate(self.missing):
            if not count:
                self._is_ready(i)
        self.events = [(0.0, -1, position) for position in range(problem.positions)]
        while self.events:
            now, touched = self.events[0][0], set[int]()
            while self.events and self.events[0][0] == now:
                _, i, position = heapq.heappop(self.events)
                touched.add(position)
                if i >= 0:
                    self._end(i, touched)
            for position in sorted(touched):
                if self.positions[position].free <= now:
                    self._go_on(position, now)

    def _is_ready(self, i: int) -> None:
        position = self.positions[self.problem.places[i][0]]
        if self.problem.channel[i] < 0:
            heapq.heappush(position.ready, (self.rule.priority[i], i))
        else:
            position.waiting.append(i)

    def _end(self, i: int, touched: set[int]) -> None:
        """Note that an op has ended, and add the positions that may go on."""
        problem, computes = self.problem, self.problem.channel[i] < 0
        for user in problem.users[i]:
            if computes or problem.channel[user] < 0:
                self._has_one_more(user)
                touched.add(problem.places[user][0])
        if computes:
            position, group, block = self.positions[problem.places[i][0]], problem.group[i], problem.block[i]
            position.ops[block] -= 1
            if not position.ops[block]:
                position.left.discard(block)
                position.kept[group].remove(block)
                position.done[group] += 1
                while position.done.get(position.oldest) == problem.blocks[problem.places[i][0]]:
                    position.oldest += 1

    def _go_on(self, number: int, now: float) -> None:
        """Start the next computation of a position that is free, and post what can travel before this computation ends."""
        position, i = self.positions[number], self._next(number)
        until = now if i < 0 else now + self.problem.seconds[i]
        self._post(position, now, until)
        if i >= 0:
            position.running, position.free = len(position.order), until
            position.order.append(i)
            self.starts[i], self.ends[i] = now, until
            self.ahead[i] = position.last.get(_COMPUTE, (-1, 0.0))[0]
            position.last[_COMPUTE] = i, until
            self._let_go(i)
            heapq.heappush(self.events, (until, i, number))
        elif position.waiting:  # look again when a link is free
            heapq.heappush(self.events, (min(self._earliest(op, now) for op in position.waiting), -1, number))

    def _next(self, number: int) -> int:
        """Return the best op that is ready and for whose block there is memory; -1 if there is none."""
        position, aside, best = self.positions[number], [], -1
        while position.ready and best < 0:
            entry = heapq.heappop(position.ready)
            if self._may_leave(number, entry[1]) and self._may_keep(number, entry[1]):
                best = entry[1]
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(position.ready, entry)
        return best

    def _may_leave(self, number: int, i: int) -> bool:
        """Return whether a position may leave gradients of weights of an op's block for later, and note that it does.

        Backwards of the same block go in the order of micro-batches. So all gradients that are left can be computed, and nothing
        waits without end.
        """
        position, block = self.positions[number], self.problem.block[i]
        if self.problem.leaves[i] and block not in position.left:
            if len(position.left) >= self.rule.left[number]:
                return False
            position.left.add(block)
        return True

    def _may_keep(self, number: int, i: int) -> bool:
        """Return whether a position may keep the block of an op, and note that it does.

        Micro-batches begin in order, so that none waits for the sums of one that may not begin. Once those before it have ended,
        each of them can keep the rest of its blocks, so none waits for memory without end (the banker's algorithm of Dijkstra).
        """
        position, group, block = self.positions[number], self.problem.group[i], self.problem.block[i]
        if group not in position.kept:
            if group != len(position.kept) or group - position.oldest >= self.rule.alive[number]:
                return False
        elif block in position.kept[group]:
            return True
        blocks, later = self.problem.blocks[number], 1
        for begun in range(len(position.kept) - 1, position.oldest - 1, -1):
            if begun < group and blocks - position.done[begun] + later > self.rule.keep[number]:
                return False
            later += len(position.kept[begun])
        position.kept.setdefault(group, set()).add(block)
        position.done.setdefault(group, 0)
        return True

    def _earliest(self, i: int, now: float) -> float:
        """Return when an op that is posted now can start to travel."""
        problem = self.problem
        lane, start = problem.lanes[i][0][0], max(now, self.quiet.get(problem.channel[i], 0.0))
        for need in problem.needs[i]:
            start = max(start, self.ends[need])
        for place in problem.places[i]:
            start = max(start, self.positions[place].until(lane))
        return start

    def _post(self, position: _Position, now: float, until: float) -> None:
        """Post ops that can start to travel before `until`: always the one that can start first, or the best one of those."""
        while position.waiting:
            start, _, i = min((self._earliest(op, now), self.rule.priority[op], op) for op in position.waiting)
            if start > now and start >= until:
                return
            position.waiting.remove(i)
            self._travel(i, start, now)

    def _travel(self, i: int, start: float, now: float) -> None:
        problem, at, places = self.problem, start, self.problem.places[i]
        self.starts[i] = start
        before = [self.positions[place].last.get(problem.lanes[i][0][0], (-1, 0.0)) for place in places]
        self.ahead[i] = max(before, key=lambda last: last[1])[0]
        for lane, seconds in problem.lanes[i]:
            at = max([at, *(self.positions[place].until(lane) for place in places)]) + seconds
            for place in places:
                self.positions[place].last[lane] = i, at
        self.ends[i] = self.quiet[problem.channel[i]] = at
        for place in places:
            position = self.positions[place]
            if place != places[0] and position.free > now:  # the receiver has posted it before what it computes now
                position.order.insert(position.running, i)
                position.running += 1
            else:
                position.order.append(i)
            heapq.heappush(self.events, (at, i if place == places[0] else -1, place))
        for user in problem.users[i]:
            if problem.channel[user] >= 0:
                self._has_one_more(user)
                if (sender := problem.places[user][0]) not in places:  # nothing else may happen there that it waits for
                    heapq.heappush(self.events, (now, -1, sender))
        self._let_go(i)

    def _let_go(self, first: int) -> None:
        """Note that an op has started, for those that are held until then."""
        for second in self.held.get(first, ()):
            self._has_one_more(second)

    def _has_one_more(self, i: int) -> None:
        self.missing[i] -= 1
        if not self.missing[i]:
            self._is_ready(i)
