"""Which slice of a rank's tensor is which parameter of the whole model. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Index = tuple[slice | int, ...]
Parts = dict[str, list[tuple[str, Index]]]
"""For each parameter of a module: (global name, index into the tensor); an empty index is all of it."""


def columns(widths: Mapping[str, int], before: Index = (slice(None),)) -> list[tuple[str, Index]]:
    """Parts that lie side by side along the axis that `before` leads up to."""
    found: list[tuple[str, Index]] = []
    start = 0
    for name, width in widths.items():
        found.append((name, (*before, slice(start, start + width))))
        start += width
    return found


def ffn_columns(inwards: Iterable[str], inner: int, before: Index = (slice(None),)) -> list[tuple[str, Index]]:
    """The parts of a feed-forward layer's inward product, side by side."""
    return columns(dict.fromkeys(inwards, inner), before)
