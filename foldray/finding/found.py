"""The found schedule, `list`: the lists of a whole step, made for the times that its ops take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from foldray.finding.bound import lower_bound
from foldray.finding.greedy import Rule, Walk, walk
from foldray.finding.moves import improve
from foldray.finding.problem import Problem
from foldray.schedule import (
    ONE_A_ONE_M,
    SEQUENTIAL,
    STREAM,
    WEAVE,
    Cost,
    Op,
    Overlap,
    Reduction,
    Schedule,
    Span,
    StepGraph,
    step_schedule,
    times,
)

_WORK = 1_500_000  # ops that the local moves run at most, over all their steps: some seconds
_MOST_RUNS = 8000
_LAGS = (1, 2, 3)


class Found(NamedTuple):
    """A schedule that was found.

    Args:
        schedule: the lists of all positions.
        seconds: seconds of the step, by the simulator.
        bound: seconds that no list can beat (`lower_bound`).
        named, named_seconds: the fastest list with a name, and its seconds.
        alive: for every position, the most micro-batches that have begun there and not ended.
    """

    schedule: Schedule
    seconds: float
    bound: float
    named: str
    named_seconds: float
    alive: tuple[int, ...]


def find(graph: StepGraph, cost: Cost, ahead: int = 1, moves: bool = True, before: Schedule | None = None) -> Found:
    """Return the fastest schedule that is found at given costs. The same arguments give the same schedule.

    First, the fastest of the named lists is found. Then list scheduling runs the step by several rules, one of which follows that
    list. At last, local moves improve the fastest step. The named list is returned if nothing is faster.

    Args:
        graph: the graph of the step.
        cost: the cost of every op.
        ahead: micro-batches that may be alive at a position beyond those of the pipeline's own order.
        moves: whether local moves improve the fastest step.
        before: a schedule of the same graph that was found at other costs. No slower one is returned.

    Raises:
        UserError: the virtual stages do not fit the micro-batches (`check_pipeline`).
    """
    problem = Problem(graph, cost)
    name, fastest = _fastest_named(graph, cost, ahead)
    given = [fastest, *([_Timed(before, times(graph, before, cost))] if before else [])]
    own = problem.alive(step_schedule(graph, Overlap(SEQUENTIAL.name)))
    most = tuple(count + ahead for count in own)
    bound = lower_bound(problem, most)
    followed = ([each.spans[op].start for op in problem.ops] for each in given)
    priorities = [*(ranked(problem) for ranked in _RULES.values()), *followed]
    quickest = _quickest(problem, [[count + extra for count in own] for extra in range(ahead + 1)], priorities)
    step = improve(problem, *quickest, min(_MOST_RUNS, _WORK // len(problem.ops)) if moves else 0, bound)
    found = step.schedule(problem)
    best = min(*given, _Timed(found, times(graph, found, cost)), key=lambda each: each.seconds)
    return Found(best.schedule, best.seconds, bound, name, fastest.seconds, problem.alive(best.schedule))


def first_list(graph: StepGraph, cost: Cost, ahead: int = 1) -> Schedule:
    """Return the fastest list of list scheduling by its own rules, without named lists and local moves.

    It is much quicker than `find` without moves, and may be slower than the fastest named list.

    Args:
        graph, cost, ahead: as for `find`.

    Raises:
        UserError: the virtual stages do not fit the micro-batches (`check_pipeline`).
    """
    problem = Problem(graph, cost)
    own = problem.alive(step_schedule(graph, Overlap(SEQUENTIAL.name)))
    step, _ = _quickest(problem, [[count + ahead for count in own]], [ranked(problem) for ranked in _RULES.values()])
    return step.schedule(problem)


class _Timed(NamedTuple):
    """A schedule and the spans of its ops."""

    schedule: Schedule
    spans: Mapping[Op, Span]

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans.values())


def _quickest(problem: Problem, alive: Iterable[Sequence[int]], priorities: Sequence[Sequence[float]]) -> tuple[Walk, Rule]:
    """Return the fastest step of list scheduling, and its rule. There is one for every limit of memory and every priority."""
    rules = [Rule(priority, most) for most, priority in product(alive, priorities)]
    walks = ((walk(problem, rule), rule) for rule in rules)
    return min(((step, rule) for step, rule in walks if step is not None), key=lambda each: each[0].seconds)


def _fastest_named(graph: StepGraph, cost: Cost, ahead: int) -> tuple[str, _Timed]:
    """Return the fastest named list of this graph, and its name."""
    seen: dict[Schedule, str] = {}
    for name, lists in _named(graph, ahead):
        seen.setdefault(lists, name)
    simulated = {name: _Timed(lists, times(graph, lists, cost)) for lists, name in seen.items()}
    name = min(simulated, key=lambda name: simulated[name].seconds)
    return name, simulated[name]


def _named(graph: StepGraph, ahead: int) -> Iterator[tuple[str, Schedule]]:
    # Of lags, a list has those that differ.
    lags = [lag for lag in _LAGS if lag <= graph.slicing.degree]
    ways = [Overlap(SEQUENTIAL.name), Overlap(ONE_A_ONE_M.name), *(Overlap(STREAM.name, lag) for lag in lags)]
    if graph.apart:
        ways = ways[:1]  # their order is that of AF-Pipe
    elif ahead:
        ways.append(Overlap(WEAVE.name))
    reductions = ("end", "buckets") if any(graph.chunks) else ("end",)
    for way in ways:
        for reduction in reductions:
            yield str(way), step_schedule(graph, way, reduction=Reduction(reduction))


Priorities = Callable[[Problem], list[float]]


def _longest_path(problem: Problem) -> list[float]:
    """What most time depends on goes first."""
    return _ranked(problem, lambda i: (-problem.tails[i],))


def _oldest(problem: Problem) -> list[float]:
    """The oldest micro-batch goes first."""
    return _ranked(problem, lambda i: (problem.group[i], -problem.tails[i]))


def _backward(problem: Problem) -> list[float]:
    """Backward goes first, so that micro-batches end early."""
    return _ranked(problem, lambda i: (problem.ops[i].direction == "F", problem.group[i], -problem.tails[i]))


_RULES: Mapping[str, Priorities] = {"longest path": _longest_path, "oldest": _oldest, "backward": _backward}


def _ranked(problem: Problem, key: Callable[[int], tuple[float, ...]]) -> list[float]:
    """Return the rank of every op by a key. Gradients of weights go last: nobody waits for them before the end."""
    order = sorted(range(len(problem.ops)), key=lambda i: (problem.ops[i].direction == "W", key(i), i))
    ranks = [0.0] * len(order)
    for rank, i in enumerate(order):
        ranks[i] = float(rank)
    return ranks
