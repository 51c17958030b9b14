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
STEPS = 8  # of each size; FlowMoE (section 4.1) takes ten, of which the last two here go to the run-off
_WARM_UP = 2  # of these
TURNS = 4  # steps of each turn in the run-off, the first to warm up


class Search(Protocol):
    """Proposes sizes and is told what a step took with them; only rank 0 asks."""

    def ask(self) -> int | None:
        """Bytes to try next; None when there is nothing left to try."""

    def tell(self, size: int, seconds: float) -> None:
        """What a step took."""

    @property
    def ranked(self) -> list[int]:
        """The sizes that were told, the fastest first."""


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
    yield from searching(execution, groups, device, search, tell)


def searching(
    execution: Execution, groups: Groups, device: torch.device, search: MakeSearch, tell: Callable[[Chunks], None]
) -> Tuning:
    """Try sizes for some steps each, and keep the better one of the best two.

    Machines drift: a size may look fast because it was tried in a good moment. So the two take turns once more, first, second,
    second, first, and these steps decide.
    """
    largest = max((chunk.bytes for chunk in execution.gradients.chunks(None)), default=SMALLEST)
    largest = int(groups.control.all_reduce(torch.tensor(float(largest), dtype=torch.float64, device=device), "max"))
    asked = search(SMALLEST, largest) if groups.control.index == 0 else None

    def record(size: int, seconds: float, chosen: bool) -> None:
        if asked is not None:
            tell({"kind": "chunks", "sp_bytes": size, "step_time_s": seconds, "chosen": chosen})

    while (size := _agreed(groups, device, (asked.ask() or 0) if asked else 0)) > 0:
        slowest = _slowest(groups, device, (yield from _steps(execution, size, STEPS, _WARM_UP)))
        if asked is not None:
            asked.tell(size, slowest)
        record(size, slowest, False)
    first, second = (_agreed(groups, device, asked.ranked[:2][place] if asked else 0) for place in (0, -1))
    times: dict[int, list[float]] = {first: [], second: []}
    for size in (first, second, second, first):
        times[size] += yield from _steps(execution, size, TURNS, 1)
    found = {size: _slowest(groups, device, seconds) for size, seconds in times.items()}
    best = min(found, key=found.__getitem__)
    resize(execution, best)
    record(best, found[best], True)


def _steps(execution: Execution, size: int, count: int, warm_up: int) -> Generator[None, float, list[float]]:
    """What so many steps take with a size, the first of them left out."""
    if execution.ordering.reduction.bytes != size:
        resize(execution, size)
    seconds = []
    for _ in range(count):
        seconds.append((yield))
    return seconds[warm_up:]


def resize(execution: Execution, size: int) -> None:
    """Cut gradients into chunks of another size from now on."""
    ordering = execution.ordering
    execution.reorder(ordering._replace(reduction=ordering.reduction._replace(bytes=size)))


def _agreed(groups: Groups, device: torch.device, value: int) -> int:
    """The first rank's number."""
    own = torch.tensor([value], dtype=torch.int64, device=device)
    return int(groups.control.all_gather(own)[0])


def _slowest(groups: Groups, device: torch.device, seconds: list[float]) -> float:
    """The slowest rank's median."""
    return float(groups.control.all_reduce(torch.tensor(median(seconds), dtype=torch.float64, device=device), "max"))
