"""Local moves: a step is run again and again, each time with two neighbours swapped that the end of the step waits for.

The end of a step waits for a path of ops, the critical path. Two ops on it, one of which waits only because the other one has
their lane, may be swapped: a slice of attention with experts, one all-to-all with another, or gradients of weights with what
somebody waits for. No other swap of neighbours makes the step shorter (the neighbourhood of Van Laarhoven, Aarts and Lenstra for
job shops, Operations Research 40(1), 1992). If the second one was not ready when the first one started, the first one may be
held until the second one has started, and the lane idles meanwhile.

A descent takes no swap that makes the step longer, and ends where no swap makes it shorter. So there are also searches that take
such swaps at first (simulated annealing, as in that paper). All draws come from fixed seeds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from foldray.finding.greedy import Rule, Walk, walk
from foldray.finding.problem import Problem

_SAME = 1e-9  # relative difference of seconds that counts as none
_MOST_SEARCHES, _ENOUGH = 12, 500  # searches that take swaps for the worse, and runs that are enough for one
_TEMPERATURES = (0.005, 0.02)  # relative growth of seconds that a search takes at its start with a chance of 1/e


class _Candidate(NamedTuple):
    """A step and the rule that makes it."""

    step: Walk
    rule: Rule


def improve(problem: Problem, step: Walk, rule: Rule, runs: int, goal: float = 0.0) -> Walk:
    """Return the fastest step found by swaps, beginning with `step`.

    Args:
        rule: the rule that it was made with; its priorities are replaced by the starts of the ops.
        goal: seconds that no step can be faster than; the search ends there.
    """
    start = _Candidate(step, rule._replace(priority=step.starts))
    best = _search(problem, start, runs // 4, goal)
    searches = max(len(_TEMPERATURES), min(_MOST_SEARCHES, runs // _ENOUGH))
    for seed in range(searches):
        temperature = _TEMPERATURES[seed % len(_TEMPERATURES)]
        searched = _search(problem, start, runs // (2 * searches), goal, temperature, seed)
        best = min(
            best, searched, _search(problem, searched, runs // (4 * searches), goal), key=lambda candidate: candidate.step.seconds
        )
    return best.step


def _search(problem: Problem, start: _Candidate, runs: int, goal: float, temperature: float = 0.0, seed: int = 0) -> _Candidate:
    """Return the best step of a walk by swaps. At a temperature, which falls to zero, it also takes swaps for the worse."""
    draw, best, now, left = random.Random(seed), start, start, runs
    seen: set[tuple[int, int]] = set()  # swaps that are not tried again before the step is shorter
    while left > 0 and best.step.seconds > goal * (1 + _SAME):
        pairs = [pair for pair in _swaps(problem, now.step) if pair not in seen]
        draw.shuffle(pairs)
        for pair in pairs[:left]:
            left -= 1
            rule = _swapped(problem, now, *pair, hold=not temperature or draw.random() < 0.5)
            step = walk(problem, rule)
            longer = math.inf if step is None else step.seconds / now.step.seconds - 1
            heat = temperature * left / runs
            if step is None or (longer > _SAME and not (heat and draw.random() < math.exp(-longer / heat))):
                seen.add(pair)
                continue
            if longer < -_SAME:
                seen.clear()
            else:  # back again would not help
                seen.update((pair, pair[::-1]))
            now = _Candidate(step, rule)
            break
        else:
            if not temperature or not seen:
                return best
            seen.clear()
            left -= 1
        best = min(best, now, key=lambda candidate: candidate.step.seconds)
    return best


def _swapped(problem: Problem, now: _Candidate, before: int, after: int, hold: bool) -> Rule:
    """Return the rule that has two neighbours of a lane in the other order.

    Args:
        hold: whether the one before waits for the one after if that was not ready.
    """
    step, rule = now
    priority, held = list(rule.priority), tuple(pair for pair in rule.held if pair != (before, after))
    priority[before], priority[after] = priority[after], priority[before]
    ready = max((step.ends[need] for need in problem.needs[after]), default=0.0)
    if hold and ready > step.starts[before]:
        held = (*held, (after, before))
    return rule._replace(priority=priority, held=held)


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
