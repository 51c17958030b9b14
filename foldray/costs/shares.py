"""Seconds of one rank, by what they are spent on."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from foldray.clock import COMPUTE

COMPUTING = ("gemm", "experts", "attention", "memory", "launch")
GROUPS = ("tp", "cp", "ep", "ep_inside", "etp", "dp_cp", "edp", "pp", "host")
"""Group families whose ranks communicate; and a rank and its host."""
STEP = (*COMPUTING, *(f"exposed_{group}" for group in GROUPS), "crowding", "bubble", "optimizer", "straggling")
"""Names for the seconds of a step: computation, communication that nothing hides, and the rest."""

_NAMES = (*STEP, *GROUPS)
_PLACE = {name: place for place, name in enumerate(_NAMES)}


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds by name.

    The seconds of the names in `STEP` sum to a stretch of time. The seconds of the names in `GROUPS` are all communication
    of a group family, hidden or not.
    """

    seconds: tuple[float, ...] = (0.0,) * len(_NAMES)

    @classmethod
    def of(cls, named: Iterable[tuple[str, float]]) -> Shares:
        """Return shares from (name, seconds). Seconds of the same name are added."""
        sums = [0.0] * len(_NAMES)
        for name, seconds in named:
            sums[_PLACE[name]] += seconds
        return cls(tuple(sums))

    def __add__(self, other: Shares) -> Shares:
        return Shares(tuple(map(operator.add, self.seconds, other.seconds)))

    def __mul__(self, factor: float) -> Shares:
        return Shares(tuple([factor * share for share in self.seconds]))

    def of_step(self) -> dict[str, float]:
        """Return the seconds of a step by name, without names that take no time."""
        return {name: seconds for name, seconds in zip(STEP, self.seconds, strict=False) if seconds > 0}

    def of_groups(self) -> dict[str, float]:
        """Return the seconds of communication by group family, without families that take no time."""
        return {name: seconds for name in GROUPS if (seconds := self.seconds[_PLACE[name]]) > 0}


class Work(NamedTuple):
    """Seconds on a lane.

    Args:
        what: a name of `COMPUTING`, or the family of the group that communicates.
        weights: whether they go into gradients of weights that may be an op of their own.
        calls: calls of the host to start this work on a GPU, in units of the constant `issue`.
    """

    lane: str
    what: str
    seconds: float
    weights: bool = False
    calls: float = 0.0


class Price(NamedTuple):
    """The cost of an op.

    Args:
        works: the work of the op, one after another; each takes time, or calls of the host.
        lanes: (lane, seconds) of the same work for the clock. Successive work on one lane is added up.
        seconds: seconds of the whole op.
        calls: calls of the host to start it on a GPU.
    """

    works: tuple[Work, ...]
    lanes: tuple[tuple[str, float], ...]
    seconds: float
    calls: float

    @classmethod
    def of(cls, works: Iterable[Work]) -> Price:
        works = tuple(work for work in works if work.seconds or work.calls)
        runs = groupby(works, key=lambda work: work.lane)
        lanes = tuple((lane, sum(work.seconds for work in run)) for lane, run in runs)
        calls = sum(work.calls for work in works)
        return cls(works, lanes or ((COMPUTE, 0.0),), sum(seconds for _, seconds in lanes), calls)

    def shares(self, travels: bool) -> Shares:
        """Return the shares of an op.

        If the op travels, its seconds count as communication only, because only the clock knows which of them are exposed.
        """
        traffic = [(work.what, work.seconds) for work in self.works if work.lane != COMPUTE]
        if travels:
            return Shares.of(traffic)
        busy = [(work.what if work.lane == COMPUTE else f"exposed_{work.what}", work.seconds) for work in self.works]
        return Shares.of(busy + traffic)


class Stretch(NamedTuple):
    """A stretch of one rank's time.

    Args:
        seconds: seconds from its start to its end.
        crowding: seconds of these that computation loses to communication beside it.
        waiting: seconds of these that the GPU waits for the host.
    """

    seconds: float
    crowding: float
    waiting: float

    def __add__(self, other: object) -> Stretch:
        assert isinstance(other, Stretch)
        return Stretch(*map(operator.add, self, other))

    def times(self, count: float) -> Stretch:
        return Stretch(*(count * seconds for seconds in self))
