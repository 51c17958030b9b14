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
| `flow` | FlowMoE, section 3.2 | A0 A1 … E0 E1 … as `aaam`, over micro-batches along the batch | at every block |

A backward order is the mirror of a forward one, with a lag of its own. Pieces are those of a sequence, and those of all
micro-batches that go side by side (`StepGraph.batch_degree`): any of the orders takes both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from foldray.errors import UserError
from foldray.schedule.op import Op, Schedule
from foldray.schedule.pipeline import pipeline
from foldray.schedule.reduction import REDUCTIONS, Reduction, place_reductions
from foldray.schedule.slicing import SliceCost, Slicing, slice_sequence
from foldray.schedule.step_graph import StepGraph
from foldray.schedule.traffic import OpCosts, by_urgency

OVERLAPS = ("sequential", "moe_only", "aaam", "one_a_one_m", "stream", "flow")


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
        batch_degree: parts into which a micro-batch is cut along the batch (FlowMoE's R), whose pieces go side by side.
        reduction: when gradients travel.
        costs: what ops take, with which `chunks` give way to all-to-alls; until there are any, they leave as soon as they are
            ready.
    """

    forward: Overlap = Overlap("sequential")
    backward: Overlap = Overlap("sequential")
    slicing: Slicing | None = None
    recompute: tuple[str, ...] = ()
    batch_degree: int = 1
    reduction: Reduction = Reduction()
    costs: OpCosts | None = None

    @property
    def goes_by_costs(self) -> bool:
        """Whether knowing what ops take would change anything."""
        return self.reduction.kind == "chunks"


def named_ordering(name: str, length: int, cost: SliceCost, multiple_of: int = 1) -> Ordering:
    """The ordering that a short name stands for: KIND[:DEGREE[:LAG[:BACKWARD_LAG]]][@PARTS][+REDUCTION[=BYTES]].

    As in `stream:4:2`, `flow@4+chunks=1000000` or `moe_only:4+buckets`. Slices are time-uniform; `-even` behind the kind, as in
    `one_a_one_m-even:4`, makes them equal. `flow` is cut along the batch, in two unless told, with its gradients in chunks.

    Raises:
        UserError: no such kind, or numbers that do not fit.
    """
    order, plus, how = name.partition("+")
    order, at, parts = order.partition("@")
    given, *numbers = order.split(":")
    kind = given.removesuffix("-even")
    if kind not in OVERLAPS:
        raise UserError("schedule", name, "names no kind of schedule", OVERLAPS)
    if len(numbers) > 3 or not all(number.isdecimal() for number in numbers) or (at and not parts.isdecimal()):
        form = "KIND:DEGREE:LAG:BACKWARD_LAG@PARTS+REDUCTION=BYTES"
        raise UserError("schedule", name, f"must read {form}, all but KIND optional")
    reduction = _named_reduction(name, how) if plus else Reduction("chunks" if kind == "flow" else "end")
    batch_degree = int(parts) if at else 2 if kind == "flow" else 1
    degree, lag, backward_lag = [int(number) for number in numbers] + [1, 2, 2][len(numbers) :]
    if len(numbers) == 2:
        backward_lag = lag
    if kind == "sequential" and (degree > 1 or batch_degree > 1):
        raise UserError("schedule", name, "sequential cuts nothing", ["sequential"])
    if degree == 1 and batch_degree == 1:
        return Ordering(reduction=reduction)
    slicing = slice_sequence("token_uniform" if given != kind else "time_uniform", length, degree, cost, multiple_of)
    if kind == "moe_only":
        slicing = slicing._replace(attention=(length,))
    ways = Overlap(kind, lag), Overlap(kind, backward_lag)
    return Ordering(*ways, slicing if degree > 1 else None, batch_degree=batch_degree, reduction=reduction)


def _named_reduction(name: str, how: str) -> Reduction:
    kind, equals, size = how.partition("=")
    if kind not in REDUCTIONS or (equals and not size.isdecimal()) or (size and int(size) < 1):
        raise UserError("schedule", name, "names no way of reducing gradients behind its +", [*REDUCTIONS, "chunks=BYTES"])
    return Reduction(kind, int(size)) if size else Reduction(kind)


def step_schedule(
    graph: StepGraph,
    forward: Overlap,
    backward: Overlap | None = None,
    reduction: Reduction | None = None,
    costs: OpCosts | None = None,
) -> Schedule:
    """The lists of all positions: the pipeline's order of stages, each written out, and the reductions of their gradients.

    Args:
        backward: None is as forward.
        reduction: of `graph.chunks`; None is at the end.
        costs: what ops take, if it is known (`Ordering`).

    Raises:
        UserError: virtual stages that do not fit (`check_pipeline`).
    """
    ordering = Ordering(forward, backward or forward, reduction=reduction or Reduction(), costs=costs)
    return tuple(position_list(graph, position, ordering) for position in range(graph.positions))


def position_list(graph: StepGraph, position: int, ordering: Ordering) -> tuple[Op, ...]:
    """Everything that a pipeline position does, in order."""
    order = expand(graph, pipeline(graph.pipeline)[position], ordering.forward, ordering.backward)
    if graph.chunks:
        order = place_reductions(graph, order, position, ordering.reduction.kind)
    if ordering.costs is None or not ordering.goes_by_costs:
        return order
    return by_urgency(graph, order, ordering.costs)


def expand(graph: StepGraph, stages: Iterable[Op], forward: Overlap, backward: Overlap | None = None) -> tuple[Op, ...]:
    """A position's list, its `stage` ops written out."""
    settings = {"F": forward, "B": backward or forward}
    orders: dict[tuple[int, str], tuple[Op, ...]] = {}
    found: list[Op] = []
    for op in stages:
        first = op.micro_batch * graph.batch_degree
        if op.kind != "stage":
            found += [op._replace(micro_batch=first + m) for m in range(graph.batch_degree)]
            continue
        key = op.layer, op.direction
        if key not in orders:
            orders[key] = stage_order(graph, op.layer, op.direction, settings[op.direction])
        found += [piece._replace(micro_batch=first + piece.micro_batch) for piece in orders[key]]
    return tuple(found)


def stage_order(graph: StepGraph, stage: int, direction: str, overlap: Overlap) -> tuple[Op, ...]:
    """One direction of a stage for the first micro-batches that go together, collectives included."""
    layers = list(graph.layers[stage])
    drained = overlap.kind != "stream"
    lag = {"one_a_one_m": 1, "stream": overlap.lag}.get(overlap.kind, graph.slicing.degree * graph.batch_degree)
    has_head = stage == len(graph.stages) - 1
    runs = [[layer] for layer in layers] if drained else [layers]
    order: list[Op] = []
    for run in runs:
        order += _wave(graph, run, has_head and not drained, lag, staggered=direction == "B")
    if has_head and drained:
        order += _pieces(graph, "head", layers[-1])
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
            if staggered and not head and op.layer == layers[-1]:
                for before in _pieces(graph, "merge", op.layer):
                    if _place(before) < _place(op):
                        merge(before)

    for step, op in enumerate(_steps(graph, layers, head)):
        for need in graph.needs(op):
            if need.kind == "embed":
                order.append(need)
            elif need.kind == "merge" and need.layer in layers:
                run_experts(max((due for due, other in experts if _place(other) <= _place(need)), default=-1))
                merge(need)
        order.append(op)
        if op.kind == "attention" and graph.blocks[op.layer] == "dense":
            order.append(op._replace(kind="ffn"))
        elif op.kind == "attention":
            routes = [
                route
                for route in graph.pieces("route", op.layer, op.micro_batch)
                if graph.tokens(route).stop in _newly(graph, op)
            ]
            order += routes
            experts += [(step + lag, route._replace(kind="expert")) for route in routes]
        run_experts(step)
    run_experts(10**9)
    if not head and graph.blocks[layers[-1]] == "moe":
        for op in _pieces(graph, "merge", layers[-1]):
            merge(op)
    return order


def _steps(graph: StepGraph, layers: list[int], head: bool) -> Iterator[Op]:
    for layer in layers:
        yield from _pieces(graph, "attention", layer)
    if head:
        yield from _pieces(graph, "head", layers[-1])


def _pieces(graph: StepGraph, kind: str, layer: int) -> Iterator[Op]:
    """All ops of a kind at a block, of the micro-batches that go together."""
    return (op for m in range(graph.batch_degree) for op in graph.pieces(kind, layer, m))


def _place(op: Op) -> tuple[int, int, int]:
    """Sorts pieces as a wave meets them."""
    return op.layer, op.micro_batch, op.part


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
