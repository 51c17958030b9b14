"""The memory of a rank at the fullest pipeline position, in bytes.

Weights, gradients and optimizer states follow from the number of parameters. Activations are the tensors that the runtime's
ops keep from forward to backward, times the largest number of micro-batches that the position has in flight.

`imbalance` is everywhere the rows of the fullest rank over the mean, beyond the model's routing pattern.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.costs.activations import (
    block_activations,
    combined_rows,
    expert_activations,
    freed_bytes,
    operands,
    residual,
    slices_of,
)
from foldray.costs.bounds import ends_of
from foldray.costs.candidate import OWN_SOFTWARE, Candidate, Content, Pieces, PipelineLayout, Software
from foldray.costs.device import FLOAT32
from foldray.costs.rank import RankCosts, shared_by_fold, shared_by_ops
from foldray.costs.updates import elements, moment
from foldray.costs.working import after_backward, buffers, exchanged, head_logits, in_chunks, networks, passing_keys, unreduced
from foldray.finding import blocks_left
from foldray.fold import Fold
from foldray.graph import PipelineGraph
from foldray.kinds import ATTENTION, EXPERT, FFN, HEAD, SHARED
from foldray.orders import passes

GIB = 2**30


class Memory(NamedTuple):
    """Bytes of one rank, by use.

    Args:
        weights: weights in the dtype of computation, and float32 copies (`parameters`).
        gradients: float32 sums of gradients. Several micro-batches add to whole sums, which ZeRO-2 frees only after the last.
        optimizer: two moments; one for the matrices that Muon updates. Nothing if they are on the host.
        activations: activations that are kept from forward to backward, of all micro-batches in flight.
        buffers: rows that travel between ranks, handovers, weights that ZeRO-3 has gathered.
        logits: logits of one piece, with their gradient, log-softmax and float32 copy.
        working: bytes beyond all these that the fullest op needs while it runs.
        workspace: device context, communicators, fragmentation.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    logits: float
    working: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(self)


def ledger(candidate: Candidate, rank: RankCosts, imbalance: float = 1.0) -> Memory:
    """Return the memory of a rank at the fullest position."""
    ordering = candidate.ordering
    row = ordering.forward.row
    keeping = Keeping(ordering.ahead if row.found else None, row.weaves)
    memory = peak_memory(rank, candidate.layout, candidate.pipeline, candidate.pieces, imbalance, keeping)
    if not candidate.graph.later:
        return memory
    # The W of all pieces waits for the last one. Blocks that do not drain have begun the block before by then.
    blocks = ordering.batch_degree * (1 if row.drains else 2) if ordering.weight_gradients == "whole" and not row.found else 1
    most = max(operands(rank, block, imbalance) for block in rank.job.different)
    return memory._replace(buffers=memory.buffers + blocks * most)


class Keeping(NamedTuple):
    """The activations that a schedule keeps beyond those of the pipeline's own order.

    Args:
        ahead: for found lists, how much more they may keep, in micro-batches (`finding.find`). They may keep a block until its
            gradients of weights are computed.
        woven: whether one micro-batch goes forward while another one goes backward. The backward frees a block for each block
            that the forward fills, so there is at most one block more.
    """

    ahead: float | None = None
    woven: bool = False

    def on_the_way(self, stages: int) -> int:
        """Return how many blocks at most have on the device what goes to the host: one that leaves, and two that were fetched,
        one of which goes backward. While micro-batches go both ways, another one goes forward.

        Args:
            stages: number of stages of a position. A list may go through all of them at a time.
        """
        if self.ahead is None:
            return 3 + self.woven
        return stages * (2 + 2 * math.ceil(1 + self.ahead))


_NO_MORE = Keeping()


def peak_memory(
    rank: RankCosts,
    layout: PipelineLayout,
    pipeline: PipelineGraph,
    pieces: Pieces,
    imbalance: float = 1.0,
    keeping: Keeping = _NO_MORE,
    too_much: Callable[[float], bool] = lambda held: False,
) -> Memory:
    """Return the same as `ledger`, for all candidates with this layout, pipeline, pieces and keeping.

    Args:
        too_much: number of bytes → whether nobody asks what more than these are. Some of the memory is then enough.
    """
    position, memories = _Position(rank, layout, pipeline, pieces, imbalance, keeping), list[Memory]()
    for place in reversed(layout.fullest):  # the first position keeps most micro-batches
        memory = position.idle(place)
        if not too_much(memory.total):
            running = position.fullest_backward(place)
            memory = memory._replace(working=max(memory.working, running - memory.logits))
        if too_much(memory.total):
            return memory
        memories.append(memory)
    return max(reversed(memories), key=attrgetter("total"))


class _Position:
    """The memory of any position of a pipeline. The arguments are those of `peak_memory`.

    Attributes:
        size, away: bytes that each block keeps on the device and on the host.
    """

    def __init__(
        self,
        rank: RankCosts,
        layout: PipelineLayout,
        pipeline: PipelineGraph,
        pieces: Pieces,
        imbalance: float,
        keeping: Keeping,
    ):
        self.rank, self.layout, self.pipeline, self.pieces = rank, layout, pipeline, pieces
        self.imbalance, self.keeping, sliced = imbalance, keeping, slices_of(pieces.slicing)
        self.alone = keeping == _NO_MORE and pieces.hiding == "nothing"  # no op runs beside those of another piece
        different = rank.job.different
        self.away = {block: freed_bytes(rank, block, pieces.offload, sliced, imbalance) for block in different}
        self.size = {
            block: block_activations(rank, block, pieces.recompute, sliced, imbalance) - self.away[block] for block in different
        }

    def idle(self, place: int) -> Memory:
        """Return the memory of a position without what its ops need while they run."""
        rank, pieces, content = self.rank, self.pieces, self.layout.positions.content(place)
        several, slicing = self.pipeline.micro_batches * pieces.batch_degree > 1, pieces.slicing
        weights, gradients, optimizer, behind = _at_rest(rank, content, several)
        kept, rows = self.kept(place) * pieces.batch_degree, buffers(rank, slicing, self.imbalance, self.alone)
        if content.head:  # gradients of all heads but the last one wait until the blocks between the heads go backward
            rows += (content.heads - 1) * residual(rank)
        logits = max((head_logits(rank, max(cut)) for kind, cut in ends_of(content, slicing) if kind == HEAD), default=0.0)
        workspace = rank.device.share["workspace"] * GIB
        return Memory(weights, gradients, optimizer, kept, rows, logits, max(0.0, behind - kept - rows - logits), workspace)

    def kept(self, place: int) -> float:
        """Return the bytes that a position keeps on the device from forward to backward, of one part of each micro-batch."""
        rank, content, keeping, pipeline, size = (
            self.rank, self.layout.positions.content(place), self.keeping, self.pipeline, self.size,
        )  # fmt: skip
        flying = blocks_in_flight(self.layout, pipeline, place, keeping.woven)
        if keeping.ahead is not None:
            own = {block: size[block] for block, _ in content.blocks}
            left = {block: operands(rank, block, self.imbalance) for block in own}
            in_order, less = sum(count for _, count in flying), bool(self.pieces.recompute or self.pieces.offload)
            kept = kept_by_list(content.blocks, own, left, in_order, pipeline.micro_batches, keeping.ahead, less)
        else:
            kept = sum([count * size[block] for block, count in flying])
            kept += keeping.woven * max([size[block] for block, _ in content.blocks])
        if self.pieces.offload:
            kept += fullest(content.blocks, self.away, keeping.on_the_way(pipeline.virtual_stages), pipeline.micro_batches)
        return kept

    def fullest_backward(self, place: int) -> float:
        """Return the bytes that the fullest op of a position needs while it goes backward, beside what is kept and `buffers`.

        Blocks go backward one after another, and those before have freed what they kept. Where pieces of several blocks overlap,
        the last one of them may still have it. A found list has no such order, and while two micro-batches are woven, one keeps
        what the other one frees.
        """
        pieces, most = self.pieces, 0.0
        parts, overlaps = pieces.batch_degree * (self.keeping == _NO_MORE), pieces.hiding == "all"
        for number in self.layout.forms_at[place]:
            freed = last = 0.0  # by all blocks before, and by the last one of them
            for block, count in self.layout.backward[number]:
                running = _running(self.rank, block, pieces, self.imbalance, self.alone)
                most = max(most, running - (freed - last * overlaps))
                last = parts * self.size[block]
                freed += count * last
        return most


class _Resting(NamedTuple):
    """Bytes of a position whatever its activations are: as in `Held`, and those that it needs for a while after backward."""

    weights: float
    gradients: float
    optimizer: float
    behind: float


@shared_by_fold
def _at_rest(rank: RankCosts, content: Content, several: bool) -> _Resting:
    weights, gradients, optimizer = content_parameters(rank, content)
    gradients += several * unreduced(rank, content)
    if (copied := rank.copied) is not None:  # sums of one micro-batch go home block by block
        mixed = sum(count for block, count in content.blocks if block.moe)
        weights += copied.room * copied.expert * mixed
        gradients += copied.room * copied.sums * (mixed if several else min(mixed, 2)) if copied.copies else 0.0
    updating = moment(rank, content) - several * unreduced(rank, content)
    return _Resting(weights, gradients, optimizer, max(after_backward(rank, content, several), updating))


@shared_by_ops
def _running(rank: RankCosts, block: BlockSpec, pieces: Pieces, imbalance: float, alone: bool) -> float:
    """Return the bytes that a block's fullest op needs while it goes backward, with what it keeps for that if it runs again.

    Args:
        alone: whether attention goes backward alone. Then no rows travel, and experts have freed what they kept.
    """
    slicing, sliced = pieces.slicing, slices_of(pieces.slicing)
    whole = block_activations(rank, block, (), sliced, imbalance)

    def again(kinds: tuple[str, ...], cut: Sequence[int]) -> float:
        kept = [whole - block_activations(rank, block, (kind,), sliced, imbalance) for kind in kinds if kind in pieces.recompute]
        return max(kept, default=0.0) * max(cut) / slicing.length

    attends = max(need(rank, block, slicing, imbalance) for need in (passing_keys, in_chunks))
    attends += again((ATTENTION,), slicing.attention)
    if alone:
        attends -= exchanged(rank, slicing, imbalance)
        if block.moe:
            attends -= expert_activations(rank, block, pieces.recompute, imbalance) + combined_rows(rank, block)
    feeds = networks(rank, block, slicing, imbalance) + again((EXPERT, FFN, SHARED), slicing.moe)
    return max(attends, feeds) + residual(rank)  # the gradient of the block's output


def kept_by_list(
    held: Sequence[tuple[BlockSpec, int]],
    size: Mapping[BlockSpec, float],
    left: Mapping[BlockSpec, float],
    in_order: int,
    micro_batches: int,
    ahead: float,
    again: bool,
) -> float:
    """Return the most bytes that a position may keep with a found list (`finding.find`).

    Args:
        held: blocks and how many of them the position has.
        size: bytes that a block of one micro-batch keeps from forward to backward.
        left: bytes that it keeps instead until its gradients of weights are computed, if these are more.
        in_order: number of blocks, over all micro-batches, that the position keeps in the pipeline's own order.
        ahead: how much more it may keep, in micro-batches.
        again: whether blocks keep less, because ops run again or are on the host.
    """
    count = sum(number for _, number in held)
    most = in_order + int(ahead * count)
    growth = {block: max(0.0, left[block] - kept) for block, kept in size.items()}
    growing = min(most, blocks_left(count, ahead)) if again else most
    return fullest(held, size, most, micro_batches) + fullest(held, growth, growing, micro_batches)


def fullest(held: Iterable[tuple[BlockSpec, int]], size: Mapping[BlockSpec, float], most: int, micro_batches: int) -> float:
    """Return the most bytes of `most` of a position's blocks of all micro-batches, if a block of one needs `size` bytes."""
    left, total = most, 0.0
    for block, count in sorted(held, key=lambda item: -size[item[0]]):
        number = min(left, count * micro_batches)
        total += number * size[block]
        left -= number
    return total


def least_memory(
    rank: RankCosts,
    layout: PipelineLayout,
    pipeline: PipelineGraph,
    recompute: tuple[str, ...],
    imbalance: float,
    offload: tuple[str, ...] = (),
) -> float:
    """Return a lower bound of the bytes at the fullest position, for every cut of the sequences.

    The bound counts parameters, activations of whole sequences and the workspace, but nothing that goes to the host.
    """
    most, size = 0.0, dict[BlockSpec, float]()
    for block in rank.job.different:
        size[block] = block_activations(rank, block, recompute, 0, imbalance) - freed_bytes(rank, block, offload, 0, imbalance)
    for place in layout.fullest:
        held = sum(content_parameters(rank, layout.positions.content(place)))
        for block, count in blocks_in_flight(layout, pipeline, place):
            held += count * size[block]
        most = max(most, held)
    return most + rank.device.share["workspace"] * GIB


class Held(NamedTuple):
    """Bytes for the parameters of a rank: weights (with float32 copies), float32 sums of gradients, the optimizer's state."""

    weights: float
    gradients: float
    optimizer: float


@shared_by_fold
def content_parameters(rank: RankCosts, content: Content) -> Held:
    """Return the bytes for the parameters of a position."""
    count, software = rank.elements(content), rank.job.software
    held = parameters(rank.fold, rank.zero, rank.device.bytes, count, elements(rank, content), software, rank.job.offload)
    frozen = sum(rank.elements(content, trained=False).values())  # with neither float32 copies nor gradients
    return held._replace(weights=held.weights + frozen * rank.device.bytes)


def parameters(
    fold: Fold,
    zero: int,
    itemsize: int,
    count: Mapping[str, float],
    hidden: Mapping[str, float] | None = None,
    software: Software = OWN_SOFTWARE,
    offload: bool = False,
) -> Held:
    """Return the bytes for the parameters of a rank, without what is on the host (`offload.py`).

    The optimizer updates float32 weights. They are copies if a rank computes in a smaller dtype. Under ZeRO, a rank holds the
    sums that it owns. Under ZeRO-1, it also holds its whole gradients; ZeRO-2 and ZeRO-3 free them once they are reduced.

    Args:
        itemsize: bytes of a weight in the dtype of computation.
        count: number of parameters that the rank computes with, by group family of their gradients.
        hidden: the number of those that Muon updates, which have one moment instead of two; None without Muon.
        offload: whether the float32 weights and the moments are on the host.
    """
    weights = gradients = optimizer = 0.0
    for family, whole in count.items():
        ranks = fold.group_size(family)
        shared = zero > 0 and ranks > 1
        owned = whole / ranks if shared else whole
        weights += (owned if zero == 3 else whole) * itemsize + (owned * FLOAT32 if itemsize < FLOAT32 and not offload else 0)
        apart = owned if shared and (software.apart or zero > 1) else 0
        gradients += software.gradients * (apart + (whole if zero < 2 or not shared else 0))
        moments = 2 * software.moments * owned - software.moments * (hidden or {}).get(family, 0.0) / (ranks if shared else 1)
        optimizer += 0 if offload else moments
    return Held(weights, gradients, optimizer)


@lru_cache(maxsize=4096)
def in_flight(graph: PipelineGraph, place: int, woven: bool = False) -> Mapping[int, int]:
    """Return {stage: number of micro-batches in flight}, at the moment when a position has most of them in flight.

    With `woven`, the backward of a pair frees what its forward fills, so the forward counts after it.
    """
    # This moment is right after the warm-up, which takes at most two rounds of pp micro-batches.
    graph = replace(graph, micro_batches=min(graph.micro_batches, 3 * graph.pp))
    alive, most, total, peak = Counter[int](), Counter[int](), 0, 0
    order = passes(graph, place, woven)
    pairs = (op for pair in order.pairs for op in (pair[::-1] if woven else pair))
    for op in (*order.warm_up, *pairs, *order.cool_down):
        change = 1 if op.direction == "F" else -1
        alive[op.layer] += change
        total += change
        if total > peak:
            most, peak = Counter(alive), total
    return most


@lru_cache(maxsize=16384)
def blocks_in_flight(
    layout: PipelineLayout, graph: PipelineGraph, place: int, woven: bool = False
) -> list[tuple[BlockSpec, int]]:
    """Return (block, number of activations of such blocks that a position keeps, over all micro-batches in flight)."""
    counts = Counter[BlockSpec]()
    for stage, flying in in_flight(graph, place, woven).items():
        for block, count in layout.contents[layout.form_of[stage]].blocks:
            counts[block] += flying * count
    return list(counts.items())
