"""Measurements in the first steps of a training: the times of ops, and the fastest order and size of gradient chunks.

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
ORDER_STEPS = 5  # the same, if orders are searched, some of which may be slow
_WARM_UP = 2  # the first steps of a trial, which do not count
TURNS = 4  # steps of each turn in the run-off; the first one is to warm up
_FINALISTS = 3
WATCHED = 16  # steps whose median is compared with the time that was found
PATIENCE = 3  # medians in a row that must be off by more than DRIFT before training measures anew
DRIFT = 0.1


class Knobs(NamedTuple):
    """The settings that may change from one step to the next: the order, and bytes of a chunk of gradients.

    Orders have numbers (`Online.orderings`). `sp_bytes` is 0 if the search does not change this size.
    """

    order: int
    sp_bytes: int = 0


class Search(Protocol):
    """The interface of searches. A search proposes settings, and takes the time of a step with them. Only rank 0 has one."""

    def ask(self) -> Knobs | None:
        """Return the next setting to try; None if the search is finished."""

    def tell(self, knobs: Knobs, seconds: float) -> None:
        """Take the seconds of a step with a setting."""

    @property
    def finalists(self) -> Sequence[Knobs]:
        """One to three measured settings for the run-off, the fastest first."""


MakeSearch = Callable[[Sequence[int], tuple[int, int] | None], Search]
"""Makes a search from the numbers of orders, and from the smallest and the largest size of chunks (None if it is settled)."""

Tell = Callable[[Tried | Settled | Listed | Drifted], None]
"""Takes a record of what was found."""

Steps = Generator[None, float, None]
"""A generator that takes the seconds of each step, and changes the settings of the next one."""


class Online:
    """Changes the settings of a training between its steps. All ranks make the same changes.

    Args:
        orderings: the orderings to choose from, by number: their degrees, or with names their places.
        sizes: whether the search may change the size of gradient chunks.
        names: short names of the orderings, if they differ in more than degrees. The search then needs the times of their ops.
        worth: says whether so many steps are left that a search pays.
    """

    def __init__(
        self,
        execution: Execution,
        groups: Groups,
        device: torch.device,
        orderings: Mapping[int, Ordering],
        sizes: bool,
        names: Sequence[str] = (),
        worth: Callable[[], bool] = lambda: True,
    ):
        self.execution, self.groups, self.device, self.orderings, self.sizes = execution, groups, device, orderings, sizes
        self.names, self.worth = names, worth
        self.chosen: Knobs | None = None
        self.seconds: float | None = None
        self._patience = PATIENCE
        self._order = 0 if names else execution.ordering.degree
        self._settled: dict[int, Ordering] = {}  # by number, once the times of its ops are measured
        self._listed: dict[Knobs, tuple[FoundList, Listed | None]] = {}  # found lists, with what rank 0 tells of them

    def steps(self, search: MakeSearch | None, tell: Tell) -> Steps:
        """Measure the first steps, then watch all others. The caller sends the seconds of each step.

        Without a search, no setting changes. A setting that was chosen before is kept until steps drift.
        """
        changes = search is not None or self.execution.lacks_costs
        yield from self._learn(tell)
        if search is not None and self.chosen is None and self.worth():
            yield from self.search(search, tell)
        while changes:
            yield from self._watch(tell)
            before, self.seconds = self.chosen, None
            self._forget()
            yield from self._learn(tell)
            if search is not None and self.worth():
                yield from self.search(search, tell)
            # A search that finds the same again was not worth its steps.
            self._patience = PATIENCE if self.chosen != before else 2 * self._patience

    def search(self, make: MakeSearch, tell: Tell) -> Steps:
        """Try settings for some steps each, and choose the fastest one of the finalists.

        The speed of machines changes over time, so a setting may only seem fast. Therefore the finalists take turns in a
        run-off, in the order first, second, second, first, and these steps decide.
        """
        sizes = self._range()
        search = make(list(self.orderings), sizes) if self.groups.control.index == 0 else None

        def record(knobs: Knobs, seconds: float, chosen: bool) -> None:
            if search is not None:
                name = self.names[knobs.order] if self.names else None
                record: Tried = {
                    "kind": "tried", "degree": self.orderings[knobs.order].degree, "sp_bytes": knobs.sp_bytes or None,
                    "step_time_s": seconds, "chosen": chosen, "order": name,
                }  # fmt: skip
                tell(record)

        while (knobs := self._agreed(search.ask() if search else None)) is not None:
            steps = (ORDER_STEPS, 1) if self.names else (STEPS, _WARM_UP)  # traced steps were a warm-up
            slowest = self._slowest((yield from self._take(knobs, *steps, tell)))
            if search is not None:
                search.tell(knobs, slowest)
            record(knobs, slowest, False)
        finalists = [*search.finalists, *[None] * _FINALISTS][:_FINALISTS] if search else [None] * _FINALISTS
        best = [knobs for given in finalists if (knobs := self._agreed(given)) is not None]
        times: dict[Knobs, list[float]] = {knobs: [] for knobs in best}
        for knobs in (*best, *reversed(best)):
            times[knobs] += yield from self._take(knobs, TURNS, 1, tell)
        medians = {knobs: self._slowest(seconds) for knobs, seconds in times.items()}
        self.choose(min(medians, key=medians.__getitem__))
        assert self.chosen is not None
        record(self.chosen, medians[self.chosen], True)
        if (self.sizes or self.names) and (listed := self._listed.get(self.chosen, (None, None))[1]) is not None:
            tell(listed)  # another list may have been told last

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
        now = self.orderings[self._order]
        self.execution.reorder(now if self.names else now._replace(reduction=self.execution.ordering.reduction))

    @property
    def _now(self) -> Knobs:
        return Knobs(self._order, (self.execution.ordering.reduction.bytes or 0) if self.sizes else 0)

    def _turn_to(self, knobs: Knobs) -> None:
        """Use a setting from the next step on."""
        if knobs == self._now:
            return
        ordering = self.execution.ordering
        if knobs.order != self._order:
            settled = self._settled.get(knobs.order, self.orderings[knobs.order])
            ordering = settled if self.names else settled._replace(reduction=ordering.reduction)
            self._order = knobs.order
        if knobs.sp_bytes:
            ordering = ordering._replace(reduction=ordering.reduction._replace(bytes=knobs.sp_bytes))
        found = self._listed.get(knobs, (None, None))[0]  # a list has the chunks of one size
        self.execution.reorder(ordering._replace(found=found))

    def _learn(self, tell: Tell, anyway: bool = False) -> Steps:
        """Measure the times of ops with the present setting, if the order needs them, or `anyway`: one warm-up step, then traced
        ones."""
        execution, was_open = self.execution, self.execution.ordering.open
        while execution.lacks_costs or (anyway and execution.ordering.costs is None):
            if execution.trace is None:
                yield
                execution.trace = Trace(self.device)
            yield
            execution.learn_costs()
        if execution.trace is None:
            return
        execution.trace = None
        settled = execution.ordering
        self._settled[self._order], degree = settled, settled.degree
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
        yield from self._learn(tell, bool(self.names))
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
        values = torch.tensor([knobs or (-1, 0)], dtype=torch.int64, device=self.device)
        order, size = self.groups.control.all_gather(values)[0].tolist()
        return Knobs(order, size) if order >= 0 else None

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
