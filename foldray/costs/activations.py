"""What the ops of a block keep from forward to backward, in bytes of a rank (`memory.py`).

`imbalance` is everywhere the rows of the fullest rank over the mean, beyond the model's routing pattern.
"""

from __future__ import annotations

from foldray.blueprint import AttentionSpec, BlockSpec, FeedForwardSpec
from foldray.costs.device import FLOAT32, INT64
from foldray.costs.rank import RankCosts, shared_by_ops
from foldray.costs.working import not_kept
from foldray.graph import Slicing
from foldray.kinds import ATTENTION, EXPERT, FFN, SHARED

_WEIGHTED_ROW = 16  # bytes for the weight and the place of a row that is summed


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
        total += _feed_forward(rank, n, block.moe.shared) - n * model.hidden * b * (fold.tp == 1 and model.adapter is None)
        total += n * model.hidden * b * block.moe.shared_gate  # its output
    return total + expert_activations(rank, block, again, imbalance) + passed_on(rank, imbalance) + combined_rows(rank, block)


def combined_rows(rank: RankCosts, block: BlockSpec) -> float:
    """Return those bytes of `block_activations` that the weighted sum of rows keeps: the rows, their weights and places.

    A sum of rows whose weights have travelled keeps nothing.
    """
    assert block.moe
    if rank.travelling.beside:
        return 0.0
    n = rank.job.seq_len / (rank.fold.cp * rank.fold.tp) * rank.sequences
    return n * block.moe.topk * (rank.model.hidden * rank.device.bytes + _WEIGHTED_ROW)


def passed_on(rank: RankCosts, imbalance: float = 1.0) -> float:
    """Return those bytes of `block_activations` that say where a node's rows go, if a rank passes them on."""
    rows, fold = rank.travelling, rank.fold
    tokens = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences * imbalance
    return INT64 * tokens * (rows.inside + rows.fullest * min(rank.model.topk, fold.ep_inside)) * bool(rows.inside)


def expert_activations(rank: RankCosts, block: BlockSpec, again: tuple[str, ...] = (), imbalance: float = 1.0) -> float:
    """Return those bytes of `block_activations` that belong to the experts: their rows, and what they compute."""
    assert block.moe
    fold, row, beside = rank.fold, rank.model.hidden * rank.device.bytes, rank.travelling.beside
    tokens = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences * imbalance
    rows, arrived = tokens * block.moe.topk * rank.overload, tokens * rank.travelling.arrived
    if EXPERT in again:
        return arrived * (row + sum(beside))
    # As the products take them: gathered, by expert.
    given, b = rank.model.adapter, rank.device.bytes
    narrow = given.rank * (given.inwards + given.outwards) if given else 0  # between the two products of adapters
    # Frozen products keep no input.
    computed = rows * ((given is None or given.inwards) * fold.etp * row + (block.moe.expert.width + fold.etp * narrow) * b)
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
    tokens, queries, outputs, local = n * fold.tp, spec.queries / fold.tp, spec.outputs / fold.tp, spec.cut(fold.tp)
    keys_and_values = local.keys + local.values
    memory = tokens * fold.cp * keys_and_values * b if sliced else 0.0
    if again:
        return memory
    if spec.latent:
        return memory + _latent(rank, spec, n, sliced)
    # With slices, `memory` already has keys and values. But if nothing changes queries and keys, they stay one tensor with the
    # values. A norm keeps this tensor, and makes other queries and keys; behind the rotation, it keeps queries and keys alone.
    normed, adapters = spec.norm != "none", model.adapter
    made = queries if sliced and (spec.rope or normed) else queries + keys_and_values
    if normed:
        made += queries + (keys_and_values if sliced and spec.norm != "turned_head" else local.keys)
    if spec.gates:  # what the heads put out before the gate, and its sigmoid
        made += outputs + spec.gates / fold.tp
    if adapters:  # the narrow rows between the two products of an adapter
        made += adapters.rank * len(adapters.attention)
        # Frozen products keep no input, and norms keep theirs.
        made -= model.hidden * (not set(adapters.attention) - {"out"})
    kept = tokens * ((model.hidden + made + outputs) * b + spec.heads / fold.tp * FLOAT32)
    return memory + kept + _rotations(rank, spec)


def _linear(rank: RankCosts, spec: AttentionSpec, n: float, again: bool, sliced: int) -> float:
    """Return what `_attention` keeps of linear attention: its input, the product of it, outputs, and what slices begin with.

    With CP, it keeps the maps of all chunks of a slice, and the states between them.
    """
    fold, b, local = rank.fold, rank.device.bytes, spec.cut(rank.fold.tp)
    wide, chunks, carried = max(FLOAT32, b), 2 * fold.cp if fold.cp > 1 else 0, _carried(rank, spec)
    if again:
        return carried * max(0, sliced - 1)
    made = sum(width for _, width in local.inputs.values()) + sum(local.downs.values())
    maps = chunks * local.heads * local.key_dim * (local.key_dim + 2 * local.value_dim) * wide + chunks * local.tail * b
    numbers = n * fold.tp * (rank.model.hidden + made + local.outputs)
    numbers += n * rank.model.hidden * (fold.tp > 1 and bool(local.downs))  # the piece that narrow vectors are made of
    return numbers * b + max(1, sliced) * (carried + rank.sequences * maps)


def _carried(rank: RankCosts, spec: AttentionSpec) -> float:
    """Return the bytes with which a slice of linear attention begins: a state, and the last inputs of its convolution."""
    if not spec.linear:
        return 0.0
    local, b = spec.cut(rank.fold.tp), rank.device.bytes
    return rank.sequences * (local.state * max(FLOAT32, b) + local.tail * b)


def _latent(rank: RankCosts, spec: AttentionSpec, n: float, sliced: int) -> float:
    """Return what `_attention` keeps of latent attention, beyond the keys and values of slices."""
    assert spec.latent
    fold, hidden, b, latent = rank.fold, rank.model.hidden, rank.device.bytes, spec.latent
    tokens, local = n * fold.tp, spec.cut(fold.tp)
    narrow = n * sum(spec.downs.values()) + tokens * (latent.query_rank + latent.rank)  # before and after their norms
    whole = tokens * hidden if fold.tp > 1 and not latent.query_rank else 0.0
    made = local.queries + (0 if sliced else local.keys + local.values) + local.outputs
    numbers = n * hidden + narrow + whole + tokens * made
    return numbers * b + tokens * local.heads * FLOAT32 + _rotations(rank, spec)


def _feed_forward(rank: RankCosts, n: float, spec: FeedForwardSpec) -> float:
    """Return the bytes of a feed-forward network's input and first product (both halves if it is gated).

    With adapters, its products are frozen, and keep no input.
    """
    return n * (rank.fold.tp * rank.model.hidden * (rank.model.adapter is None) + spec.width) * rank.device.bytes


@shared_by_ops
def moved_bytes(rank: RankCosts, block: BlockSpec, kind: str, sliced: int = 0, imbalance: float = 1.0) -> float:
    """Return the bytes that the ops of a kind keep at a block, and that go to the host if the kind is offloaded.

    Weights and the tables of positions stay, and so do the keys and values that slices share.
    """
    freed = freed_bytes(rank, block, (kind,), sliced, imbalance)
    # Without TP, the input of the shared expert is on the device still, because the router keeps it, too.
    shares = kind == SHARED and freed and rank.fold.tp == 1 and rank.model.adapter is None
    # What a slice of linear attention begins with travels, and is on the device as well.
    carried = _carried(rank, block.attention) * max(0, sliced - 1) if kind == ATTENTION else 0.0
    return freed + shares * residual(rank) + carried


@shared_by_ops
def freed_bytes(rank: RankCosts, block: BlockSpec, kinds: tuple[str, ...], sliced: int = 0, imbalance: float = 1.0) -> float:
    """Return those bytes of `block_activations` that are not on the device while what these kinds of ops keep is on the host.

    What runs again keeps its input. Here the inputs of attention and of dense networks leave, too, and the rows of experts.
    """
    if not kinds:
        return 0.0
    whole = block_activations(rank, block, (), sliced, imbalance)
    freed = whole - block_activations(rank, block, kinds, sliced, imbalance)
    if ATTENTION in kinds:
        freed += residual(rank) - _rotations(rank, block.attention)
    if FFN in kinds and block.dense:
        freed += residual(rank)
    if EXPERT in kinds and block.moe:
        freed += expert_activations(rank, block, (EXPERT,), imbalance)
    return freed


def residual(rank: RankCosts) -> float:
    """Return the bytes of a rank's share of the residual stream at a block."""
    return rank.job.seq_len / (rank.fold.cp * rank.fold.tp) * rank.sequences * rank.model.hidden * rank.device.bytes


def _rotations(rank: RankCosts, spec: AttentionSpec) -> float:
    """Return the bytes of the cosines and sines of a block's positions. All blocks and micro-batches share them, so
    `block_activations` counts a little too much."""
    tokens = rank.job.seq_len / rank.fold.cp
    return 0.0 if spec.linear or not spec.rope else FLOAT32 * tokens * spec.rope.dim
