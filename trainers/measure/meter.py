"""Measures the seconds of a call on all workers at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from foldray.comm import Communicator

ROUNDS = 7
_AT_LEAST = 0.02  # seconds of one measurement
_STANDARD = {"cpu": 1024, "cuda": 8192}  # side of the standard matrix product
_WARM = 2.0  # seconds of products after which a GPU has the speed that it keeps in training; a cold one is faster


class Meter:
    """Measures the seconds of a call on the slowest worker.

    The result is the median of several measurements. Each measurement makes enough calls to be long enough for the clock.
    All workers must call the meter together, because a call may need all of them.

    Processors change their speed from minute to minute. So a computation and a standard matrix product run in turns. The
    result is scaled to the speed at which the product takes its standard time: that of the fastest quarter of many products.
    Other programs on a node can only make a product slower, so their disturbance does not count.
    """

    def __init__(self, device: torch.device, control: Communicator, dtype: torch.dtype):
        self.device, self.control, side = device, control, _STANDARD[device.type]
        self._a, self._b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        begin = time.perf_counter()
        while device.type == "cuda" and time.perf_counter() - begin < _WARM:
            self.took(self.product, ROUNDS)
        self.standard = statistics.quantiles((self.took(self.product, 1) for _ in range(8 * ROUNDS)), n=4)[0]

    def __call__(self, run: Callable[[], Any]) -> float:
        calls = self._calls(run)
        rounds = [(self.took(self.product, 1), self.took(run, calls) / calls) for _ in range(ROUNDS)]
        return self.slowest(statistics.median(seconds / product for product, seconds in rounds) * self.standard)

    def plain(self, run: Callable[[], Any]) -> float:
        """Measure a call that does not compute, such as communication, without the standard product."""
        calls = self._calls(run)
        return self.slowest(statistics.median(self.took(run, calls) / calls for _ in range(ROUNDS)))

    @property
    def pace(self) -> float:
        """The present time of the standard product over its standard time."""
        return statistics.median(self.took(self.product, 1) for _ in range(ROUNDS)) / self.standard

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all workers."""
        return float(self.control.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=self.device), "max"))

    def product(self) -> torch.Tensor:
        return self._a @ self._b

    def _calls(self, run: Callable[[], Any]) -> int:
        self.took(run, 1)
        return max(1, round(_AT_LEAST / max(self.slowest(self.took(run, 1)), 1e-7)))

    def took(self, run: Callable[[], Any], calls: int) -> float:
        """Return the seconds of some calls on this worker."""
        wait_for(self.device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        wait_for(self.device)
        return time.perf_counter() - begin


def together(control: Communicator, device: torch.device) -> None:
    """Return on all ranks at once, when each has done all that it has been given."""
    control.all_reduce(torch.zeros(1, device=device))
    wait_for(device)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it has been given. A CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
