"""Generators of the order inside a pipeline stage: which piece of which block computes when, forward and backward.

All of them are one wave with two settings: where it drains, and how many slices of attention run between a micro-batch's router
and its experts (the lag), which is the time that its dispatch has to travel. For one block of d = 4, A attention with router, E
experts, M merge; collectives start as soon as what they carry is there:

| kind | source | order of computation | drains |
|---|---|---|---|
| `sequential` | Megatron-LM | A0 E0 M0, nothing cut | at every block |
| `moe_only` | Tutel | A0 (whole) E0 E1 E2 E3 M0 M1 M2 M3 | at every block |
| `aaam` | FoldMoE, figure 2b | A0 A1 A2 A3 E0 E1 E2 E3 M0 M1 M2 M3 | at every block |
| `one_a_one_m` | FoldMoE, figures 2c and 7 | A0 A1 E0 A2 E1 A3 E2 E3 M0 M1 M2 M3 | at every block |
| `stream` | | as above with any lag, and merges just before the next block's attention needs them | once |

A backward order is the mirror of a forward one, with a lag of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from foldray.errors import UserError
from foldray.schedule.op import Op, Schedule
from foldray.schedule.pipeline import pipeline
from foldray.schedule.slicing import SliceCost, Slicing, slice_sequence
from foldray.schedule.step_graph import StepGraph

OVERLAPS = ("sequential", "moe_only", "aaam", "one_a_one_m", "stream")


class Overlap(NamedTuple):
    """How a stage's pieces are ordered in one direction.

    Args:
        kind: one of `OVERLAPS`.
        lag: of `stream`: steps of attention between a micro-batch's router and its experts.
    """

    kind: str
    lag: int = 2


class Ordering(NamedTuple):
    """How sequences are cut, and in which order a rank works on the pieces.

    Args:
        slicing: None is whole sequences, of any length.
        recompute: kinds of ops whose forward is computed again before their backward.
    """

    forward: Overlap = Overlap("sequential")
    backward: Overlap = Overlap("sequential")
    slicing: Slicing | None = None
    recompute: tuple[str, ...] = ()


def named_ordering(name: str, length: int, cost: SliceCost, multiple_of: int = 1) -> Ordering:
    """The ordering that a short name stands for: KIND[:DEGREE[:LAG[:BACKWARD_LAG]]], as in `stream:4:2`.

    Slices are time-uniform; `-even` behind the kind, as in `one_a_one_m-even:4`, makes them equal.

    Raises:
        UserError: no such kind, or numbers that do not fit.
    """
    given, *numbers = name.split(":")
    kind = given.removesuffix("-even")
    if kind not in OVERLAPS:
        raise UserError("schedule", name, "names no kind of schedule", OVERLAPS)
    if len(numbers) > 3 or not all(number.isdecimal() for number in numbers):
        raise UserError("schedule", name, "must read KIND:DEGREE:LAG:BACKWARD_LAG, the numbers optional")
    degree, lag, backward_lag = [int(number) for number in numbers] + [1, 2, 2][len(numbers) :]
    if len(numbers) == 2:
        backward_lag = lag
    if kind == "sequential" and degree > 1:
        raise UserError("schedule", name, "sequential cuts nothing", ["sequential"])
    if degree == 1:
        return Ordering()
    slicing = slice_sequence("token_uniform" if given != kind else "time_uniform", length, degree, cost, multiple_of)
    if kind == "moe_only":
        slicing = slicing._replace(attention=(length,))
    return Ordering(Overlap(kind, lag), Overlap(kind, backward_lag), slicing)


def step_schedule(graph: StepGraph, forward: Overlap, backward: Overlap | None = None) -> Schedule:
    """The lists of all positions: the pipeline's order of stages, each written out.

    Args:
        backward: None is as forward.

    Raises:
        UserError: virtual stages that do not fit (`check_pipeline`).
    """
    return tuple(expand(graph, ops, forward, backward) for ops in pipeline(graph.pipeline))


def expand(graph: StepGraph, stages: Iterable[Op], forward: Overlap, backward: Overlap | None = None) -> tuple[Op, ...]:
    """A position's list, its `stage` ops written out."""
    settings = {"F": forward, "B": backward or forward}
    orders: dict[tuple[int, str], tuple[Op, ...]] = {}
    found: list[Op] = []
    for op in stages:
        if op.kind != "stage":
            found.append(op)
            continue
        key = op.layer, op.direction
        if key not in orders:
            orders[key] = stage_order(graph, op.layer, op.direction, settings[op.direction])
        found += [piece._replace(micro_batch=op.micro_batch) for piece in orders[key]]
    return tuple(found)


def stage_order(graph: StepGraph, stage: int, direction: str, overlap: Overlap) -> tuple[Op, ...]:
    """One direction of a stage for micro-batch 0, collectives included."""
    layers = list(graph.layers[stage])
    drained = overlap.kind != "stream"
    lag = {"one_a_one_m": 1, "stream": overlap.lag}.get(overlap.kind, graph.slicing.degree)
    has_head = stage == len(graph.stages) - 1
    runs = [[layer] for layer in layers] if drained else [layers]
    order: list[Op] = []
    for run in runs:
        order += _wave(graph, run, has_head and not drained, lag, staggered=direction == "B")
    if has_head and drained:
        order += graph.pieces("head", layers[-1])
    return _with_collectives(graph, order if direction == "F" else list(_mirrored(graph, order)))


def _wave(graph: StepGraph, layers: list[int], head: bool, lag: int, staggered: bool) -> list[Op]:
    """Forward ops of a run of blocks, which drains at its end.

    Args:
        head: whether the run ends with the head.
        staggered: at the run's end, merge each micro-batch one step behind its experts rather than all of them last: mirrored,
            the first collectives of a backward do not block those behind them.
    """
    order: list[Op] = []
    experts: deque[tuple[int, Op]] = deque()  # with the step at which each is due
    merged: set[Op] = set()

    def merge(op: Op) -> None:
        if op not in merged:
            merged.add(op)
            order.append(op)

    def run_experts(due: int) -> None:
        while experts and experts[0][0] <= due:
            op = experts.popleft()[1]
            order.append(op)
            if staggered and not head and op.layer == layers[-1] and op.part:
                merge(op._replace(kind="merge", part=op.part - 1))

    for step, op in enumerate(_steps(graph, layers, head)):
        for need in graph.needs(op):
            if need.kind == "embed":
                order.append(need)
            elif need.kind == "merge" and need.layer in layers:
                run_experts(max((due for due, other in experts if other[2:4] <= need[2:4]), default=-1))
                merge(need)
        order.append(op)
        if op.kind == "attention" and graph.blocks[op.layer] == "dense":
            order.append(op._replace(kind="ffn"))
        elif op.kind == "attention":
            routes = [route for route in graph.pieces("route", op.layer) if graph.tokens(route).stop in _newly(graph, op)]
            order += routes
            experts += [(step + lag, route._replace(kind="expert")) for route in routes]
        run_experts(step)
    run_experts(10**9)
    if not head and graph.blocks[layers[-1]] == "moe":
        for op in graph.pieces("merge", layers[-1]):
            merge(op)
    return order


def _steps(graph: StepGraph, layers: list[int], head: bool) -> Iterator[Op]:
    for layer in layers:
        yield from graph.pieces("attention", layer)
    if head:
        yield from graph.pieces("head", layers[-1])


def _newly(graph: StepGraph, op: Op) -> range:
    """Ends of the micro-batches that a slice of attention completes."""
    tokens = graph.tokens(op)
    return range(tokens.start + 1, tokens.stop + 1)


def _mirrored(graph: StepGraph, order: list[Op]) -> Iterator[Op]:
    for op in reversed(order):
        if op.kind in graph.recompute:
            yield op._replace(direction="R")
        yield op._replace(direction="B")


def _with_collectives(graph: StepGraph, order: list[Op]) -> tuple[Op, ...]:
    """Every collective behind the last op that it needs."""
    found: list[Op] = []
    for op in order:
        found.append(op)
        if op.direction == "F" and op.kind == "route":
            found += [op._replace(kind=kind) for kind in (("counts", "dispatch") if graph.ragged else ("dispatch",))]
        elif op.kind == "expert" and op.direction != "R":
            found.append(op._replace(kind="combine" if op.direction == "F" else "dispatch"))
        elif (op.kind, op.direction) == ("merge", "B"):
            found.append(op._replace(kind="combine"))
    return tuple(found)
