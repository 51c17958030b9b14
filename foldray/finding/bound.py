"""A lower bound of the time of a step: no legal list is faster on these lanes, at these costs, within this memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from foldray.finding.problem import Problem
from foldray.schedule import StepGraph
from foldray.timeline import Recording, recorded_cost


def lower_bound(problem: Problem, alive: Sequence[int] | None = None) -> float:
    """Return a bound of the seconds of a step. It is the largest of three:

    - The longest path through the ops.
    - For every lane (the computation of a position, or a link), all that it has to do, between the shortest way to the first of
      its ops and the shortest way from the last one to the end.
    - For every position, the sum of the times that its micro-batches are alive there at least, divided by the most that may be
      alive at once.

    Args:
        problem: the ops and their costs.
        alive: for every position, the most micro-batches that have begun there and not ended. None is no limit.
    """
    bounds = [max(problem.tails, default=0.0), *_lanes(problem)]
    if alive is not None:
        bounds += [_alive(problem, position, most) for position, most in enumerate(alive)]
    return max(bounds)


def recorded_bound(graph: StepGraph, recordings: Sequence[Recording]) -> float:
    """Return the seconds that no list of a recorded step's ops can beat.

    Args:
        graph: the graph of the step.
        recordings: the step as every rank has recorded it.
    """
    return lower_bound(Problem(graph, recorded_cost(graph, recordings)))


def _lanes(problem: Problem) -> list[float]:
    heads, busy = problem.heads, defaultdict[tuple[int, int], float](float)
    before, after = defaultdict[tuple[int, int], float](lambda: inf), defaultdict[tuple[int, int], float](lambda: inf)
    for i, places in enumerate(problem.places):
        lanes = problem.lanes[i] if problem.channel[i] >= 0 else ((-1, problem.seconds[i]),)
        for lane, seconds in lanes:
            for place in places:
                key = place, lane
                busy[key] += seconds
                before[key] = min(before[key], heads[i])
                after[key] = min(after[key], problem.tails[i] - problem.seconds[i])
    return [before[key] + seconds + after[key] for key, seconds in busy.items()]


def _alive(problem: Problem, position: int, most: int) -> float:
    """Return the bound of a position's memory: at least as long as the longest path through them, its micro-batches are alive."""
    own = {i for i, places in enumerate(problem.places) if problem.channel[i] < 0 and places[0] == position}
    paths: list[float | None] = [None] * len(problem.ops)  # from the first op of the same micro-batch at the position
    longest: dict[int, float] = {}
    for i, needs in enumerate(problem.needs):
        group = problem.group[i]
        before = [path for need in needs if problem.group[need] == group and (path := paths[need]) is not None]
        if before or i in own:
            paths[i] = path = max(before, default=0.0) + problem.seconds[i]
            if i in own:
                longest[group] = max(longest.get(group, 0.0), path)
    return sum(longest.values()) / most
