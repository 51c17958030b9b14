"""The joules that a training's devices use, by counters that they have: of GPUs (NVML), or else of processors (Linux's powercap).

Without GPUs, a node's processors count once, whatever number of ranks run on them. Memory, network and what GPUs leave to their
host are in no number. A counter of processors begins again after minutes (262 kJ on many), so a longer step looks shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from foldray.comm import Communicator

POWERCAP = Path("/sys/class/powercap")
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine, which share its processors


@dataclass
class Counter:
    """A device's counter.

    Args:
        read: returns the count, or raises OSError or ValueError.
        joules: joules of a count of one.
        most: the largest count, after which it begins again at 0; None if it never does.
    """

    read: Callable[[], int]
    joules: float
    most: int | None = None
    _before: int | None = None

    def taken(self) -> float:
        """Return the joules since the last call; NaN if they are not known, as at the first call, and after one that raised."""
        before, self._before = self._before, None
        now = self._before = self.read()
        if before is not None and now < before and self.most is not None:
            now += self.most
        return math.nan if before is None or now < before else (now - before) * self.joules


class Energy:
    """The joules of all devices of a training, each counted by one rank. All ranks of `control` must make theirs together.

    Attributes:
        lacking: why there is no number; None if there is one. It is the same on all ranks, since part of a sum is none.
    """

    def __init__(self, control: Communicator, device: torch.device, powercap: Path = POWERCAP):
        counters, lacking, machine = list[Counter](), None, ""
        try:
            if device.type == "cuda":
                counters = [gpu(device)]
            else:
                counters, machine = processors(powercap), _BOOT.read_text()
            for counter in counters:
                counter.read()
        except (OSError, ValueError) as error:
            lacking = str(error)
        found = control.all_gather_object((machine, lacking))
        self.lacking = next((reason for _, reason in found if reason is not None), None)
        first = [other for other, _ in found].index(machine) == control.index
        self._counters = counters if device.type == "cuda" or first else []
        self._kept = 0.0

    def taken(self) -> float:
        """Return the joules that this rank counts, since the last call and without pauses; NaN if they are not known."""
        joules, self._kept = self._kept + self._since(), 0.0
        return joules

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is used meanwhile."""
        self._kept += self._since()
        yield
        self._since()

    def _since(self) -> float:
        if self.lacking is not None:
            return math.nan
        try:
            return sum((counter.taken() for counter in self._counters), 0.0)
        except (OSError, ValueError):  # training goes on without the number
            return math.nan


def gpu(device: torch.device) -> Counter:
    """Return the counter of a GPU, which NVML finds by UUID, because it knows nothing of CUDA_VISIBLE_DEVICES."""
    try:
        import pynvml
    except ImportError:
        raise OSError("NVML needs the package 'nvidia-ml-py'; install it with: pip install nvidia-ml-py") from None

    def read() -> int:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # since the driver was loaded
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from None

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:  # a part of a GPU (MIG) has no counter of its own
        raise OSError(f"NVML: {error}") from None
    return Counter(read, 1e-3)


def processors(powercap: Path) -> list[Counter]:
    """Return the counters of a node's processors. Their parts, and the whole machine, are in counters that are left out."""
    zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if (zone / "name").read_text().startswith("package")]
    if not zones:
        raise OSError(f"{powercap} has no counter of a processor")
    return [Counter(partial(_number, zone / "energy_uj"), 1e-6, _number(zone / "max_energy_range_uj")) for zone in zones]


def _number(file: Path) -> int:
    return int(file.read_text())
