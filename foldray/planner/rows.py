"""The rows of a token that travel between attention and experts: one for each expert, each rank, or first for each node."""

from __future__ import annotations

from typing import NamedTuple

from foldray.blueprint import overload, visits_of_a_token
from foldray.fold import Fold
from foldray.planner.candidate import Job

_NUMBER = 4  # bytes of the number of an expert


class Travelling(NamedTuple):
    """The rows of a token that travel to the experts, and back.

    Args:
        mean: number of rows that a token has.
        fullest: rows of the fullest rank of an expert-parallel group, over the tokens of a rank.
        room: rows that are made of a token, some of which may have nowhere to go.
        beside: bytes of the tensors that travel beside a row: of its weights, and of the numbers of its experts. Empty if
            weights do not travel.
        inside: the same as `fullest` of the rows that ranks of a node pass on to each other; 0 if tokens do not travel once to
            each node.
    """

    mean: float
    fullest: float
    room: float
    beside: tuple[int, ...] = ()
    inside: float = 0.0

    @property
    def arrived(self) -> float:
        """Rows that arrive at the fullest rank with their experts, over the tokens of a rank."""
        return self.inside or self.fullest


def travelling(job: Job, fold: Fold, itemsize: int) -> Travelling:
    """Return the rows of a job's tokens.

    Args:
        fold: its expert-parallel sizes count.
        itemsize: bytes of a number of an activation. Weights have at least four.
    """
    topk, ep, places = job.model.topk, fold.ep, fold.ep_across
    if job.dispatch == "assignment":
        return Travelling(topk, topk * overload(job.model, ep), topk)
    visits, beside = visits_of_a_token(job.model, places), (max(4, itemsize) * topk, _NUMBER * topk)
    inside = ep * max(visits_of_a_token(job.model, ep)) if places < ep else 0.0
    return Travelling(sum(visits), places * max(visits), min(topk, places), beside, inside)
