"""All legal folds of a number of ranks, and their names."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.fold import divisors


def legal_folds(world: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of every legal fold of `world` ranks, without sizes of 1."""
    for pp in divisors(world):
        for tp, cp in _pairs(world // pp):
            for ep, etp in _pairs(world // pp):
                sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
                yield {axis: size for axis, size in sizes.items() if size > 1}


def name(fold: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in fold.items()) or "dp"


def _pairs(ranks: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in divisors(ranks) for b in divisors(ranks // a))
