"""Seconds of collectives over a fold's groups, from where a group's ranks lie.

A group's ranks on one node reach each other over the node's own links, those on other nodes through their GPUs' adapters, one
each. Rings and exchanges use both at once; the slower of the two is what counts. Within a group of g ranks, r of them on each of
n nodes, a collective over B bytes (of the whole tensor, or of what a rank sends in all) moves for each rank

| | inside its node | between nodes |
|---|---|---|
| all-gather, reduce-scatter | B · (g − 1) / g | B · (n − 1) / n / r: r rings, one through each adapter |
| all-reduce | twice that | twice that |
| all-to-all | B · (r − 1) / g | B · (g − r) / g |

An all-to-all between nodes loses speed as nodes multiply (`contention`): its flows cross, and switches route them blindly.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from foldray.fold import Fold
from foldray.planner.device import Device

INTRA, INTER = "intra", "inter"
"""The lanes of the clock: a rank has one of each."""


class Shape(NamedTuple):
    """A group: its ranks, how many of them share a node at least, and its nodes."""

    size: int
    together: int
    nodes: int


class Travel(NamedTuple):
    """Seconds on a lane."""

    lane: str
    seconds: float


class Collective(NamedTuple):
    """The cost of a collective of one group, linear in what it moves: seconds until its first byte, and per byte."""

    lane: str
    start: float
    per_byte: float

    def travel(self, moved: float) -> Travel:
        return Travel(self.lane, self.start + moved * self.per_byte)


_NOBODY = Collective(INTRA, 0.0, 0.0)
"""A group of one rank."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster under a fold."""

    fold: Fold
    device: Device
    _shapes: dict[str, Shape] = field(default_factory=dict, repr=False, compare=False)
    _gathers: dict[str, Collective] = field(default_factory=dict, repr=False, compare=False)
    _exchanges: dict[str, Collective] = field(default_factory=dict, repr=False, compare=False)

    def shape(self, family: str) -> Shape:
        """Of the family's first group; the others lie on nodes as it does."""
        if family not in self._shapes:
            grid, axes = self.fold.axes(family)
            steps = tuple((grid.stride(axis), grid.sizes[grid.axes.index(axis)]) for axis in axes)
            self._shapes[family] = _placed(self.fold.offset, steps, self.device.hardware.gpus_per_node)
        return self._shapes[family]

    def gather(self, family: str, whole: float) -> Travel:
        """An all-gather, or a reduce-scatter, of `whole` bytes in all."""
        if family not in self._gathers:
            self._gathers[family] = self._gather(self.shape(family))
        return self._gathers[family].travel(whole)

    def reduce(self, family: str, whole: float) -> Travel:
        """An all-reduce."""
        lane, seconds = self.gather(family, whole)
        return Travel(lane, 2 * seconds)

    def exchange(self, family: str, sent: float) -> Travel:
        """An all-to-all in which a rank has `sent` bytes for all ranks, itself among them, alike."""
        if family not in self._exchanges:
            self._exchanges[family] = self._exchange(self.shape(family))
        return self._exchanges[family].travel(sent)

    def hand_over(self, bytes_: float) -> Travel:
        """From one pipeline stage to the next."""
        near, far = self._links(Shape(2, 2, 2), "intra", "inter")
        lane, link = (INTRA, near) if self.shape("pp").nodes == 1 else (INTER, far)
        return Travel(lane, bytes_ / link.speed + link.start)

    def _gather(self, shape: Shape) -> Collective:
        size, together, nodes = shape
        if size == 1:
            return _NOBODY
        near, far = self._links(shape, "intra", "inter")
        inside, across = (size - 1) / size / near.speed, (nodes - 1) / nodes / together / far.speed
        return self._slower(shape, inside, across, near.start * math.log2(together) + far.start * math.log2(nodes))

    def _exchange(self, shape: Shape) -> Collective:
        size, together, nodes = shape
        if size == 1:
            return _NOBODY
        near, far = self._links(shape, "exchange", "exchange")
        loss = 1 + self.device.share["contention"] * math.log2(nodes)
        inside, across = (together - 1) / size / near.speed, (size - together) / size / far.speed * loss
        return self._slower(shape, inside, across, near.start * (together - 1) + far.start * (size - together))

    def _links(self, shape: Shape, *shares: str) -> tuple[_Link, _Link]:
        """Within nodes and between them, for a group; each reaches a share of what its link has."""
        hardware, reached = self.device.hardware, self.device.share
        (near, near_start), (far, far_start) = hardware.intra.of(shape.together), hardware.inter.of(shape.nodes)
        return _Link(near * reached[shares[0]], near_start), _Link(far * reached[shares[1]], far_start)

    @staticmethod
    def _slower(shape: Shape, inside: float, across: float, start: float) -> Collective:
        """Both links at once, behind their messages' starts: so many within the node and so many beyond, one after another.

        Args:
            inside, across: seconds per byte.
        """
        if shape.together == 1:
            inside = 0.0
        return Collective(INTER if shape.nodes > 1 else INTRA, start, max(inside, across))


class _Link(NamedTuple):
    """Bytes a second, and seconds until a message's first byte."""

    speed: float
    start: float


@lru_cache(maxsize=4096)
def _placed(first: int, steps: tuple[tuple[int, int], ...], ranks_per_node: int) -> Shape:
    """Of a group from a rank on.

    Args:
        steps: stride and size of every axis that it lies along.
    """
    ranks, copies = [first], 1
    for stride, size in steps:
        if stride % ranks_per_node == first % ranks_per_node == 0:  # the same once more, on nodes of its own
            copies *= size
        else:
            ranks = [rank + stride * i for i in range(size) for rank in ranks]
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    return Shape(len(ranks) * copies, min(nodes.values()), len(nodes) * copies)
