"""Seconds of one rank, and what they are spent on."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from foldray.schedule import COMPUTE

COMPUTING = ("gemm", "experts", "attention", "memory", "launch")
GROUPS = ("tp", "cp", "ep", "etp", "dp_cp", "edp")
STEP = (*COMPUTING, *(f"exposed_{group}" for group in GROUPS), "crowding", "bubble", "optimizer", "straggling")
"""What the seconds of a step go into: computation, traffic that nothing hides, and the rest."""

_NAMES = (*STEP, *GROUPS)
_PLACE = {name: place for place, name in enumerate(_NAMES)}


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds by name: those of `STEP` sum to a stretch of time; those of `GROUPS` are all traffic of a group, hidden or not."""

    seconds: tuple[float, ...] = (0.0,) * len(_NAMES)

    @classmethod
    def of(cls, named: Iterable[tuple[str, float]]) -> Shares:
        """From names and seconds; those of the same name are added."""
        found = [0.0] * len(_NAMES)
        for name, seconds in named:
            found[_PLACE[name]] += seconds
        return cls(tuple(found))

    def __add__(self, other: Shares) -> Shares:
        return Shares(tuple(map(operator.add, self.seconds, other.seconds)))

    def __mul__(self, factor: float) -> Shares:
        return Shares(tuple([factor * each for each in self.seconds]))

    def of_step(self) -> dict[str, float]:
        """What the step's seconds go into, without what takes none."""
        return {name: seconds for name, seconds in zip(STEP, self.seconds, strict=False) if seconds > 0}

    def of_groups(self) -> dict[str, float]:
        """Seconds of every group's traffic, without what takes none."""
        return {name: seconds for name in GROUPS if (seconds := self.seconds[_PLACE[name]]) > 0}


class Work(NamedTuple):
    """Seconds on a lane, and what for: one of `COMPUTING`, or the family of the group that talks."""

    lane: str
    what: str
    seconds: float


class Price(NamedTuple):
    """What an op costs.

    Args:
        works: one after another; none takes no time.
        lanes: the same as the clock takes it, what follows on the same lane put together.
        seconds: of all.
    """

    works: tuple[Work, ...]
    lanes: tuple[tuple[str, float], ...]
    seconds: float

    @classmethod
    def of(cls, works: Iterable[Work]) -> Price:
        works = tuple(work for work in works if work.seconds)
        runs = groupby(works, key=lambda work: work.lane)
        lanes = tuple((lane, sum(work.seconds for work in run)) for lane, run in runs)
        return cls(works, lanes or ((COMPUTE, 0.0),), sum(seconds for _, seconds in lanes))

    def shares(self, travels: bool) -> Shares:
        """Of an op that travels all is traffic, and none of it a share of the step: what is exposed is told by the clock."""
        traffic = [(work.what, work.seconds) for work in self.works if work.lane != COMPUTE]
        if travels:
            return Shares.of(traffic)
        own = [(work.what if work.lane == COMPUTE else f"exposed_{work.what}", work.seconds) for work in self.works]
        return Shares.of(own + traffic)


class Stretch(NamedTuple):
    """How long one rank takes for something.

    Args:
        seconds: from the start to the end.
        crowding: how much of them computation lost to what travelled beside it.
    """

    seconds: float
    crowding: float

    def __add__(self, other: object) -> Stretch:
        assert isinstance(other, Stretch)
        return Stretch(self.seconds + other.seconds, self.crowding + other.crowding)

    def times(self, count: float) -> Stretch:
        return Stretch(self.seconds * count, self.crowding * count)
