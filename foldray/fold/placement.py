"""A fold on nodes: which groups stay inside one, and the axis orders that keep the busiest groups there."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from foldray.errors import UserError
from foldray.fold.fold import FAMILIES, Fold
from foldray.fold.grid import Grid

HEAT: Mapping[str, float] = MappingProxyType({"etp": 32, "tp": 16, "ep": 8, "cp": 4, "edp": 2, "dp_cp": 2, "pp": 1})
"""How much a family suffers from a slow link: an ordering, each rank twice the next, and nothing that was measured.

Per layer and token, forward and backward: etp gathers and scatters each of the token's top-k rows among all its ranks; tp does
the same with the token itself; ep sends k rows there and back, each to one rank only; cp passes keys and values round, which
grouped-query attention makes narrow. edp and dp_cp sum gradients once per step, however many tokens it has, and have all of
backward to do it in; pp hands one activation from stage to stage, once per stage and not per layer.
"""


@dataclass(frozen=True)
class Placement:
    """A fold's ranks on nodes of equal size, filled one after the other from the cluster's rank 0; the last may be partly empty.

    Args:
        fold: its `offset` is its first rank in the cluster, so it may begin in the middle of a node.
        ranks_per_node: ranks that share a node.

    Raises:
        UserError: `ranks_per_node` is less than 1.
    """

    fold: Fold
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise UserError("ranks_per_node", self.ranks_per_node, "a node holds at least 1 rank")

    @property
    def nodes(self) -> int:
        """Nodes that the fold touches."""
        return self.node(self.fold.offset + self.fold.world_size - 1) - self.node(self.fold.offset) + 1

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def named(self, ranks: Iterable[int]) -> str:
        """The nodes that hold these ranks, as text: "node 0", "nodes 0–3", "nodes 0 2", or their number if they are many."""
        on = sorted({self.node(rank) for rank in ranks})
        if len(on) < 2:
            return f"node {on[0]}"
        if on[-1] - on[0] == len(on) - 1:
            return f"nodes {on[0]}–{on[-1]}"
        return f"nodes {' '.join(map(str, on))}" if len(on) < 5 else f"{len(on)} nodes"

    def crossing(self, family: str) -> float:
        """Share of the pairs within a family's groups whose two ranks lie on different nodes; 0 for groups of one rank."""
        groups = self.fold.groups(family)
        size = len(groups[0])
        if size == 1:
            return 0.0
        together = sum(count * (count - 1) for shares in self._shares(family) for count in shares.values())
        return 1 - together / (len(groups) * size * (size - 1))

    def spans(self, family: str) -> int:
        """The most nodes that one group of the family touches."""
        return max(map(len, self._shares(family)))

    def inside(self, family: str) -> bool:
        """Whether every group of the family lies on one node."""
        return self.spans(family) == 1

    def score(self, heat: Mapping[str, float] = HEAT) -> float:
        """Each family's heat times the share of it that crosses nodes, summed: lower is better, 0 means that nothing crosses."""
        return _score(heat, self.crossing)

    def as_dict(self) -> dict:
        """The "placement" of the document that `foldray explain --json` prints."""
        asked = {"crossing": self.crossing, "spans": self.spans, "inside": self.inside}
        families = {name: {key: ask(name) for key, ask in asked.items()} for names in FAMILIES.values() for name in names}
        return {"ranks_per_node": self.ranks_per_node, "nodes": self.nodes, "score": self.score(), "families": families}

    def _shares(self, family: str) -> Iterator[Counter[int]]:
        """For each group, how many of its ranks each node holds."""
        return (Counter([rank // self.ranks_per_node for rank in group]) for group in self.fold.groups(family))


def best_order(fold: Fold, ranks_per_node: int, heat: Mapping[str, float] = HEAT) -> Fold:
    """The fold in the legal pair of axis orders with the lowest score; of equals the present one, then the first by name."""
    shares: dict[tuple, float] = {}

    def crossing(candidate: Fold, family: str) -> float:
        grid, axes = candidate.axes(family)
        # The strides of its axes say all about a family's groups, and most orders share them with another.
        key = (family, *map(grid.stride, axes))
        if key not in shares:
            shares[key] = Placement(candidate, ranks_per_node).crossing(family)
        return shares[key]

    def rank(candidate: Fold) -> tuple[float, bool, str, str]:
        return _score(heat, partial(crossing, candidate)), candidate != fold, candidate.order, candidate.moe_order

    legal = []
    for order, moe_order in itertools.product(_orders(fold.attention), _orders(fold.moe)):
        with suppress(UserError):  # whose pipeline groups differ
            legal.append(replace(fold, order=order, moe_order=moe_order))
    return min(legal, key=rank)


def _score(heat: Mapping[str, float], crossing: Callable[[str], float]) -> float:
    # Rounded, so that orders that are equally good are equal here too, whichever of their families cross.
    return round(math.fsum(weight * crossing(family) for family, weight in heat.items()), 9)


def _orders(grid: Grid) -> Iterator[str]:
    """Every order of the axes, those of size 1 left where they are: to move them changes no group."""
    moving = [axis for axis, size in zip(grid.axes, grid.sizes, strict=True) if size > 1]
    for permuted in itertools.permutations(moving):
        rest = iter(permuted)
        yield "-".join(next(rest) if axis in moving else axis for axis in grid.axes)
