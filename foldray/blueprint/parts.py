"""The parameters of the whole model inside a rank's tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Index = tuple[slice | int, ...]
Parts = dict[str, list[tuple[str, Index]]]
"""For each tensor of a module, the model's parameters in it: (name, index). An empty index is the whole tensor."""


def columns(widths: Mapping[str, int], before: Index = (slice(None),)) -> list[tuple[str, Index]]:
    """Return parts that lie side by side along one axis of a tensor.

    Args:
        widths: width of each part along the axis, by name.
        before: index of the axes before that axis.
    """
    found: list[tuple[str, Index]] = []
    start = 0
    for name, width in widths.items():
        found.append((name, (*before, slice(start, start + width))))
        start += width
    return found


def ffn_columns(inwards: Iterable[str], inner: int, before: Index = (slice(None),)) -> list[tuple[str, Index]]:
    """Return the parts of a feed-forward network's product into the inner layer, `inner` columns each."""
    return columns(dict.fromkeys(inwards, inner), before)
