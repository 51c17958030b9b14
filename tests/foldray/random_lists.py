"""Random costs of ops, and the lists that they lead to."""

from __future__ import annotations

import random

from foldray.finding import Found
from foldray.finding.greedy import Rule, walk
from foldray.finding.problem import Problem
from foldray.schedule import COMPUTE, SEQUENTIAL, Cost, Op, Overlap, Schedule, StepGraph, step_schedule


def random_cost(graph: StepGraph, seed: int, shared: bool, zeros: bool = False) -> Cost:
    """Return random seconds for every op. With `shared`, all that travels uses one link; else each channel has its own."""
    draw = random.Random(seed)
    seconds = {op: draw.choice([0.0, 1.0] if zeros else [0.1, 0.5, 1.0, 2.0]) * draw.random() for op in graph.ops()}

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel = graph.channel(op)
        return ((COMPUTE if channel is None else "link" if shared and channel[0] != "counts" else str(channel), seconds[op]),)

    return cost


def find_at_random(seed: int, graph: StepGraph, cost: Cost, ahead: int, before: Schedule | None) -> Found:
    """Return lists of random costs and priorities, as `find` returns lists. Times may never lead to them, but they may run."""
    draw = random.Random(seed)
    problem = Problem(graph, random_cost(graph, seed, shared=draw.random() < 0.5, zeros=draw.random() < 0.5))
    own = problem.kept(step_schedule(graph, Overlap(SEQUENTIAL.name)))
    most = [kept + int(ahead * blocks) for kept, blocks in zip(own, problem.blocks, strict=True)]
    alive, left = ([draw.randint(1, 4) for _ in own] for _ in range(2))
    step = walk(problem, Rule([draw.random() for _ in problem.ops], most, alive, left))
    assert step is not None
    return Found(step.schedule(problem), step.seconds, 0.0, "", step.seconds, own, own)
