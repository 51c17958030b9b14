"""Which rank goes to which node, so that the least traffic crosses nodes.

This is a partition of a graph into parts of given sizes, which has no quick exact solution. The search begins with the orders
of both grids' axes: ranks in such an order fill the nodes, whole groups first. The best of these beginnings are improved by
passes of swaps (Kernighan and Lin, "An efficient heuristic procedure for partitioning graphs", 1970): a pass makes the best swap
again and again, even where it does harm, with ranks that have not been swapped, and keeps the swaps up to the best moment. Free
seats take part as ranks without traffic, so that the swaps also choose how many ranks a node gets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from foldray.errors import UserError
from foldray.fold.fold import Fold
from foldray.fold.grid import Grid
from foldray.nodes.traffic import Edges

_IMPROVED, _SMALL = 3, 512  # beginnings that swaps improve: so many, or more as long as all their seats are at most 512
_MOST_SEATS = 1280  # above, swaps take too long, and the best beginning is the answer
_EQUAL = 1e-9  # relative difference of traffic below which two arrangements are equally good


class Room(NamedTuple):
    """Room for ranks on a node.

    Args:
        kind: the ranks that it is for. Rooms of several kinds may be on one node.
    """

    node: int
    seats: int
    kind: str = ""


def arrange(edges: Edges, rooms: Sequence[Room], kinds: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the node of every rank.

    If no other arrangement is better, ranks fill the rooms one after the other.

    Args:
        rooms: the rooms. If they have more seats than there are ranks, some stay free.
        kinds: the kind of every rank; None is "" for all.
    """
    world = edges.fold.world_size
    kinds = [""] * world if kinds is None else list(kinds)
    rooms = _enough(rooms, world)
    for kind in dict.fromkeys(kinds):
        seats, wanted = sum(room.seats for room in rooms if room.kind == kind), kinds.count(kind)
        if seats < wanted:
            raise UserError("nodes", " ".join(str(room.seats) for room in rooms), f"have room for {seats} of {wanted} ranks")
    all_seats = sum(room.seats for room in rooms)
    first = filled(range(world), rooms, kinds)
    scored = [(edges.across(first), 0, first)]
    if scored[0][0]:
        known = {tuple(first)}
        for where in _beginnings(edges.fold, rooms, kinds):
            if tuple(where) not in known:
                known.add(tuple(where))
                scored.append((edges.across(where), len(scored), where))
    chosen, best = first, scored[0][0]
    for across, _, where in sorted(scored, key=lambda beginning: beginning[:2])[: max(_IMPROVED, _SMALL // all_seats)]:
        if across and all_seats <= _MOST_SEATS:
            where = _improved(edges.matrix, where, rooms, kinds)
            across = edges.across(where)
        if across < best * (1 - _EQUAL):
            chosen, best = where, across
    return tuple(map(int, chosen))


def filled(order: Sequence[int], rooms: Sequence[Room], kinds: Sequence[str] | None = None, unit: int = 1) -> np.ndarray:
    """Return the node of every rank if ranks fill the rooms of their kind in an order.

    Args:
        order: the ranks. Each `unit` of them stay together as long as a room has as many seats.
    """
    node_of = np.full(len(order), -1)
    for kind in ("",) if kinds is None else dict.fromkeys(kinds):
        ranks = [rank for rank in order if kinds is None or kinds[rank] == kind]
        fitting = [room for room in rooms if room.kind == kind]
        whole = [room.node for room in fitting for _ in range(room.seats // unit * unit)]
        rest = [room.node for room in fitting for _ in range(room.seats % unit)]
        node_of[ranks] = [*whole, *rest][: len(ranks)]
    return node_of


def _enough(rooms: Sequence[Room], world: int) -> list[Room]:
    """Return the rooms that matter: no more of a kind than there are ranks, and at most twice as many seats, the largest first.

    Otherwise a small fold on a large cluster would take long."""
    rooms = [room._replace(seats=min(room.seats, world)) for room in rooms if room.seats > 0]
    if sum(room.seats for room in rooms) <= 2 * world:
        return rooms
    kept: list[int] = []
    for kind in dict.fromkeys(room.kind for room in rooms):
        fitting = sorted((i for i, room in enumerate(rooms) if room.kind == kind), key=lambda i: -rooms[i].seats)
        total = list(itertools.accumulate(rooms[i].seats for i in fitting))
        kept += [i for i, before in zip(fitting, [0, *total], strict=False) if before < 2 * world]
    return [rooms[i] for i in sorted(kept)]


def _beginnings(fold: Fold, rooms: Sequence[Room], kinds: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield arrangements: ranks in an order of the axes of a grid, whole groups first, into rooms in some order."""
    large = sorted(rooms, key=lambda room: -room.seats)
    most = large[0].seats
    orders = (rooms,) if most == large[-1].seats else (rooms, large, large[::-1])
    for order, sizes in _orders(fold):
        units = {math.prod(sizes[:count]) for count in range(len(sizes))}
        for unit, into in itertools.product(sorted(units), orders):
            if unit <= most:
                yield filled(order, into, kinds, unit)


def _orders(fold: Fold) -> Iterator[tuple[list[int], list[int]]]:
    """Yield all ranks in an order of the axes of a grid, with the sizes of the axes. If the grids have ranks of their own, both
    are in an order of their axes."""
    if fold.disjoint:
        for (ranks, sizes), (expert_ranks, _) in itertools.product(_grid_orders(fold.attention), _grid_orders(fold.moe)):
            yield [rank - fold.offset for rank in (*ranks, *expert_ranks)], sizes
        return
    for grid in fold.views.values():
        for ranks, sizes in _grid_orders(grid):
            yield [rank - fold.offset for rank in ranks], sizes


def _grid_orders(grid: Grid) -> Iterator[tuple[list[int], list[int]]]:
    table = np.asarray(grid.ranks).reshape(grid.sizes[::-1])  # the fastest axis last
    axes = [axis for axis, size in enumerate(table.shape) if size > 1]
    single = [axis for axis, size in enumerate(table.shape) if size == 1]
    for order in itertools.permutations(axes):
        yield table.transpose(*single, *order).ravel().tolist(), [table.shape[axis] for axis in reversed(order)]


def _improved(traffic: np.ndarray, where: np.ndarray, rooms: Sequence[Room], kinds: Sequence[str]) -> np.ndarray:
    """Swap ranks as long as less traffic crosses nodes.

    Args:
        traffic: between each two ranks, in both directions together.
    """
    world = len(where)
    names = {name: number for number, name in enumerate(dict.fromkeys([*kinds, *(room.kind for room in rooms)]))}
    taken = np.zeros((max(room.node for room in rooms) + 1, len(names)), int)
    kind_of = np.array([names[kind] for kind in kinds])
    np.add.at(taken, (where, kind_of), 1)
    # Free seats are ranks without traffic.
    for room in rooms:
        free = room.seats - taken[room.node, names[room.kind]]
        taken[room.node, names[room.kind]] = 0
        where, kind_of = (
            np.append(where, [room.node] * free).astype(int),
            np.append(kind_of, [names[room.kind]] * free).astype(int),
        )
    weights = np.zeros((len(where),) * 2)
    weights[:world, :world] = traffic
    patience, apart = 2 * max(room.seats for room in rooms), kind_of[:, None] != kind_of[None, :]
    least = _EQUAL * traffic.sum()
    while True:
        swaps = _pass(weights, where, apart, patience, least)
        if not swaps:
            return where[:world]
        for a, b in swaps:
            where[[a, b]] = where[[b, a]]


def _pass(weights: np.ndarray, where: np.ndarray, apart: np.ndarray, patience: int, least: float) -> list[tuple[int, int]]:
    """Return the swaps of a pass up to its best moment; none if the traffic between nodes does not fall by more than `least`.

    Args:
        apart: whether two ranks are of different kinds.
        patience: swaps without a new best moment after which the pass ends.
    """
    where, everyone = where.copy(), np.arange(len(where))
    toward = weights @ np.eye(where.max() + 1)[where]  # of each rank to each node
    lost = np.where(apart | (where[:, None] == where[None, :]), np.inf, 2 * weights)
    swaps, kept, gained, most = list[tuple[int, int]](), 0, 0.0, least
    while len(swaps) - kept < patience:
        better = toward[:, where] - toward[everyone, where][:, None]  # for each rank, at the node of each other one
        gain = better + better.T
        gain -= lost
        a, b = divmod(int(gain.argmax()), len(where))
        if gain[a, b] == -np.inf:
            break
        change = weights[:, b] - weights[:, a]
        toward[:, where[a]] += change
        toward[:, where[b]] -= change
        where[[a, b]] = where[[b, a]]
        lost[[a, b]] = lost[:, [a, b]] = np.inf  # each rank is swapped once
        swaps.append((a, b))
        gained += gain[a, b]
        if gained > most:
            most, kept = gained, len(swaps)
    return swaps[:kept]
