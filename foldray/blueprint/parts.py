"""The parameters of the whole model inside a rank's tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

Index = tuple[slice | int, ...]
Parts = dict[str, list[tuple[str, Index]]]
"""For each tensor of a module, the model's parameters in it: (name, index). An empty index is the whole tensor."""


def columns(widths: Mapping[str, int], before: Index = (slice(None),)) -> list[tuple[str, Index]]:
    """Return parts of these widths that lie side by side along one axis of a tensor, behind the axes of `before`."""
    ends = accumulate(widths.values())
    return [(name, (*before, slice(end - width, end))) for (name, width), end in zip(widths.items(), ends, strict=True)]


def ffn_columns(inwards: Iterable[str], inner: int, before: Index = (slice(None),)) -> list[tuple[str, Index]]:
    """Return the parts of a feed-forward network's product into the inner layer, `inner` columns each."""
    return columns(dict.fromkeys(inwards, inner), before)
