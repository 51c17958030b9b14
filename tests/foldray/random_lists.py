"""Random costs of ops and the lists that they lead to, and lists made at random by the rules of the graph alone."""

from __future__ import annotations

import random
from collections import defaultdict

from foldray.clock import COMPUTE, Cost
from foldray.finding import Found
from foldray.finding.greedy import Rule, walk
from foldray.finding.problem import Problem
from foldray.graph import Channel, Op, Schedule, StepGraph
from foldray.orders import SEQUENTIAL, Overlap, step_schedule


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


def lists_at_random(graph: StepGraph, seed: int) -> Schedule:
    """Return lists that only the rules of `check` bind. Positions run far ahead, and receivers post what was sent long ago."""
    draw, ops = random.Random(seed), list(graph.ops())
    users = defaultdict[Op, set[Op]](set)
    for op in ops:
        for need in graph.needs(op):
            users[need].add(op)
    before = {op: {*graph.needs(op), *(user for freed in graph.frees(op) for user in users[freed])} - {op} for op in ops}
    after = defaultdict[Op, list[Op]](list)
    for op in ops:
        for each in before[op]:
            after[each].append(op)
    lists: list[dict[Op, None]] = [{} for _ in range(graph.positions)]
    sent: dict[Channel | None, list[Op]] = {}  # messages that their receiver has not posted
    hurry = [draw.random() ** 2 for _ in lists]

    def may_start(op: Op, place: int) -> bool:
        """Whether all that an op needs at a position has started there. What it needs from elsewhere comes with messages."""
        return op not in lists[place] and all(need in lists[place] for need in before[op] if place in graph.where(need))

    ready = [op for op in ops if not before[op]]
    while True:
        heads = [(queue[0], graph.where(queue[0])[1]) for queue in sent.values() if queue]
        free = [(op, graph.where(op)[0]) for op in ready] + [each for each in heads if may_start(*each)]
        if not free:
            break
        ((op, place),) = draw.choices(free, [hurry[place] for _, place in free])
        lists[place][op] = None
        if place != graph.where(op)[0]:
            sent[graph.channel(op)].remove(op)
        else:
            ready.remove(op)
            if len(graph.where(op)) > 1:
                sent.setdefault(graph.channel(op), []).append(op)
        ready += [each for each in after[op] if each not in ready and may_start(each, graph.where(each)[0])]
    return tuple(map(tuple, lists))


def any_list(seed: int, graph: StepGraph, cost: Cost, ahead: int, before: Schedule | None) -> Found:
    """Return lists made at random, as `find` returns lists."""
    none = (0,) * graph.positions
    return Found(lists_at_random(graph, seed), 0.0, 0.0, "", 0.0, none, none)
