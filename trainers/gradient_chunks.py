"""Chunks of gradients while training: what ops take is learnt from a step, and a good size is searched for, step after step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from statistics import median
from typing import Protocol

import torch

from foldray.comm import Groups
from foldray.runtime import Execution, Trace
from trainers.telemetry import Chunks

SMALLEST = 64 << 10  # bytes: below, a message is all start-up on any network
STEPS = 10  # of each size (FlowMoE, section 4.1)
_WARM_UP = 2  # of these


class Search(Protocol):
    """Proposes sizes and is told what a step took with them; only rank 0 asks."""

    def ask(self) -> int | None:
        """Bytes to try next; None when there is nothing left to try."""

    def tell(self, size: int, seconds: float) -> None:
        """What a step took."""

    @property
    def best(self) -> int:
        """The best size that was told."""


MakeSearch = Callable[[int, int], Search]
"""From the smallest and the largest size that make sense."""

Tuning = Generator[None, float, None]
"""Is sent each step's seconds, and changes how the next one runs."""


def tuning(
    execution: Execution, groups: Groups, device: torch.device, search: MakeSearch | None, tell: Callable[[Chunks], None]
) -> Tuning:
    """What to do around the first steps; all ranks send it the time of every step.

    Args:
        search: makes a search for the size; None leaves the ordering's.
        tell: takes a record of every size that was tried, and of the one chosen.
    """
    if not execution.lacks_costs:
        return
    yield  # a step to warm up
    execution.trace = Trace(device)
    yield
    execution.learn_costs()
    execution.trace = None
    if search is None:
        return
    largest = max((chunk.bytes for chunk in execution.gradients.chunks(None)), default=SMALLEST)
    largest = int(groups.control.all_reduce(torch.tensor(float(largest), dtype=torch.float64, device=device), "max"))
    asked = search(SMALLEST, largest) if groups.control.index == 0 else None
    while (size := _agreed(groups, device, (asked.ask() or 0) if asked else 0)) > 0:
        resize(execution, int(size))
        seconds = []
        for _ in range(STEPS):
            seconds.append((yield))
        took = torch.tensor(median(seconds[_WARM_UP:]), dtype=torch.float64, device=device)
        slowest = float(groups.control.all_reduce(took, "max"))
        if asked is not None:
            asked.tell(int(size), slowest)
            tell({"kind": "chunks", "sp_bytes": int(size), "step_time_s": slowest, "chosen": False})
    best = int(_agreed(groups, device, asked.best if asked else 0))
    resize(execution, best)
    if asked is not None:
        tell({"kind": "chunks", "sp_bytes": best, "step_time_s": None, "chosen": True})


def resize(execution: Execution, size: int) -> None:
    """Cut gradients into chunks of another size from now on."""
    ordering = execution.ordering
    execution.reorder(ordering._replace(reduction=ordering.reduction._replace(bytes=size)))


def _agreed(groups: Groups, device: torch.device, value: float) -> float:
    """The first rank's number."""
    own = torch.tensor([value], dtype=torch.float64, device=device)
    return float(groups.control.all_gather(own)[0])
