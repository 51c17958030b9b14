"""Finds the legal folds that are nearest to an illegal one."""

from __future__ import annotations

import itertools
import math

from foldray.fold.fold import ATTENTION_AXES, MOE_AXES, Fold, divisors


def nearest_folds(world_size: int, sizes: dict[str, int], expert_ranks: int = 0, count: int = 3) -> list[dict[str, int]]:
    """Return the legal folds of `world_size` ranks with the least change of the requested sizes, counted in doublings.

    The two grids share only pp, or nothing if the experts have ranks of their own. So the function finds the nearest pairs of
    the other sizes separately for each pp and each grid, and then combines them.

    Args:
        sizes: the requested tp, cp, pp, ep and etp, and with `expert_ranks` expert_pp.
    """
    if not 0 <= expert_ranks < world_size:
        return []

    def distance(axis: str, size: int) -> float:
        return abs(math.log2(size / max(1, sizes.get(axis, 1))))

    def pairs(ranks: int, first: str, second: str) -> list[tuple[float, tuple[int, int]]]:
        legal = ((a, b) for a in divisors(ranks) for b in divisors(ranks // a))
        return sorted((distance(first, a) + distance(second, b), (a, b)) for a, b in legal)[:count]

    attention_ranks, moe_ranks = world_size - expert_ranks, expert_ranks or world_size
    attention = {pp: pairs(attention_ranks // pp, "tp", "cp") for pp in divisors(attention_ranks)}
    moe = {pp: pairs(moe_ranks // pp, "ep", "etp") for pp in divisors(moe_ranks)}
    pipelines = {(pp, pp): distance("pp", pp) for pp in attention}
    if expert_ranks:
        both = itertools.product(attention, moe)
        pipelines = {(pp, expert_pp): distance("pp", pp) + distance("expert_pp", expert_pp) for pp, expert_pp in both}
    nearest = sorted(
        (ours[0] + theirs[0] + change, (*ours[1], pp, *theirs[1], expert_pp))
        for (pp, expert_pp), change in pipelines.items()
        for ours in attention[pp]
        for theirs in moe[expert_pp]
    )[:count]
    if expert_ranks:
        names = ("tp", "cp", "pp", "ep", "etp", "expert_pp", "expert_ranks")
        return [dict(zip(names, (*values, expert_ranks), strict=True)) for _, values in nearest]
    folds = [Fold(world_size, *values[:-1]) for _, values in nearest]
    return [{axis: getattr(fold, axis) for axis in dict.fromkeys(ATTENTION_AXES + MOE_AXES)} for fold in folds]
