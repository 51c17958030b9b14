"""Seconds of a call on workers that measure together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from foldray.comm import Communicator

ROUNDS = 7
_AT_LEAST = 0.02  # seconds of one measurement
_STANDARD = 1024  # side of the product that everything is measured beside


class Meter:
    """Seconds of a call, the slowest worker's: the median of some measurements, each as many calls as make it long enough to be
    told. All workers call it together, for what they measure may need all of them.

    Processors change their speed from minute to minute. So whatever computes is measured beside a product of matrices, taking
    turns, and told in seconds of the moment at which that product took its median.
    """

    def __init__(self, device: torch.device, control: Communicator, dtype: torch.dtype):
        self.device, self.control = device, control
        self._a, self._b = (torch.randn(_STANDARD, _STANDARD, device=device, dtype=dtype) for _ in range(2))
        self.standard = statistics.median(self.took(self.product, 1) for _ in range(4 * ROUNDS))

    def __call__(self, run: Callable[[], Any]) -> float:
        calls = self._calls(run)
        rounds = [(self.took(self.product, 1), self.took(run, calls) / calls) for _ in range(ROUNDS)]
        return self.slowest(statistics.median(took / beside for beside, took in rounds) * self.standard)

    def plain(self, run: Callable[[], Any]) -> float:
        """Of what does not compute."""
        calls = self._calls(run)
        return self.slowest(statistics.median(self.took(run, calls) / calls for _ in range(ROUNDS)))

    @property
    def pace(self) -> float:
        """What a computation takes now over what it would take at the standard's moment."""
        return statistics.median(self.took(self.product, 1) for _ in range(ROUNDS)) / self.standard

    def slowest(self, seconds: float) -> float:
        """The largest of all workers'."""
        return float(self.control.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=self.device), "max"))

    def product(self) -> torch.Tensor:
        return self._a @ self._b

    def _calls(self, run: Callable[[], Any]) -> int:
        self.took(run, 1)
        return max(1, round(_AT_LEAST / max(self.slowest(self.took(run, 1)), 1e-7)))

    def took(self, run: Callable[[], Any], calls: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
