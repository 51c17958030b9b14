"""All legal ways to train a job on a cluster, the best first.

Whatever is not predicted yet has lower bounds of time and memory (`nodes.py`). What has the lowest bound of time is refined next,
so predictions come out in their order, fastest first. Once there are enough of them, whatever needs at least as much memory as
the leanest of these is left out: it could not have been shown.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from foldray.errors import UserError
from foldray.planner.nodes import Planned, Refinement
from foldray.planner.space import Space


class Found(NamedTuple):
    """What a search found.

    Args:
        best: those that fit first, then by step time.
        front: those that nothing beats in both time and memory, fastest first.
        legal: folds that there are.
    """

    best: list[Planned]
    front: list[Planned]
    legal: int


def search(space: Space, top: int = 10) -> Found:
    """The `top` best, and the front of time and memory.

    Best first: the queue has nodes by their bound of time, and a node is replaced by its refinements (A*).

    Raises:
        UserError: no fold is legal.
    """
    refinement = Refinement(space)
    folds = list(refinement.folds())
    if not folds:
        raise UserError("gpus", space.gpus, f"has no legal fold for this model and batch with {dict(space.pins) or 'any sizes'}")
    numbers = itertools.count()
    queue = [(node.seconds, next(numbers), node) for node in folds]
    heapq.heapify(queue)
    fit: list[Planned] = []
    unfit: list[Planned] = []
    front: list[Planned] = []
    while queue:
        _, _, node = heapq.heappop(queue)
        enough = len(fit) >= top if node.held <= refinement.limit else len(fit) + len(unfit) >= top
        if enough and front and front[-1].memory.total <= node.held:
            continue
        if not isinstance(node.what, Planned):
            for each in refinement.refined(node):
                heapq.heappush(queue, (each.seconds, next(numbers), each))
            continue
        (fit if node.what.fits else unfit).append(node.what)
        if not front or node.what.memory.total < front[-1].memory.total:
            front.append(node.what)
    return Found([*fit[:top], *unfit[: max(0, top - len(fit))]], front, len(folds))
