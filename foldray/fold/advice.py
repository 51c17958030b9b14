"""Finds the legal folds that are nearest to an illegal one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from foldray.fold.fold import ATTENTION_AXES, MOE_AXES, Fold, divisors


def nearest_folds(world_size: int, sizes: dict[str, int], count: int = 3) -> list[dict[str, int]]:
    """Return the legal folds of `world_size` ranks with the least change of tp, cp, pp, ep and etp, counted in doublings.

    The two grids share only pp. So the function finds the nearest pairs of sizes separately for each pp and each grid, and
    then combines them.
    """
    if world_size < 1:
        return []

    def distance(axis: str, size: int) -> float:
        return abs(math.log2(size / max(1, sizes.get(axis, 1))))

    def pairs(ranks: int, first: str, second: str) -> list[tuple[float, tuple[int, int]]]:
        distances = ((distance(first, a) + distance(second, b), (a, b)) for a, b in _pairs(ranks))
        return sorted(distances)[:count]

    legal = sorted(
        (attention[0] + moe[0] + distance("pp", pp), (*attention[1], pp, *moe[1]))
        for pp in divisors(world_size)
        for attention in pairs(world_size // pp, "tp", "cp")
        for moe in pairs(world_size // pp, "ep", "etp")
    )
    folds = [Fold(world_size, *values) for _, values in legal[:count]]
    return [{axis: getattr(fold, axis) for axis in dict.fromkeys(ATTENTION_AXES + MOE_AXES)} for fold in folds]


def nearest_disjoint(world_size: int, expert_ranks: int, sizes: dict[str, int], count: int = 3) -> list[dict[str, int]]:
    """Return the nearest legal folds whose experts have ranks of their own, the nearest first.

    The function chooses the sizes of each half separately.

    Args:
        sizes: the requested tp, cp, pp, ep, etp and expert_pp.
    """
    if not 0 < expert_ranks < world_size:
        return []

    def half(ranks: int, axes: tuple[str, str, str]) -> list[dict[str, int]]:
        legal = [(a, b, pp) for a, b in _pairs(ranks) for pp in divisors(ranks // a // b)]
        wanted = [max(1, sizes.get(axis, 1)) for axis in axes]

        def distance(sizes: tuple[int, ...]) -> float:
            return sum(abs(math.log2(n / size)) for n, size in zip(sizes, wanted, strict=True))

        nearest = sorted(legal, key=lambda sizes: (distance(sizes), sizes))[:count]
        return [dict(zip(axes, sizes, strict=True)) for sizes in nearest]

    attention, experts = half(world_size - expert_ranks, ("tp", "cp", "pp")), half(expert_ranks, ("ep", "etp", "expert_pp"))
    # The nearest sizes of both halves come first, then the second nearest of one half with the nearest of the other.
    options = [(0, 0), (1, 0), (0, 1), (1, 1)]
    folds = [attention[a] | experts[b] for a, b in options if a < len(attention) and b < len(experts)]
    return [{**fold, "expert_ranks": expert_ranks} for fold in folds[:count]]


def _pairs(ranks: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in divisors(ranks) for b in divisors(ranks // a))
