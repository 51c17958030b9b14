"""Lower bounds of a step's time, from what its ops compute and send, without a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from foldray.blueprint import BlockSpec
from foldray.kinds import ATTENTION, COMBINE, DISPATCH, EMBED, EXCHANGES, EXPERT, FFN, HEAD, MERGE, OP_KINDS, ROUTE
from foldray.planner.candidate import Pieces
from foldray.planner.costs import RankCosts
from foldray.planner.layout import Content, PipelineLayout
from foldray.planner.memo import PassWork
from foldray.schedule import Slicing

_DENSE, _MOE = (ATTENTION, FFN), (ATTENTION, ROUTE, DISPATCH, EXPERT, COMBINE, MERGE)


def _ops(block: BlockSpec) -> tuple[str, ...]:
    return _MOE if block.moe else _DENSE


def ops_of_pass(block: BlockSpec, back: bool, pieces: Pieces) -> list[tuple[str, bool]]:
    """The kinds of ops of one pass of a block, each with whether it is a backward op; recomputed ones are forward ops."""
    return [(each, back) for each in _ops(block)] + [(each, False) for each in _recomputed(block, back, pieces)]


def _recomputed(block: BlockSpec, back: bool, pieces: Pieces) -> list[str]:
    return [each for each in _ops(block) if back and each in pieces.recompute]


def cut_of(kind: str, slicing: Slicing) -> tuple[int, ...]:
    """Tokens of all pieces of a kind of op in a block."""
    return slicing.attention if OP_KINDS[kind].cut == "slices" else slicing.moe


def ends_of(content: Content, slicing: Slicing) -> list[tuple[str, tuple[int, ...]]]:
    """The embedding and the head, as far as they are there, with the tokens of their pieces."""
    found = [(EMBED, slicing.attention)] if content.embedding else []
    return [*found, (HEAD, slicing.moe if content.head.moe else slicing.attention)] if content.head else found


def pass_works(rank: RankCosts, blocks: Iterable[BlockSpec], pieces: Pieces) -> Mapping[tuple[BlockSpec, bool], PassWork]:
    """By block and whether it is a backward pass; of these blocks at least."""
    found = rank.blocks.passes.setdefault(pieces, {})
    for block in blocks:
        if (block, False) not in found:
            for back in (False, True):
                found[block, back] = _pass_work(rank, block, back, pieces)
    return found


def _pass_work(rank: RankCosts, block: BlockSpec, back: bool, pieces: Pieces) -> PassWork:
    """Of one pass of a block. What computes goes one after another, and so does what travels.

    A block in one piece is a chain, but that experts may be computed again while their gradients are on the way to them. A block
    that drains begins with attention and routing (backward, ends with them) of a piece, which nothing travels beside. It ends
    with a sum, and no sooner than a piece comes back from the last expert.
    """
    own = {each: rank.totals(each, cut_of(each, pieces.slicing), back, block) for each in _ops(block)}
    again = {
        each: rank.totals(each, cut_of(each, pieces.slicing), False, block).total for each in _recomputed(block, back, pieces)
    }
    plain = sum(each.total for name, each in own.items() if name not in EXCHANGES)
    computed = plain + sum(again.values())
    if not block.moe:
        return PassWork(computed, 0.0, computed)
    combine, merge = own[COMBINE], own[MERGE]
    travels = own[DISPATCH].total + combine.total
    if pieces.hiding == "nothing":
        return PassWork(computed, travels, computed + travels - min(again.get(EXPERT, 0.0), combine.total))
    bound_by_link = own[ATTENTION].first + own[ROUTE].least + travels + merge.least
    last_back = plain - merge.total + merge.least + combine.least
    return PassWork(computed, travels, max(computed, bound_by_link, last_back))


def stage_work(rank: RankCosts, content: Content, back: bool, pieces: Pieces) -> PassWork:
    """Of one pass of a stage by a part of a micro-batch: its blocks, its embedding, its head."""
    works = pass_works(rank, [block for block, _ in content.blocks], pieces)
    computed = 0.0
    for kind, cut in ends_of(content, pieces.slicing):
        computed += rank.totals(kind, cut, back, None).total
    travels, least = 0.0, computed
    for block, count in content.blocks:
        work = works[block, back]
        computed += count * work.computed
        travels += count * work.travels
        least += count * work.least
    return PassWork(computed, travels, least)


def stage_bounds(rank: RankCosts, contents: Sequence[Content], pieces: Pieces) -> list[float]:
    """Seconds that stages take at least to go forward and backward. Those of several together are no more than they are apart.

    Where blocks drain, what each of them takes at least; else all that computes, or all that travels, if that is more. What
    travels beside computation slows it down.
    """
    known = rank.blocks.bounds.setdefault(pieces, {})
    for content in contents:
        if content not in known:
            known[content] = _stage_bound(rank, content, pieces)
    return [known[content] for content in contents]


def _stage_bound(rank: RankCosts, content: Content, pieces: Pieces) -> float:
    crowding, total = rank.device.share["crowding"], 0.0
    for back in (False, True):
        work = stage_work(rank, content, back, pieces)
        least = max(work.computed, work.travels) if pieces.hiding == "all" else work.least
        total += least + crowding * (work.computed + work.travels - least)
    return pieces.batch_degree * total


def step_bound(
    layout: PipelineLayout, micro_batches: int, stages: Sequence[float], behind: Sequence[float], handover: float
) -> float:
    """Seconds that a step takes at least.

    A position computes its stages for every micro-batch, then updates its weights. Or: before that a stage of every position
    ahead of it goes forward, and behind it backward, until the first one updates.

    Args:
        micro_batches: of one data-parallel rank.
        stages: seconds of every form of stage, forward and backward.
        behind: seconds of every position behind its last backward.
        handover: seconds from a stage to the next.
    """
    found, ahead = 0.0, 0.0
    for after, forms in zip(behind, layout.forms_at, strict=True):
        computed = micro_batches * sum([stages[form] for form in forms])
        found = max(found, computed + max(ahead + behind[0], after))
        ahead += stages[forms[0]] + 2 * handover
    return found


def fold_bound(
    rank: RankCosts, contents_at: Sequence[Content], stage: float, micro_batches: int, pieces: Pieces, behind: Sequence[float]
) -> float:
    """Seconds that a step takes at least, however many stages a position has.

    Args:
        contents_at: of every position, all of its stages.
        stage: seconds of a position's first stage at least, forward and backward.
        micro_batches, behind: as for `step_bound`.
    """
    ahead = stage + 2 * rank.handover.seconds
    places = {content: place for place, content in enumerate(contents_at)}  # of those that are alike, the last one waits longest
    bounds = stage_bounds(rank, list(places), pieces)
    return max(
        micro_batches * bound + max(place * ahead + behind[0], behind[place])
        for place, bound in zip(places.values(), bounds, strict=True)
    )
