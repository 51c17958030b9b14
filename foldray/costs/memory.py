"""The memory of a rank at the fullest pipeline position, in bytes.

Weights, gradients and optimizer states follow from the number of parameters. Activations are the tensors that the runtime's
ops keep from forward to backward, times the largest number of micro-batches that the position has in flight.

`imbalance` is everywhere the rows of the fullest rank over the mean, beyond the model's routing pattern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint import AttentionSpec, BlockSpec, FeedForwardSpec
from foldray.costs.bounds import ends_of
from foldray.costs.candidate import OWN_SOFTWARE, Candidate, Content, Pieces, PipelineLayout, Software
from foldray.costs.device import FLOAT32, INT64
from foldray.costs.rank import RankCosts, shared_by_fold, shared_by_ops
from foldray.costs.updates import elements, moment
from foldray.costs.working import after_backward, buffers, head_logits, in_chunks, networks, not_kept, passing_keys, unreduced
from foldray.finding import blocks_left
from foldray.fold import Fold
from foldray.graph import PipelineGraph, Slicing
from foldray.kinds import ATTENTION, EXPERT, FFN, HEAD, SHARED
from foldray.orders import passes

GIB = 2**30
_WEIGHTED_ROW = 16  # bytes for the weight and the place of a row that is summed


class Memory(NamedTuple):
    """Bytes of one rank, by use.

    Args:
        weights: weights in the dtype of computation, and float32 copies (`parameters`).
        gradients: float32 sums of gradients. Several micro-batches add to whole sums, which ZeRO-2 frees only after the last.
        optimizer: two moments; one for the matrices that Muon updates.
        activations: activations that are kept from forward to backward, of all micro-batches in flight.
        buffers: rows that travel between ranks, float32 gradients of keys and values of sliced sequences, weights that
            ZeRO-3 has gathered.
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
    return memory._replace(buffers=memory.buffers + blocks * max(operands(rank, block, imbalance) for block in rank.job.blocks))


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


_NO_MORE = Keeping()


def peak_memory(
    rank: RankCosts,
    layout: PipelineLayout,
    pipeline: PipelineGraph,
    pieces: Pieces,
    imbalance: float = 1.0,
    keeping: Keeping = _NO_MORE,
) -> Memory:
    """Return the same as `ledger`, for all candidates with this layout, pipeline, pieces and keeping."""
    memories = (_position(rank, layout, place, pipeline, pieces, imbalance, keeping) for place in _fullest_places(layout))
    return max(memories, key=lambda memory: memory.total)


def _fullest_places(layout: PipelineLayout) -> list[int]:
    """Return one position for each kind: among positions with equal stages, the first has most micro-batches in flight."""
    return list({forms: place for place, forms in reversed([*enumerate(layout.forms_at)])}.values())


def _position(
    rank: RankCosts,
    layout: PipelineLayout,
    place: int,
    pipeline: PipelineGraph,
    pieces: Pieces,
    imbalance: float,
    keeping: Keeping,
) -> Memory:
    content, sliced = layout.positions.content(place), slices_of(pieces.slicing)
    flying = blocks_in_flight(layout, pipeline, place, keeping.woven)
    size = {block: block_activations(rank, block, pieces.recompute, sliced, imbalance) for block, _ in content.blocks}
    if keeping.ahead is not None:
        left = {block: operands(rank, block, imbalance) for block in size}
        in_order = sum(count for _, count in flying)
        kept = kept_by_list(content.blocks, size, left, in_order, pipeline.micro_batches, keeping.ahead, bool(pieces.recompute))
    else:
        kept = sum(count * size[block] for block, count in flying) + keeping.woven * max(size.values())
    held, workspace = content_parameters(rank, content), rank.device.share["workspace"] * GIB
    several = pipeline.micro_batches * pieces.batch_degree > 1
    held = held._replace(gradients=held.gradients + several * unreduced(rank, content))
    kept, rows = kept * pieces.batch_degree, buffers(rank, pieces.slicing, imbalance)
    if content.head:  # gradients of all heads but the last one wait until the blocks between the heads go backward
        rows += (content.heads - 1) * pieces.slicing.length * rank.sequences * rank.model.hidden * rank.device.bytes
    slicing = pieces.slicing
    logits = max((head_logits(rank, max(cut)) for kind, cut in ends_of(content, slicing) if kind == HEAD), default=0.0)
    needs = networks, passing_keys, in_chunks
    running = [max(need(rank, block, slicing, imbalance) for need in needs) for block in size]
    updating = moment(rank, content) - several * unreduced(rank, content)
    behind = max(after_backward(rank, content, several), updating) - kept - rows - logits
    return Memory(*held, kept, rows, logits, max(0.0, max(running) - logits, behind), workspace)


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
        again: whether ops run again.
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
    rank: RankCosts, layout: PipelineLayout, pipeline: PipelineGraph, recompute: tuple[str, ...], imbalance: float
) -> float:
    """Return a lower bound of the bytes at the fullest position, for every cut of the sequences.

    The bound counts parameters, activations of whole sequences and the workspace.
    """
    most = 0.0
    for place in _fullest_places(layout):
        held = sum(content_parameters(rank, layout.positions.content(place)))
        for block, count in blocks_in_flight(layout, pipeline, place):
            held += count * block_activations(rank, block, recompute, 0, imbalance)
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
    return parameters(rank.fold, rank.zero, rank.device.bytes, count, elements(rank, content), software)


def parameters(
    fold: Fold,
    zero: int,
    itemsize: int,
    count: Mapping[str, float],
    hidden: Mapping[str, float] | None = None,
    software: Software = OWN_SOFTWARE,
) -> Held:
    """Return the bytes for the parameters of a rank.

    The optimizer updates float32 weights. They are copies if a rank computes in a smaller dtype. Under ZeRO, a rank holds the
    sums that it owns. Under ZeRO-1, it also holds its whole gradients; ZeRO-2 and ZeRO-3 free them once they are reduced.

    Args:
        itemsize: bytes of a weight in the dtype of computation.
        count: number of parameters that the rank computes with, by group family of their gradients.
        hidden: the number of those that Muon updates, which have one moment instead of two; None without Muon.
    """
    weights = gradients = optimizer = 0.0
    for family, whole in count.items():
        ranks = fold.group_size(family)
        shared = zero > 0 and ranks > 1
        owned = whole / ranks if shared else whole
        weights += (owned if zero == 3 else whole) * itemsize + (owned * FLOAT32 if itemsize < FLOAT32 else 0)
        apart = owned if shared and (software.apart or zero > 1) else 0
        gradients += software.gradients * (apart + (whole if zero < 2 or not shared else 0))
        optimizer += 2 * software.moments * owned - software.moments * (hidden or {}).get(family, 0.0) / (ranks if shared else 1)
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


@shared_by_ops
def block_activations(
    rank: RankCosts, block: BlockSpec, again: tuple[str, ...] = (), sliced: int = 0, imbalance: float = 1.0
) -> float:
    """Return the bytes that a block keeps from forward to backward, for one micro-batch or one of its parts.

    These are the tensors that the autograd graphs of foldray's ops hold. The forward of the kinds of ops in `again` runs again.

    Args:
        sliced: number of slices; 0 if sequences are whole.
    """
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    n = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences
    total = 2 * n * model.hidden * b  # the input and the output of attention
    total += _attention(rank, block.attention, n, ATTENTION in again, sliced) - not_kept(rank, block, n, again)
    if block.mtp and ATTENTION not in again:  # a state, an embedding, both normed side by side, their product, numbers of tokens
        total += 5 * n * model.hidden * b + n * fold.tp * INT64
    if model.norms == "after":  # products take the residual stream itself, and not a norm of it
        total -= ((ATTENTION not in again) + (not block.dense or FFN not in again)) * n * model.hidden * b
    if block.after:  # what the norms behind attention and the network take
        total += ((ATTENTION not in again) + (not block.dense or FFN not in again)) * n * model.hidden * b
    if block.dense:
        total += 0.0 if FFN in again else _feed_forward(rank, n, block.dense)
    if not block.moe:
        return total
    if "moe" in rank.job.again:  # all that such a layer keeps is its token
        return total + n * model.hidden * b
    experts, topk = block.moe.experts, block.moe.topk
    # The token; two float32 numbers of each expert; of each chosen one, its number and two float32 numbers.
    total += n * (model.hidden * b + experts * 2 * FLOAT32 + topk * (INT64 + 2 * FLOAT32))
    # The rows of each token. If weights travel, the token of each row and the places of the weights as well.
    total += INT64 * n * (rank.travelling.room + (rank.travelling.room + topk) * bool(rank.travelling.beside))
    if block.moe.shared and SHARED not in again:
        # Without TP, the shared expert and the router have the same input tensor.
        total += _feed_forward(rank, n, block.moe.shared) - n * model.hidden * b * (fold.tp == 1)
        total += n * model.hidden * b * block.moe.shared_gate  # its output
    return total + expert_activations(rank, block, again, imbalance) + combined_rows(rank, block)


def combined_rows(rank: RankCosts, block: BlockSpec) -> float:
    """Return those bytes of `block_activations` that the weighted sum of rows keeps: the rows, their weights and places.

    A sum of rows whose weights have travelled keeps nothing.
    """
    assert block.moe
    if rank.travelling.beside:
        return 0.0
    n = rank.job.seq_len / (rank.fold.cp * rank.fold.tp) * rank.sequences
    return n * block.moe.topk * (rank.model.hidden * rank.device.bytes + _WEIGHTED_ROW)


def expert_activations(rank: RankCosts, block: BlockSpec, again: tuple[str, ...] = (), imbalance: float = 1.0) -> float:
    """Return those bytes of `block_activations` that belong to the experts: their rows, and what they compute."""
    assert block.moe
    fold, row, beside = rank.fold, rank.model.hidden * rank.device.bytes, rank.travelling.beside
    tokens = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences * imbalance
    rows, arrived = tokens * block.moe.topk * rank.overload, tokens * rank.travelling.arrived
    if EXPERT in again:
        return tokens * rank.travelling.fullest * (row + sum(beside))
    # As the products take them: gathered, by expert.
    computed = rows * (fold.etp * row + block.moe.expert.width * rank.device.bytes)
    if rank.travelling.inside:  # places of rows that a node passes on, and of their weights
        to_node = tokens * rank.travelling.fullest
        computed += 2 * INT64 * arrived + INT64 * to_node * (block.moe.topk + min(block.moe.topk, fold.ep_inside))
    return computed + (fold.etp * summed_rows(rank, block, rows, arrived) if beside else 0.0)


def summed_rows(rank: RankCosts, block: BlockSpec, rows: float, arrived: float) -> float:
    """Return the bytes that the experts' weighted sum keeps if the weights have travelled, without those that ETP gathers.

    The gradients of weights need the results. Rows that have arrived have weights and numbers of experts. `rows` are the
    experts' own.
    """
    assert block.moe
    # The token of a row; for each choice its weight, the number of its expert, and whether this rank has the expert.
    numbers = INT64 + block.moe.topk * (max(FLOAT32, rank.device.bytes) + INT64 + 1)
    return rows * (rank.model.hidden * rank.device.bytes + _WEIGHTED_ROW) + arrived * numbers


def operands(rank: RankCosts, block: BlockSpec, imbalance: float = 1.0) -> float:
    """Return the bytes that the gradients of a block's weights are computed from: inputs of products, gradients of results.

    If such gradients are ops of their own, these bytes stay until the next rows travel. This bound has all of a block.
    """
    fold, hidden, local = rank.fold, rank.model.hidden, block.attention.cut(rank.fold.tp)
    wide = rank.job.seq_len / fold.cp * rank.sequences
    made = sum(width + (inside or 0) for inside, width in local.inputs.values()) + sum(local.downs.values())
    numbers = wide * (2 * hidden + made + local.outputs) + 3 * hidden * wide / fold.tp * block.mtp
    for dense in (block.dense, block.moe and block.moe.shared):
        numbers += wide * (2 * hidden + (dense.width + dense.inner) / fold.tp) if dense else 0.0
    return numbers * rank.device.bytes + (expert_operands(rank, block, imbalance) if block.moe else 0.0)


def expert_operands(rank: RankCosts, block: BlockSpec, imbalance: float = 1.0) -> float:
    """Return those bytes of `operands` that belong to the experts."""
    assert block.moe
    fold, expert = rank.fold, block.moe.expert
    tokens = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences
    rows = tokens * block.moe.topk * fold.etp * imbalance * rank.overload
    return rows * (2 * rank.model.hidden + (expert.width + expert.inner) / fold.etp) * rank.device.bytes


def slices_of(slicing: Slicing) -> int:
    """Return the number of slices; 0 if sequences are whole."""
    return len(slicing.attention) if slicing.cuts_attention else 0


def _attention(rank: RankCosts, spec: AttentionSpec, n: float, again: bool, sliced: int) -> float:
    """Return the bytes of attention's input, queries, keys, values and outputs.

    With slices, a rank keeps the keys and values of all context-parallel ranks, even if attention runs again.
    """
    if spec.linear:
        return _linear(rank, spec, n, again, sliced)
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    tokens, queries, outputs = n * fold.tp, spec.queries / fold.tp, spec.outputs / fold.tp
    keys_and_values = (spec.keys + spec.values) / fold.tp
    memory = tokens * fold.cp * keys_and_values * b if sliced else 0.0
    if again:
        return memory
    if spec.latent:
        return memory + _latent(rank, spec, n, sliced)
    # Sines and cosines of rope. All blocks and micro-batches share them, so this counts a little too much.
    rotations = FLOAT32 * tokens / rank.sequences * spec.rope.dim if spec.rope else 0.0
    # With slices, `memory` already has keys and values. But if nothing changes queries and keys, they stay one tensor with the
    # values. A norm keeps this tensor, and makes other queries and keys.
    normed = spec.norm != "none"
    made = queries if sliced and (spec.rope or normed) else queries + keys_and_values
    if normed:
        made += queries + (keys_and_values if sliced else spec.keys / fold.tp)
    if spec.gates:  # what the heads put out before the gate, and its sigmoid
        made += outputs + spec.gates / fold.tp
    return memory + tokens * ((model.hidden + made + outputs) * b + spec.heads / fold.tp * FLOAT32) + rotations


def _linear(rank: RankCosts, spec: AttentionSpec, n: float, again: bool, sliced: int) -> float:
    """Return what `_attention` keeps of linear attention: its input, the product of it, outputs, and what slices begin with.

    With CP, it keeps the maps of all chunks of a slice, and the states between them.
    """
    fold, b, local = rank.fold, rank.device.bytes, spec.cut(rank.fold.tp)
    wide, chunks = max(FLOAT32, b), 2 * fold.cp if fold.cp > 1 else 0
    carried = rank.sequences * (local.state * wide + local.tail * b)
    if again:
        return carried * max(0, sliced - 1)
    made = sum(width for _, width in local.inputs.values())
    maps = chunks * local.heads * local.key_dim * (local.key_dim + 2 * local.value_dim) * wide + chunks * local.tail * b
    return n * fold.tp * (rank.model.hidden + made + local.outputs) * b + max(1, sliced) * (carried + rank.sequences * maps)


def _latent(rank: RankCosts, spec: AttentionSpec, n: float, sliced: int) -> float:
    """Return what `_attention` keeps of latent attention, beyond the keys and values of slices."""
    assert spec.latent
    assert spec.rope
    fold, hidden, b, latent = rank.fold, rank.model.hidden, rank.device.bytes, spec.latent
    tokens, local = n * fold.tp, spec.cut(fold.tp)
    narrow = n * sum(spec.downs.values()) + tokens * (latent.query_rank + latent.rank)  # before and after their norms
    whole = tokens * hidden if fold.tp > 1 and not latent.query_rank else 0.0
    made = local.queries + (0 if sliced else local.keys + local.values) + local.outputs
    numbers = n * hidden + narrow + whole + tokens * made
    return numbers * b + tokens * (local.heads + spec.rope.dim / rank.sequences) * FLOAT32


def _feed_forward(rank: RankCosts, n: float, spec: FeedForwardSpec) -> float:
    """Return the bytes of a feed-forward network's input and first product (both halves if it is gated)."""
    return n * (rank.fold.tp * rank.model.hidden + spec.width) * rank.device.bytes
