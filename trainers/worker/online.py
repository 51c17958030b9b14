"""What training finds out about itself in its first steps: what ops take, and which degree and which size of gradient chunks is
fastest. All of them are steps that train.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import torch

from foldray.comm import Groups
from foldray.runtime import Execution, Trace
from foldray.schedule import Ordering
from trainers.records import Settled, Tried

SMALLEST = 64 << 10  # bytes: below, a message is all start-up on any network
STEPS = 8  # of each choice; FlowMoE (section 4.1) takes ten, of which the last two here go to the run-off
_WARM_UP = 2  # of these
TURNS = 4  # steps of each turn in the run-off, the first to warm up


class Knobs(NamedTuple):
    """What may change from one step to the next.

    Args:
        degree: pieces of a sequence.
        sp_bytes: bytes of gradients that travel at once; 0 where that is not searched for.
    """

    degree: int
    sp_bytes: int = 0


class Search(Protocol):
    """Proposes and is told what a step took; only rank 0 asks."""

    def ask(self) -> Knobs | None:
        """What to try next; None when there is nothing left to try."""

    def tell(self, knobs: Knobs, seconds: float) -> None:
        """What a step took."""

    @property
    def ranked(self) -> list[Knobs]:
        """What was told, the fastest first."""


MakeSearch = Callable[[Sequence[int], tuple[int, int] | None], Search]
"""From the degrees, and the smallest and the largest size of chunks that make sense (None: the size is settled)."""

Tell = Callable[[Tried | Settled], None]
"""Takes a record of what was found."""

Steps = Generator[None, float, None]
"""Is sent each step's seconds, and changes how the next one runs."""


class Online:
    """Changes how a training's steps run, between them; all ranks do the same.

    Args:
        orderings: by degree, the ones to choose from.
        sizes: whether gradient chunks may have other sizes.
    """

    def __init__(
        self, execution: Execution, groups: Groups, device: torch.device, orderings: Mapping[int, Ordering], sizes: bool
    ):
        self.execution, self.groups, self.device, self.orderings, self.sizes = execution, groups, device, orderings, sizes
        self.chosen: Knobs | None = None
        self._settled: dict[int, Ordering] = {}  # by degree, once it is known what its pieces take

    def steps(self, search: MakeSearch | None, tell: Tell) -> Steps:
        """What to do around the first steps, each of whose times is sent.

        Args:
            search: makes what chooses; None leaves everything as it is.
            tell: takes a record of everything that was tried, and of what was chosen.
        """
        yield from self._learn(tell)
        if search is not None:
            yield from self.search(search, tell)

    def search(self, make: MakeSearch, tell: Tell) -> Steps:
        """Try each for some steps, and keep the better one of the best two.

        Machines drift: something may look fast because it was tried in a good moment. So the two take turns once more, first,
        second, second, first, and these steps decide.
        """
        sizes = self._range()
        asked = make(list(self.orderings), sizes) if self.groups.control.index == 0 else None

        def record(knobs: Knobs, seconds: float, chosen: bool) -> None:
            if asked is not None:
                size = knobs.sp_bytes or None
                tell({"kind": "tried", "degree": knobs.degree, "sp_bytes": size, "step_time_s": seconds, "chosen": chosen})

        while (knobs := self._agreed(asked.ask() if asked else None)) is not None:
            slowest = self._slowest((yield from self._take(knobs, STEPS, _WARM_UP, tell)))
            if asked is not None:
                asked.tell(knobs, slowest)
            record(knobs, slowest, False)
        best = [self._agreed(asked.ranked[:2][place] if asked else None) for place in (0, -1)]
        first, second = (knobs for knobs in best if knobs is not None)
        times: dict[Knobs, list[float]] = {first: [], second: []}
        for knobs in (first, second, second, first):
            times[knobs] += yield from self._take(knobs, TURNS, 1, tell)
        found = {knobs: self._slowest(seconds) for knobs, seconds in times.items()}
        self.choose(min(found, key=found.__getitem__))
        assert self.chosen is not None
        record(self.chosen, found[self.chosen], True)

    def choose(self, knobs: Knobs) -> None:
        """Settle it."""
        self._turn_to(knobs)
        self.chosen = knobs

    @property
    def _now(self) -> Knobs:
        ordering = self.execution.ordering
        degree = ordering.slicing.degree if ordering.slicing else 1
        return Knobs(degree, (ordering.reduction.bytes or 0) if self.sizes else 0)

    def _turn_to(self, knobs: Knobs) -> None:
        """Cut and order the steps that follow so."""
        now = self.execution.ordering
        if knobs == self._now:
            return
        ordering = now
        if knobs.degree != self._now.degree:
            ordering = self._settled.get(knobs.degree, self.orderings[knobs.degree])._replace(reduction=now.reduction)
        if knobs.sp_bytes:
            ordering = ordering._replace(reduction=ordering.reduction._replace(bytes=knobs.sp_bytes))
        self.execution.reorder(ordering)

    def _learn(self, tell: Tell) -> Steps:
        """What ops take in pieces like the present ones, where the order goes by it: a step to warm up, and a traced one."""
        execution, was_open = self.execution, self.execution.ordering.open
        if not execution.lacks_costs:
            return
        yield
        execution.trace = Trace(self.device)
        yield
        execution.learn_costs()
        execution.trace = None
        degree, settled = self._now.degree, execution.ordering
        self._settled[degree] = settled
        if was_open and self.groups.control.index == 0:
            tell({"kind": "settled", "degree": degree, "forward": str(settled.forward), "backward": str(settled.backward)})

    def _take(self, knobs: Knobs, count: int, warm_up: int, tell: Tell) -> Generator[None, float, list[float]]:
        """What so many steps take, the first of them left out."""
        self._turn_to(knobs)
        yield from self._learn(tell)
        seconds = []
        for _ in range(count):
            seconds.append((yield))
        return seconds[warm_up:]

    def _range(self) -> tuple[int, int] | None:
        """Sizes of chunks from the smallest to everything, on the rank that has most."""
        if not self.sizes:
            return None
        own = max((chunk.bytes for chunk in self.execution.gradients.chunks(None)), default=SMALLEST)
        most = torch.tensor(float(own), dtype=torch.float64, device=self.device)
        return SMALLEST, max(SMALLEST, int(self.groups.control.all_reduce(most, "max")))

    def _agreed(self, knobs: Knobs | None) -> Knobs | None:
        """The first rank's."""
        own = torch.tensor([knobs or (0, 0)], dtype=torch.int64, device=self.device)
        degree, size = self.groups.control.all_gather(own)[0].tolist()
        return Knobs(degree, size) if degree else None

    def _slowest(self, seconds: list[float]) -> float:
        """The slowest rank's median."""
        own = torch.tensor(median(seconds), dtype=torch.float64, device=self.device)
        return float(self.groups.control.all_reduce(own, "max"))
