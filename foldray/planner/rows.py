"""The rows of a token that travel between attention and experts: one for each expert, or one for each rank."""

from __future__ import annotations

from typing import NamedTuple

from foldray.blueprint import overload, visits_of_a_token
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
    """

    mean: float
    fullest: float
    room: float
    beside: tuple[int, ...] = ()


def travelling(job: Job, ep: int, itemsize: int) -> Travelling:
    """Return the rows of a job's tokens.

    Args:
        ep: expert-parallel size.
        itemsize: bytes of a number of an activation. Weights have at least four.
    """
    topk = job.model.topk
    if job.dispatch == "assignment":
        return Travelling(topk, topk * overload(job.model, ep), topk)
    visits = visits_of_a_token(job.model, ep)
    return Travelling(sum(visits), ep * max(visits), min(topk, ep), (max(4, itemsize) * topk, _NUMBER * topk))
