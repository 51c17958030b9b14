"""A lower bound of the time of a step: no legal list is faster on these lanes, at these costs, within this memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from foldray.clock import Recording, recorded_cost
from foldray.finding.problem import Problem
from foldray.graph import StepGraph


def lower_bound(problem: Problem, keep: Sequence[int] | None = None) -> float:
    """Return a bound of the seconds of a step. It is the largest of three:

    - The longest path through the ops.
    - For every lane (the computation of a position, or a link), all that it has to do, between the shortest way to the first of
      its ops and the shortest way from the last one to the end.
    - For every position, the sum of the times for which it keeps the blocks of all micro-batches at least, divided by the most
      that it may keep at once.

    Args:
        keep: for every position, the most blocks that it may keep at once (`Problem.kept`). None is no limit.
    """
    bounds = [max(problem.tails, default=0.0), *_lanes(problem)]
    if keep is not None:
        bounds += [_memory(problem, position, most) for position, most in enumerate(keep)]
    return max(bounds)


def recorded_bound(graph: StepGraph, recordings: Sequence[Recording]) -> float:
    """Return the seconds that no list of a recorded step's ops can beat."""
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


def _memory(problem: Problem, position: int, most: int) -> float:
    """Return the bound of a position's memory: it keeps each block for the longest path from the block's first op to its last."""
    by_micro_batch, known, total = defaultdict[int, list[int]](list), dict[object, float](), 0.0
    for i, group in enumerate(problem.group):
        if group >= 0:
            by_micro_batch[group].append(i)
    for ops in by_micro_batch.values():
        # Micro-batches have equal ops. Most have equal costs, too.
        costs = tuple(sorted((*problem.relative(i), problem.seconds[i]) for i in ops))
        if costs not in known:
            blocks = {problem.block[i] for i in ops if problem.channel[i] < 0 and problem.places[i][0] == position}
            known[costs] = sum(_longest(problem, ops, position, block) for block in blocks)
        total += known[costs]
    return total / most


def _longest(problem: Problem, ops: Sequence[int], position: int, block: tuple[int, int]) -> float:
    """Return the longest path between ops of a block at a position, among the ops of its micro-batch."""
    paths, longest = dict[int, float](), 0.0
    for i in ops:
        of_block = problem.channel[i] < 0 and problem.block[i] == block and problem.places[i][0] == position
        before = [paths[need] for need in problem.needs[i] if need in paths]
        if before or of_block:
            paths[i] = max(before, default=0.0) + problem.seconds[i]
            if of_block:
                longest = max(longest, paths[i])
    return longest
