"""The rows of a token that travel between attention and experts: one for each expert, each rank, or first for each node."""

from __future__ import annotations

import math
from typing import NamedTuple

from foldray.blueprint import overload, visits_of_a_token
from foldray.costs.candidate import Job
from foldray.fold import Fold

_NUMBER = 4  # bytes of the number of an expert
_GROUP, _SCALE = 128, 4  # numbers of a row in float8 that share a scale, and its bytes (`moe/exchange.py`)


class Travelling(NamedTuple):
    """The rows of a token that travel to the experts, and back.

    Args:
        mean: number of rows that a token has.
        fullest: rows of the fullest rank of an expert-parallel group, over the tokens of a rank.
        room: rows that are made of a token, some of which may have nowhere to go.
        beside: bytes of the tensors that travel beside a row: of its weights, and of the numbers of its experts. Empty if
            weights do not travel.
        out, back: bytes of a row on its way to the experts, and on its way back.
        scales: bytes of the scales of a row on its way to the experts, beyond `out`.
        inside: rows that ranks of a node pass on to the fullest one, over the tokens of a rank; 0 if tokens do not travel once
            to each node.
    """

    mean: float
    fullest: float
    room: float
    out: float
    back: float
    beside: tuple[int, ...] = ()
    scales: float = 0.0
    inside: float = 0.0

    def messages(self, out: bool, weights: bool, back: bool) -> list[float]:
        """Return the bytes for a row in each message: to the experts (`out`) or from them, with its weights or without.

        A gradient (`back`) has no numbers of experts.
        """
        beside = sum(self.beside[: 1 if back else 2]) * weights + self.scales * out
        return [self.out if out else self.back, *([beside] if beside else [])]

    @property
    def arrived(self) -> float:
        """Rows that arrive at the fullest rank with their experts, over the tokens of a rank."""
        return self.inside or self.fullest


def travelling(job: Job, fold: Fold, itemsize: int) -> Travelling:
    """Return the rows of a job's tokens. A number of an activation has `itemsize` bytes, and one of a weight at least four."""
    topk, ep, places, hidden = job.model.topk, fold.ep, fold.ep_across, job.model.hidden
    back = (itemsize if job.wire is None else 2) * hidden
    out, scales = (hidden, _SCALE * math.ceil(hidden / _GROUP)) if job.wire == "float8" else (back, 0)
    if job.dispatch == "assignment":
        return Travelling(topk, topk * overload(job.model, ep), topk, out, back, scales=scales)
    visits, beside = visits_of_a_token(job.model, places), (max(4, itemsize) * topk, _NUMBER * topk)
    inside = ep * max(visits_of_a_token(job.model, ep)) if places < ep else 0.0
    return Travelling(sum(visits), places * max(visits), min(topk, places), out, back, beside, scales, inside)
