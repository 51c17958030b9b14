"""AF-Pipe: the lists of a step whose experts have positions of their own (DisagMoE, section 4.2).

A micro-batch goes through a chain of halves: attention of block 0, its experts, attention of block 1, its experts, and so on.
Each half stands at a position. While a micro-batch is at the experts or on its way, attention's position works on another
one. The lists follow from a run on a clock with simple rules:

- A half takes one unit of time forward and two backward. The way between two positions takes one unit.
- A free position first goes backward, then forward, each time with the half that is nearest to the start of the model.
- At most `alive` micro-batches are on their way at once.

So the step warms up with forwards, alternates forwards and backwards, and ends with backwards, for any number of positions of
either half and any number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, PROJECT, ROUTE
from foldray.schedule.clock import UNITS
from foldray.schedule.op import Direction, Op, Schedule
from foldray.schedule.step_graph import StepGraph
from foldray.schedule.weave import woven

_WAY = 1  # units of time


class Half(NamedTuple):
    """The attention of a block with what comes before it, or its experts, or the end of the model.

    Args:
        position: the pipeline position.
        ops: the forward ops that compute, for the first micro-batch, in order.
    """

    position: int
    ops: tuple[Op, ...]


class _Pass(NamedTuple):
    """One half of one micro-batch, in one direction."""

    direction: Direction
    half: int
    micro_batch: int


def af_pipe(graph: StepGraph, alive: int | None = None) -> Schedule:
    """Return the lists of all positions, without the reductions of gradients.

    Args:
        graph: a step whose experts have positions of their own.
        alive: most micro-batches that have started and not ended. None is two for every position: one there and one on its
            way.
    """
    graph = replace(graph, chunks=())
    halves = list(chain(graph))
    orders: list[list[Op]] = [[] for _ in range(graph.positions)]
    for each in _run(graph, halves, alive or 2 * graph.positions):
        half = halves[each.half]
        ops = half.ops if each.direction == "F" else _mirrored(graph, half.ops)
        orders[half.position] += [op._replace(micro_batch=each.micro_batch) for op in ops]
    return woven(graph, tuple(map(tuple, orders)))


def chain(graph: StepGraph) -> Iterator[Half]:
    """Yield the halves that a micro-batch goes through, in order."""
    for layer, place in enumerate(graph.at):
        yield Half(place.attention, tuple(_attention(graph, layer)))
        if graph.blocks[layer].moe:
            yield Half(place.experts, tuple(graph.pieces(EXPERT, layer)))
    last = len(graph.at) - 1
    merges = graph.pieces(MERGE, last) if graph.blocks[last].moe else ()
    yield Half(graph.at[last].attention, (*merges, *graph.pieces(HEAD, last)))


def _attention(graph: StepGraph, layer: int) -> Iterator[Op]:
    """Yield the sums of the block before, then slice by slice: projections, attention, and routers or dense FFN."""
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
            yield routes.pop(0)


def _mirrored(graph: StepGraph, ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in reversed(ops):
        yield from graph.rerun(op)
        yield op._replace(direction="B")


def _run(graph: StepGraph, halves: list[Half], alive: int) -> Iterator[_Pass]:
    """Yield all passes in the order in which they start on the clock."""
    last, started, ended = len(halves) - 1, 0, 0
    free = [0] * graph.positions  # when each position is free
    ready: list[list[tuple[bool, int, int, _Pass]]] = [[] for _ in range(graph.positions)]  # the first entry goes first
    events: list[tuple[int, int, _Pass | None]] = [(0, 0, None)]  # when a pass becomes ready, or a position may look again
    number = 0

    def becomes_ready(at: int, each: _Pass) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, each))

    def start() -> None:
        nonlocal started
        while started < graph.micro_batches and started - ended < alive:
            becomes_ready(now, _Pass("F", 0, started))
            started += 1

    now = 0
    start()
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, each = heapq.heappop(events)
            if each is not None:
                order = each.direction == "F", each.half, each.micro_batch
                heapq.heappush(ready[halves[each.half].position], (*order, each))
        for position, waiting in enumerate(ready):
            if not waiting or free[position] > now:
                continue
            each = heapq.heappop(waiting)[-1]
            yield each
            free[position] = end = now + UNITS[each.direction]
            number += 1
            heapq.heappush(events, (end, number, None))
            if each.direction == "F" and each.half == last:
                if graph.backward:
                    becomes_ready(end, _Pass("B", last, each.micro_batch))
                else:
                    ended += 1
            elif each.direction == "B" and each.half == 0:
                ended += 1
            else:
                onwards = each.half + (1 if each.direction == "F" else -1)
                way = _WAY * (halves[onwards].position != position)
                becomes_ready(end + way, each._replace(half=onwards))
            start()
