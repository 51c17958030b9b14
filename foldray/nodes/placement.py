"""The placement of a fold on nodes: which groups stay inside a node, and which axis orders keep the busiest groups there."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from foldray.errors import UserError
from foldray.fold.fold import Fold
from foldray.fold.grid import Grid

HEAT: Mapping[str, float] = MappingProxyType({"etp": 32, "tp": 16, "ep": 8, "cp": 4, "edp": 2, "dp_cp": 2, "pp": 1})
"""How much a slow link slows down a family. The numbers only order the families, in powers of two. They are not measured.

The first four families send data for every layer and token, forward and backward. etp gathers and scatters each of the
token's top-k rows among all ranks of a group. tp does the same with the token itself. ep sends k rows out and back, each to
one rank only. cp passes keys and values round, which are narrow with grouped-query attention. edp and dp_cp sum gradients
only once per step, and have the whole backward for it. pp sends one activation from stage to stage, once per stage and not
per layer.
"""


@dataclass(frozen=True)
class Placement:
    """The ranks of a fold on nodes of equal size.

    Ranks fill the nodes one after the other, from the cluster's rank 0. The last node may be partly empty.

    Args:
        fold: the fold. Its `offset` is its first rank in the cluster, so it may begin in the middle of a node.
    """

    fold: Fold
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise UserError("ranks_per_node", self.ranks_per_node, "must be at least 1")

    @property
    def nodes(self) -> int:
        """Number of nodes that hold ranks of the fold."""
        return self.node(self.fold.offset + self.fold.world_size - 1) - self.node(self.fold.offset) + 1

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def in_words(self) -> str:
        """How the ranks are on nodes, in words."""
        return f"{self.ranks_per_node} per node"

    def named(self, ranks: Iterable[int]) -> str:
        """Name the nodes that hold these ranks: "node 0", "nodes 0–3", "nodes 0 2", or "5 nodes" if they are many."""
        on = sorted({self.node(rank) for rank in ranks})
        if len(on) < 2:
            return f"node {on[0]}"
        if on[-1] - on[0] == len(on) - 1:
            return f"nodes {on[0]}–{on[-1]}"
        return f"nodes {' '.join(map(str, on))}" if len(on) < 5 else f"{len(on)} nodes"

    def crossing(self, family: str) -> float:
        """Return the share of pairs in a family's groups whose ranks lie on different nodes; 0 for groups of one rank."""
        groups = self.fold.groups(family)
        size = len(groups[0])
        if size == 1:
            return 0.0
        together = sum(count * (count - 1) for shares in self._shares(family) for count in shares.values())
        return 1 - together / (len(groups) * size * (size - 1))

    def spans(self, family: str) -> int:
        """Return the largest number of nodes that a group of the family covers."""
        return max(map(len, self._shares(family)))

    def inside(self, family: str) -> bool:
        """Whether every group of the family lies on one node."""
        return self.spans(family) == 1

    def score(self, heat: Mapping[str, float] = HEAT) -> float:
        """Return the sum of heat × `crossing` over the families. Lower is better; at 0, no group crosses nodes."""
        return _score(heat, self.crossing)

    def as_dict(self) -> dict:
        """Return the entry "placement" of the document that `foldray explain --json` prints."""
        measures = {"crossing": self.crossing, "spans": self.spans, "inside": self.inside}
        families = {
            name: {key: of(name) for key, of in measures.items()} for names in self.fold.families.values() for name in names
        }
        return {"ranks_per_node": self.ranks_per_node, "nodes": self.nodes, "score": self.score(), "families": families}

    def _shares(self, family: str) -> Iterator[Counter[int]]:
        """Count, for each group, its ranks on each node."""
        return (Counter(map(self.node, group)) for group in self.fold.groups(family))


@dataclass(frozen=True)
class Arrangement(Placement):
    """The ranks of a fold on any nodes, such as nodes of different sizes.

    Args:
        ranks_per_node: most ranks that share a node.
        where: the node of every rank of the fold.
    """

    where: tuple[int, ...]

    @classmethod
    def of(cls, fold: Fold, where: Sequence[int]) -> Arrangement:
        return cls(fold, max(Counter(where).values()), tuple(where))

    @property
    def nodes(self) -> int:
        return len(set(self.where))

    @property
    def in_words(self) -> str:
        return f"on {self.nodes} node{'s' * (self.nodes > 1)}"

    def node(self, rank: int) -> int:
        return self.where[rank - self.fold.offset]

    def ranks(self, node: int) -> list[int]:
        """Return the ranks on a node."""
        return [rank for rank, seat in enumerate(self.where, self.fold.offset) if seat == node]


def best_order(fold: Fold, ranks_per_node: int, heat: Mapping[str, float] = HEAT) -> Fold:
    """Return the fold with the legal pair of axis orders that has the lowest score.

    Among equal scores, the fold's present orders win, then the first orders by name.
    """
    shares: dict[tuple, float] = {}

    def crossing(candidate: Fold, family: str) -> float:
        grid, axes = candidate.axes(family)
        # The strides of a family's axes determine its groups, and many orders have the same strides.
        key = (family, *map(grid.stride, axes))
        if key not in shares:
            shares[key] = Placement(candidate, ranks_per_node).crossing(family)
        return shares[key]

    def rank(candidate: Fold) -> tuple[float, bool, str, str]:
        return _score(heat, partial(crossing, candidate)), candidate != fold, candidate.order, candidate.moe_order

    legal = []
    for order, moe_order in itertools.product(_orders(fold.attention), _orders(fold.moe)):
        with suppress(UserError):  # orders whose pipeline groups differ are illegal
            legal.append(replace(fold, order=order, moe_order=moe_order))
    return min(legal, key=rank)


def _score(heat: Mapping[str, float], crossing: Callable[[str], float]) -> float:
    # Rounding makes equally good orders equal, even if different families cross nodes.
    return round(math.fsum(weight * crossing(family) for family, weight in heat.items()), 9)


def _orders(grid: Grid) -> Iterator[str]:
    """Yield every order of the axes. Axes of size 1 keep their place, because moving them changes no group."""
    moving = [axis for axis, size in zip(grid.axes, grid.sizes, strict=True) if size > 1]
    for permuted in itertools.permutations(moving):
        rest = iter(permuted)
        yield "-".join(next(rest) if axis in moving else axis for axis in grid.axes)
