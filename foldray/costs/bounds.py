"""Lower bounds of a step's time, from the seconds that its ops compute and send, without a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.costs.candidate import Content, Pieces, PipelineLayout, Positions
from foldray.costs.rank import RankCosts, Totals, shared_by_ops
from foldray.graph import Slicing, gathers
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    GATHER,
    HEAD,
    INTRA_COMBINE,
    INTRA_DISPATCH,
    MERGE,
    OP_KINDS,
    PROJECT,
    ROUTE,
    SHARED,
)

_TRAVEL = frozenset(name for name, row in OP_KINDS.items() if row.travels)
_ROUTED = (ROUTE, DISPATCH, EXPERT, COMBINE, MERGE)
_BESIDE = (GATHER, SHARED)
"""Ops beside the chain that one piece goes through."""
_NOTHING = Totals(0.0, 0.0, 0.0)


class PassWork(NamedTuple):
    """Seconds of one pass.

    Args:
        computed: all computation.
        travels: all all-to-alls.
        inside: those of them inside nodes, if rows travel between nodes besides. Both may travel at once.
        least: a lower bound of the whole pass if blocks drain.
        piece: a lower bound of the seconds until the first piece is through.
    """

    computed: float
    travels: float
    inside: float
    least: float
    piece: float

    @property
    def across(self) -> float:
        """All-to-alls that are not inside nodes, or all of them."""
        return self.travels - self.inside

    @property
    def link(self) -> float:
        """All-to-alls on the link that has most of them."""
        return max(self.across, self.inside)


class StageBound(NamedTuple):
    """Lower bounds of the seconds of a stage, forward and backward together: of all of it, and of its first piece."""

    seconds: float
    piece: float


def _ops(rank: RankCosts, block: BlockSpec, pieces: Pieces) -> tuple[str, ...]:
    network = (*rank.mixture, *((SHARED,) if block.moe.shared else ())) if block.moe else (FFN,)
    kinds = (ATTENTION, *network)
    return (PROJECT, GATHER, *kinds) if gathers(pieces.slicing, rank.fold.cp) else kinds


def ops_of_pass(rank: RankCosts, block: BlockSpec, back: bool, pieces: Pieces) -> list[tuple[str, bool]]:
    """Return the ops of one pass of a block, as (kind, whether it is a backward op). Recomputed ops are forward ops."""
    kinds = _ops(rank, block, pieces)
    return [(kind, back) for kind in kinds] + [(kind, False) for kind in (_recomputed(kinds, pieces) if back else ())]


def _recomputed(kinds: Sequence[str], pieces: Pieces) -> list[str]:
    """Return the kinds of ops that run again. Projections do if attention does."""
    again = {*pieces.recompute, *((PROJECT,) if ATTENTION in pieces.recompute else ())}
    return [kind for kind in kinds if kind in again]


def cut_of(kind: str, slicing: Slicing) -> tuple[int, ...]:
    """Return the tokens of each piece of a kind of op in a block."""
    return slicing.attention if OP_KINDS[kind].cut == "slices" else slicing.moe


def ends_of(content: Content, slicing: Slicing) -> list[tuple[str, tuple[int, ...]]]:
    """Return the kinds EMBED and HEAD that a content has, each as often as it has it, with the tokens of each of its pieces."""
    embedding = [(EMBED, slicing.attention)] if content.embedding else []
    if not content.head:
        return embedding
    return embedding + [(HEAD, slicing.moe if content.head.moe else slicing.attention)] * content.heads


def least_computed(rank: RankCosts, blocks: Iterable[BlockSpec], pieces: Pieces) -> float:
    """Return the seconds that the cheapest of these blocks computes, forward and backward."""
    works = [_block_works(rank, block, pieces) for block in blocks]
    return min([forward.computed + backward.computed for forward, backward in works])


@shared_by_ops
def _block_works(rank: RankCosts, block: BlockSpec, pieces: Pieces) -> tuple[PassWork, PassWork]:
    kinds = _ops(rank, block, pieces)
    totals = {kind: rank.totals(kind, cut_of(kind, pieces.slicing), block) for kind in kinds}
    again = {kind: totals[kind][0].total for kind in _recomputed(kinds, pieces)}
    forward = _pass_work(block, {kind: both[0] for kind, both in totals.items()}, {}, pieces)
    backward = _pass_work(block, {kind: both[1] for kind, both in totals.items()}, again, pieces)
    return forward, backward


def _pass_work(block: BlockSpec, totals: Mapping[str, Totals], again: Mapping[str, float], pieces: Pieces) -> PassWork:
    """Return the work of one pass of a block. Ops compute one after another, and so do all-to-alls travel on a link.

    Gathered keys and values do not count: other ops can hide them.

    A block in one piece is a chain, except that the shared expert runs while rows travel to experts, or gradients come back, and
    that experts may be recomputed while their gradients travel to them. For several pieces, `least` is the largest of three
    bounds of a block that drains: all computation; all travel on a link, with what a piece does before and after it; attention,
    routing and experts of all pieces, with one combine and weighted sum after them. Backward has the reverse order and the same
    bounds.

    Args:
        totals: kind → seconds of the ops of this pass.
        again: kind → seconds of the ops that run again in it.
    """
    plain = piece = 0.0
    for kind, seconds in totals.items():
        if kind not in _TRAVEL:
            plain += seconds.total
        piece += seconds.least if kind not in _BESIDE else 0.0
    computed = plain + sum(again.values())
    if not block.moe:
        return PassWork(computed, 0.0, 0.0, computed, piece)
    dispatch, combine, merge = totals[DISPATCH], totals[COMBINE], totals[MERGE]
    there, back = totals.get(INTRA_DISPATCH, _NOTHING), totals.get(INTRA_COMBINE, _NOTHING)
    inside = there.total + back.total
    travels = dispatch.total + combine.total + inside
    if pieces.hiding == "nothing":
        shared = (totals[SHARED].total if SHARED in totals else 0.0) + again.get(SHARED, 0.0)
        hidden = min(again.get(EXPERT, 0.0), combine.total + back.total) + min(shared, dispatch.total + there.total)
        return PassWork(computed, travels, inside, computed + travels - hidden, piece)
    by_link = max(dispatch.total + combine.total, inside and dispatch.least + inside + combine.least)
    bound_by_link = totals[ATTENTION].first + totals[ROUTE].least + by_link + merge.least
    last_back = plain - merge.total + merge.least + back.least + combine.least
    return PassWork(computed, travels, inside, max(computed, bound_by_link, last_back), piece)


def stage_works(rank: RankCosts, content: Content, pieces: Pieces) -> tuple[PassWork, PassWork]:
    """Return the work of a stage's forward and backward for one part of a micro-batch: blocks, embedding and head."""
    blocks = [(_block_works(rank, block, pieces), count) for block, count in content.blocks]
    ends = [rank.totals(kind, cut, None) for kind, cut in ends_of(content, pieces.slicing)]
    forward, backward = (_together(back, ends, blocks) for back in (False, True))
    return forward, backward


def _together(
    back: bool, ends: Sequence[tuple[Totals, Totals]], blocks: Sequence[tuple[tuple[PassWork, PassWork], int]]
) -> PassWork:
    """Return the work of a pass: embedding and head, and several blocks of each kind."""
    computed = least = sum([totals[back].total for totals in ends]) if ends else 0
    travels = inside = piece = 0.0
    for works, count in blocks:
        of_block = works[back]
        computed += count * of_block.computed
        travels += count * of_block.travels
        inside += count * of_block.inside
        least += count * of_block.least
        piece += count * of_block.piece
    return PassWork(computed, travels, inside, least, piece)


def common_computed(rank: RankCosts, content: Content, pieces: Pieces) -> float:
    """Return the seconds that a content computes, forward and backward, without recomputation and without routed experts.

    They are the same for all folds with the same grid of attention.
    """
    ends = [rank.totals(kind, cut, None) for kind, cut in ends_of(content, pieces.slicing)]
    seconds = sum(forward.total + backward.total for forward, backward in ends)
    for block, count in content.blocks:
        kinds = [kind for kind in _ops(rank, block, pieces) if kind not in _TRAVEL and kind not in _ROUTED]
        both = [rank.totals(kind, cut_of(kind, pieces.slicing), block) for kind in kinds]
        seconds += count * sum(forward.total + backward.total for forward, backward in both)
    return seconds


def stage_bounds(rank: RankCosts, contents: Sequence[Content], pieces: Pieces) -> list[float]:
    """Return lower bounds of the seconds of forward and backward of stages, for one micro-batch.

    If blocks drain, a stage takes at least the sum of the bounds of its blocks. Otherwise it takes at least all of its
    computation or all of its all-to-alls, whichever is longer. Hidden communication slows computation down (`crowding`). The
    bound of several stages together is at most the sum of their bounds.
    """
    return [_stage_bound(rank, content, pieces).seconds for content in contents]


@shared_by_ops
def _stage_bound(rank: RankCosts, content: Content, pieces: Pieces) -> StageBound:
    crowding, total, piece = rank.device.share["crowding"], 0.0, 0.0
    for work in stage_works(rank, content, pieces):
        least = max(work.computed, work.link) if pieces.hiding == "all" else work.least
        total += least + crowding * max(0.0, work.computed + work.link - least)
        piece += work.piece
    return StageBound(pieces.batch_degree * total, piece)


def hop_bounds(rank: RankCosts, contents: Sequence[Content], pieces: Pieces, stages: Sequence[float]) -> list[float]:
    """Return lower bounds of the seconds until the next stage can begin: forward and backward together, with handovers.

    The next stage begins after the whole pass (`stages`), or after its first piece if there are several.
    """
    if not pieces.several:
        return [seconds + 2 * rank.handover.seconds for seconds in stages]
    return [_stage_bound(rank, content, pieces).piece for content in contents]


def step_bound(
    layout: PipelineLayout, micro_batches: int, stages: Sequence[float], behind: Sequence[float], hops: Sequence[float]
) -> float:
    """Return a lower bound of the seconds of a step.

    A position computes its stages for every micro-batch, and then updates its weights. Before its first stage begins, the
    first stage of every earlier position must go forward. After its last backward, the same stages must go backward, and the
    first position updates its weights.

    Args:
        micro_batches: micro-batches of one data-parallel place.
        stages: for every form of stage, seconds of forward and backward of one micro-batch.
        behind: for every different content of positions, seconds after the last backward.
        hops: for every form of stage, seconds until the next stage can begin (`hop_bounds`).
    """
    bound, ahead, number_at = 0.0, 0.0, layout.positions.number_at
    first = behind[number_at[0]]
    for number, forms in zip(number_at, layout.forms_at, strict=True):
        computed = micro_batches * sum([stages[form] for form in forms])
        bound = max(bound, computed + max(ahead + first, behind[number]))
        ahead += hops[forms[0]]
    return bound


def fold_bound(
    rank: RankCosts,
    positions: Positions,
    hop: float,
    micro_batches: int,
    pieces: Pieces,
    behind: Sequence[float],
    enough: float = math.inf,
) -> float:
    """Return a lower bound of the seconds of a step, for any number of stages per position.

    Args:
        hop: lower bound of the seconds until the stage after a position's first stage can begin, forward and backward.
        micro_batches, behind: as for `step_bound`.
        enough: seconds from which on a bound need not be the largest one.
    """
    first, bound = behind[positions.number_at[0]], 0.0
    # The last of equal positions waits longest. The last position has a head, so its bound is often the largest.
    for content, place, after in reversed([*zip(positions.different, positions.last, behind, strict=True)]):
        bound = max(bound, micro_batches * _stage_bound(rank, content, pieces).seconds + max(place * hop + first, after))
        if bound >= enough:
            break
    return bound
