"""AF-Pipe: the lists of a step whose experts have positions of their own (DisagMoE, section 4.2).

A micro-batch goes through a chain of halves: attention of block 0, its experts, attention of block 1, its experts, and so on.
Each half stands at a position. While a micro-batch is at the experts or on its way, attention's position works on another
one. The lists follow from a run on a clock with simple rules:

- A half takes one unit of time forward and two backward; the end of the model (sums and head) takes none. The way between two
  positions takes one unit.
- A free position goes forward and backward in turns, if both wait.
- Of the forwards that wait, the first one by a *priority* goes first; likewise of the backwards.
- At most `alive` micro-batches are on their way at once.

No priority is best for all placements. So every priority of `_PRIORITIES` runs with several limits `alive`, and the fastest
run gives the lists. Rounds of micro-batches are best if the halves go around all positions in turn, as in interleaved 1F1B
(arXiv:2104.04473); the oldest micro-batch first, if a micro-batch stays between two positions for several blocks.

So the step warms up with forwards, alternates forwards and backwards, and ends with backwards, for any number of positions of
either half and any number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from math import inf
from typing import NamedTuple

from foldray.clock.times import UNITS
from foldray.graph.op import Direction, Op, Schedule
from foldray.graph.step_graph import StepGraph
from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, PROJECT, ROUTE, SHARED
from foldray.orders.handovers import place_handovers

_WAY = 1  # units of time
_DIRECTIONS: tuple[Direction, ...] = ("F", "B")
_QUARTERS = (4, 6, 8, 12)  # of the number of positions: limits of micro-batches alive
_NEARLY = 1.02  # fewer micro-batches alive need less memory, which is worth so much time


class Half(NamedTuple):
    """The attention of a block with what comes before it, or its experts, or the end of the model.

    Args:
        ops: the forward ops that compute, for the first micro-batch, in order.
        units: units of time of its forward.
    """

    position: int
    ops: tuple[Op, ...]
    units: int = 1


class _Pass(NamedTuple):
    """One half of one micro-batch, in one direction."""

    direction: Direction
    half: int
    micro_batch: int


class _Line(NamedTuple):
    """The halves that every micro-batch of a step goes through.

    Args:
        halves: for every half, its position and the units of time of its forward.
    """

    halves: tuple[tuple[int, int], ...]
    positions: int
    micro_batches: int
    backward: bool

    def least(self, alive: int) -> float:
        """Return a lower bound of the units of time of a step in which `alive` micro-batches are on their way at once.

        A position computes its halves of all micro-batches. One of these must come to it first, and one goes on from it last. And
        no more than `alive` micro-batches share the time.
        """
        times, both = UNITS["F"] + UNITS["B"] * self.backward, 1 + self.backward
        way, before, busy = 0, dict[int, int](), Counter[int]()
        for place, (position, units) in enumerate(self.halves):
            way += _WAY * both * (place > 0 and position != self.halves[place - 1][0])
            before.setdefault(position, way)
            busy[position] += times * units
            way += times * units
        ending = UNITS["B"] * self.halves[0][1] if self.backward else self.halves[-1][1]  # the next one may begin with it
        there = max(before[position] + self.micro_batches * units for position, units in busy.items())
        return max(there, self.micro_batches * (way - ending) / alive)


Priority = Callable[[_Pass, int], tuple[int, ...]]
"""(a pass, number of positions) → its rank among the passes of its direction that wait; the smallest goes first."""

_PRIORITIES: tuple[Priority, ...] = (
    # As many micro-batches as positions go through a half before they go through the next one.
    lambda waiting, positions: (
        waiting.micro_batch // positions,
        waiting.half if waiting.direction == "F" else -waiting.half,
        waiting.micro_batch,
    ),
    lambda waiting, positions: (waiting.micro_batch,),  # the oldest micro-batch first
    lambda waiting, positions: (waiting.half, waiting.micro_batch),  # the first half first
)


def af_pipe(graph: StepGraph, alive: int | None = None) -> Schedule:
    """Return the lists of all positions, without the reductions of gradients.

    Args:
        alive: most micro-batches that have started and not ended. None is the fewest with which the step is nearly as fast as
            with three for every position: one there, one that comes and one that goes.
    """
    return _af_pipe(replace(graph, chunks=(), later=(), slicing=graph.slicing.in_units), alive)


@lru_cache(maxsize=24)  # every position takes its list from the same lists, and many candidates of a search have equal ones
def _af_pipe(graph: StepGraph, alive: int | None) -> Schedule:
    return place_handovers(graph, *orders_of_halves(graph, alive))


def orders_of_halves(graph: StepGraph, alive: int | None = None) -> tuple[Schedule, dict[Op, tuple[int, int]]]:
    """Return the orders in which all positions compute in `af_pipe`, and when each op begins and ends on its clock."""
    halves, positions = list(chain(graph)), graph.positions
    line = _Line(tuple((half.position, half.units) for half in halves), positions, graph.micro_batches, graph.backward)
    passes = _passes(line, alive)
    orders: list[list[Op]] = [[] for _ in range(positions)]
    spans: dict[Op, tuple[int, int]] = {}
    forwards = [half.ops for half in halves]
    backwards = [tuple(back for op in reversed(ops) for back in graph.backward_of(op)) for ops in forwards]
    ticks = max(map(len, backwards))  # of a unit of time, so that all ops of a half have whole numbers of ticks
    for half_pass, start in passes:
        half = halves[half_pass.half]
        ops = (forwards if half_pass.direction == "F" else backwards)[half_pass.half]
        moments = [ticks * start + ticks * UNITS[half_pass.direction] * half.units * i // len(ops) for i in range(len(ops) + 1)]
        for op, span in zip(ops, pairwise(moments), strict=True):
            numbered = Op(*op[:-1], half_pass.micro_batch)
            orders[half.position].append(numbered)
            spans[numbered] = span
    return tuple(map(tuple, orders)), spans


def chain(graph: StepGraph) -> Iterator[Half]:
    """Yield the halves that a micro-batch goes through, in order."""
    for layer, place in enumerate(graph.at):
        yield Half(place.attention, tuple(_attention(graph, layer)))
        if graph.blocks[layer].moe:
            yield Half(place.experts, tuple(graph.pieces(EXPERT, layer)))
    last = len(graph.at) - 1
    merges = graph.pieces(MERGE, last) if graph.blocks[last].moe else ()
    yield Half(graph.at[last].attention, (*merges, *graph.pieces(HEAD, last)), 0)


def _attention(graph: StepGraph, layer: int) -> Iterator[Op]:
    """Yield the sums of the block before, then slice by slice: projections, attention, and routers or dense FFN.

    A head of the block before comes last, because the next block's rows travel meanwhile (multi-token prediction).
    """
    if layer == 0:
        yield from graph.pieces(EMBED, 0)
    elif graph.blocks[layer - 1].moe:
        yield from graph.pieces(MERGE, layer - 1)
    routes = list(graph.pieces(ROUTE, layer)) if graph.blocks[layer].moe else []
    for op in graph.pieces(ATTENTION, layer):
        if graph.gathers:
            yield op._replace(kind=PROJECT)
        yield op
        if not graph.blocks[layer].moe:
            yield op._replace(kind=FFN)
        while routes and graph.tokens(routes[0]).stop <= graph.tokens(op).stop:
            yield (route := routes.pop(0))
            if graph.has(SHARED, layer):
                yield route._replace(kind=SHARED)
    if layer - 1 in graph.heads:
        yield from graph.pieces(HEAD, layer - 1)


def _ways(line: _Line, alive: int | None) -> list[tuple[int, Priority]]:
    """Return pairs of a limit `alive` and a priority, the limit with the least memory first."""
    limits = [-(-line.positions * quarters // 4) for quarters in _QUARTERS] if alive is None else [alive]
    return list(product(limits, _PRIORITIES))


@lru_cache(maxsize=16)  # they are the same whatever ops the halves have, and memory asks for them as well as lists
def _passes(line: _Line, alive: int | None) -> list[tuple[_Pass, int]]:
    """Return all passes with their starts. Of the ways to order them that are nearly as fast as the fastest one, take the first.

    A way does not run if its bound says that it is not nearly as fast, or that one before it is nearly as fast as this one.
    """
    ways = _ways(line, alive)
    least, runs = [line.least(limit) for limit, _ in ways], dict[int, tuple[int, list[tuple[_Pass, int]]]]()
    fastest, first = inf, len(ways)
    while True:
        left = [
            way
            for way, bound in enumerate(least)
            if way not in runs and bound <= _NEARLY * fastest and (way < first or runs[first][0] > _NEARLY * bound)
        ]
        if not left:
            return runs[first][1]
        way = min(left, key=lambda way: (least[way], way))
        runs[way] = _run(line, ways[way][1], ways[way][0])
        fastest = min(seconds for seconds, _ in runs.values())
        first = min(way for way, (seconds, _) in runs.items() if seconds <= _NEARLY * fastest)


def _run(line: _Line, priority: Priority, alive: int) -> tuple[int, list[tuple[_Pass, int]]]:
    """Run all passes on the clock. Return when the last one ends, and all with their starts, in the order of these."""
    last, started, ended, order = len(line.halves) - 1, 0, 0, list[tuple[_Pass, int]]()
    free = [0] * line.positions  # when each position is free
    turn: list[Direction] = ["F"] * line.positions  # the direction that goes first if both wait
    ready = [{direction: list[tuple[tuple[int, ...], _Pass]]() for direction in _DIRECTIONS} for _ in free]
    events: list[tuple[int, _Pass | tuple[()]]] = [(0, ())]  # when a pass becomes ready, or a position may look again
    now = 0
    while events:
        while started < line.micro_batches and started - ended < alive:
            heapq.heappush(events, (now, _Pass("F", 0, started)))
            started += 1
        now = events[0][0]
        while events and events[0][0] == now:
            _, half_pass = heapq.heappop(events)
            if half_pass:
                waiting = ready[line.halves[half_pass.half][0]][half_pass.direction]
                heapq.heappush(waiting, (priority(half_pass, line.positions), half_pass))
        for position, waits in enumerate(ready):
            going = [direction for direction in _DIRECTIONS if waits[direction]]
            if not going or free[position] > now:
                continue
            direction = turn[position] if len(going) > 1 else going[0]
            half_pass = heapq.heappop(waits[direction])[-1]
            turn[position] = "B" if direction == "F" else "F"
            order.append((half_pass, now))
            free[position] = end = now + UNITS[direction] * line.halves[half_pass.half][1]
            heapq.heappush(events, (end, ()))
            if direction == "F" and half_pass.half == last and line.backward:
                heapq.heappush(events, (end, _Pass("B", last, half_pass.micro_batch)))
            elif half_pass.half == (last if direction == "F" else 0):
                ended += 1
            else:
                onwards = half_pass.half + (1 if direction == "F" else -1)
                arrival = end + _WAY * (line.halves[onwards][0] != position)
                heapq.heappush(events, (arrival, _Pass(direction, onwards, half_pass.micro_batch)))
    return max(free), order
