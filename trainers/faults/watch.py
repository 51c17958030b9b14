"""The signs of life of ranks: a thread that shows them, and who stands still or is slow, found from those of all ranks."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainers.telemetry.mailbox import Outbox
from trainers.telemetry.records import Beat

if TYPE_CHECKING:
    from foldray.comm import Activity  # torch takes a second to import, and a run's folder needs only `Pace`

STALLED = 75  # exit code of a rank that has ended itself
_RECENT = 15  # signs of life that a rank's pace is measured over
_SLOW = 1.3  # times as long as the other ranks, or as before
_QUIET_S = 10.0  # without a sign of life for so much longer than the others, a rank counts as stopped
_UNSEEN_S = 15.0  # more time between two looks does not count, because the driver itself stood still


@dataclass(frozen=True)
class Standstill:
    """The ranks that the others wait for, if they are known, when training does not get on; the same in one line."""

    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Pace:
    """How much of its time a rank does not wait for others. In a synchronous training, this is its share of work.

    Args:
        busy: share of the newest time, from 0 to 1.
        over_others: `busy` over the median of the other ranks of its pipeline position; None without others.
        over_before: `busy` over the share before, in this attempt; None at its beginning.
    """

    busy: float
    over_others: float | None
    over_before: float | None

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for this rank, because it works much longer than they do."""
        return (self.over_others or 0.0) > _SLOW


class Watch:
    """Keeps the newest signs of life of every rank of an attempt."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self._first: dict[int, Beat] = {}
        self._recent: dict[int, deque[Beat]] = {}
        self._arrived: dict[int, float] = {}  # on this machine's clock, because those of nodes differ
        self._silent_s: dict[int, float] = {}
        self._looked = -math.inf

    def receive(self, beat: Beat, now: float | None = None) -> None:
        """Take a sign of life that arrives now, in seconds of `time.monotonic`."""
        self.beats[beat["rank"]] = beat
        self._first.setdefault(beat["rank"], beat)
        self._recent.setdefault(beat["rank"], deque(maxlen=_RECENT)).append(beat)
        self._arrived[beat["rank"]] = time.monotonic() if now is None else now

    def clear(self) -> None:
        for by_rank in (self.beats, self._first, self._recent, self._arrived, self._silent_s):
            by_rank.clear()

    def stands(self, patience: float) -> bool:
        """Whether a rank has told that nothing changed for so many seconds."""
        return any(beat["still_s"] > patience for beat in self.beats.values())

    def silent(self, limit: float, now: float | None = None) -> tuple[int, ...]:
        """Return the ranks that train, and have shown no sign of life for longer than `limit` seconds.

        Call this from time to time while the queue answers, so that the signs of a rank would arrive.
        """
        now = time.monotonic() if now is None else now
        passed = min(now - self._looked, _UNSEEN_S)
        for rank, at in self._arrived.items():
            self._silent_s[rank] = 0.0 if at > self._looked else self._silent_s.get(rank, 0.0) + passed
        self._looked = now
        limits = {rank: max(limit, beat.get("may_take_s") or 0.0) for rank, beat in self._training()}
        return tuple(sorted(rank for rank, limit in limits.items() if self._silent_s[rank] > limit))

    def _training(self) -> Iterator[tuple[int, Beat]]:
        return ((rank, beat) for rank, beat in self.beats.items() if beat["trained_s"] and not beat.get("ends"))

    def paces(self, positions: Mapping[int, int] | None = None) -> dict[int, Pace]:
        """Return the pace of every rank that has shown enough signs of life, among those of its pipeline position, or all.

        Positions may have different work.
        """
        alike: dict[int | None, list[tuple[float, int]]] = {}
        for rank, beats in self._recent.items():
            if len(beats) == _RECENT:
                alike.setdefault(positions.get(rank) if positions else None, []).append((_busy(beats[0], beats[-1]), rank))
        paces = {}
        for group in map(sorted, alike.values()):
            shares = [share for share, _ in group]
            for i, (share, rank) in enumerate(group):
                typical = _median_without(shares, i)
                before = _busy(self._first[rank], self._recent[rank][0])
                paces[rank] = Pace(share, share / typical if typical else None, share / before if before else None)
        return paces

    def standstill(self, silent: tuple[int, ...] = ()) -> Standstill:
        """Say which ranks the others wait for.

        These are the ranks that `silent` has found; else ranks whose signs of life have stopped; else ranks that wait for nobody,
        while others wait; else, if all ranks wait, those that have started the fewest operations of a communicator that others
        wait in.
        """
        beats = self.beats
        if not beats:
            return Standstill((), "no rank has shown a sign of life")
        newest = max(self._arrived.values())
        quiet = silent or tuple(sorted(rank for rank, at in self._arrived.items() if newest - at > _QUIET_S))
        if quiet:
            seconds = min(max(newest - self._arrived[rank], self._silent_s.get(rank, 0.0)) for rank in quiet)
            return Standstill(quiet, f"{named(quiet)} showed no sign of life for {seconds:.0f} s{self._waiting(quiet)}")
        busy = tuple(sorted(rank for rank, beat in beats.items() if not beat["waits"]))
        doing = ", ".join(dict.fromkeys(beats[rank]["doing"] for rank in busy))
        if busy and len(busy) < len(beats):
            return Standstill(busy, f"{named(busy)} stood still in {doing}{self._waiting(busy)}")
        return Standstill((), f"all ranks stood still in {doing}") if busy else self._behind()

    def _behind(self) -> Standstill:
        """Compare what the ranks have started, where all of them wait."""
        for name in dict.fromkeys(wait.rpartition(" of ")[2] for beat in self.beats.values() for wait in beat["waits"]):
            started = {rank: beat["started"].get(name, 0) for rank, beat in self.beats.items()}
            if len(set(started.values())) > 1:
                behind = tuple(sorted(rank for rank, count in started.items() if count == min(started.values())))
                text = f"{named(behind)} has started {min(started.values())} operations of {name}, others {max(started.values())}"
                return Standstill(behind, text + self._waiting(behind))
        return Standstill((), f"all ranks wait for each other{self._waiting(())}")

    def _waiting(self, without: Iterable[int]) -> str:
        """Say what the other ranks wait for, as the end of a sentence."""
        waits = {rank: beat for rank, beat in sorted(self.beats.items()) if beat["waits"] and rank not in set(without)}
        if not waits:
            return ""
        rank, beat = next(iter(waits.items()))
        also = f", and {len(waits) - 1} other{'s' if len(waits) > 2 else ''} with it" if len(waits) > 1 else ""
        return f"; rank {rank} waits in {beat['doing']} for {beat['waits'][0]}{also}"


def _busy(first: Beat, last: Beat) -> float:
    """Return the share of the time between two signs of life in which a rank did not wait; 0 without time between them."""
    trained, waited = last["trained_s"] - first["trained_s"], last["waited_s"] - first["waited_s"]
    return max(1.0 - waited / trained, 0.0) if trained > 0 else 0.0


def _median_without(values: Sequence[float], i: int) -> float:
    """Return the median of sorted values without the i-th one, in a time that does not grow with them; 0 if there is no other."""
    count = len(values) - 1
    if not count:
        return 0.0
    low, high = ((count - 1) // 2, count // 2)
    return (values[low + (low >= i)] + values[high + (high >= i)]) / 2


def named(ranks: tuple[int, ...]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks)) or '?'}"


class Pulse:
    """A thread that tells the driver what this rank is doing, and ends the process if it does not get on.

    Waits in torch's process groups have a timeout of their own. The thread is for all other places where a rank may stand
    still, such as a storage that does not answer. It waits longer, so the ranks that only wait for this one end first, with
    an error that names what they waited for.

    Use it as a context manager around the training. Nothing else may use its outbox. After `patience` seconds without any change,
    the process ends.
    """

    def __init__(self, rank: int, activity: Activity, outbox: Outbox, patience: float, period: float = 2.0):
        self._rank, self._activity, self._outbox = rank, activity, outbox
        self._patience, self._period = patience, period
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foldray-pulse", daemon=True)
        self._began, self._waited_s = math.inf, 0.0

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(self._period)
        self._beat(ends=True)  # it says where the rank was
        self._outbox.flush(self._period)

    @property
    def stops(self) -> bool:
        return self._outbox.stops

    def trains(self) -> None:
        """Say that training begins: the rank has been built."""
        self._began, self._waited_s = time.monotonic(), self._activity.waited_s

    def _run(self) -> None:
        while True:
            self._beat()
            self._outbox.flush(self._period / 2)  # the answer may ask to stop; if the driver is gone, there is none
            if time.monotonic() - self._activity.since > (self._activity.may_take_s or self._patience):
                self._outbox.flush()
                os._exit(STALLED)
            if self._ends.wait(self._period):
                return

    def _beat(self, ends: bool = False) -> None:
        activity, now = self._activity, time.monotonic()
        self._outbox.send({
            "kind": "beat", "rank": self._rank, "doing": str(activity.doing), "waits": activity.waits,
            "started": dict(activity.started), "still_s": now - activity.since, "trained_s": max(now - self._began, 0.0),
            "waited_s": activity.waited_s - self._waited_s, "may_take_s": activity.may_take_s, "ends": ends,
        })  # fmt: skip
