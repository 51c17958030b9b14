"""The space of a search: all legal folds of a cluster, the schedules of each fold, and the stages of each pipeline."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from foldray.blueprint import BlockSpec, ModelSpec, even_sizes, make_stages, smallest_slice, stage_positions
from foldray.costs.candidate import Job, PipelineLayout, Positions, make_layout
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.memory import blocks_in_flight
from foldray.costs.network import Network
from foldray.fold import Fold, divisors
from foldray.graph import PipelineGraph, Reduction, SliceCost
from foldray.kinds import ATTENTION, EXPERT, FFN
from foldray.orders import OVERLAPS, Ordering, Overlap, Sequences, overlap_kind

DEGREES = (2, 4, 8)
BATCH_DEGREES = (1, 2)
RECOMPUTE: tuple[tuple[str, ...], ...] = ((), (EXPERT,), (ATTENTION, FFN, EXPERT))
MICRO_BATCHES = (1, 2, 4, 8, 16)
KINDS = tuple(name for name, row in OVERLAPS.items() if row.of_stages)
"""Kinds whose steps the search puts together from passes of stages."""
REDUCTIONS = (*(Reduction("chunks", size << 20) for size in (64, 16, 4, 1)), Reduction("buckets"), Reduction("end"))


@dataclass(frozen=True)
class Space:
    """The space of a search.

    Args:
        pins: axis → size, for axes with a fixed size.
        zero: stage of ZeRO: 1 or 3.
        micro_batches: sizes of micro-batches to try, in sequences.
        degrees: numbers of pieces of a sequence to try; for attention, every smaller one beside it.
        batch_degrees: numbers of parts of a micro-batch to try.
        recompute: sets of kinds of ops to recompute.
        offload: kinds of ops that keep on the host what their backward needs. None of them is in a set of `recompute`.
        kinds: overlap kinds to try.
        reductions: times and sizes of reductions to try; each candidate has the best of them.
        imbalance: rows of the fullest rank over the mean, for the memory.
        experts: for workers of their own for the experts, their hardware; None is that of attention.
        expert_gpus: and their number; None tries all.
    """

    job: Job
    hardware: Hardware
    gpus: int
    pins: Mapping[str, int] = field(default_factory=dict)
    zero: int = 1
    micro_batches: Sequence[int] = MICRO_BATCHES
    degrees: Sequence[int] = DEGREES
    batch_degrees: Sequence[int] = BATCH_DEGREES
    recompute: Sequence[tuple[str, ...]] = RECOMPUTE
    kinds: Sequence[str] = KINDS
    reductions: Sequence[Reduction] = REDUCTIONS
    imbalance: float = 1.0
    experts: Hardware | None = None
    expert_gpus: int | None = None
    offload: tuple[str, ...] = ()

    def folds(self) -> Iterator[Fold]:
        """Yield every legal fold with the fixed sizes.

        If tokens travel once to each rank, a fold whose expert-parallel groups have several ranks on each of several nodes comes
        again, with tokens that travel once to each node first.
        """
        if self.job.dispatch != "rank":
            yield from self._one_level()
            return
        device = Device.of(self.job, self.hardware)
        for fold in self._one_level():
            yield fold
            if (inside := in_two_levels(fold, device)) != fold:
                yield inside

    def _one_level(self) -> Iterator[Fold]:
        for fold in legal_folds(self.job.model, self.job.seq_len, self.gpus, self.pins):
            if self.job.global_batch % fold.dp == 0:
                yield fold

    def orderings(self, smallest: int, travels: bool, batch_degree: int) -> Iterator[Ordering]:
        """Yield the schedules of folds, without recomputation.

        Args:
            smallest: the smallest slice of such a fold.
            travels: whether rows travel. If not (EP1), there is only `sequential`.
        """
        if batch_degree == 1:
            yield Ordering()
        if not travels:
            return
        sequences = Sequences(self.job.seq_len, SliceCost.of(self.job.model), smallest)
        for kind, degree in itertools.product(self._kinds(batch_degree), self._degrees(batch_degree)):
            if sequences.length // sequences.multiple_of < degree:
                continue
            fewer = [count for count in self.degrees if count < degree] if overlap_kind(kind).cuts_attention else []
            for cut in (sequences.cut_for(kind, degree, attention_degree=count) for count in (None, *fewer)):
                yield Ordering(Overlap(kind, 1), Overlap(kind, 1), cut, batch_degree=batch_degree)

    def _kinds(self, batch_degree: int) -> Iterable[str]:
        """Return the kinds that cut; of kinds with the same order, the one that is meant for this number of parts."""
        rows = {kind: overlap_kind(kind) for kind in self.kinds}
        cutting = [(kind, row) for kind, row in rows.items() if row.cuts and row.batch_degree <= batch_degree]
        cutting.sort(key=lambda named: named[1].batch_degree)
        return {(row.order, row.cuts_attention, row.drains): kind for kind, row in cutting}.values()

    def _degrees(self, batch_degree: int) -> list[int]:
        """Return the numbers of pieces of a sequence. With several parts, sequences may be whole."""
        whole = [1] if batch_degree > 1 else []
        return [*whole, *(degree for degree in self.degrees if degree * batch_degree <= max(self.degrees))]


def in_two_levels(fold: Fold, device: Device) -> Fold:
    """Return a fold whose tokens travel once to each node first, if its groups have several ranks on each of several nodes."""
    size, together, nodes = Network(fold, device).shape("ep")
    return replace(fold, ep_inside=together) if nodes > 1 and together > 1 and size == together * nodes else fold


def legal_folds(model: ModelSpec, seq_len: int, gpus: int, pins: Mapping[str, int] = MappingProxyType({})) -> Iterator[Fold]:
    """Yield every fold of `gpus` ranks that divides a model and its sequences."""

    def sizes(axis: str, among: int, legal: Callable[[int], bool]) -> list[int]:
        return [n for n in divisors(among) if legal(n) and n == pins.get(axis, n)]

    def cuts_heads(tp: int) -> bool:
        dense = model.ffn_hidden if model.has_dense else 0
        shared = model.qk_norm != "all" and tp % model.kv_heads == 0  # several ranks have the same key/value head
        whole = [model.heads, 0 if shared else model.kv_heads, dense, model.shared_hidden, model.vocab]
        whole += [model.linear.heads, model.linear.kv_heads] if model.linear else []
        return not any(size % tp for size in whole)

    for pp in sizes("pp", gpus, lambda n: n <= model.layers):
        place = gpus // pp
        moe = [
            (ep, etp)
            for ep in sizes("ep", place, lambda n: model.experts % n == 0)
            for etp in sizes("etp", place // ep, lambda n: model.expert_hidden % n == 0 and not (model.expert_bias and n > 1))
        ]
        for tp in sizes("tp", place, cuts_heads):
            for cp in sizes("cp", place // tp, lambda n, tp=tp: seq_len % smallest_slice(n, tp) == 0):  # type: ignore[misc]
                yield from (Fold(gpus, tp, cp, pp, ep, etp) for ep, etp in moe)


class Staging(NamedTuple):
    """One way to cut a model into stages.

    Args:
        virtual_stages: number of stages of a position.
        stage_layers: number of blocks of each stage; None cuts evenly.
        pipeline: the pipeline with at most 3·pp micro-batches, which are enough to find its memory (`memory.in_flight`).
    """

    virtual_stages: int
    stage_layers: tuple[int, ...] | None
    layout: PipelineLayout
    pipeline: PipelineGraph


class Weights(NamedTuple):
    """How long the parts of a model compute, in units of its mean block.

    Args:
        blocks: block → its time; 1 for blocks that are missing.
        ends: time of the heads and of the blocks of multi-token prediction, which the last stage has as well.
    """

    blocks: Mapping[BlockSpec, float]
    ends: float


_EQUAL = Weights({}, 0.0)


class Stagings(NamedTuple):
    """All stagings to try, and the properties of all of them together that bounds need.

    Args:
        leanest: stagings, except for those that need at least the memory of another one on every rank.
        positions: the different contents of pipelines, each with all its positions.
        first_blocks: smallest number of blocks of a stage.
    """

    all: Sequence[Staging]
    leanest: Sequence[Staging]
    positions: Sequence[Positions]
    first_blocks: int


def make_stagings(blocks: Sequence[BlockSpec], pp: int, micro_batches: int, weights: Weights = _EQUAL) -> Stagings:
    """Return the stagings of a model's blocks.

    Several virtual stages need a multiple of pp micro-batches. Their number divides the blocks of the fullest position.

    Args:
        blocks: the blocks, with those of multi-token prediction, which are in the last stage.
    """
    further = sum(block.mtp for block in blocks)
    layers = len(blocks) - further
    several = pp > 1 and PipelineGraph(pp, micro_batches).full_rounds
    stagings, leanest = list[Staging](), list[tuple[Staging, list[Counter[BlockSpec]]]]()
    for virtual_stages in divisors(-(-layers // pp)) if several else [1]:
        pipeline = PipelineGraph(pp, min(micro_batches, 3 * pp), virtual_stages)
        for sizes in _cuts(blocks[:layers], pp, virtual_stages, weights):
            cut = make_stages(layers, pp, virtual_stages, sizes, further)
            stages = tuple(tuple(blocks[i] for i in stage.layers) for stage in cut)
            stagings.append(staging := Staging(virtual_stages, sizes, make_layout(stages, pp), pipeline))
            kept = [Counter(dict(blocks_in_flight(staging.layout, pipeline, place))) for place in range(pp)]
            if not any(_needs_no_less(staging, kept, *lean) for lean in leanest):
                leanest.append((staging, kept))
    positions = list(dict.fromkeys(staging.layout.positions for staging in stagings))
    first_blocks = min(len(form.blocks) for staging in stagings for form in staging.layout.forms)
    return Stagings(stagings, [staging for staging, _ in leanest], positions, first_blocks)


def _cuts(blocks: Sequence[BlockSpec], pp: int, virtual_stages: int, weights: Weights) -> Iterator[tuple[int, ...] | None]:
    """Yield the numbers of blocks of stages: even ones (None), and those with fewer blocks beside the embedding and the head.

    Either the head counts as the number of blocks that take about as long, or both ends count as one block each, as in
    Megatron-LM's options `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`. A cut is left out
    if another cut loads no position more, and has no more blocks at the first position, which keeps the activations of most
    micro-batches.
    """
    layers, count = len(blocks), pp * virtual_stages
    if count > layers:
        return
    known = list[tuple[float, int]]()
    for first, last in ((0, 0), (0, math.floor(weights.ends)), (0, math.ceil(weights.ends)), (1, 1)) if pp > 1 else ((0, 0),):
        sizes = even_sizes(layers, count, first, last)
        if min(sizes) < 1:
            continue
        loads, held, begin, end = [0.0] * pp, 0, 0, 0
        for size, place in zip(sizes, stage_positions(count, pp), strict=True):
            begin, end = end, end + size
            loads[place] += sum(weights.blocks.get(block, 1.0) for block in blocks[begin:end])
            held += size if place == 0 else 0
        most = max(*loads[:-1], loads[-1] + weights.ends) if pp > 1 else 0.0
        if not any(most >= load and held >= few for load, few in known):
            known.append((most, held))
            yield tuple(sizes) if first + last else None


def _needs_no_less(one: Staging, kept: list[Counter[BlockSpec]], lean: Staging, lean_kept: list[Counter[BlockSpec]]) -> bool:
    """Whether `one` needs at least the memory of `lean`.

    This holds if their positions have the same contents, and no position of `one` keeps fewer activations of any block.
    """
    same = one.layout.positions == lean.layout.positions
    return same and all(more >= fewer for more, fewer in zip(kept, lean_kept, strict=True))
