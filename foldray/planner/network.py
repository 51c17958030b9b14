"""Seconds of collectives over a fold's groups, from the placement of the groups on nodes.

Ranks on the same node use the node's own links. Ranks on different nodes use network adapters, one per GPU. Rings and
all-to-alls use both kinds of links at once, and the slower one decides. In a group of g ranks on n nodes, with r ranks on
each node, a collective over B bytes (of the whole tensor; of all that a rank sends in an all-to-all) moves these bytes per
rank:

| | inside its node | between nodes |
|---|---|---|
| all-gather, reduce-scatter | B · (g − 1) / g | B · (n − 1) / n / r: r rings, one through each adapter |
| all-reduce | twice that | twice that |
| all-to-all | B · (r − 1) / g | B · (g − r) / g |

The time of an all-to-all between nodes grows by a share for every doubling of the nodes (`contention`), because its flows
collide in the switches.
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
"""Lanes of the clock. Every rank has one lane of each name."""


class Shape(NamedTuple):
    """The placement of a group: number of ranks, smallest number of its ranks on a node, number of nodes."""

    size: int
    together: int
    nodes: int


class Travel(NamedTuple):
    """Seconds on a lane."""

    lane: str
    seconds: float


class Collective(NamedTuple):
    """The cost of a collective of one group: its lane, seconds to start, and seconds per byte."""

    lane: str
    start: float
    per_byte: float

    def travel(self, moved: float) -> Travel:
        return Travel(self.lane, self.start + moved * self.per_byte)


_NOBODY = Collective(INTRA, 0.0, 0.0)
"""The cost for a group of one rank."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster under a fold."""

    fold: Fold
    device: Device
    _shapes: dict[str, Shape] = field(default_factory=dict, repr=False, compare=False)
    _gathers: dict[str, Collective] = field(default_factory=dict, repr=False, compare=False)
    _exchanges: dict[str, Collective] = field(default_factory=dict, repr=False, compare=False)

    def shape(self, family: str) -> Shape:
        """Return the placement of a family's first group. It stands for all groups of the family."""
        if family not in self._shapes:
            grid, axes = self.fold.axes(family)
            steps = tuple((grid.stride(axis), grid.length(axis)) for axis in axes)
            self._shapes[family] = _placed(grid.ranks[0], steps, self.device.hardware.gpus_per_node)
        return self._shapes[family]

    def gather(self, family: str, whole: float) -> Travel:
        """Return the cost of an all-gather or a reduce-scatter.

        Args:
            family: group family.
            whole: bytes of the whole tensor.
        """
        if family not in self._gathers:
            self._gathers[family] = self._gather(self.shape(family))
        return self._gathers[family].travel(whole)

    def reduce(self, family: str, whole: float) -> Travel:
        """Return the cost of an all-reduce of `whole` bytes: that of a reduce-scatter and an all-gather."""
        lane, seconds = self.gather(family, whole)
        return Travel(lane, 2 * seconds)

    def exchange(self, family: str, sent: float) -> Travel:
        """Return the cost of an all-to-all with equal shares.

        Args:
            family: group family.
            sent: bytes that a rank sends to all ranks together, itself included.
        """
        if family not in self._exchanges:
            self._exchanges[family] = self._exchange(self.shape(family))
        return self._exchanges[family].travel(sent)

    def hand_over(self, bytes_: float) -> Travel:
        """Return the cost to send bytes from one pipeline stage to the next."""
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
        """Return the links within nodes and between nodes for a group.

        Args:
            shape: placement of the group.
            shares: names of the constants with the share of each link's speed that is reached.
        """
        hardware, reached = self.device.hardware, self.device.share
        (near, near_start), (far, far_start) = hardware.intra.of(shape.together), hardware.inter.of(shape.nodes)
        return _Link(near * reached[shares[0]], near_start), _Link(far * reached[shares[1]], far_start)

    @staticmethod
    def _slower(shape: Shape, inside: float, across: float, start: float) -> Collective:
        """Return the cost of a collective that uses both links at once. The slower link decides.

        Args:
            shape: placement of the group.
            inside, across: seconds per byte, within a node and between nodes.
            start: seconds to start all messages, one after another.
        """
        if shape.together == 1:
            inside = 0.0
        return Collective(INTER if shape.nodes > 1 else INTRA, start, max(inside, across))


class _Link(NamedTuple):
    """Bytes per second, and seconds until the first byte of a message arrives."""

    speed: float
    start: float


@lru_cache(maxsize=4096)
def _placed(first: int, steps: tuple[tuple[int, int], ...], ranks_per_node: int) -> Shape:
    """Return the placement of a group.

    Args:
        first: first rank of the group.
        steps: (stride, size) of every axis of the group.
        ranks_per_node: ranks that share a node.
    """
    ranks, copies = [first], 1
    for stride, size in steps:
        if stride % ranks_per_node == first % ranks_per_node == 0:  # the same ranks again, on other nodes
            copies *= size
        else:
            ranks = [rank + stride * i for i in range(size) for rank in ranks]
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    return Shape(len(ranks) * copies, min(nodes.values()), len(nodes) * copies)
