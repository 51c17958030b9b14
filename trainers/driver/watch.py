"""Who stands still: found from the signs of life of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from trainers.records import Beat

_QUIET_S = 10.0  # without a sign of life for so much longer than the others, a rank counts as stopped


@dataclass(frozen=True)
class Standstill:
    """What the ranks were doing when training did not get on.

    Args:
        ranks: the ranks that the others wait for; empty if this is not known.
        what: the same in one line, with what the others wait for.
    """

    ranks: tuple[int, ...]
    what: str


class Watch:
    """Keeps the last sign of life of every rank of an attempt."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self._arrived: dict[int, float] = {}  # on this machine's clock, because those of nodes differ

    def receive(self, beat: Beat, now: float | None = None) -> None:
        """Take a sign of life that arrives now, in seconds of `time.monotonic`."""
        self.beats[beat["rank"]] = beat
        self._arrived[beat["rank"]] = time.monotonic() if now is None else now

    def clear(self) -> None:
        """Forget the ranks of an attempt."""
        self.beats.clear()
        self._arrived.clear()

    def stands(self, patience: float) -> bool:
        """Whether a rank has told that nothing changed for so many seconds."""
        return any(beat["still_s"] > patience for beat in self.beats.values())

    def standstill(self) -> Standstill:
        """Say which ranks the others wait for.

        These are ranks whose signs of life have stopped; else ranks that wait for nobody, while others wait; else, if all
        ranks wait, those that have started the fewest operations of a communicator that others wait in.
        """
        beats = self.beats
        if not beats:
            return Standstill((), "no rank has shown a sign of life")
        newest = max(self._arrived.values())
        quiet = tuple(sorted(rank for rank, at in self._arrived.items() if newest - at > _QUIET_S))
        if quiet:
            seconds = min(newest - self._arrived[rank] for rank in quiet)
            return Standstill(quiet, f"{named(quiet)} showed no sign of life for {seconds:.0f} s{self._waiting(quiet)}")
        busy = tuple(sorted(rank for rank, beat in beats.items() if not beat["waits"]))
        if busy and len(busy) < len(beats):
            doing = ", ".join(dict.fromkeys(beats[rank]["doing"] for rank in busy))
            return Standstill(busy, f"{named(busy)} stood still in {doing}{self._waiting(busy)}")
        if busy:
            doing = ", ".join(dict.fromkeys(beats[rank]["doing"] for rank in busy))
            return Standstill((), f"all ranks stood still in {doing}")
        return self._behind()

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


def named(ranks: tuple[int, ...]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks)) or '?'}"
