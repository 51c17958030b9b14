"""Rank tables: a grid of ranks, and the groups along its axes. This module computes with integers only.

The order of ranks is that of Megatron-Core's rank generator. The fastest axis comes first. The stride of an axis is the
product of the sizes to its left. A group holds every value of its axes for one fixed value of all other axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """`math.prod(sizes)` consecutive ranks from `offset`, arranged along named axes, the fastest axis first."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def length(self, axis: str) -> int:
        """Return the size of an axis."""
        return self.sizes[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        return math.prod(self.sizes[: self.axes.index(axis)])

    @property
    def ranks(self) -> range:
        return range(self.offset, self.offset + self.size)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on every axis.

        Raises:
            ValueError: the rank is not in the grid.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the grid of ranks {self.ranks[0]}…{self.ranks[-1]}")
        rest, place = rank - self.offset, {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rest, place[axis] = divmod(rest, size)
        return place

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes together. The leftmost axis runs fastest, within a group and among groups."""
        inside = self._offsets([axis for axis in self.axes if axis in axes])
        across = self._offsets([axis for axis in self.axes if axis not in axes])
        return tuple(tuple(self.offset + base + step for step in inside) for base in across)

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the group of one rank along these axes."""
        place = self.coordinate(rank)
        base = rank - sum(place[axis] * self.stride(axis) for axis in axes)
        return tuple(base + step for step in self._offsets([axis for axis in self.axes if axis in axes]))

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        offsets = [0]
        for axis in axes:
            stride, size = self.stride(axis), self.length(axis)
            offsets = [base + stride * i for i in range(size) for base in offsets]
        return offsets


def listed(group: Sequence[int], most: int = 8) -> str:
    """Return a group as text, such as `[0 2 4]`. A long group is shortened to its first members and its last one."""
    shown = [*group[: most - 1], "…", group[-1]] if len(group) > most else group
    return "[" + " ".join(map(str, shown)) + "]"
