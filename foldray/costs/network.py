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
from operator import attrgetter
from typing import NamedTuple

from foldray.costs.device import Device
from foldray.costs.memo import Table, shared
from foldray.fold import Fold

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


_once = shared(attrgetter("_known"))


@dataclass(frozen=True)
class Network:
    """The links of a cluster under a fold."""

    fold: Fold
    device: Device
    _known: Table = field(default_factory=Table, repr=False, compare=False)

    @_once
    def shape(self, family: str) -> Shape:
        """Return the placement of the group of a family which covers most nodes, and has fewest ranks together on one of them.

        All groups of a family communicate at once, and the other groups wait for this one. If the sizes of a fold do not divide
        a node, some groups lie inside nodes and others do not.
        """
        grid, axes = self.fold.axes(family)
        steps = {axis: (grid.stride(axis), grid.length(axis)) for axis in grid.axes}
        inside = tuple(sorted(steps[axis] for axis in axes))
        beside = tuple(sorted(step for axis, step in steps.items() if axis not in axes))
        return _widest(grid.ranks[0], inside, beside, self.device.hardware.gpus_per_node)

    def gather(self, family: str, whole: float) -> Travel:
        """Return the cost of an all-gather or a reduce-scatter of a tensor with `whole` bytes."""
        return self._gather(family).travel(whole)

    def reduce(self, family: str, whole: float) -> Travel:
        """Return the cost of an all-reduce of `whole` bytes: that of a reduce-scatter and an all-gather."""
        lane, seconds = self.gather(family, whole)
        return Travel(lane, 2 * seconds)

    def exchange(self, family: str, sent: float) -> Travel:
        """Return the cost of an all-to-all with equal shares. `sent` counts the bytes of a rank to all ranks, itself included."""
        return self._exchange(family).travel(sent)

    def hand_over(self, bytes_: float) -> Travel:
        """Return the cost to send bytes from one pipeline stage to the next."""
        near, far = self._links(Shape(2, 2, 2), "intra", "inter")
        lane, link = (INTRA, near) if self.shape("pp").nodes == 1 else (INTER, far)
        return Travel(lane, bytes_ / link.speed + link.start)

    @_once
    def _gather(self, family: str) -> Collective:
        size, together, nodes = shape = self.shape(family)
        if size == 1:
            return _NOBODY
        near, far = self._links(shape, "intra", "inter")
        inside, across = (size - 1) / size / near.speed, (nodes - 1) / nodes / together / far.speed
        return self._slower(shape, inside, across, near.start * math.log2(together) + far.start * math.log2(nodes))

    @_once
    def _exchange(self, family: str) -> Collective:
        size, together, nodes = shape = self.shape(family)
        if size == 1:
            return _NOBODY
        near, far = self._links(shape, "exchange", "exchange")
        loss = 1 + self.device.share["contention"] * math.log2(nodes)
        inside, across = (together - 1) / size / near.speed, (size - together) / size / far.speed * loss
        return self._slower(shape, inside, across, near.start * (together - 1) + far.start * (size - together))

    def _links(self, shape: Shape, *shares: str) -> tuple[_Link, _Link]:
        """Return the links within nodes and between nodes; `shares` name constants, the share of each link's speed."""
        hardware, reached = self.device.hardware, self.device.share
        (near, near_start), (far, far_start) = hardware.intra.of(shape.together), hardware.inter.of(shape.nodes)
        return _Link(near * reached[shares[0]], near_start), _Link(far * reached[shares[1]], far_start)

    @staticmethod
    def _slower(shape: Shape, inside: float, across: float, start: float) -> Collective:
        """Return the cost of a collective that uses both links at once. The slower link decides.

        `inside` and `across` are seconds per byte; `start` is the time to start all messages, one after another.
        """
        if shape.together == 1:
            inside = 0.0
        return Collective(INTER if shape.nodes > 1 else INTRA, start, max(inside, across))


class _Link(NamedTuple):
    """Bytes per second, and seconds until the first byte of a message arrives."""

    speed: float
    start: float


_Steps = tuple[tuple[int, int], ...]
"""(stride, size) of axes, by ascending strides. Each stride is a multiple of those before it."""


@lru_cache(maxsize=4096)
def _widest(first: int, inside: _Steps, beside: _Steps, ranks_per_node: int) -> Shape:
    """Return the placement of the widest group of a family (`Network.shape`).

    Args:
        first: first rank of the grid.
        inside, beside: the axes of a group, and the axes along which groups lie side by side.
    """
    begins = {first % ranks_per_node}  # where groups begin on a node, which is all that their placement depends on
    for stride, size in beside:
        begins = {(begin + stride * i) % ranks_per_node for begin in begins for i in range(min(size, ranks_per_node))}
    return max((_placed(begin, inside, ranks_per_node) for begin in begins), key=lambda shape: (shape.nodes, -shape.together))


def _placed(begin: int, steps: _Steps, ranks_per_node: int) -> Shape:
    """Return the placement of a group whose first rank has this place on a node."""
    ranks, copies = [begin], 1
    for stride, size in steps:
        if stride % ranks_per_node == 0 and ranks[-1] < ranks_per_node:  # the same ranks again, on other nodes
            copies *= size
        else:
            ranks = [rank + stride * i for i in range(size) for rank in ranks]
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    return Shape(len(ranks) * copies, min(nodes.values()), len(nodes) * copies)
