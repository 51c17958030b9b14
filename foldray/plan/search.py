"""The search through all legal ways to train a job on a cluster, for the best ones.

The nodes of the search are sets of candidates with lower bounds of time and memory. The search always refines the node with the
lowest bound of time, so it finds predictions in the order of their time, fastest first. It ends once it has enough predictions.
If the front is asked for, it then skips only nodes that need at least as much memory as the leanest prediction. No candidate of
such a node is among the best or on the front. A node is refined in these steps:

1. all folds with the same grid of attention, bounded by what they have in common: all ops but those of routed experts;
2. one fold, bounded by the work of its blocks;
3. the fold with a micro-batch and a choice of recomputation (`Group`); the bound is that of whole micro-batches, because parts
   take at least as long together;
4. one schedule of the group, with its exact memory (`Choice`);
5. the same candidate with simulated stages, with the best of all lags (`Simulated`);
6. the prediction of the candidate, with the best of all reductions (`Planned`).

A bound of a node is at most the bounds of its refinements.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec, smallest_slice
from foldray.costs.bounds import common_computed, fold_bound, hop_bounds, least_computed, stage_bounds, stage_works, step_bound
from foldray.costs.candidate import Candidate, Content, Pieces, StageForm
from foldray.costs.device import Device
from foldray.costs.memo import Memo, Table, shared
from foldray.costs.memory import GIB, Memory, least_memory, peak_memory
from foldray.costs.moved import Moved, moved
from foldray.costs.offload import Offloaded, offloaded
from foldray.costs.ops import OpWork
from foldray.costs.passes import with_best_lags
from foldray.costs.prediction import Prediction, Step, straggling
from foldray.costs.rank import RankCosts
from foldray.costs.updates import least_behind
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.graph import Slicing
from foldray.orders import Ordering
from foldray.plan.space import Space, Staging, Stagings, Weights, make_stagings


class Planned(NamedTuple):
    """A candidate with its predicted time and memory, and whether it fits into a GPU's memory.

    Args:
        host: what the optimizer takes on the host; None if it is on the GPU.
        moved: what ops keep on the host for their backward; None if they keep nothing there.
    """

    candidate: Candidate
    prediction: Prediction
    memory: Memory
    fits: bool
    host: Offloaded | None = None
    moved: Moved | None = None


class SameGrid(NamedTuple):
    """Folds with the same grid of attention, and the micro-batches that divide their batch, the smallest first."""

    folds: list[Fold]
    micro_batches: list[int]


class Group(NamedTuple):
    """Candidates with the same fold, micro-batch and recomputation. `rank` has the costs of whole micro-batches."""

    rank: RankCosts
    micro_batch: int
    recompute: tuple[str, ...]


class Choice(NamedTuple):
    """One candidate of a group with its memory, before any simulation. `rank` has the costs of a part of a micro-batch."""

    group: Group
    rank: RankCosts
    ordering: Ordering
    staging: Staging
    memory: Memory


class Simulated(NamedTuple):
    """A candidate with simulated stages, before the simulation of its pipeline."""

    step: Step
    memory: Memory


class Node(NamedTuple):
    """A set of candidates with lower bounds.

    Args:
        seconds: lower bound of the step time.
        held: lower bound of the memory, in bytes.
        what: the candidates; the list of all its groups for a fold.
    """

    seconds: float
    held: float
    what: SameGrid | list[Group] | Group | Choice | Simulated | Planned


def _weights(rank: RankCosts) -> Weights:
    """Return how long a model's blocks and ends compute, from the costs of a rank that holds all of the model."""
    length, blocks = rank.job.seq_len, rank.job.blocks
    pieces, layers = Pieces(Slicing((length,), (length,))), tuple(block for block in blocks if not block.mtp)

    def computed(last: bool, *held: BlockSpec) -> float:
        content = Content.of([StageForm(held, False, last)])
        return sum(work.computed for work in stage_works(rank, content, pieces))

    mean = computed(False, *layers) / len(layers)
    by_block = {block: computed(False, block) / mean for block in set(layers)}
    return Weights(by_block, computed(True, *blocks) / mean - len(layers))


class _Cut(NamedTuple):
    """The properties of a fold that its orderings depend on: its cuts of sequences, and whether rows travel (EP)."""

    cp: int
    tp: int
    travels: bool


def _cut(fold: Fold) -> _Cut:
    return _Cut(fold.cp, fold.tp, fold.ep > 1)


_once = shared(attrgetter("_known"))


class Refinement:
    """The nodes of a space, from grids of attention to predictions."""

    def __init__(self, space: Space):
        self.space, self.job = space, space.job
        self.device = Device.of(space.job, space.hardware)
        self.limit = space.hardware.memory_gib * GIB
        self._memo = Memo()
        self._slower = 1 + straggling(space.gpus, self.device)
        self._known = Table()
        self._again = tuple(sorted({kind for again in space.recompute for kind in again}))
        self._weights = _weights(self._rank(Fold(1), 1))

    def grids(self) -> Iterator[SameGrid]:
        """Yield all legal folds by their grids of attention."""
        for _, same in itertools.groupby(self.space.folds(), attrgetter("tp", "cp", "pp")):
            folds = list(same)
            if sizes := sorted(n for n in self.space.micro_batches if self.job.global_batch % (folds[0].dp * n) == 0):
                yield SameGrid(folds, sizes)

    def bounded(self, grid: SameGrid) -> Node:
        """Return the node of some folds, bounded by the seconds of what they all have in common."""
        fold, bound = grid.folds[0], math.inf
        fastest = self._fastest_pieces(_Cut(fold.cp, fold.tp, True), ())
        for size in grid.micro_batches:
            rank, micro_batches = self._rank(fold, size), self.job.global_batch // (fold.dp * size)
            for positions, pieces in itertools.product(self._stagings_of(fold.pp, micro_batches).positions, fastest):
                common = max(common_computed(rank, content, pieces) for content in positions.different)
                bound = min(bound, micro_batches * common)
        return Node(self._slower * bound, 0.0, grid)

    def _folds(self, node: Node, grid: SameGrid) -> Iterator[Node]:
        for fold in grid.folds:
            ranks = self._holding((self._rank(fold, n), n) for n in grid.micro_batches)
            # Recomputation costs time and saves memory, so one bound is without it and the other with all of it.
            seconds = self._least_seconds([Group(*rank, ()) for rank, _ in ranks])
            held = min(least for _, least in ranks)
            groups = [Group(*rank, again) for rank, _ in ranks for again in self.space.recompute]
            yield Node(max(seconds, node.seconds), held, groups)

    def _holding(self, ranks: Iterable[tuple[RankCosts, int]]) -> list[tuple[tuple[RankCosts, int], float]]:
        """Return (costs, micro-batch) with the least memory, the smallest micro-batch first, up to the first that cannot fit.

        A larger micro-batch never needs less memory.
        """
        holding = list[tuple[tuple[RankCosts, int], float]]()
        for rank in ranks:
            holding.append((rank, self._least_held(Group(*rank, self._again))))
            if holding[-1][1] > self.limit:
                break
        return holding

    def _rank(self, fold: Fold, sequences: int) -> RankCosts:
        return RankCosts(self.job, fold, self.device, sequences, self.space.zero, self._memo)

    def refined(self, node: Node, needless: Callable[[float], bool]) -> Iterator[Node]:
        """Yield nodes that have the same candidates together, with higher bounds; in the last step, the prediction.

        Nodes whose memory is `needless` for the search are left out.
        """
        what = node.what
        if isinstance(what, SameGrid):
            yield from self._folds(node, what)
        elif isinstance(what, list):
            for group in what:
                held = max(self._least_held(group), node.held)
                if not needless(held):
                    yield Node(max(self._least_seconds([group]), node.seconds), held, group)
        elif isinstance(what, Group):
            yield from self._choices(node, what, needless)
        elif isinstance(what, Choice):
            group = what.group
            stages = what.staging.virtual_stages, self.space.zero, what.staging.stage_layers
            candidate = Candidate(self.job, group.rank.fold, what.ordering, group.micro_batch, *stages)
            candidate = with_best_lags(candidate, what.rank)
            step = Step(candidate, OpWork(candidate, self.device, what.rank))
            yield Node(max(step.simulated_bound(), node.seconds), node.held, Simulated(step, what.memory))
        elif isinstance(what, Simulated):
            step, candidate = what.step, what.step.candidate
            reduction = step.fastest(self.space.reductions)
            candidate = replace(candidate, ordering=candidate.ordering._replace(reduction=reduction))
            prediction = step.prediction(reduction)
            fits, host = node.held <= self.limit, offloaded(candidate, step.rank)
            planned = Planned(candidate, prediction, what.memory, fits, host, moved(candidate, step.rank))
            yield Node(prediction.seconds, node.held, planned)

    def _choices(self, node: Node, group: Group, needless: Callable[[float], bool]) -> Iterator[Node]:
        fold, micro_batches = group.rank.fold, self._micro_batches(group)
        for parts in self.space.batch_degrees if fold.ep > 1 else (1,):
            if group.micro_batch % parts:
                continue
            rank = group.rank if parts == 1 else self._rank(fold, group.micro_batch // parts)
            for staging in self._stagings(group).all:
                layout = staging.layout
                behind, memories = least_behind(rank, layout.positions), dict[Slicing, Memory]()
                for pieces, orderings in self._orderings(_cut(fold), parts, group.recompute).items():
                    memory = memories.get(pieces.slicing)  # which is the same whatever is hidden
                    if memory is None:
                        memory = peak_memory(rank, layout, staging.pipeline, pieces, self.space.imbalance, too_much=needless)
                        memories[pieces.slicing] = memory
                    if needless(memory.total):
                        continue
                    stages = stage_bounds(rank, layout.contents, pieces)
                    hops = hop_bounds(rank, layout.contents, pieces, stages)
                    seconds = self._slower * step_bound(layout, micro_batches, stages, behind, hops)
                    for ordering in orderings:
                        what = Choice(group, rank, ordering, staging, memory)
                        yield Node(max(seconds, node.seconds), memory.total, what)

    def _least_seconds(self, groups: Iterable[Group]) -> float:
        """Return a lower bound of the seconds of some groups.

        It is the bound of whole sequences with all all-to-alls hidden. With context parallelism, slices can cost less than
        the ring of whole sequences. The bound is then the lower one of whole sequences and of the fewest slices.
        """
        bound = math.inf
        for group in groups:
            rank, stagings, micro_batches = group.rank, self._stagings(group), self._micro_batches(group)
            fastest = self._fastest_pieces(_cut(rank.fold), group.recompute)
            hops = [self._least_hop(group, pieces) for pieces in fastest]
            for positions in stagings.positions:
                behind = least_behind(rank, positions)
                for pieces, hop in zip(fastest, hops, strict=True):
                    bound = min(bound, fold_bound(rank, positions, hop, micro_batches, pieces, behind, enough=bound))
        return self._slower * bound

    def _least_hop(self, group: Group, pieces: Pieces) -> float:
        """Return a lower bound of the seconds until the next stage can begin. With EP, it may begin after a small piece."""
        rank = group.rank
        if rank.fold.pp == 1 or rank.fold.ep > 1:
            return 0.0
        blocks = self._stagings(group).first_blocks
        return blocks * least_computed(rank, self.job.different, pieces) + 2 * rank.handover.seconds

    @_once
    def _fastest_pieces(self, cut: _Cut, recompute: tuple[str, ...]) -> Sequence[Pieces]:
        """Return the pieces that `_least_seconds` bounds."""
        piece = self.job.seq_len // (cut.cp * cut.tp)
        slicings = {Slicing((piece,), (piece,)): None}
        if cut.cp > 1:
            sliced = [pieces.slicing for pieces in self._orderings(cut, 1, recompute) if pieces.hiding != "nothing"]
            slicings |= dict.fromkeys(slicing for slicing in sliced if slicing.degree == min(self.space.degrees))
        return [Pieces(slicing, recompute, "all") for slicing in slicings]

    def _least_held(self, group: Group) -> float:
        return min(
            least_memory(group.rank, staging.layout, staging.pipeline, group.recompute, self.space.imbalance, self.space.offload)
            for staging in self._stagings(group).leanest
        )

    def _stagings(self, group: Group) -> Stagings:
        return self._stagings_of(group.rank.fold.pp, self._micro_batches(group))

    @_once
    def _stagings_of(self, pp: int, micro_batches: int) -> Stagings:
        return make_stagings(self.job.blocks, pp, micro_batches, self._weights)

    @_once
    def _orderings(self, cut: _Cut, batch_degree: int, recompute: tuple[str, ...]) -> Mapping[Pieces, list[Ordering]]:
        """Return the schedules of a group, by their pieces: the bounds of time and memory depend on nothing else."""
        by_pieces: dict[Pieces, list[Ordering]] = {}
        for bare in self._bare_orderings(smallest_slice(cut.cp, cut.tp), cut.travels, batch_degree):
            ordering = bare._replace(recompute=recompute, offload=self.space.offload)
            by_pieces.setdefault(Pieces.of(ordering, self.job.seq_len, cut.cp * cut.tp), []).append(ordering)
        return by_pieces

    @_once
    def _bare_orderings(self, smallest: int, travels: bool, batch_degree: int) -> Sequence[Ordering]:
        return tuple(self.space.orderings(smallest, travels, batch_degree))

    def _micro_batches(self, group: Group) -> int:
        return self.job.global_batch // (group.rank.fold.dp * group.micro_batch)


class Found(NamedTuple):
    """The result of a search.

    Args:
        best: the best candidates: first those that fit into memory, then the others, each sorted by step time.
        front: all candidates that no other candidate beats in both time and memory, fastest first; empty if nobody asks.
        legal: number of legal folds.
    """

    best: list[Planned]
    front: list[Planned]
    legal: int


@contextmanager
def without_cycles() -> Iterator[None]:
    """Let Python look for no cycles of objects. A search makes millions of objects and no cycle; looking takes a quarter more."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


@without_cycles()
def search(space: Space, top: int = 10, with_front: bool = False) -> Found:
    """Search a space for the `top` best candidates and, if asked, for the front of time and memory, which takes longer.

    This is a best-first search (A*): the queue sorts nodes by their bound of time, and the refinements of a node replace it.
    """
    refinement = Refinement(space)
    grids = list(refinement.grids())
    if not grids:
        raise UserError("gpus", space.gpus, f"has no legal fold for this model and batch with {dict(space.pins) or 'any sizes'}")
    numbers = itertools.count()
    queue = [(node.seconds, next(numbers), node) for node in map(refinement.bounded, grids)]
    heapq.heapify(queue)
    fit: list[Planned] = []
    unfit: list[Planned] = []
    front: list[Planned] = []
    leanest = math.inf if with_front else 0.0  # bytes below which a candidate is on the front

    def needless(held: float) -> bool:
        enough = len(fit) >= top if held <= refinement.limit else len(fit) + len(unfit) >= top
        return enough and leanest <= held

    while queue:
        _, _, node = heapq.heappop(queue)
        if needless(node.held):
            continue
        if not isinstance(node.what, Planned):
            for refined in refinement.refined(node, needless):
                heapq.heappush(queue, (refined.seconds, next(numbers), refined))
            continue
        (fit if node.what.fits else unfit).append(node.what)
        if node.what.memory.total < leanest:
            front.append(node.what)
            leanest = node.what.memory.total
    return Found([*fit[:top], *unfit[: max(0, top - len(fit))]], front, sum(len(grid.folds) for grid in grids))
