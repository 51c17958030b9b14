"""The ranks of a fold on the nodes of a cluster, in order and by their traffic, as `foldray explain --cluster` shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from foldray.amounts import in_bytes, three_digits
from foldray.choosing import expected
from foldray.costs.hardware import load_hardware
from foldray.errors import UserError
from foldray.nodes import ROWS, Arrangement, Edges, Room, arrange, filled
from foldray.orders import AUTO
from foldray.recipe import Recipe

_SIZES = re.compile(r"(\d+x)?\d+(,(\d+x)?\d+)*")
_SHOWN = 16  # nodes in the table
_FASTEST = 3  # orders beside the recipe's own
_MOST_NODES, _MOST_RANKS = 1 << 17, 2048


class Node(NamedTuple):
    """A node of a cluster: its name, and for how many ranks it has room."""

    name: str
    seats: int


def named_nodes(cluster: str, world: int) -> list[Node]:
    """Return the nodes that a word describes.

    Args:
        cluster: sizes of nodes, such as "3,5" or "16x8"; or the name of a cluster that comes with foldray, or a hardware file,
            whose nodes are as many as the ranks need.
    """
    if _SIZES.fullmatch(cluster):
        parts = [part.rpartition("x") for part in cluster.split(",")]
        if (count := sum(int(times or 1) for times, _, _ in parts)) > _MOST_NODES:
            raise UserError("cluster", cluster, f"must have at most {_MOST_NODES} nodes, but has {count}")
        sizes = [int(size) for times, _, size in parts for _ in range(int(times or 1))]
    else:
        seats = load_hardware(cluster).gpus_per_node
        sizes = [seats] * -(-world // seats)
    return [Node(f"node {number}", size) for number, size in enumerate(sizes)]


def expected_steps(cluster: str, recipe: Recipe) -> dict[str, float]:
    """Return the seconds of a step that the planner expects on the hardware of a cluster, by the order of the step.

    There are none for a cluster that is described by its nodes alone, and for experts with workers of their own.
    """
    if _SIZES.fullmatch(cluster) or recipe.placement is not None:
        return {}
    return expected(recipe, load_hardware(cluster))


def steps_table(seconds: Mapping[str, float], cluster: str) -> str:
    """Return a text with the recipe's own order and the fastest others."""
    (own, took), *others = seconds.items()
    label = "auto, until it has chosen" if own == AUTO.name else f"{own} (the recipe's)"
    rows = [(label, took), *sorted(others, key=lambda pair: pair[1])[:_FASTEST]]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {three_digits(each):>6} s{each / took:>8.2f} ×" for name, each in rows]
    return "\n".join([f"a step on {cluster}, as the planner expects it:", *lines])


@dataclass(frozen=True)
class Seats:
    """The ranks of a fold on nodes.

    Args:
        edges: the fold and its traffic.
        nodes: the nodes.
        before, after: the ranks in order, one node after the other; and so that the least traffic crosses nodes.
        in_bytes: whether the traffic is in bytes of a step, and not in the units of `HEAT`.
    """

    edges: Edges
    nodes: Sequence[Node]
    before: Arrangement
    after: Arrangement
    in_bytes: bool

    @classmethod
    def of(cls, edges: Edges, nodes: Sequence[Node], in_bytes: bool) -> Seats:
        """Find the best arrangement."""
        if (world := edges.fold.world_size) > _MOST_RANKS:
            raise UserError("world_size", world, f"at most {_MOST_RANKS} ranks are put on nodes")
        fold, rooms = edges.fold, [Room(number, node.seats) for number, node in enumerate(nodes)]
        try:
            after = arrange(edges, rooms)
        except UserError as error:
            raise UserError("cluster", error.value, error.rule) from None
        before = filled(range(fold.world_size), rooms)
        return cls(edges, nodes, Arrangement.of(fold, before.tolist()), Arrangement.of(fold, after), in_bytes)

    @property
    def _families(self) -> list[str]:
        """Families with traffic, those that send most first."""
        split = self.edges.split(self.before.where)
        return sorted((name for name, share in split.items() if sum(share)), key=lambda name: -sum(split[name]))

    def document(self) -> dict[str, Any]:
        """Return the entry "seats" of the document that `foldray explain --json` prints."""
        sides = {"before": self.before, "after": self.after}
        split = {side: self.edges.split(placed.where) for side, placed in sides.items()}
        return {
            "unit": "bytes" if self.in_bytes else "score",
            "nodes": [
                {"name": node.name, "seats": node.seats} | {side: placed.ranks(number) for side, placed in sides.items()}
                for number, node in enumerate(self.nodes)
            ],
            "across": {side: self.edges.across(placed.where) for side, placed in sides.items()},
            "families": {
                name: {
                    side: split[side][name]._asdict() | {"groups": self._groups(name), "crossing": self._crossing(placed, name)}
                    for side, placed in sides.items()
                }
                for name in self._families
            },
        }

    def text(self) -> str:
        """Return tables of the nodes and of the traffic."""
        used = [number for number in range(len(self.nodes)) if self.before.ranks(number) or self.after.ranks(number)]
        nodes = [("", "seats", "ranks in order", "ranks by traffic")]
        nodes += [
            (node.name, str(node.seats), _runs(self.before.ranks(number)), _runs(self.after.ranks(number)))
            for number, node in ((number, self.nodes[number]) for number in used[:_SHOWN])
        ]
        unit = "bytes of a step" if self.in_bytes else "points of the score"
        traffic: list[Sequence[str]] = [(f"between nodes, {unit}", "in all", "ranks in order", "", "ranks by traffic", "")]
        first, second = (self.edges.split(placed.where) for placed in (self.before, self.after))
        for name in self._families:
            total = sum(first[name])
            cells = [name, self._amount(total)]
            for placed, share in ((self.before, first[name]), (self.after, second[name])):
                cells += [f"{self._amount(share.across)} ({share.across / total:.0%})", self._crossings(placed, name)]
            traffic.append(cells)
        total = sum(map(sum, first.values()))
        across = [self.edges.across(placed.where) for placed in (self.before, self.after)]
        if total:
            shares = [cell for crossing in across for cell in (f"{self._amount(crossing)} ({crossing / total:.0%})", "")]
            traffic.append(("all", self._amount(total), *shares))
        more = [f"… {len(used) - _SHOWN} more nodes"] if len(used) > _SHOWN else []
        best = "ranks in order are as good as any"
        if self.before.where != self.after.where:
            best = f"by traffic, {1 - across[1] / across[0]:.0%} less crosses nodes"
        return "\n".join([*_columns(nodes), *more, "", *_columns(traffic), "", best])

    def _groups(self, family: str) -> int:
        return 0 if family == ROWS else sum(len(group) > 1 for group in self.edges.fold.groups(family))

    def _crossing(self, placed: Arrangement, family: str) -> int:
        """Return the number of groups that are on several nodes."""
        groups = () if family == ROWS else placed.fold.groups(family)
        return sum(len(set(map(placed.node, group))) > 1 for group in groups)

    def _crossings(self, placed: Arrangement, family: str) -> str:
        groups = self._groups(family)
        return f"{self._crossing(placed, family)} of {groups} group{'s' * (groups > 1)}" if groups else ""

    def _amount(self, value: float) -> str:
        return in_bytes(value, decimal=True) if self.in_bytes else three_digits(value)


def _runs(ranks: Sequence[int]) -> str:
    """Return ranks as runs, such as "0–3 8–11", of which the first six are shown."""
    starts = [0, *(number for number, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1), len(ranks)]
    runs = [f"{ranks[a]}–{ranks[b - 1]}" if b - a > 1 else str(ranks[a]) for a, b in pairwise(starts) if b > a]
    return " ".join(runs[:6] + ["…"] * (len(runs) > 6)) or "–"


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
