"""Local moves: a step is run again and again, each time with two neighbours swapped that the end of the step waits for.

The end of a step waits for a path of ops, the critical path. Two ops on it, one of which waits only because the other one has
their lane, may be swapped: a slice of attention with experts, one all-to-all with another, or gradients of weights with what
somebody waits for. No other swap of neighbours makes the step shorter (the neighbourhood of Van Laarhoven, Aarts and Lenstra for
job shops, Operations Research 40(1), 1992).
"""

from __future__ import annotations

from collections.abc import Iterator

from foldray.finding.greedy import Rule, Walk, walk
from foldray.finding.problem import Problem

_SAME = 1e-9  # relative difference of seconds that counts as none


def improve(problem: Problem, step: Walk, rule: Rule, runs: int, goal: float = 0.0) -> Walk:
    """Return the fastest step found by swaps, beginning with `step`.

    Args:
        step: the step to begin with.
        rule: the rule that it was made with; its priorities are replaced by the starts of the ops.
        runs: most runs of the step.
        goal: seconds that no step can be faster than; the search ends there.
    """
    best = now = step
    seen: set[tuple[int, int]] = set()
    order = list(step.starts)
    while runs > 0 and best.seconds > goal * (1 + _SAME):
        moved = False
        for before, after in _swaps(problem, now):
            if (before, after) in seen:
                continue
            if runs <= 0:
                break
            runs -= 1
            tried = list(order)
            tried[before], tried[after] = tried[after], tried[before]
            other = walk(problem, rule._replace(priority=tried))
            if other.seconds < now.seconds * (1 - _SAME):
                seen.clear()
            elif other.seconds > now.seconds * (1 + _SAME):
                seen.add((before, after))
                continue
            else:  # as fast: the path may be another one now
                seen.update(((before, after), (after, before)))
            now, order, moved = other, tried, True
            break
        if now.seconds < best.seconds:
            best = now
        if not moved:
            return best
    return best


def _swaps(problem: Problem, step: Walk) -> Iterator[tuple[int, int]]:
    """Yield pairs of neighbours on a lane of a critical path: (before, after). Neither needs the other. Last ones come first."""
    ends, starts = step.ends, step.starts
    i = max(range(len(ends)), key=ends.__getitem__)
    while i >= 0:
        start, before = starts[i], step.ahead[i]
        near = start * (1 - _SAME)
        needs = [need for need in problem.needs[i] if ends[need] >= near]
        if before >= 0 and ends[before] >= near and before not in problem.needs[i]:
            yield before, i
            i = needs[0] if needs and problem.channel[i] >= 0 else before
        else:
            i = needs[0] if needs else (before if before >= 0 and start > 0 else -1)
