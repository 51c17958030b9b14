"""The search through all legal ways to train a job on a cluster, for the best ones.

Sets of candidates have lower bounds of time and memory (`nodes.py`). The search always refines the set with the lowest bound
of time. So it finds predictions in the order of their time, fastest first. Once it has enough predictions, it skips every
set that needs at least as much memory as the leanest prediction. No candidate of such a set is among the best or on the
front.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from foldray.errors import UserError
from foldray.planner.nodes import Planned, Refinement
from foldray.planner.space import Space


class Found(NamedTuple):
    """The result of a search.

    Args:
        best: the best candidates: first those that fit into memory, then the others, each sorted by step time.
        front: all candidates that no other candidate beats in both time and memory, fastest first.
        legal: number of legal folds.
    """

    best: list[Planned]
    front: list[Planned]
    legal: int


def search(space: Space, top: int = 10) -> Found:
    """Search a space for the `top` best candidates, and for the front of time and memory.

    This is a best-first search (A*): the queue sorts nodes by their bound of time, and the refinements of a node replace it.
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

    def needless(held: float) -> bool:
        enough = len(fit) >= top if held <= refinement.limit else len(fit) + len(unfit) >= top
        return enough and bool(front) and front[-1].memory.total <= held

    while queue:
        _, _, node = heapq.heappop(queue)
        if needless(node.held):
            continue
        if not isinstance(node.what, Planned):
            for each in refinement.refined(node, needless):
                heapq.heappush(queue, (each.seconds, next(numbers), each))
            continue
        (fit if node.what.fits else unfit).append(node.what)
        if not front or node.what.memory.total < front[-1].memory.total:
            front.append(node.what)
    return Found([*fit[:top], *unfit[: max(0, top - len(fit))]], front, len(folds))
