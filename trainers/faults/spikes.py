"""Finds losses that stand out from those before."""

from __future__ import annotations

import math
import statistics
from collections import deque

_WINDOW, _FEWEST = 64, 20  # losses to compare with; with fewer, training has just begun
_TIMES, _LEAST = 8.0, 0.2  # a spike is so many deviations above the median, and so many nats


class Spikes:
    """Compares every loss with the median of those before.

    The deviation is the median distance from that median, which one spike does not change.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = False

    def look(self, loss: float) -> float | None:
        """Add the loss of a step. Return the median before, if a spike begins with this loss."""
        before, was_high = list(self._losses), self._high
        self._losses.append(loss)
        if len(before) < _FEWEST or not math.isfinite(loss):
            return None
        median = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(each - median) for each in before)  # of a normal distribution
        self._high = loss - median > max(_TIMES * deviation, _LEAST)
        return median if self._high and not was_high else None
