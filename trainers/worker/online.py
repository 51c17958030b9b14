"""Measurements in the first steps of a training: the times of ops, and the fastest degree and size of gradient chunks.

Training then watches its steps. If they take another time than was found, and do so for long, it measures anew. All of these
steps train the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Protocol, cast

import torch

from foldray.comm import Groups
from foldray.orders import FoundList, Ordering
from foldray.runtime import Execution, Trace
from trainers.telemetry.records import Drifted, Listed, Settled, Tried

SMALLEST = 64 << 10  # bytes; for smaller messages, every network needs nearly all the time to start them
STEPS = 8  # steps of each trial; FlowMoE (section 4.1) takes ten, but here a run-off follows
_WARM_UP = 2  # the first steps of a trial, which do not count
TURNS = 4  # steps of each turn in the run-off; the first one is to warm up
WATCHED = 16  # steps whose median is compared with the time that was found
PATIENCE = 3  # medians in a row that must be off by more than DRIFT before training measures anew
DRIFT = 0.1


class Knobs(NamedTuple):
    """The settings that may change from one step to the next: pieces of a sequence, and bytes of a chunk of gradients.

    `sp_bytes` is 0 if the search does not change this size.
    """

    degree: int
    sp_bytes: int = 0


class Search(Protocol):
    """The interface of searches. A search proposes settings, and takes the time of a step with them. Only rank 0 has one."""

    def ask(self) -> Knobs | None:
        """Return the next setting to try; None if the search is finished."""

    def tell(self, knobs: Knobs, seconds: float) -> None:
        """Take the seconds of a step with a setting."""

    @property
    def ranked(self) -> list[Knobs]:
        """The measured settings, the fastest first."""


MakeSearch = Callable[[Sequence[int], tuple[int, int] | None], Search]
"""Makes a search from the degrees, and from the smallest and the largest size of chunks (None if the size is settled)."""

Tell = Callable[[Tried | Settled | Listed | Drifted], None]
"""Takes a record of what was found."""

Steps = Generator[None, float, None]
"""A generator that takes the seconds of each step, and changes the settings of the next one."""


class Online:
    """Changes the settings of a training between its steps. All ranks make the same changes.

    It chooses from orderings, by degree. `sizes` says whether the search may change the size of gradient chunks.
    """

    def __init__(
        self, execution: Execution, groups: Groups, device: torch.device, orderings: Mapping[int, Ordering], sizes: bool
    ):
        self.execution, self.groups, self.device, self.orderings, self.sizes = execution, groups, device, orderings, sizes
        self.chosen: Knobs | None = None
        self.seconds: float | None = None
        self._patience = PATIENCE
        self._settled: dict[int, Ordering] = {}  # by degree, once the times of its ops are measured
        self._listed: dict[Knobs, tuple[FoundList, Listed | None]] = {}  # found lists, with what rank 0 tells of them

    def steps(self, search: MakeSearch | None, tell: Tell) -> Steps:
        """Measure the first steps, then watch all others. The caller sends the seconds of each step.

        Without a search, no setting changes. A setting that was chosen before is kept until steps drift.
        """
        changes = search is not None or self.execution.lacks_costs
        yield from self._learn(tell)
        if search is not None and self.chosen is None:
            yield from self.search(search, tell)
        while changes:
            yield from self._watch(tell)
            before, self.seconds = self.chosen, None
            self._forget()
            yield from self._learn(tell)
            if search is not None:
                yield from self.search(search, tell)
            # A search that finds the same again was not worth its steps.
            self._patience = PATIENCE if self.chosen != before else 2 * self._patience

    def search(self, make: MakeSearch, tell: Tell) -> Steps:
        """Try settings for some steps each, and choose the faster one of the best two.

        The speed of machines changes over time, so a setting may only seem fast. Therefore the best two take turns in a
        run-off, in the order first, second, second, first, and these steps decide.
        """
        sizes = self._range()
        search = make(list(self.orderings), sizes) if self.groups.control.index == 0 else None

        def record(knobs: Knobs, seconds: float, chosen: bool) -> None:
            if search is not None:
                size = knobs.sp_bytes or None
                tell({"kind": "tried", "degree": knobs.degree, "sp_bytes": size, "step_time_s": seconds, "chosen": chosen})

        while (knobs := self._agreed(search.ask() if search else None)) is not None:
            slowest = self._slowest((yield from self._take(knobs, STEPS, _WARM_UP, tell)))
            if search is not None:
                search.tell(knobs, slowest)
            record(knobs, slowest, False)
        best = [self._agreed(search.ranked[:2][place] if search else None) for place in (0, -1)]
        first, second = (knobs for knobs in best if knobs is not None)
        times: dict[Knobs, list[float]] = {first: [], second: []}
        for knobs in (first, second, second, first):
            times[knobs] += yield from self._take(knobs, TURNS, 1, tell)
        medians = {knobs: self._slowest(seconds) for knobs, seconds in times.items()}
        self.choose(min(medians, key=medians.__getitem__))
        assert self.chosen is not None
        record(self.chosen, medians[self.chosen], True)
        if self.sizes and (listed := self._listed.get(self.chosen, (None, None))[1]) is not None:
            tell(listed)  # the list for another size may have been told last

    def choose(self, knobs: Knobs, seconds: float | None = None) -> None:
        """Use a setting for all following steps, which take so many seconds; None measures them."""
        self._turn_to(knobs)
        self.chosen, self.seconds = knobs, seconds

    def _watch(self, tell: Tell) -> Steps:
        """Watch steps until their time has changed for long. Without a known time, the first median is the time."""
        drifted = 0
        while drifted < self._patience:
            now = self._slowest((yield from _seconds(WATCHED)))
            self.seconds = self.seconds or now
            drifted = drifted + 1 if abs(now / self.seconds - 1) > DRIFT else 0
        if self.groups.control.index == 0 and self.seconds:
            tell({"kind": "drifted", "step_time_s": now, "found_s": self.seconds})

    def _forget(self) -> None:
        """Forget the times of ops and what was chosen by them."""
        self._settled.clear()
        self._listed.clear()
        degree, reduction = self._now.degree, self.execution.ordering.reduction
        self.execution.reorder(self.orderings[degree]._replace(reduction=reduction))

    @property
    def _now(self) -> Knobs:
        ordering = self.execution.ordering
        return Knobs(ordering.degree, (ordering.reduction.bytes or 0) if self.sizes else 0)

    def _turn_to(self, knobs: Knobs) -> None:
        """Use a setting from the next step on."""
        if knobs == self._now:
            return
        ordering = self.execution.ordering
        if knobs.degree != self._now.degree:
            ordering = self._settled.get(knobs.degree, self.orderings[knobs.degree])._replace(reduction=ordering.reduction)
        if knobs.sp_bytes:
            ordering = ordering._replace(reduction=ordering.reduction._replace(bytes=knobs.sp_bytes))
        found = self._listed.get(knobs, (None, None))[0]  # a list has the chunks of one size
        self.execution.reorder(ordering._replace(found=found))

    def _learn(self, tell: Tell) -> Steps:
        """Measure the times of ops with the present setting, if the order needs them: one warm-up step, then traced ones."""
        execution, was_open = self.execution, self.execution.ordering.open
        while execution.lacks_costs:
            if execution.trace is None:
                yield
                execution.trace = Trace(self.device)
            yield
            execution.learn_costs()
        if execution.trace is None:
            return
        execution.trace = None
        degree, settled = self._now.degree, execution.ordering
        self._settled[degree] = settled
        listed: Listed | None = None
        if (found := execution.found) is not None:
            lists = [[list(op) for op in order] for order in found.schedule]
            record = {**found._asdict(), "kept": list(found.kept), "own": list(found.own), "lists": lists}
            record.pop("schedule")
            listed = cast(Listed, {"kind": "listed", "degree": degree, **record})
            tell(listed)
        if settled.found is not None:
            self._listed[self._now] = settled.found, listed
        elif was_open and self.groups.control.index == 0:
            tell({"kind": "settled", "degree": degree, "forward": str(settled.forward), "backward": str(settled.backward)})

    def _take(self, knobs: Knobs, count: int, warm_up: int, tell: Tell) -> Generator[None, float, list[float]]:
        """Run some steps with a setting, and return their seconds without the warm-up steps."""
        self._turn_to(knobs)
        yield from self._learn(tell)
        return (yield from _seconds(count))[warm_up:]

    def _range(self) -> tuple[int, int] | None:
        """Return the smallest and the largest size of chunks. The largest one is the largest buffer of all ranks."""
        if not self.sizes:
            return None
        largest = max((chunk.bytes for chunk in self.execution.gradients.chunks(None)), default=SMALLEST)
        most = torch.tensor(float(largest), dtype=torch.float64, device=self.device)
        return SMALLEST, max(SMALLEST, int(self.groups.control.all_reduce(most, "max")))

    def _agreed(self, knobs: Knobs | None) -> Knobs | None:
        """Return the setting of the first rank."""
        values = torch.tensor([knobs or (0, 0)], dtype=torch.int64, device=self.device)
        degree, size = self.groups.control.all_gather(values)[0].tolist()
        return Knobs(degree, size) if degree else None

    def _slowest(self, seconds: list[float]) -> float:
        """Return the median seconds of the slowest rank."""
        value = torch.tensor(median(seconds), dtype=torch.float64, device=self.device)
        return float(self.groups.control.all_reduce(value, "max"))


def _seconds(count: int) -> Generator[None, float, list[float]]:
    """Let so many steps run, and return their seconds."""
    seconds = []
    for _ in range(count):
        seconds.append((yield))
    return seconds
