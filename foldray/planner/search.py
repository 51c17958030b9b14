"""All legal ways to train a job on a cluster, the best first.

Whatever is not predicted yet has *floors* of time and memory, and cannot take less: first a fold, from the costs of one block;
then the fold with a micro-batch and with what is computed again; then each of its schedules; then the same with all stages
looked at, and with simulated ones. What has the lowest floor is looked at more closely next, so predictions come out in their
order, fastest first. Once there are enough of them, whatever needs at least as much memory as the leanest of these is left out:
it could not have been shown.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint.layout import smallest_slice
from foldray.errors import UserError
from foldray.fold import Fold, divisors
from foldray.kinds import ATTENTION, EXPERT, FFN
from foldray.planner.candidate import Candidate, Job
from foldray.planner.costs import Hiding, OpWork, RankCosts
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware
from foldray.planner.memory import GIB, Memory, block_activations, buffers, in_flight, ledger, parameters
from foldray.planner.prediction import Prediction, Step, hiding
from foldray.schedule import (
    SEARCHED,
    Ordering,
    PipelineGraph,
    Reduction,
    Sequences,
    SliceCost,
    Slicing,
    make_ordering,
    overlap_kind,
)

DEGREES = (2, 4, 8)
RECOMPUTE: tuple[tuple[str, ...], ...] = ((), (EXPERT,), (ATTENTION, FFN, EXPERT))
MICRO_BATCHES = (1, 2, 4)


class Planned(NamedTuple):
    """A candidate, what is predicted for it, and whether it fits into memory."""

    candidate: Candidate
    prediction: Prediction
    memory: Memory
    fits: bool


@dataclass(frozen=True)
class Space:
    """What is searched.

    Args:
        pins: sizes of axes that are settled.
        zero: stage of ZeRO: 1, or 3.
        imbalance: rows of the fullest rank over the mean, for memory.
    """

    job: Job
    hardware: Hardware
    gpus: int
    pins: Mapping[str, int] = field(default_factory=dict)
    zero: int = 1
    micro_batches: Sequence[int] = MICRO_BATCHES
    degrees: Sequence[int] = DEGREES
    recompute: Sequence[tuple[str, ...]] = RECOMPUTE
    kinds: Sequence[str] = SEARCHED
    imbalance: float = 1.0

    def folds(self) -> Iterator[Fold]:
        """Every legal fold with the settled sizes."""
        model, job = self.job.model, self.job
        for pp in self._sizes("pp", self.gpus, lambda n: n <= model.layers):
            place = self.gpus // pp
            moe = [
                (ep, etp)
                for ep in self._sizes("ep", place, lambda n: model.experts % n == 0)
                for etp in self._sizes("etp", place // ep, lambda n: model.expert_hidden % n == 0)
            ]
            for tp in self._sizes("tp", place, self._cuts_heads):
                for cp in self._sizes("cp", place // tp, lambda n, tp=tp: job.seq_len % smallest_slice(n, tp) == 0):  # type: ignore[misc]
                    if job.global_batch % (place // tp // cp) == 0:
                        yield from (Fold(self.gpus, tp, cp, pp, ep, etp) for ep, etp in moe)

    def orderings(self, fold: Fold, recompute: tuple[str, ...]) -> Iterator[Ordering]:
        """Schedules of a fold: where no token travels there is nothing to hide, and only whole sequences."""
        reduction = Reduction("buckets")
        yield Ordering(recompute=recompute, reduction=reduction)
        if fold.ep == 1:
            return
        cost = SliceCost.of_model(self.job.model.hidden, self.job.model.heads)
        sequences = Sequences(self.job.seq_len, cost, smallest_slice(fold.cp, fold.tp))
        for kind in self.kinds:
            for degree in self.degrees if overlap_kind(kind).cuts else ():
                if sequences.length // sequences.multiple_of >= degree:
                    yield make_ordering(sequences, kind, degree, 1, backward_lag=1, reduction=reduction, recompute=recompute)

    def _cuts_heads(self, tp: int) -> bool:
        model = self.job.model
        dense = model.ffn_hidden if len(model.moe_layers) < model.layers else 0
        return not any(size % tp for size in (model.heads, model.kv_heads, dense, model.shared_hidden, model.vocab))

    def _sizes(self, axis: str, among: int, legal: object) -> list[int]:
        found = [n for n in divisors(among) if legal(n)]  # type: ignore[operator]
        return [n for n in found if n == self.pins[axis]] if axis in self.pins else found


class Found(NamedTuple):
    """What a search found.

    Args:
        best: those that fit first, then by step time.
        front: those that nothing beats in both time and memory, fastest first.
        legal: folds that there are.
    """

    best: list[Planned]
    front: list[Planned]
    legal: int


def search(space: Space, top: int = 10) -> Found:
    """The `top` best, and the front of time and memory.

    Raises:
        UserError: no fold is legal.
    """
    floors = _Floors(space)
    folds = list(floors.folds())
    if not folds:
        raise UserError("gpus", space.gpus, f"has no legal fold for this model and batch with {dict(space.pins) or 'any sizes'}")
    numbers = itertools.count()
    queue = [(node.seconds, next(numbers), node) for node in folds]
    heapq.heapify(queue)
    fit: list[Planned] = []
    unfit: list[Planned] = []
    front: list[Planned] = []
    while queue:
        _, _, node = heapq.heappop(queue)
        enough = len(fit) >= top if node.held <= floors.limit else len(fit) + len(unfit) >= top
        if enough and front and front[-1].memory.total <= node.held:
            continue
        if not isinstance(node.what, Planned):
            for each in floors.closer(node):
                heapq.heappush(queue, (each.seconds, next(numbers), each))
            continue
        (fit if node.what.fits else unfit).append(node.what)
        if not front or node.what.memory.total < front[-1].memory.total:
            front.append(node.what)
    return Found([*fit[:top], *unfit[: max(0, top - len(fit))]], front, len(folds))


class _Group(NamedTuple):
    """Candidates that share a fold, a micro-batch and what is computed again."""

    rank: RankCosts
    micro_batch: int
    recompute: tuple[str, ...]


class _Schedule(NamedTuple):
    """An ordering, how it cuts the sequences that a rank has, and what it may hide."""

    ordering: Ordering
    slicing: Slicing
    how: Hiding


class _Plan(NamedTuple):
    """One of a group's schedules."""

    group: _Group
    schedule: _Schedule
    virtual: int


class _Known(NamedTuple):
    """A candidate whose memory is known, and whether its stages have been simulated."""

    step: Step
    memory: Memory
    simulated: bool


class _Node(NamedTuple):
    """Candidates that take so many seconds and bytes at least; a fold's are its groups."""

    seconds: float
    held: float
    what: list[_Group] | _Group | _Plan | _Known | Planned


class _Floors:
    """Lower bounds, ever closer."""

    def __init__(self, space: Space):
        self.space = space
        self.device = Device.of(space.job, space.hardware)
        self.limit = space.hardware.memory_gib * GIB
        self._known: dict = {}
        self._schedules: dict[tuple, list[_Schedule]] = {}
        model = space.job.model
        self._kinds = {model.block_kind(layer) for layer in range(model.layers)}
        self._again = tuple(sorted({kind for again in space.recompute for kind in again}))

    def folds(self) -> Iterator[_Node]:
        """All there is."""
        for fold in self.space.folds():
            sizes = [n for n in self.space.micro_batches if self.space.job.global_batch % (fold.dp * n) == 0]
            ranks = [RankCosts(self.space.job, fold, self.device, n, self.space.zero, self._known) for n in sizes]
            groups = [_Group(rank, n, again) for rank, n in zip(ranks, sizes, strict=True) for again in self.space.recompute]
            if groups:
                # Whatever is computed again costs time, and saves memory.
                seconds = min(self._fastest(_Group(rank, n, ())) for rank, n in zip(ranks, sizes, strict=True))
                held = min(self._leanest(_Group(rank, n, self._again)) for rank, n in zip(ranks, sizes, strict=True))
                yield _Node(seconds, held, groups)

    def closer(self, node: _Node) -> Iterator[_Node]:
        """The same candidates with floors that are closer; at last what is predicted."""
        what = node.what
        if isinstance(what, list):
            for group in what:
                yield _Node(max(self._fastest(group), node.seconds), max(self._leanest(group), node.held), group)
        elif isinstance(what, _Group):
            for schedule in self._schedules_of(what):
                for virtual in self._virtual(what):
                    seconds = self._seconds(what, schedule.slicing, schedule.how, virtual)
                    held = self._held(what, schedule.slicing, virtual) + buffers(
                        what.rank, schedule.slicing, self.space.imbalance
                    )
                    yield _Node(max(seconds, node.seconds), max(held, node.held), _Plan(what, schedule, virtual))
        elif isinstance(what, _Plan):
            group, ordering = what.group, what.schedule.ordering
            candidate = Candidate(self.space.job, group.rank.fold, ordering, group.micro_batch, what.virtual, self.space.zero)
            step = Step(candidate, OpWork(candidate, self.device, group.rank))
            memory = ledger(candidate, group.rank, self.space.imbalance)
            yield _Node(max(step.floor(step.least), node.seconds), memory.total, _Known(step, memory, False))
        elif isinstance(what, _Known) and not what.simulated:
            yield _Node(max(what.step.floor(what.step.simulated), node.seconds), node.held, what._replace(simulated=True))
        elif isinstance(what, _Known):
            prediction = what.step.prediction()
            planned = Planned(what.step.candidate, prediction, what.memory, node.held <= self.limit)
            yield _Node(prediction.seconds, node.held, planned)

    def _fastest(self, group: _Group) -> float:
        """Whole sequences all of whose tokens travel unseen; or in as few pieces as can be, where a ring costs more."""
        slicings = [self._whole(group)]
        if group.rank.fold.cp > 1:
            sliced = [each.slicing for each in self._schedules_of(group) if each.how != "nothing"]
            slicings += [each for each in sliced if each.degree == min(self.space.degrees)]
        cuts = self._virtual(group)[-1]
        return min(self._seconds(group, each, "all", cuts) for each in slicings)

    def _leanest(self, group: _Group) -> float:
        """Whole sequences, one stage to a position."""
        return self._held(group, self._whole(group), 1)

    def _whole(self, group: _Group) -> Slicing:
        piece = self.space.job.seq_len // (group.rank.fold.cp * group.rank.fold.tp)
        return Slicing((piece,), (piece,))

    def _seconds(self, group: _Group, slicing: Slicing, how: Hiding, virtual: int) -> float:
        """A position computes all its blocks for every micro-batch; the last one also waits for the first micro-batch to come
        through a stage of every position before it, and these for the last one to come back.

        Args:
            virtual: stages of a position; more are faster.
        """
        rank, rounds, (layers, more) = group.rank, self._rounds(group), divmod(self.space.job.model.layers, group.rank.fold.pp)
        pp = rank.fold.pp
        blocks = max(rounds * (layers + (more > 0)), rounds * layers + (pp - 1) * (layers // virtual))
        key = "least", rank.alike, group.recompute, slicing, how
        if key not in self._known:
            self._known[key] = min(sum(rank.block_floor(kind, group.recompute, slicing, how)) for kind in self._kinds)
        return blocks * self._known[key] + 2 * (pp - 1) * rank.handover.seconds

    def _held(self, group: _Group, slicing: Slicing, virtual: int) -> float:
        """Bytes of the first position, which has most in flight.

        Args:
            virtual: stages of a position; more have more in flight.
        """
        rank, fold = group.rank, group.rank.fold
        most, sliced = -(-self.space.job.model.layers // fold.pp), slicing.degree > 1
        flying = _flying(fold.pp, min(self._rounds(group), 3 * fold.pp), virtual) * most / virtual
        found = math.inf
        for kind in self._kinds:
            weights, kept = ("parameters", kind, fold), ("kept", kind, rank.alike, group.recompute, sliced)
            if weights not in self._known:
                self._known[weights] = sum(
                    parameters(rank.fold, rank.zero, rank.device.bytes, rank.elements({kind: most}, True, False))
                )
            if kept not in self._known:
                self._known[kept] = block_activations(rank, kind, group.recompute, sliced, self.space.imbalance)
            found = min(found, self._known[weights] + flying * self._known[kept])
        return found + self.device.share["workspace"] * GIB

    def _schedules_of(self, group: _Group) -> list[_Schedule]:
        fold, length = group.rank.fold, self.space.job.seq_len
        key = fold.cp, fold.tp, fold.ep > 1, group.recompute
        if key not in self._schedules:
            whole = Slicing((length,), (length,))
            self._schedules[key] = [
                _Schedule(each, (each.slicing or whole).shared(fold.cp * fold.tp), hiding(each))
                for each in self.space.orderings(fold, group.recompute)
            ]
        return self._schedules[key]

    def _rounds(self, group: _Group) -> int:
        return self.space.job.global_batch // (group.rank.fold.dp * group.micro_batch)

    def _virtual(self, group: _Group) -> list[int]:
        pp, layers = group.rank.fold.pp, self.space.job.model.layers
        even = pp in divisors(layers) and PipelineGraph(pp, self._rounds(group)).full_rounds
        return divisors(layers // pp) if pp > 1 and even else [1]


@lru_cache(maxsize=4096)
def _flying(pp: int, micro_batches: int, virtual: int) -> int:
    """Passes of a stage that the first position has in flight."""
    return sum(in_flight(PipelineGraph(pp, micro_batches, virtual), 0).values())
