"""A graph and its lists, compiled once into numbers, then run on a clock for any costs.

The rules are the executor's. A position starts its ops in the order of its list. An op that computes waits for all it needs. An
op that travels is posted at once and blocks nobody, except that the host must have what other collectives bring it (row counts)
before it posts. A channel is a queue: what travels on it does so in order. The cost of an op is a sequence of lanes and seconds.
An op that computes keeps its position busy all along. Whoever needs a lane that another op uses waits for it.

There are two ways to run. If every lane belongs to one queue, be it a position or a channel, then an op starts at the latest end
of its predecessors: one pass in topological order finds all times (longest paths in a DAG). If queues share a lane, it goes to
whoever asks first, so events are processed in the order of their time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Generic, NamedTuple, TypeVar

from foldray.schedule.graph import Graph
from foldray.schedule.op import Op

COMPUTE = "compute"

LaneSeconds = Sequence[tuple[str, float]]
"""The cost of an op: lanes and seconds, one after another. A lane is `COMPUTE`, or a link of which each position has one."""


class ScheduleError(ValueError):
    """A schedule that its graph does not allow; the text names the fault in one line."""


class Times(NamedTuple):
    """When each op starts and when it ends, by its number, in the unit of the costs."""

    starts: list[float]
    ends: list[float]


Class = TypeVar("Class", bound=Hashable)


class CompiledSchedule(Generic[Class]):
    """Lists of ops as numbers.

    Args:
        graph: what binds the ops.
        schedule: for every position its list.
        cost_class: ops of the same class cost the same.
        partial: ops that stand in no list are taken as done at time zero. Without, whoever needs one waits forever.

    Attributes:
        ops: all ops, by number.
        classes: the classes of costs, in the order in which `run` takes costs.
        class_of: for every op the number of its class.
        channel_of: for every op the number of its channel; -1 for one that computes.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Iterable[Iterable[Op]],
        cost_class: Callable[[Op], Class],
        partial: bool = False,
    ):
        self.graph, lists = graph, [tuple(ops) for ops in schedule]
        self.ops = tuple(dict.fromkeys(op for ops in lists for op in ops))
        self._number = {op: i for i, op in enumerate(self.ops)}
        self.lists = [[self._number[op] for op in ops] for ops in lists]
        classes: dict[Class, int] = {}
        self.class_of = [classes.setdefault(cost_class(op), len(classes)) for op in self.ops]
        self.classes = tuple(classes)
        channels: dict[Hashable, int] = {}
        named = [graph.channel(op) for op in self.ops]
        self.channel_of = [-1 if name is None else channels.setdefault(name, len(channels)) for name in named]
        self.places = [graph.where(op) for op in self.ops]
        self.queues = [self._queue(channel) for channel in range(len(channels))]
        self.waits: list[tuple[int, ...]] = []  # what a position waits for before it starts an op
        self.remote: list[tuple[int, ...]] = []  # what a posted op waits for besides
        self._link(partial)

    def _queue(self, channel: int) -> list[int]:
        """A channel's order, as far as all its ends agree."""
        ends = [[i for i in ops if self.channel_of[i] == channel] for ops in self.lists]
        agreed = takewhile(lambda heads: len(set(heads)) == 1, zip(*filter(None, ends), strict=False))
        return [heads[0] for heads in agreed]

    def _link(self, partial: bool) -> None:
        """Who waits for whom, without what the order of a list implies: an earlier op of the same position that computes."""
        absent = len(self.ops)  # stands for every op that no list has; it never ends
        index = [{i: k for k, i in enumerate(ops)} for ops in self.lists]
        home = {i: place for place, ops in enumerate(self.lists) for i in ops if self.channel_of[i] < 0}
        for i, op in enumerate(self.ops):
            waits, remote = list[int](), list[int]()
            for needed in self.graph.needs(op):
                need = self._number.get(needed, absent)
                if need == absent and partial:
                    continue
                place = home.get(need)
                if place is not None and index[place].get(i, -1) > index[place][need]:
                    continue
                blocks = self.channel_of[i] < 0 or self.graph.channel(needed) is not None
                (waits if blocks else remote).append(need)
            self.waits.append(tuple(waits))
            self.remote.append(tuple(remote))

    @cached_property
    def _order(self) -> list[tuple[int, int, tuple[int, ...]]] | None:
        """(Op, its class, its predecessors), each op behind its predecessors; None if the lists cannot finish."""
        predecessors = self._predecessors()
        missing, followers = list(map(len, predecessors)), [list[int]() for _ in self.ops]
        for i, before in enumerate(predecessors):
            for each in before:
                followers[each].append(i)
        order = [i for i, count in enumerate(missing) if not count]
        for i in order:  # grows on the way: Kahn's algorithm
            for follower in followers[i]:
                missing[follower] -= 1
                if not missing[follower]:
                    order.append(follower)
        return [(i, self.class_of[i], tuple(predecessors[i])) for i in order] if len(order) == len(self.ops) else None

    def _predecessors(self) -> list[dict[int, None]]:
        """By op, what it starts behind; an op that cannot start has itself among them."""
        count, posts = len(self.ops), [0] * len(self.ops)
        found = [dict.fromkeys(i if need == count else need for need in self.waits[i] + self.remote[i]) for i in range(count)]
        for ops in self.lists:
            last: tuple[int, ...] = ()  # what holds the position up at this place of its list
            for i in ops:
                posts[i] += 1
                found[i].update(dict.fromkeys(last))
                last = (i,) if self.channel_of[i] < 0 else tuple(dict.fromkeys(last + self.waits[i]))
        for queue in self.queues:
            for i, following in pairwise(queue):
                found[following][i] = None
        queued = {i for queue in self.queues for i in queue}
        for i, channel in enumerate(self.channel_of):
            if posts[i] != len(self.places[i]) or (channel >= 0 and i not in queued):
                found[i][i] = None
        return found

    @cached_property
    def _lane_users(self) -> list[tuple[int, tuple[int, ...], int]]:
        """(Class, positions, queue) that there are; a queue is a position or, numbered behind all positions, a channel."""
        found: dict[tuple[int, tuple[int, ...], int], None] = {}
        for place, ops in enumerate(self.lists):
            for i in ops:
                channel = self.channel_of[i]
                key = ((place,), place) if channel < 0 else (tuple(self.places[i]), len(self.lists) + channel)
                found[self.class_of[i], *key] = None
        return list(found)

    def run(self, costs: Sequence[LaneSeconds]) -> Times:
        """When each op runs.

        Args:
            costs: of every class, at least one lane.

        Raises:
            ScheduleError: the positions wait for each other.
        """
        if self.contended(costs) or self._order is None:
            return self.run_once(costs)
        return self.one_pass([sum(seconds for _, seconds in each) for each in costs])

    def run_once(self, costs: Sequence[LaneSeconds]) -> Times:
        """As `run`, event by event: quicker than to find the order for one pass, if there is one run alone."""
        return _EventRun(self, costs).times()

    def contended(self, costs: Sequence[LaneSeconds]) -> bool:
        """Whether some lane is used by more than one queue."""
        owner: dict[tuple[str, int], int] = {}
        for cost_class, places, queue in self._lane_users:
            for lane, _ in costs[cost_class]:
                if lane != COMPUTE and any(owner.setdefault((lane, place), queue) != queue for place in places):
                    return True
        return False

    def one_pass(self, seconds: Sequence[float]) -> Times:
        """When each op runs if nobody waits for a lane: start = the latest end of its predecessors.

        Args:
            seconds: of every class.
        """
        assert self._order is not None
        starts = [0.0] * len(self.ops)
        ends = starts.copy()
        for i, cost_class, predecessors in self._order:
            start = 0.0
            for before in predecessors:  # comparisons, not max(): a search runs this loop millions of times
                if ends[before] > start:
                    start = ends[before]
            starts[i] = start
            ends[i] = start + seconds[cost_class]
        return Times(starts, ends)


class _EventRun:
    """One run of a compiled schedule, event by event: a position starts its next op, or the head of a channel travels.

    An actor is a position or, numbered behind all positions, a channel. Each has at most one event at a time. An actor that
    misses something is woken when this has ended. Events at the same time are processed in the order in which they were planned.
    """

    def __init__(self, compiled: CompiledSchedule, costs: Sequence[LaneSeconds]):
        self.schedule = compiled
        self.costs = [costs[cost_class] for cost_class in compiled.class_of]
        self.positions, channels, count = len(compiled.lists), len(compiled.queues), len(compiled.ops)
        self.starts = [0.0] * count
        self.ends: list[float | None] = [None] * (count + 1)  # the last one never ends: an op that no list has
        self.started = [0] * self.positions  # ops of each list
        self.free = [0.0] * self.positions  # when each position has done what it has started to compute
        self.lanes: list[dict[str, float]] = [{} for _ in range(self.positions)]  # when each lane is free
        self.posted = [0.0] * count  # when the last of its places has posted an op
        self.missing = [len(places) for places in compiled.places]  # places that have not posted an op yet
        self.sent = [0] * channels  # ops of each queue
        self.quiet = [0.0] * channels  # when each channel's last op has arrived
        self.planned = [False] * channels  # whether the head of a channel has an event, or will be looked at again
        self.waiters: dict[int, list[int]] = {}  # op → actors
        self.events: list[tuple[float, int, int]] = []  # time, number, actor
        self.count = 0

    def times(self) -> Times:
        for position in range(self.positions):
            self._plan_start(position)
        while self.events:
            at, _, actor = heapq.heappop(self.events)
            if actor < self.positions:
                self._start(actor, at)
            else:
                self._travel(actor - self.positions, at)
        ends = [end for end in self.ends[:-1] if end is not None]
        if len(ends) < len(self.starts) or any(map(int.__lt__, self.started, map(len, self.schedule.lists))):
            raise ScheduleError(f"the positions wait for each other: {'; '.join(self._stuck())}")
        return Times(self.starts, ends)

    def _stuck(self) -> list[str]:
        """One clause for every position that cannot finish, or for every op that was posted and has not arrived."""
        schedule, clauses, posted = self.schedule, [], []
        done = {op for op, end in zip(schedule.ops, self.ends, strict=False) if end is not None}
        for position, (ops, count) in enumerate(zip(schedule.lists, self.started, strict=True)):
            if count < len(ops):
                op = schedule.ops[ops[count]]
                missing = ", ".join(str(need) for need in schedule.graph.needs(op) if need not in done)
                clauses.append(f"position {position} in {op} for {missing}")
            posted += [f"position {position} for the end of {schedule.ops[i]}" for i in ops if self.ends[i] is None]
        return clauses or posted

    def _push(self, at: float, actor: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (at, self.count, actor))

    def _ready(self, needs: Sequence[int], at: float, actor: int) -> float | None:
        """The latest of these ends, and `at`; None if one is missing, whose end will wake the actor."""
        for need in needs:
            end = self.ends[need]
            if end is None:
                self.waiters.setdefault(need, []).append(actor)
                return None
            if end > at:
                at = end
        return at

    def _plan_start(self, position: int) -> None:
        """Plan when a position starts its next op, if nothing is missing."""
        ops, count = self.schedule.lists[position], self.started[position]
        if count < len(ops):
            at = self._ready(self.schedule.waits[ops[count]], self.free[position], position)
            if at is not None:
                self._push(at, position)

    def _start(self, position: int, at: float) -> None:
        i = self.schedule.lists[position][self.started[position]]
        self.started[position] += 1
        channel = self.schedule.channel_of[i]
        if channel < 0:
            self.free[position] = self._use(i, (position,), at)
            self._finish(i, at, self.free[position])
        else:
            self.free[position] = at
            self.posted[i] = max(self.posted[i], at)
            self.missing[i] -= 1
            self._plan_travel(channel)
        self._plan_start(position)

    def _plan_travel(self, channel: int) -> None:
        """Plan when the head of a channel travels, if all its places have posted it and nothing is missing."""
        queue, sent = self.schedule.queues[channel], self.sent[channel]
        if self.planned[channel] or sent == len(queue) or self.missing[queue[sent]]:
            return
        self.planned[channel] = True
        i, actor = queue[sent], self.positions + channel
        at = self._ready(self.schedule.remote[i], max(self.quiet[channel], self.posted[i]), actor)
        if at is not None:
            self._push(at, actor)

    def _travel(self, channel: int, at: float) -> None:
        i = self.schedule.queues[channel][self.sent[channel]]
        lane, places = self.costs[i][0][0], self.schedule.places[i]
        begin = at if lane == COMPUTE else max([at, *(self.lanes[place].get(lane, 0.0) for place in places)])
        if begin > at:  # the link is busy: in line again, behind what is ready before that
            self._push(begin, self.positions + channel)
            return
        self.sent[channel] += 1
        self.quiet[channel] = self._use(i, places, at)
        self._finish(i, at, self.quiet[channel])
        self.planned[channel] = False
        self._plan_travel(channel)

    def _use(self, i: int, places: Sequence[int], at: float) -> float:
        """Take an op's lanes one after another, each once it is free at all its places; when the last one is done."""
        for lane, seconds in self.costs[i]:
            if lane == COMPUTE:
                at += seconds
                continue
            for place in places:
                at = max(at, self.lanes[place].get(lane, 0.0))
            at += seconds
            for place in places:
                self.lanes[place][lane] = at
        return at

    def _finish(self, i: int, start: float, end: float) -> None:
        self.starts[i], self.ends[i] = start, end
        for actor in self.waiters.pop(i, ()):
            if actor < self.positions:
                self._plan_start(actor)
            else:
                self.planned[actor - self.positions] = False
                self._plan_travel(actor - self.positions)
