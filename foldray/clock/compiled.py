"""A graph and its lists, compiled once into numbers, then run on a clock for any costs.

The clock follows the same rules as the executor:

- A position starts its ops in the order of its list.
- An op that computes waits for all ops that it needs, and keeps its position busy from its start to its end.
- A position posts an op that travels, and goes on. The op travels once all ops that it needs have ended.
- A channel is a queue: its ops travel one after another, in order.
- The cost of an op is a sequence of (lane, seconds). An op waits while another op uses the lane that it needs.
- A host may need time to issue an op (`Host`). It goes through the list without waiting for its GPU, so it gets ahead in ops
  for which the GPU takes longer. Where it is not ahead, the GPU waits for it.

There are two ways to run. If every lane belongs to one queue (a position or a channel), an op starts at the latest end of
its predecessors, and one pass in topological order finds all times (longest paths in a DAG). If queues share a lane, the
lane goes to the op that asks first, so the run processes events in the order of their time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from math import inf
from typing import Generic, NamedTuple, TypeVar

from foldray.graph.op import Op
from foldray.graph.pipeline_graph import Graph

COMPUTE = "compute"

LaneSeconds = Sequence[tuple[str, float]]
"""The cost of an op: (lane, seconds), one after another. A lane is `COMPUTE`, or a link of which each position has one."""


class ScheduleError(ValueError):
    """A schedule breaks a rule of its graph. The message is one line."""


class Host(NamedTuple):
    """The hosts, which issue the ops of the positions to their GPUs.

    Args:
        seconds: for every class, the time that the host needs to issue one of its ops.
        waits: for every class, whether the host waits for what one of its ops needs, because it must read the row counts of a
            dispatch. It does so once it has given its GPU something else to compute, or if there is nothing that it can give.
        begin: when the hosts begin; a negative moment if they are ahead.
    """

    seconds: Sequence[float]
    waits: Sequence[bool]
    begin: float = 0.0


class Times(NamedTuple):
    """When ops start and end, in the unit of the costs.

    Args:
        starts, ends: start and end of each op on its GPU or link, by its number.
        hosts: for every position, when its host has issued the last op; empty without hosts.
    """

    starts: list[float]
    ends: list[float]
    hosts: Sequence[float] = ()


Class = TypeVar("Class", bound=Hashable)


class CompiledSchedule(Generic[Class]):
    """The lists of a schedule, with numbers instead of ops.

    Args:
        cost_class: op → a class. Ops of one class have the same cost.
        partial: whether ops that no list has count as done at time zero. Otherwise an op that needs such an op never starts.

    Attributes:
        classes: the cost classes, in the order in which `run` takes costs.
        channel_of: for every op, the number of its channel; -1 if the op computes.
        waits: for every op that computes, the ops that must end before it. Earlier computing ops of the same list are left
            out.
        remote: for every op that travels, the ops that must end before it travels, with the same exception.
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
        self.number = {op: i for i, op in enumerate(self.ops)}
        self.lists = [[self.number[op] for op in ops] for ops in lists]
        classes: dict[Class, int] = {}
        self.class_of = [classes.setdefault(cost_class(op), len(classes)) for op in self.ops]
        self.classes = tuple(classes)
        channels: dict[Hashable, int] = {}
        named = [graph.channel(op) for op in self.ops]
        self.channel_of = [-1 if name is None else channels.setdefault(name, len(channels)) for name in named]
        self.places = [graph.where(op) for op in self.ops]
        self.queues = self._queues(len(channels))
        self.waits: list[tuple[int, ...]] = []
        self.remote: list[tuple[int, ...]] = []
        self._link(partial)

    def _queues(self, channels: int) -> list[list[int]]:
        """Return the order of the ops of every channel, up to the first op in which its ends differ."""
        ends: list[list[list[int]]] = [[[] for _ in self.lists] for _ in range(channels)]
        for place, ops in enumerate(self.lists):
            for i in ops:
                if (channel := self.channel_of[i]) >= 0:
                    ends[channel][place].append(i)
        agreed = (takewhile(lambda heads: len(set(heads)) == 1, zip(*filter(None, each), strict=False)) for each in ends)
        return [[heads[0] for heads in each] for each in agreed]

    def _link(self, partial: bool) -> None:
        """Fill `waits` and `remote`. The order of a list already implies its earlier computing ops."""
        absent = len(self.ops)  # the number for every op that no list has; this op never ends
        index = [{i: k for k, i in enumerate(ops)} for ops in self.lists]
        home = {i: place for place, ops in enumerate(self.lists) for i in ops if self.channel_of[i] < 0}
        for i, op in enumerate(self.ops):
            waits, remote = list[int](), list[int]()
            for needed in self.graph.needs(op):
                need = self.number.get(needed, absent)
                if need == absent and partial:
                    continue
                place = home.get(need)
                if place is not None and index[place].get(i, -1) > index[place][need]:
                    continue
                (waits if self.channel_of[i] < 0 else remote).append(need)
            self.waits.append(tuple(waits))
            self.remote.append(tuple(remote))

    @cached_property
    def _order(self) -> list[tuple[int, int, tuple[int, ...]]] | None:
        """(op, its class, its predecessors) in topological order; None if the lists cannot finish."""
        predecessors = self.predecessors()
        missing, followers = list(map(len, predecessors)), [list[int]() for _ in self.ops]
        for i, before in enumerate(predecessors):
            for predecessor in before:
                followers[predecessor].append(i)
        order = [i for i, count in enumerate(missing) if not count]
        for i in order:  # Kahn's algorithm: the loop extends the list that it reads
            for follower in followers[i]:
                missing[follower] -= 1
                if not missing[follower]:
                    order.append(follower)
        return [(i, self.class_of[i], tuple(predecessors[i])) for i in order] if len(order) == len(self.ops) else None

    def predecessors(self) -> list[dict[int, None]]:
        """Return, for each op, the ops that must end before it starts. An op that can never start has itself among them."""
        count, posts = len(self.ops), [0] * len(self.ops)
        predecessors = [
            dict.fromkeys(i if need == count else need for need in self.waits[i] + self.remote[i]) for i in range(count)
        ]
        for ops in self.lists:
            last: tuple[int, ...] = ()  # the ops that must end before the position reaches this place of its list
            for i in ops:
                posts[i] += 1
                predecessors[i].update(dict.fromkeys(last))
                last = (i,) if self.channel_of[i] < 0 else last
        for queue in self.queues:
            for i, following in pairwise(queue):
                predecessors[following][i] = None
        queued = {i for queue in self.queues for i in queue}
        for i, channel in enumerate(self.channel_of):
            if posts[i] != len(self.places[i]) or (channel >= 0 and i not in queued):
                predecessors[i][i] = None
        return predecessors

    @cached_property
    def _lane_users(self) -> list[tuple[int, tuple[int, ...], int]]:
        """All (class, positions, queue) in use. A queue is a position, or a channel with a number after all positions."""
        lane_users: dict[tuple[int, tuple[int, ...], int], None] = {}
        for place, ops in enumerate(self.lists):
            for i in ops:
                channel = self.channel_of[i]
                key = ((place,), place) if channel < 0 else (tuple(self.places[i]), len(self.lists) + channel)
                lane_users[self.class_of[i], *key] = None
        return list(lane_users)

    def run(self, costs: Sequence[LaneSeconds], host: Host | None = None) -> Times:
        """Return start and end of each op.

        Args:
            costs: the cost of every class, in the order of `classes`; each has at least one lane.

        Raises:
            ScheduleError: the positions wait for each other.
        """
        if host is not None or self.contended(costs) or self._order is None:
            return self.run_once(costs, host)
        return self.one_pass([sum(seconds for _, seconds in lanes) for lanes in costs])

    def run_once(self, costs: Sequence[LaneSeconds], host: Host | None = None) -> Times:
        """Do the same as `run`, event by event. For a single run, this is faster than to find the topological order first."""
        return _EventRun(self, costs, host).times()

    def contended(self, costs: Sequence[LaneSeconds]) -> bool:
        """Whether more than one queue uses the same lane of a position."""
        owner: dict[tuple[str, int], int] = {}
        for cost_class, places, queue in self._lane_users:
            for lane, _ in costs[cost_class]:
                if lane != COMPUTE and any(owner.setdefault((lane, place), queue) != queue for place in places):
                    return True
        return False

    def one_pass(self, seconds: Sequence[float]) -> Times:
        """Return start and end of each op if no op waits for a lane: an op starts at the latest end of its predecessors.

        The lists must be able to finish.
        """
        assert self._order is not None
        starts = [0.0] * len(self.ops)
        ends = starts.copy()
        for i, cost_class, predecessors in self._order:
            start = 0.0
            for before in predecessors:  # faster than max(); a search runs this loop millions of times
                if ends[before] > start:
                    start = ends[before]
            starts[i] = start
            ends[i] = start + seconds[cost_class]
        return Times(starts, ends)


class _EventRun:
    """One run of a compiled schedule, event by event: a position starts its next op, or the head of a channel travels.

    An actor is a position, or a channel with a number after all positions. An actor has at most one event at a time. If it
    waits for an op, the end of this op wakes it. Events at the same time run in the order of their running numbers: a start has
    a new one, and an op that travels has one since it was posted. So a link takes first what was posted first.
    """

    def __init__(self, compiled: CompiledSchedule, costs: Sequence[LaneSeconds], host: Host | None):
        self.schedule, self.host = compiled, host
        self.costs = [costs[cost_class] for cost_class in compiled.class_of]
        self.positions, channels, count = len(compiled.lists), len(compiled.queues), len(compiled.ops)
        self.starts = [0.0] * count
        self.ends: list[float | None] = [None] * (count + 1)  # the last entry is for ops that no list has; it stays None
        self.started = [0] * self.positions  # by position: number of ops that it has started
        self.free = [0.0] * self.positions  # by position: when the computation that it has started ends
        self.lanes: list[dict[str, float]] = [{} for _ in range(self.positions)]  # by position: lane → when it is free
        self.issued = [-inf if host is None else host.begin] * self.positions  # by position: when its host issued the last op
        # By position: ops that its host must wait for before it posts them, and when the position has reached them in its list.
        self.in_line: list[list[tuple[int, float]]] = [[] for _ in range(self.positions)]
        self.posted = [0.0] * count  # by op: when the last position posted it
        self.number = [0] * count  # by op: the running number of its posting
        self.missing = [len(places) for places in compiled.places]  # by op: number of positions that must still post it
        self.sent = [0] * channels  # by channel: number of ops that have begun to travel
        self.quiet = [0.0] * channels  # by channel: when its last op has arrived
        self.planned = [False] * channels  # by channel: whether its head has an event, or waits to be woken
        self.waiters: dict[int, list[int]] = {}  # op → actors that wait for its end
        self.events: list[tuple[float, int, int]] = []  # heap of (time, running number, actor)
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
        return Times(self.starts, ends, () if self.host is None else self.issued)

    def _stuck(self) -> list[str]:
        """Return a clause for every position that cannot finish. If there are none, name every posted op without an end."""
        schedule, clauses, posted = self.schedule, [], []
        done = {op for op, end in zip(schedule.ops, self.ends, strict=False) if end is not None}
        for position, (ops, count) in enumerate(zip(schedule.lists, self.started, strict=True)):
            if count < len(ops):
                op = schedule.ops[ops[count]]
                missing = ", ".join(str(need) for need in schedule.graph.needs(op) if need not in done)
                clauses.append(f"position {position} in {op} for {missing}")
            posted += [f"position {position} for the end of {schedule.ops[i]}" for i in ops if self.ends[i] is None]
        return clauses or posted

    def _next_number(self) -> int:
        self.count += 1
        return self.count

    def _ready(self, needs: Sequence[int], at: float, actor: int) -> float | None:
        """Return the latest of these ops' ends and `at`. If an op has no end yet, return None; its end wakes the actor."""
        for need in needs:
            end = self.ends[need]
            if end is None:
                self.waiters.setdefault(need, []).append(actor)
                return None
            if end > at:
                at = end
        return at

    def _plan_start(self, position: int) -> None:
        """Plan when a position starts its next op, if this op does not wait for others."""
        ops, count = self.schedule.lists[position], self.started[position]
        if count < len(ops):
            begin = max(self.free[position], self.issued[position])
            at = self._ready(self.schedule.waits[ops[count]], begin, position)
            if at is not None:
                heapq.heappush(self.events, (at, self._next_number(), position))
                return
        if self.in_line[position]:
            self._wait(position)

    def _start(self, position: int, at: float) -> None:
        i = self.schedule.lists[position][self.started[position]]
        self.started[position] += 1
        if self.schedule.channel_of[i] < 0:
            self._compute(i, position, at)
        else:
            self.free[position] = at
            if self.host is not None and self.host.waits[self.schedule.class_of[i]]:
                self.in_line[position].append((i, at))
            else:
                self._post(i, at)
        self._plan_start(position)

    def _compute(self, i: int, position: int, at: float) -> None:
        if self.host is not None:
            self.issued[position] += self.host.seconds[self.schedule.class_of[i]]
        self.free[position] = max(self._use(i, (position,), at), self.issued[position])
        self._finish(i, at, self.free[position])
        if self.in_line[position]:
            self._wait(position)

    def _wait(self, position: int) -> None:
        """Let the host wait for all that the ops in its line need, as far as it is known when that ends, and post them."""
        in_line, self.in_line[position] = self.in_line[position], []
        for i, at in in_line:
            needs = (self.schedule.number.get(op, -1) for op in self.schedule.graph.needs(self.schedule.ops[i]))
            self.issued[position] = max([self.issued[position], *(end for need in needs if (end := self.ends[need]) is not None)])
            self._post(i, max(at, self.issued[position]))

    def _post(self, i: int, at: float) -> None:
        self.posted[i], self.number[i] = max(self.posted[i], at), self._next_number()
        self.missing[i] -= 1
        self._plan_travel(self.schedule.channel_of[i])

    def _plan_travel(self, channel: int) -> None:
        """Plan when the head of a channel travels, if all its positions have posted it and it does not wait for others."""
        queue, sent = self.schedule.queues[channel], self.sent[channel]
        if self.planned[channel] or sent == len(queue) or self.missing[queue[sent]]:
            return
        self.planned[channel] = True
        i, actor = queue[sent], self.positions + channel
        at = self._ready(self.schedule.remote[i], max(self.quiet[channel], self.posted[i]), actor)
        if at is not None:
            heapq.heappush(self.events, (at, self.number[i], actor))

    def _travel(self, channel: int, at: float) -> None:
        i = self.schedule.queues[channel][self.sent[channel]]
        lane, places = self.costs[i][0][0], self.schedule.places[i]
        begin = at if lane == COMPUTE else max([at, *(self.lanes[place].get(lane, 0.0) for place in places)])
        if begin > at:  # the link is busy
            heapq.heappush(self.events, (begin, self.number[i], self.positions + channel))
            return
        self.sent[channel] += 1
        self.quiet[channel] = self._use(i, places, at)
        self._finish(i, at, self.quiet[channel])
        self.planned[channel] = False
        self._plan_travel(channel)

    def _use(self, i: int, places: Sequence[int], at: float) -> float:
        """Use an op's lanes one after another, each once it is free at all positions. Return when the last use ends."""
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
        if i not in self.waiters:
            return
        for actor in self.waiters.pop(i):
            if actor < self.positions:
                self._plan_start(actor)
            else:
                self.planned[actor - self.positions] = False
                self._plan_travel(actor - self.positions)
