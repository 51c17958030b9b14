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


@dataclass(frozen=True)
class Network:
    """The links of a cluster under a fold."""

    fold: Fold
    device: Device
    _shapes: dict[str, Shape] = field(default_factory=dict, repr=False, compare=False)

    def shape(self, family: str) -> Shape:
        """Of the family's first group; the others lie on nodes as it does."""
        if family not in self._shapes:
            grid, axes = self.fold.axes(family)
            steps = tuple((grid.stride(axis), grid.sizes[grid.axes.index(axis)]) for axis in axes)
            self._shapes[family] = _placed(self.fold.offset, steps, self.device.hardware.gpus_per_node)
        return self._shapes[family]

    def gather(self, family: str, whole: float) -> Travel:
        """An all-gather, or a reduce-scatter, of `whole` bytes in all."""
        size, together, nodes = shape = self.shape(family)
        if size == 1:
            return Travel(INTRA, 0.0)
        near, far = self._lanes(shape, "intra", "inter")
        inside, across = whole * (size - 1) / size / near.speed, whole * (nodes - 1) / nodes / together / far.speed
        return self._slower(shape, inside, across, near.start * math.log2(together) + far.start * math.log2(nodes))

    def reduce(self, family: str, whole: float) -> Travel:
        """An all-reduce."""
        lane, seconds = self.gather(family, whole)
        return Travel(lane, 2 * seconds)

    def exchange(self, family: str, sent: float) -> Travel:
        """An all-to-all in which a rank has `sent` bytes for all ranks, itself among them, alike."""
        size, together, nodes = shape = self.shape(family)
        if size == 1:
            return Travel(INTRA, 0.0)
        near, far = self._lanes(shape, "exchange", "exchange")
        loss = 1 + self.device.share["contention"] * math.log2(nodes)
        inside, across = sent * (together - 1) / size / near.speed, sent * (size - together) / size / far.speed * loss
        return self._slower(shape, inside, across, near.start * (together - 1) + far.start * (size - together))

    def hand_over(self, bytes_: float) -> Travel:
        """From one pipeline stage to the next."""
        nodes = self.shape("pp").nodes
        near, far = self._lanes(Shape(2, 2, 2), "intra", "inter")
        lane, link = (INTRA, near) if nodes == 1 else (INTER, far)
        return Travel(lane, bytes_ / link.speed + link.start)

    def _lanes(self, shape: Shape, *shares: str) -> tuple[_Lane, _Lane]:
        """Within nodes and between them, for a group; each reaches a share of what its link has."""
        found = []
        for link, ranks, share in zip(
            (self.device.hardware.intra, self.device.hardware.inter), (shape.together, shape.nodes), shares, strict=True
        ):
            speed, start = link.of(ranks)
            found.append(_Lane(speed * self.device.share[share], start))
        return found[0], found[1]

    @staticmethod
    def _slower(shape: Shape, inside: float, across: float, starts: float) -> Travel:
        """Both at once, behind their messages' starts: so many within the node and so many beyond, one after another."""
        if shape.together == 1:
            inside = 0.0
        return Travel(INTER if shape.nodes > 1 else INTRA, max(inside, across) + starts)


class _Lane(NamedTuple):
    """Bytes a second, and seconds until a message's first byte."""

    speed: float
    start: float


@lru_cache(maxsize=4096)
def _placed(first: int, steps: tuple[tuple[int, int], ...], ranks_per_node: int) -> Shape:
    """Of a group from a rank on.

    Args:
        steps: stride and size of every axis that it lies along.
    """
    ranks = [first]
    for stride, size in steps:
        ranks = [rank + stride * i for i in range(size) for rank in ranks]
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    return Shape(len(ranks), min(nodes.values()), len(nodes))
