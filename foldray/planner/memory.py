"""What a rank holds, in bytes, for the fullest pipeline position.

Weights, gradients and the optimizer's state are counted from the parameters; activations from what the runtime's ops keep between
forward and backward, times the micro-batches that the pipeline has in flight at a position (its list's peak).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint import AttentionSpec, BlockSpec, FeedForwardSpec
from foldray.fold import Fold
from foldray.kinds import ATTENTION, EXPERT, FFN, ROUTE
from foldray.planner.candidate import Candidate, Pieces
from foldray.planner.costs import RankCosts
from foldray.planner.layout import Content, PipelineLayout
from foldray.planner.memo import ActivationKey, Held
from foldray.schedule import PipelineGraph, Slicing, computed

GIB = 2**30


class Memory(NamedTuple):
    """Bytes of one rank, by what they hold.

    Args:
        weights: as they compute, and float32 copies where they compute in less.
        gradients: float32 sums.
        optimizer: two moments.
        activations: kept from forward to backward, of all micro-batches in flight.
        buffers: rows on their way between ranks, keys and values of sliced sequences with their gradients, weights gathered by
            ZeRO-3.
        logits: of one piece, with their gradient and float32 copy.
        workspace: context, communicators, fragments.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    logits: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(self)


def ledger(candidate: Candidate, rank: RankCosts, imbalance: float = 1.0) -> Memory:
    """Of the position that holds most.

    Args:
        rank: what the candidate's ranks cost.
        imbalance: rows of the fullest rank over the mean.
    """
    return peak_memory(rank, candidate.layout, candidate.pipeline, candidate.pieces, imbalance)


def peak_memory(
    rank: RankCosts, layout: PipelineLayout, pipeline: PipelineGraph, pieces: Pieces, imbalance: float = 1.0
) -> Memory:
    """As `ledger`, of all candidates that have these in common."""
    places = _fullest_places(layout)
    return max((_position(rank, layout, place, pipeline, pieces, imbalance) for place in places), key=lambda each: each.total)


def _fullest_places(layout: PipelineLayout) -> list[int]:
    """One of each kind of position: of those with stages alike, the first one has most micro-batches in flight."""
    return list({forms: place for place, forms in reversed([*enumerate(layout.forms_at)])}.values())


def _position(
    rank: RankCosts, layout: PipelineLayout, place: int, pipeline: PipelineGraph, pieces: Pieces, imbalance: float
) -> Memory:
    content, sliced = layout.contents_at[place], pieces.slicing.degree > 1
    kept = sum(
        count * block_activations(rank, block, pieces.recompute, sliced, imbalance)
        for block, count in blocks_in_flight(layout, pipeline, place)
    )
    logits = 0.0
    if content.head:
        tokens = max(pieces.slicing.moe) * rank.sequences
        logits = tokens * rank.model.vocab * (2 * 4 + rank.device.bytes)
    held, workspace = content_parameters(rank, content), rank.device.share["workspace"] * GIB
    return Memory(*held, kept * pieces.batch_degree, buffers(rank, pieces.slicing, imbalance), logits, workspace)


def least_memory(
    rank: RankCosts, layout: PipelineLayout, pipeline: PipelineGraph, recompute: tuple[str, ...], imbalance: float
) -> float:
    """Bytes of the fullest position at least, however sequences are cut: parameters, and activations of whole sequences."""
    found = 0.0
    for place in _fullest_places(layout):
        held = sum(content_parameters(rank, layout.contents_at[place]))
        for block, count in blocks_in_flight(layout, pipeline, place):
            held += count * block_activations(rank, block, recompute, False, imbalance)
        found = max(found, held)
    return found + rank.device.share["workspace"] * GIB


def content_parameters(rank: RankCosts, content: Content) -> Held:
    """Bytes that the parameters of a position cost."""
    known = rank.tables.parameters
    if content not in known:
        known[content] = parameters(rank.fold, rank.zero, rank.device.bytes, rank.elements(content))
    return known[content]


def parameters(fold: Fold, zero: int, itemsize: int, count: Mapping[str, float]) -> Held:
    """What so many parameters of a rank cost it, by family, if it computes with so many bytes of each.

    The optimizer updates float32 weights: copies where a rank computes in less, or where it updates only those that it owns. Sums
    of gradients that are shared out lie beside the gradients, unless these are given back as they leave.
    """
    weights = gradients = optimizer = 0.0
    for family, ranks in (("dp_cp", fold.dp * fold.cp), ("edp", fold.edp)):
        whole, shared = count[family], zero > 0 and ranks > 1
        own = whole / ranks if shared else whole
        weights += (own if zero == 3 else whole) * itemsize + (own * 4 if itemsize < 4 or (shared and zero < 3) else 0)
        gradients += 4 * ((own if shared else 0) + (whole if zero < 2 or not shared else 0))
        optimizer += 8 * own
    return Held(weights, gradients, optimizer)


@lru_cache(maxsize=4096)
def in_flight(graph: PipelineGraph, place: int) -> Mapping[int, int]:
    """By stage: micro-batches whose activations a position keeps at the moment at which it keeps most."""
    # It keeps most once it has warmed up, which takes two rounds.
    graph = replace(graph, micro_batches=min(graph.micro_batches, 3 * graph.pp))
    alive, most, total, peak = Counter[int](), Counter[int](), 0, 0
    for op in computed(graph, place):
        change = 1 if op.direction == "F" else -1
        alive[op.layer] += change
        total += change
        if total > peak:
            most, peak = Counter(alive), total
    return most


@lru_cache(maxsize=16384)
def blocks_in_flight(layout: PipelineLayout, graph: PipelineGraph, place: int) -> list[tuple[BlockSpec, int]]:
    """All blocks that differ, and of how many of each a position keeps activations, each once for every micro-batch."""
    found = Counter[BlockSpec]()
    for stage, flying in in_flight(graph, place).items():
        for block, count in layout.contents[layout.form_of[stage]].blocks:
            found[block] += flying * count
    return list(found.items())


def block_activations(
    rank: RankCosts, block: BlockSpec, again: tuple[str, ...] = (), sliced: bool = False, imbalance: float = 1.0
) -> float:
    """Bytes that a block keeps of one micro-batch from forward to backward: what our ops' small autograd graphs hold.

    Args:
        again: kinds of ops that are computed again.
        sliced: whether attention works on slices.
    """
    known, key = rank.blocks.activations, ActivationKey(block, again, sliced, imbalance)
    if key not in known:
        known[key] = _block_activations(rank, block, again, sliced, imbalance)
    return known[key]


def _block_activations(rank: RankCosts, block: BlockSpec, again: tuple[str, ...], sliced: bool, imbalance: float) -> float:
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    n = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences
    total = 2 * n * model.hidden * b  # what attention starts from, and what comes behind it
    total += _attention(rank, block.attention, n, ATTENTION in again, sliced)
    if block.dense:
        total += 0.0 if FFN in again else _feed_forward(rank, n, block.dense)
    if not block.moe:
        return total
    experts, topk = block.moe.experts, block.moe.topk
    if ROUTE not in again:
        total += n * (model.hidden * b + experts * 8 + topk * 32)
        if block.moe.shared:
            total += _feed_forward(rank, n, block.moe.shared) - n * model.hidden * b * (fold.tp == 1)  # they share their input
    rows = n * topk * imbalance
    total += rows * model.hidden * b  # as dispatched
    if EXPERT not in again:
        regrouped = fold.etp > 1 or (fold.ep > 1 and experts > fold.ep)
        total += rows * fold.etp * (model.hidden * regrouped + block.moe.expert.width / fold.etp) * b
    return total + n * topk * (model.hidden * b + 16)  # as combined


def _attention(rank: RankCosts, spec: AttentionSpec, n: float, again: bool, sliced: bool) -> float:
    """Input, queries, keys, values, results; sliced, those of all context-parallel ranks, whatever is computed again."""
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    tokens, queries, outputs = n * fold.tp, spec.queries / fold.tp, spec.outputs / fold.tp
    keys_and_values = (spec.keys + spec.values) / fold.tp
    memory = tokens * fold.cp * keys_and_values * b if sliced else 0.0
    if again:
        return memory
    rope = model.positions == "rope"
    turned = 8 * tokens / rank.sequences * spec.key_dim if rope else 0.0  # sines and cosines
    # Sliced, keys and values lie in the memory; but where nothing is turned, queries are part of one product with them.
    made = queries if sliced and rope else queries + keys_and_values
    return memory + tokens * ((model.hidden + made + outputs) * b + spec.heads / fold.tp * 4) + turned


def _feed_forward(rank: RankCosts, n: float, spec: FeedForwardSpec) -> float:
    """Its input, and the first product, of a gated one both halves."""
    return n * (rank.fold.tp * rank.model.hidden + spec.width) * rank.device.bytes


def buffers(rank: RankCosts, slicing: Slicing, imbalance: float = 1.0) -> float:
    """Rows under way, two pieces each way; a layer's gradients of keys and values; ZeRO-3's gathered block.

    Args:
        slicing: of the local sequences.
    """
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    rows = max(slicing.moe) * rank.sequences * model.topk * model.hidden * b
    found = 2 * rows * (1 + imbalance) * (fold.ep > 1)
    if slicing.degree > 1:
        attention = model.block(0).attention
        found += 4 * slicing.length * rank.sequences * fold.cp * (attention.keys + attention.values)
    if rank.zero == 3:
        largest = [[count for (own, _), count in rank.weights.items() if own == kind] for kind in (ATTENTION, EXPERT)]
        found += b * sum(max(counts, default=0.0) for counts in largest)
    return found
