"""The traffic of a fold as edges between ranks, and the part of it that crosses nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from foldray.fold.fold import Fold
from foldray.nodes.placement import HEAT
from foldray.nodes.routes import Routes

Way = Literal["exchange", "ring", "chain", "routes"]
ROWS = "rows"
"""The name of the traffic between attention and experts that have ranks of their own. It has no groups."""


class Flow(NamedTuple):
    """The traffic of one group family.

    Args:
        family: the family, or `ROWS`.
        way: who sends to whom. In an "exchange", a rank sends equal shares to all other members; in a "ring", everything to the
            next member; in a "chain", everything to the next member, and as much back; by "routes", a rank of attention sends
            equal shares to all ranks of experts on its routes, and gets as much back.
        sent: bytes that a rank sends in a step; for a chain and routes, in one direction.
    """

    family: str
    way: Way
    sent: float


class Share(NamedTuple):
    """Bytes of all ranks together: those that stay inside nodes, and those that cross from one node to another."""

    inside: float
    across: float


@dataclass(frozen=True)
class Edges:
    """Traffic between pairs of ranks. Ranks count from 0, also if the fold has an offset.

    Args:
        flows: its traffic, one for each family. Groups of one rank have none.
    """

    fold: Fold
    flows: tuple[Flow, ...]

    @classmethod
    def by_heat(cls, fold: Fold) -> Edges:
        """Return the traffic of a fold whose model is not known.

        What crosses nodes is then `Placement.score`: the sum over families of heat × the share of pairs on different nodes.
        """
        members = {family: sum(map(len, fold.groups(family))) for family in HEAT}
        return cls(fold, tuple(Flow(family, "exchange", weight / members[family]) for family, weight in HEAT.items()))

    def split(self, where: Sequence[int]) -> dict[str, Share]:
        """Return the traffic inside and between nodes, by family."""
        nodes = np.asarray(where)
        shares = {}
        for family, (first, second, sent) in self._by_family.items():
            crosses = nodes[first] != nodes[second]
            shares[family] = Share(float(sent[~crosses].sum()), float(sent[crosses].sum()))
        return shares

    def across(self, where: Sequence[int] | np.ndarray) -> float:
        """Return all traffic between nodes."""
        first, second, sent = self._all
        nodes = np.asarray(where)
        return float(sent[nodes[first] != nodes[second]].sum())

    @cached_property
    def matrix(self) -> np.ndarray:
        """The traffic between each two ranks, in both directions together: symmetric, [ranks, ranks]."""
        first, second, sent = self._all
        traffic = np.zeros((self.fold.world_size,) * 2)
        np.add.at(traffic, (first, second), sent)
        return traffic + traffic.T

    @cached_property
    def _all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        empty = (np.empty(0, int), np.empty(0, int), np.empty(0))
        first, second, sent = (np.concatenate(arrays) for arrays in zip(empty, *self._by_family.values(), strict=True))
        return first, second, sent

    @cached_property
    def _by_family(self) -> dict[str, _Sent]:
        edges: dict[str, _Sent] = {}
        for flow in self.flows:
            first, second, sent = _sent(self.fold, flow)
            edges[flow.family] = first - self.fold.offset, second - self.fold.offset, sent
        return edges


_Sent = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Senders, receivers, and the bytes from each sender to its receiver."""


def _sent(fold: Fold, flow: Flow) -> _Sent:
    if flow.way == "routes":
        return _by_routes(fold, flow.sent)
    groups = np.array(fold.groups(flow.family))  # [groups, members]
    size, share = groups.shape[1], flow.sent
    if size == 1:
        pairs = np.empty((2, 0), int)
    elif flow.way == "exchange":
        first, second = np.nonzero(~np.eye(size, dtype=bool))
        pairs, share = np.stack([groups[:, first].ravel(), groups[:, second].ravel()]), flow.sent / (size - 1)
    elif flow.way == "ring":
        pairs = np.stack([groups.ravel(), np.roll(groups, -1, axis=1).ravel()])
    else:
        up = np.stack([groups[:, :-1].ravel(), groups[:, 1:].ravel()])
        pairs = np.concatenate([up, up[::-1]], axis=1)
    return pairs[0], pairs[1], np.full(pairs.shape[1], share)


def _by_routes(fold: Fold, sent: float) -> _Sent:
    routes, pairs = Routes(fold), list[tuple[int, int]]()
    for rank in fold.attention.ranks:
        pairs += [(rank, share) for position in range(fold.moe_pp) for share in routes.receivers(rank, position)]
    up = np.array(pairs).T
    share = sent * fold.attention_ranks / len(pairs)  # all ranks send to as many
    return np.append(up[0], up[1]), np.append(up[1], up[0]), np.full(2 * len(pairs), share)
