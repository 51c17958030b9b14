"""How fast a run trains over time, and what happened meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that happened after a step, at a time in seconds since the epoch. Workers may stop for it."""

    time: float
    step: int
    what: str
    stops: bool


@dataclass
class Speed:
    """The speed of all steps in the order in which they ran, those that ran again as well.

    Times are in seconds since the epoch. `workers` has the time of its start and its number of workers for every attempt.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    tokens_per_s: array[float] = field(default_factory=lambda: array("d"))
    workers: list[tuple[float, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _ranks: set[int] = field(default_factory=set)
    _step: int = 0

    def receive(self, record: Mapping[str, Any]) -> None:
        """Add a record of the run."""
        time, kind = record.get("time"), record["kind"]
        if time is None:
            return
        if kind == "step":
            self._step = record["step"]
            self.times.append(time)
            self.tokens_per_s.append(record["tokens_per_s"])
        elif kind == "place":
            self._place(time, record["rank"])
        elif kind in ("failed", "grows", "slow", "spiked"):
            self._happen(time, kind, record)

    def _place(self, time: float, rank: int) -> None:
        if rank in self._ranks:  # nobody told why the attempt before has ended
            self.events.append(Event(time, self._step, "the run was started again", True))
            self._ranks.clear()
        if not self._ranks:
            self.workers.append((time, 0))
        self._ranks.add(rank)
        self.workers[-1] = (self.workers[-1][0], len(self._ranks))

    def _happen(self, time: float, kind: str, record: Mapping[str, Any]) -> None:
        if kind == "failed":
            then = f"; goes on from step {record['saved']}" if record["goes_on"] else "; the end"
            self.events.append(Event(time, record["step"], f"{record['what']}{then}", True))
        elif kind == "grows":
            self.events.append(Event(time, record["step"], "the cluster has room for more workers", True))
        elif kind == "spiked":
            what = f"the loss is {record['loss']:.3g}, after a median of {record['median']:.3g}"
            self.events.append(Event(time, record["step"], what, False))
        elif record["goes_on"]:
            self.events.append(Event(time, self._step, f"rank {record['rank']} on {record['node_ip']} is slow", False))
        if kind in ("failed", "grows"):
            self._ranks.clear()
            self.workers.append((time, 0))
