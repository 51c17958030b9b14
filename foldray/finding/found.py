"""The found schedule, `list`: the lists of a whole step, made for the times that its ops take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from foldray.clock import Cost, Span, times
from foldray.finding.bound import lower_bound
from foldray.finding.greedy import Rule, Walk, walk
from foldray.finding.moves import improve
from foldray.finding.problem import Problem
from foldray.graph import Op, Reduction, Schedule, StepGraph
from foldray.orders import ONE_A_ONE_M, SEQUENTIAL, STREAM, WEAVE, Overlap, place_handovers, step_schedule

_WORK = 1_500_000  # ops that the search runs at most, over all its steps, where its rules leave that much: some seconds
_MOST_RUNS = 8000
_LAGS = (1, 2, 3)
_MOST_SIMULATED = 4  # steps of list scheduling among which the simulator chooses, where positions share links


class Found(NamedTuple):
    """A schedule that was found.

    Args:
        seconds: seconds of the step, by the simulator.
        bound: seconds that no list can beat (`lower_bound`).
        named, named_seconds: the fastest list with a name that keeps no more blocks, and its seconds.
        kept: for every position, the most blocks that it keeps at once (`Problem.kept`).
        own: the same for the pipeline's own order, without overlap.
    """

    schedule: Schedule
    seconds: float
    bound: float
    named: str
    named_seconds: float
    kept: tuple[int, ...]
    own: tuple[int, ...]


def find(graph: StepGraph, cost: Cost, ahead: float = 1, moves: bool = True, before: Schedule | None = None) -> Found:
    """Return the fastest schedule that is found at given costs. The same arguments give the same schedule.

    First, the named lists are simulated. Then list scheduling runs the step by several rules, some of which follow named lists.
    Finally, local moves improve the fastest step. The fastest named list within the memory is returned if nothing is faster.

    Args:
        ahead: how much more a position may keep than in the pipeline's own order, in micro-batches. A position keeps a block of a
            micro-batch from the first of its ops there to the last one.
        before: a schedule of the same graph that was found at other costs. No slower one is returned.
    """
    problem = Problem(graph, cost)
    limits = _Limits.of(problem, ahead)
    named = {name: _Timed.of(problem, lists, cost) for name, lists in _named(graph).items()}
    within = {name: timed for name, timed in named.items() if limits.allow(problem, timed.schedule)}
    name = min(within, key=lambda name: within[name].seconds)
    given = [within[name], *([_Timed.of(problem, before, cost)] if before else [])]
    # The order of `weave` leads to good lists even where it needs too much memory itself.
    followed = [*given, *(named[kind] for kind in (WEAVE.name,) if kind in named and kind != name)]
    priorities = [*(_ranked(problem, key) for key in _KEYS), *(timed.starts(problem) for timed in followed)]
    rules = [
        *_rules(problem, (limits.own, limits.some, limits.most), limits.left, priorities),
        *(timed.rule(problem, limits) for timed in given),
    ]
    bound = lower_bound(problem, limits.most)
    quickest = _quickest(problem, rules, cost)
    runs = min(_MOST_RUNS, max(0, _WORK // len(problem.ops) - len(rules))) if moves else 0
    moved = improve(problem, *quickest, runs, bound)
    steps = [_Timed.of(problem, step.schedule(problem), cost) for step in (quickest[0], moved)]
    if graph.apart:
        steps = [_received_early(problem, timed, limits, cost) for timed in steps]
    best = min(*given, *steps, key=lambda timed: timed.seconds)
    return Found(best.schedule, best.seconds, bound, name, within[name].seconds, problem.kept(best.schedule), limits.own)


def first_list(graph: StepGraph, cost: Cost, ahead: float = 1) -> Schedule:
    """Return the fastest list of list scheduling by its own rules, without named lists and local moves.

    It is much quicker than `find` without moves, and may be slower than the fastest named list.
    """
    problem = Problem(graph, cost)
    limits, priorities = _Limits.of(problem, ahead), [_ranked(problem, key) for key in _KEYS]
    step, _ = _quickest(problem, _rules(problem, (limits.most,), limits.left, priorities), cost)
    if graph.apart:
        return _received_early(problem, _Timed.of(problem, step.schedule(problem), cost), limits, cost).schedule
    return step.schedule(problem)


def _received_early(problem: Problem, timed: _Timed, limits: _Limits, cost: Cost) -> _Timed:
    """Return the same order of computation, with rows received as early as in AF-Pipe's lists, if memory allows it.

    A rank posts a receive before what it computes next. If rows leave a little earlier than predicted, and the receiver has begun
    to compute, they wait until this computation ends. So a receive is posted before all that ends later than the computation
    behind the rows begins. docs/notebook/disaggregation.md has what this gains.
    """
    graph = problem.graph
    orders = tuple(tuple(op for op in ops if graph.channel(op) is None) for ops in timed.schedule)
    early = place_handovers(graph, orders, {op: timed.spans[op] for ops in orders for op in ops})
    return _Timed.of(problem, early, cost) if limits.allow(problem, early) else timed


class _Timed(NamedTuple):
    """A schedule and the spans of its ops."""

    schedule: Schedule
    spans: Mapping[Op, Span]

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, cost: Cost) -> _Timed:
        return cls(schedule, times(problem.graph, schedule, cost))

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans.values())

    def starts(self, problem: Problem) -> list[float]:
        return [self.spans[op].start for op in problem.ops]

    def rule(self, problem: Problem, limits: _Limits) -> Rule:
        """Return the rule by which list scheduling computes in the order of the schedule."""
        held = list[tuple[int, int]]()
        for ops in self.schedule:
            held += pairwise(i for i in map(problem.number.__getitem__, ops) if problem.channel[i] < 0)
        return Rule(self.starts(problem), limits.most, _anything(problem), limits.left, tuple(held))


class _Limits(NamedTuple):
    """Limits of the memory of every position.

    Args:
        own: the blocks that it keeps in the pipeline's own order.
        some, most: the most blocks that it may keep, and a number between that and `own`.
        left: the most blocks whose gradients of weights may be left for later. What these are computed from is about as much as
            what a block keeps otherwise. If ops run again, or keep their state on the host, a block keeps less, so there is a
            limit (`blocks_left`).
    """

    own: tuple[int, ...]
    some: tuple[int, ...]
    most: tuple[int, ...]
    left: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, ahead: float) -> _Limits:
        plain, blocks = step_schedule(problem.graph, Overlap(SEQUENTIAL.name)), problem.blocks
        kept = problem.kept(plain)
        some, most = (
            tuple(map(sum, zip(kept, (int(micro_batches * count) for count in blocks), strict=True)))
            for micro_batches in (ahead / 2, ahead)
        )
        left = tuple(problem.graph.micro_batches * count for count in blocks)
        if problem.graph.recompute or problem.graph.offloaded:
            left = tuple(map(max, problem.left(plain), (blocks_left(count, ahead) for count in blocks)))
        return cls(kept, some, most, left)

    def allow(self, problem: Problem, schedule: Schedule) -> bool:
        pairs = zip((*problem.kept(schedule), *problem.left(schedule)), (*self.most, *self.left), strict=True)
        return all(count <= limit for count, limit in pairs)


def blocks_left(blocks: int, ahead: float) -> int:
    """Return how many blocks may have gradients of weights left at a position with this number of blocks, if blocks keep less.

    Named lists have up to two.
    """
    return 2 + int(ahead * blocks)


def _anything(problem: Problem) -> list[int]:
    """Return no limit of micro-batches."""
    return [problem.graph.micro_batches] * problem.positions


def _rules(
    problem: Problem, keeps: Iterable[tuple[int, ...]], left: Sequence[int], priorities: Sequence[Sequence[float]]
) -> Iterator[Rule]:
    """Yield rules of list scheduling: for every limit of memory, every priority, and several limits of micro-batches.

    If fewer micro-batches are alive, each of them goes ahead faster. Nothing but trying tells which limit is best.
    """
    for keep, priority in product(dict.fromkeys(keeps), priorities):
        fewest = [-(-most // blocks) for most, blocks in zip(keep, problem.blocks, strict=True)]
        for alive in fewest, [count + 1 for count in fewest], _anything(problem):
            yield Rule(priority, keep, alive, left)


def _quickest(problem: Problem, rules: Iterable[Rule], cost: Cost) -> tuple[Walk, Rule]:
    """Return the fastest step of list scheduling, and its rule.

    Where positions share links, a list may take longer in the simulator than the step that led to it: a link that list scheduling
    has promised to an op goes to another one that asks for it first. So the simulator chooses among the best.
    """
    steps = [(step, rule) for rule in rules if (step := walk(problem, rule)) is not None]
    best = sorted(steps, key=lambda pair: pair[0].seconds)[: _MOST_SIMULATED if problem.positions > 1 else 1]
    return min(best, key=lambda pair: _Timed.of(problem, pair[0].schedule(problem), cost).seconds)


def _named(graph: StepGraph) -> dict[str, Schedule]:
    """Return the named lists of this graph that differ, by name."""
    lags = [lag for lag in _LAGS if lag <= len(graph.slicing.attention)]  # larger lags give equal lists
    ways = [
        Overlap(SEQUENTIAL.name),
        Overlap(ONE_A_ONE_M.name),
        *(Overlap(STREAM.name, lag) for lag in lags),
        Overlap(WEAVE.name),
    ]
    if graph.apart:
        ways = ways[:1]  # their order is that of AF-Pipe
    reductions = ("end", "buckets") if any(graph.chunks) else ("end",)
    names = dict[Schedule, str]()
    for way, reduction in product(ways, reductions):
        names.setdefault(step_schedule(graph, way, reduction=Reduction(reduction)), str(way))
    return {name: lists for lists, name in names.items()}


_KEYS: Sequence[Callable[[Problem, int], tuple[float, ...]]] = (
    lambda problem, i: (-problem.tails[i],),  # the longest path to the end goes first
    lambda problem, i: (problem.group[i], -problem.tails[i]),  # the oldest micro-batch
    lambda problem, i: (problem.ops[i].direction == "F", problem.group[i], -problem.tails[i]),  # backward, to end early
)
"""Priorities of ops in list scheduling: (problem, number of the op) → a key."""


def _ranked(problem: Problem, key: Callable[[Problem, int], tuple[float, ...]]) -> list[float]:
    """Return the rank of every op by a key. Gradients of weights go last: nobody waits for them before the end."""
    order = sorted(range(len(problem.ops)), key=lambda i: (problem.ops[i].direction == "W", key(problem, i), i))
    ranks = [0.0] * len(order)
    for rank, i in enumerate(order):
        ranks[i] = float(rank)
    return ranks
