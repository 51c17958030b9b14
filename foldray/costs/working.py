"""The memory that a rank needs while its ops run, in bytes, beyond parameters and what is kept from forward to backward.

Of moments that follow each other, the fullest one counts. The bytes of a network's backward are those of the runtime's kernels
(`kernels/experts.py`), and those after backward are those of its gradient buffers.
"""

from __future__ import annotations

from typing import NamedTuple

from foldray.activations import find_activation
from foldray.blueprint import AttentionSpec, BlockSpec, FeedForwardSpec
from foldray.blueprint.grouping import one_by_one
from foldray.costs.candidate import Content
from foldray.costs.device import FLOAT32, INT64
from foldray.costs.hardware import counts
from foldray.costs.parts import LINEAR_CHUNK
from foldray.costs.rank import RankCosts, shared_by_fold
from foldray.graph import Slicing
from foldray.kinds import ATTENTION, EXPERT, FFN


def buffers(rank: RankCosts, slicing: Slicing, imbalance: float = 1.0, alone: bool = False) -> float:
    """Return the bytes of buffers.

    They hold the rows that two pieces send and receive, a handover that arrives and one that leaves, and the weights of the
    largest attention and of the largest experts under ZeRO-3.

    Args:
        alone: whether no op runs beside those of another piece, so that only one piece has rows that travel.
    """
    model, fold, b = rank.model, rank.fold, rank.device.bytes
    total = (1 if alone else 2) * exchanged(rank, slicing, imbalance)
    total += 2 * slicing.length * rank.sequences * model.hidden * b * (fold.pp > 1)
    if rank.zero == 3:
        by_kind = [[count for (of, _), count in rank.weights.items() if of == kind] for kind in (ATTENTION, EXPERT)]
        total += b * sum(max(numbers, default=0.0) for numbers in by_kind)
    return total


def exchanged(rank: RankCosts, slicing: Slicing, imbalance: float = 1.0) -> float:
    """Return the bytes of the rows that a piece sends and receives."""
    travelling = rank.travelling
    row = rank.model.hidden * rank.device.bytes + sum(travelling.beside)
    rows = max(slicing.moe) * rank.sequences * (travelling.room + imbalance * travelling.fullest)
    return rows * row * (rank.fold.ep > 1)


def head_logits(rank: RankCosts, tokens: int) -> float:
    """Return the bytes of the logits of a piece at the head's fullest moment."""
    if rank.job.software.fused_loss:  # as TransformerEngine's: logits, whose place their gradients take
        return tokens * rank.sequences * (rank.model.vocab + rank.model.hidden * rank.fold.tp) * rank.device.bytes
    # Without TP, backward has the log-softmax, its gradient and that of the logits, all in float32. TP's own cross-entropy has
    # fewer tensors at once. Its fullest moment is in forward: a float32 copy of the logits, and its softmax.
    wide = max(FLOAT32, rank.device.bytes)
    made = rank.model.vocab * wide * (3 if rank.fold.tp == 1 else 2)
    # The output of the last norm, and TP's gather of it.
    taken = rank.model.hidden * rank.device.bytes * (1 + (rank.fold.tp > 1) * rank.fold.tp)
    return tokens * rank.sequences * (made + taken)


def networks(rank: RankCosts, block: BlockSpec, slicing: Slicing, imbalance: float = 1.0) -> float:
    """Return the bytes that a block's feed-forward network or its experts need while they run, beyond `buffers`."""
    tokens, fold, row = max(slicing.moe) * rank.sequences, rank.fold, rank.model.hidden * rank.device.bytes
    need = 0.0
    if block.dense:
        wide = max(slicing.attention) * rank.sequences * fold.tp
        need = 2 * wide * row + _backward(rank, FFN, block, wide / fold.tp, block.dense)
    if block.moe and rank.travelling.beside:
        fullest = imbalance * rank.travelling.fullest
        in_buffers = tokens * (rank.travelling.room + fullest)
        need = max(need, _summing(rank, block, tokens * imbalance) - in_buffers * row * (fold.ep > 1))
    elif block.moe:
        rows = tokens * block.moe.topk * imbalance * rank.overload
        sorts = fold.etp > 1 or (fold.ep > 1 and block.moe.experts > fold.ep)
        # Rows in the order of arrival; rows of all ETP ranks, also sorted by expert if there are several; their gradients.
        back = rows * row * (1 + fold.etp * (1 + sorts)) + _backward(rank, EXPERT, block, rows, block.moe.expert)
        # When ETP ranks exchange results, a rank holds the rows of all ETP ranks, its results in the order of arrival, the
        # results that it receives and their float32 sum, the rows that it has received, and the rows that it will send.
        gathered = rows * (row * (2 + 3 * fold.etp) + rank.model.hidden * FLOAT32) * (fold.etp > 1)
        # `buffers` counts the rows of the piece already. The rows that the weighted sum keeps do not exist at these moments.
        beside = rows * row * (1 + 2 * (fold.ep > 1))
        need = max(need, max(back, gathered) - beside)
    return need


def in_chunks(rank: RankCosts, block: BlockSpec, slicing: Slicing, imbalance: float = 1.0) -> float:
    """Return the bytes that linear attention needs in backward, which computes all of a slice again in chunks and keeps it.

    These are tensors in float32 at the fullest moment of a rank's chunk of tokens (`kernels/delta.py`).
    """
    if not block.attention.linear:
        return 0.0
    local, chunks = block.attention.cut(rank.fold.tp), 1 if rank.fold.cp == 1 else 2
    tokens = max(slicing.attention) * rank.fold.tp / chunks
    # Fitted to ten shapes of heads on a CPU, with chunks of 64 tokens: within 9 %.
    numbers = local.heads * (7.5 * min(LINEAR_CHUNK, tokens) + 3 * local.key_dim + 7 * local.value_dim)
    numbers += 7 * sum(local.mixed.values()) + 20 * local.decays * (local.decays > local.heads)
    return tokens * rank.sequences * numbers * max(FLOAT32, rank.device.bytes)


def passing_keys(rank: RankCosts, block: BlockSpec, slicing: Slicing, imbalance: float = 1.0) -> float:
    """Return the bytes of other ranks' keys and values while a block attends, and of float32 gradients of keys and values.

    A ring holds the keys and values of two other ranks (`model/context.py`), and an all-gather those of all ranks. Slices keep
    those of all ranks, and their gradients add up until the first slice has gone backward.
    """
    if block.attention.linear:
        return 0.0
    numbers = slicing.length * rank.sequences * _keys_and_values(rank, block.attention)
    if slicing.cuts_attention:
        return FLOAT32 * rank.fold.cp * numbers
    if rank.fold.cp == 1:
        return 0.0
    return numbers * (2 if rank.job.context == "ring" else rank.fold.cp) * (rank.device.bytes + FLOAT32)


def _keys_and_values(rank: RankCosts, spec: AttentionSpec) -> int:
    """Return the width of the keys and values of all TP ranks, several of which may have the same ones."""
    return (spec.keys + spec.values) * spec.copied(rank.fold.tp)


def _summing(rank: RankCosts, block: BlockSpec, tokens: float) -> float:
    """Return the bytes that experts need in backward if their rank sums the results, with the rows that have arrived.

    There are three full moments: when the gradients of sums become the gradients of results, between the products of the
    experts, and when the gradients of the experts' rows are summed. On a CPU, such sums have float32 copies of both sides. At the
    first moment, each choice of a row that has arrived, and each row of an expert, has its place twice and a float32 gradient.
    `tokens` are those of a rank, times the imbalance.
    """
    assert block.moe
    fold, b, moe = rank.fold, rank.device.bytes, block.moe
    rows, arrived = tokens * moe.topk * rank.overload, tokens * rank.travelling.arrived * fold.etp
    both = (rows * fold.etp + arrived) * rank.model.hidden
    results = rows * fold.etp * rank.model.hidden * b
    wide = both * FLOAT32 * (rank.device.hardware.processors == 1 and b < FLOAT32)
    # By the last moment, the kept results, rows and first products are freed.
    freed = 2 * results + rows * moe.expert.width * b
    last = both * b + wide + b * _weight_gradients(rank, EXPERT, block, moe.expert) - freed
    received = arrived * rank.model.hidden * b * (1 / fold.etp + (fold.etp > 1))  # as they have arrived, and gathered
    beside = (arrived * moe.topk + rows * fold.etp) * (2 * INT64 + FLOAT32)
    return received + max(results + wide + beside, results + _backward(rank, EXPERT, block, rows, moe.expert), last)


def _backward(rank: RankCosts, kind: str, block: BlockSpec, rows: float, spec: FeedForwardSpec) -> float:
    """Return the bytes of a network's backward between its two products, and of the gradients of its weights.

    These are the gradients of both sides of the activation, and the activation's result again, for the rows that a rank would
    have if it had the whole width of the network. A CPU that computes experts one after another has those of one at a time. On a
    GPU, gradients of weights follow when that of the activation's result is gone.
    """
    local = block.moe.experts / rank.fold.ep if kind == EXPERT and block.moe else 1.0
    on_cpu, made = rank.device.hardware.processors == 1, _weight_gradients(rank, kind, block, spec)
    if on_cpu and one_by_one(rows, rank.model.hidden, spec.inner, local):
        rows /= local
    passing = rows * (1 + find_activation(rank.model.ffn).beside) * spec.inner
    both = passing + made if on_cpu else max(passing, made)
    return (rows * (spec.width + spec.inner) + both) * rank.device.bytes


def _weight_gradients(rank: RankCosts, kind: str, block: BlockSpec, spec: FeedForwardSpec) -> float:
    """Return the number of a network's gradients of weights that exist before they are added to the sums.

    On a CPU, all do. On a GPU, a product adds the gradients of a large matrix itself, and small matrices follow one another.
    """
    count, parts = rank.trained[kind, block], rank.fold.etp if kind == EXPERT else rank.fold.tp
    if rank.device.hardware.processors == 1:
        return count
    small = [width for width in (spec.width, spec.inner) if width * rank.model.hidden / parts < counts().summing]
    return count * max(small, default=0) / (spec.width + spec.inner)


def not_kept(rank: RankCosts, block: BlockSpec, n: float, again: tuple[str, ...]) -> float:
    """Return those bytes of a block's activations that are not kept because parts of ops run again (`Job.again`)."""
    if not rank.job.again:
        return 0.0
    parts, spec, local, tokens = rank.job.again, block.attention, block.attention.cut(rank.fold.tp), n * rank.fold.tp
    row, spared = rank.model.hidden * rank.device.bytes, 0.0
    if "layernorm" in parts:  # inputs of attention and of the experts, or of a dense network
        spared += (n if block.moe else tokens) * row * (FFN not in again)
        spared += (n if spec.latent else tokens) * row * (ATTENTION not in again)
    if "core_attn" in parts and ATTENTION not in again:  # the log-sum-exp; the next product keeps the results
        spared += tokens * local.heads * FLOAT32
    if "mla_up_proj" in parts and spec.latent and ATTENTION not in again:
        spared += tokens * (local.queries + local.keys + local.values) * rank.device.bytes
    return spared


def unreduced(rank: RankCosts, content: Content) -> float:
    """Return the bytes of whole sums that micro-batches add to under ZeRO-2, until the last one's gradients are reduced."""
    return FLOAT32 * _shared(rank, content).whole if rank.zero == 2 else 0.0


def after_backward(rank: RankCosts, content: Content, several: bool) -> float:
    """Return the bytes that a position needs beyond its parameters while gradients are reduced and weights are gathered.

    Gradients are sent from copies, which stay until all have left. ZeRO-2 frees a buffer's gradients with the copy. Then weights
    are gathered buffer by buffer, and are put in order twice. With `several` passes, the whole sums of ZeRO-2 already count with
    the parameters. Software that reduces in place needs nothing.
    """
    if rank.zero not in (1, 2) or not rank.job.software.apart:
        return 0.0
    shared = _shared(rank, content)
    leaving = shared.largest + (not several) * shared.whole if rank.zero == 2 else shared.whole
    return max(FLOAT32 * leaving, rank.device.bytes * (shared.own + 3 * shared.largest) - several * unreduced(rank, content))


class _Shared(NamedTuple):
    """Numbers of parameters whose optimizer several ranks share: all, the largest gradient class, and a rank's share of it."""

    whole: float
    largest: float
    own: float


@shared_by_fold
def _shared(rank: RankCosts, content: Content) -> _Shared:
    sizes = [(count, rank.fold.group_size(family)) for family, count in rank.elements(content).items()]
    shared = [(count, count / ranks) for count, ranks in sizes if ranks > 1]
    return _Shared(sum(count for count, _ in shared), *max(shared, default=(0.0, 0.0)))
