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

from foldray.fold import Fold
from foldray.kinds import ATTENTION, EXPERT, FFN, ROUTE
from foldray.planner.candidate import Candidate
from foldray.planner.costs import RankCosts
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


class Held(NamedTuple):
    """Bytes that parameters cost a rank: as in `Memory`."""

    weights: float
    gradients: float
    optimizer: float


def ledger(candidate: Candidate, rank: RankCosts, imbalance: float = 1.0) -> Memory:
    """Of the position that holds most.

    Args:
        rank: what the candidate's ranks cost.
        imbalance: rows of the fullest rank over the mean.
    """
    stages, pipeline, pp = candidate.graph.stages, candidate.graph.pipeline, candidate.fold.pp
    # Of positions with stages alike, the first one has most micro-batches in flight.
    own = [tuple(stages[stage] for stage in pipeline.stages_at(place)) for place in range(pp)]
    different = {(own[place], place == 0, place == pp - 1): place for place in reversed(range(pp))}
    return max((_position(candidate, rank, place, imbalance) for place in different.values()), key=lambda each: each.total)


def _position(candidate: Candidate, rank: RankCosts, place: int, imbalance: float) -> Memory:
    graph = candidate.graph
    stages = graph.pipeline.stages_at(place)
    kinds: Counter[str] = Counter(kind for number in stages for kind in graph.stages[number])
    held = parameters(rank.fold, rank.zero, rank.device.bytes, rank.elements(kinds, place == 0, place == graph.pp - 1))
    flying, sliced = in_flight(graph.pipeline, place), graph.slicing.degree > 1
    kept = 0.0
    for number in stages:
        for kind, count in Counter(graph.stages[number]).items():
            kept += flying.get(number, 0) * count * block_activations(rank, kind, graph.recompute, sliced, imbalance)
    logits = 0.0
    if place == graph.pp - 1:
        tokens = max(graph.slicing.moe) * rank.sequences * rank.fold.tp
        logits = tokens * rank.model.vocab / rank.fold.tp * (2 * 4 + rank.device.bytes)
    kept *= candidate.ordering.batch_degree
    return Memory(*held, kept, buffers(rank, graph.slicing, imbalance), logits, rank.device.share["workspace"] * GIB)


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
    alive, most = Counter[int](), Counter[int]()
    for op in computed(graph, place):
        alive[op.layer] += 1 if op.direction == "F" else -1
        if alive.total() > most.total():
            most = Counter(alive)
    return most


def block_activations(
    rank: RankCosts, kind: str, again: tuple[str, ...] = (), sliced: bool = False, imbalance: float = 1.0
) -> float:
    """Bytes that a block keeps of one micro-batch from forward to backward: what our ops' small autograd graphs hold.

    Args:
        kind: dense or moe.
        again: kinds of ops that are computed again.
        sliced: whether attention works on slices.
    """
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    n = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences
    total = 2 * n * model.hidden * b  # what attention starts from, and what comes behind it
    total += _attention(rank, n, ATTENTION in again, sliced)
    if kind == "dense":
        return total + (0.0 if FFN in again else _feed_forward(rank, n, model.ffn_hidden))
    if ROUTE not in again:
        total += n * (model.hidden * b + model.experts * 8 + model.topk * 32)
        if model.shared_hidden:
            total += _feed_forward(rank, n, model.shared_hidden) - n * model.hidden * b * (fold.tp == 1)  # they share their input
    rows = n * model.topk * imbalance
    total += rows * model.hidden * b  # as dispatched
    if EXPERT not in again:
        regrouped = fold.etp > 1 or (fold.ep > 1 and model.experts > fold.ep)
        inner = len(model.activation.inwards) * model.expert_hidden / fold.etp
        total += rows * fold.etp * (model.hidden * regrouped + inner) * b
    return total + n * model.topk * (model.hidden * b + 16)  # as combined


def _attention(rank: RankCosts, n: float, again: bool, sliced: bool) -> float:
    """Input, queries, keys, values, results; sliced, those of all context-parallel ranks, whatever is computed again."""
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    tokens, heads, kv = n * fold.tp, model.heads / fold.tp * model.head_dim, model.kv_heads / fold.tp * model.head_dim
    memory = tokens * fold.cp * 2 * kv * b if sliced else 0.0
    if again:
        return memory
    rope = model.positions == "rope"
    turned = 8 * tokens / rank.sequences * model.head_dim if rope else 0.0  # sines and cosines
    # Sliced, keys and values lie in the memory; but where nothing is turned, queries are part of one product with them.
    made = heads if sliced and rope else heads + 2 * kv
    return memory + tokens * ((model.hidden + made + heads) * b + model.heads / fold.tp * 4) + turned


def _feed_forward(rank: RankCosts, n: float, inner: int) -> float:
    """Its input, and the first product, of a gated one both halves."""
    model, tp = rank.model, rank.fold.tp
    return n * (tp * model.hidden + len(model.activation.inwards) * inner) * rank.device.bytes


def buffers(rank: RankCosts, slicing: Slicing, imbalance: float = 1.0) -> float:
    """Rows under way, two pieces each way; a layer's gradients of keys and values; ZeRO-3's gathered block.

    Args:
        slicing: of the local sequences.
    """
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    rows = max(slicing.moe) * rank.sequences * model.topk * model.hidden * b
    found = 2 * rows * (1 + imbalance) * (fold.ep > 1)
    if slicing.degree > 1:
        found += 2 * 4 * slicing.length * rank.sequences * fold.cp * model.kv_heads * model.head_dim
    if rank.zero == 3:
        found += b * (rank.weights[ATTENTION] + rank.weights[EXPERT])
    return found
