"""The traffic of a fold as edges between ranks, and the part of it that crosses nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from foldray.fold.fold import Fold
from foldray.fold.placement import HEAT
from foldray.fold.routes import Routes

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
        fold: the fold.
        flows: its traffic. Groups of one rank have none.
    """

    fold: Fold
    flows: tuple[Flow, ...]

    @classmethod
    def by_heat(cls, fold: Fold, heat: Mapping[str, float] = HEAT) -> Edges:
        """Return the traffic of a fold whose model is not known.

        What crosses nodes is then `Placement.score`: the sum over families of heat × the share of pairs on different nodes.
        """
        members = {family: sum(map(len, fold.groups(family))) for family in heat}
        return cls(fold, tuple(Flow(family, "exchange", each / members[family]) for family, each in heat.items()))

    def split(self, where: Sequence[int]) -> dict[str, Share]:
        """Return the traffic inside and between nodes, by family.

        Args:
            where: the node of every rank.
        """
        nodes = np.asarray(where)
        found = {}
        for family, (first, second, sent) in self._by_family.items():
            crosses = nodes[first] != nodes[second]
            found[family] = Share(float(sent[~crosses].sum()), float(sent[crosses].sum()))
        return found

    def across(self, where: Sequence[int] | np.ndarray) -> float:
        """Return all traffic between nodes."""
        first, second, sent = self._all
        nodes = np.asarray(where)
        return float(sent[nodes[first] != nodes[second]].sum())

    @cached_property
    def matrix(self) -> np.ndarray:
        """The traffic between each two ranks, in both directions together: symmetric, [ranks, ranks]."""
        first, second, sent = self._all
        found = np.zeros((self.fold.world_size,) * 2)
        np.add.at(found, (first, second), sent)
        return found + found.T

    @cached_property
    def _all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        empty = (np.empty(0, int), np.empty(0, int), np.empty(0))
        first, second, sent = (np.concatenate(each) for each in zip(empty, *self._by_family.values(), strict=True))
        return first, second, sent

    @cached_property
    def _by_family(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """By family: senders, receivers, and what each of them sends."""
        found: dict[str, list[tuple[int, int, float]]] = {}
        for flow in self.flows:
            found.setdefault(flow.family, []).extend(_edges(self.fold, flow))
        return {family: _columns(edges, self.fold.offset) for family, edges in found.items()}


def _columns(edges: list[tuple[int, int, float]], offset: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.array([edge[:2] for edge in edges], int).reshape(-1, 2) - offset
    return ends[:, 0], ends[:, 1], np.array([edge[2] for edge in edges])


def _edges(fold: Fold, flow: Flow) -> Iterator[tuple[int, int, float]]:
    """Yield (sender, receiver, bytes)."""
    if flow.way == "routes":
        yield from _routes(fold, flow.sent)
        return
    for group in fold.groups(flow.family):
        if len(group) == 1:
            continue
        if flow.way == "exchange":
            yield from ((a, b, flow.sent / (len(group) - 1)) for a, b in itertools.permutations(group, 2))
        elif flow.way == "ring":
            yield from ((a, b, flow.sent) for a, b in zip(group, (*group[1:], group[0]), strict=True))
        else:
            yield from (pair for a, b in itertools.pairwise(group) for pair in ((a, b, flow.sent), (b, a, flow.sent)))


def _routes(fold: Fold, sent: float) -> Iterator[tuple[int, int, float]]:
    routes = Routes(fold)
    for rank in fold.attention.ranks:
        receivers = [each for position in range(fold.moe_pp) for each in routes.receivers(rank, position)]
        yield from (
            pair for each in receivers for pair in ((rank, each, sent / len(receivers)), (each, rank, sent / len(receivers)))
        )
