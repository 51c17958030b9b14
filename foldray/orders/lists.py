"""The lists of pipeline positions: all ops of a position in a step, in the order in which they start.

The pipeline schedule orders the stages, and a generator (`overlaps.py`) orders the computation inside a stage. The backward
of a stage is the mirror image of a forward order. A collective starts as soon as the data that it carries is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from foldray.clock.times import OpCosts
from foldray.graph.chunks import Reduction
from foldray.graph.op import Direction, Op, Schedule
from foldray.graph.step_graph import StepGraph
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    COUNTS,
    DISPATCH,
    EXCHANGES,
    EXPERT,
    GATHER,
    HANDOVER,
    HEAD,
    MERGE,
    PROJECT,
    ROUTE,
    STAGE,
)
from foldray.orders.af_pipe import af_pipe
from foldray.orders.generators import Run, group
from foldray.orders.ordering import Ordering
from foldray.orders.overlaps import USUAL_LAG, Overlap
from foldray.orders.pipeline import passes, pipeline
from foldray.orders.reduction import place_reductions


def step_schedule(
    graph: StepGraph,
    forward: Overlap,
    backward: Overlap | None = None,
    reduction: Reduction | None = None,
    costs: OpCosts | None = None,
) -> Schedule:
    """Return the lists of all positions: the stages in the pipeline's order with all their ops, and the reductions.

    Args:
        backward: overlap of the backward; None is the same as `forward`.
        reduction: when `graph.chunks` are reduced; None is at the end.
        costs: the times of the ops, if they are known (`Ordering`).
    """
    return ordered_schedule(graph, Ordering(forward, backward or forward, reduction=reduction or Reduction(), costs=costs))


def ordered_schedule(graph: StepGraph, ordering: Ordering) -> Schedule:
    """Return the lists of all positions (`position_list`)."""
    return tuple(position_list(graph, position, ordering) for position in range(graph.positions))


def position_list(graph: StepGraph, position: int, ordering: Ordering) -> tuple[Op, ...]:
    """Return the list of one pipeline position."""
    if ordering.found is not None and ordering.found.graph == graph:
        return ordering.found.order
    if graph.apart:
        passes_of_stages = [af_pipe(graph, ordering.alive)[position]]
    else:
        weaves = ordering.forward.row.weaves
        stages = pipeline(graph.pipeline, weaves)[position]
        woven = passes(graph.pipeline, position, woven=True).pairs if weaves else ()
        passes_of_stages = expand(graph, stages, ordering.forward, ordering.backward, woven)
    return place_reductions(graph, completed(graph, passes_of_stages), position, ordering.reduction, ordering.costs)


def expand(
    graph: StepGraph,
    stages: Iterable[Op],
    forward: Overlap,
    backward: Overlap | None = None,
    woven: Iterable[tuple[Op, Op]] = (),
) -> list[tuple[Op, ...]]:
    """Return the ops of every pass of a position's stages, in order, with collectives and handovers.

    Args:
        stages: `stage` and `handover` ops of the position, in order.
        woven: pairs of a forward and a backward whose ops go in turns (`weave`).
    """
    settings, stages = {"F": forward, "B": backward or forward}, tuple(stages)
    held, pairs = {op.layer for op in stages if op.kind == STAGE}, dict(woven)
    seconds = frozenset(pairs.values())
    orders: dict[Op, tuple[Op, ...]] = {}  # for the first micro-batch

    def order(op: Op) -> list[Op]:
        first = op._replace(micro_batch=0)
        if first not in orders and op.kind == HANDOVER:
            orders[first] = _handover(graph, op.layer, op.direction)
        elif first not in orders:
            inside = stage_order(graph, op.layer, op.direction, settings[op.direction])
            orders[first] = _with_handover(graph, inside, op.layer, op.direction)
        ahead = op.micro_batch * graph.batch_degree
        return [inner._replace(micro_batch=ahead + inner.micro_batch) for inner in orders[first]]

    expanded: list[tuple[Op, ...]] = []
    for op in stages:
        if op in seconds or (op.kind == HANDOVER and op.layer in held):
            continue  # the stage that makes its pieces sends them
        expanded.append(weave(graph, order(op), order(pairs[op])) if op in pairs else tuple(order(op)))
    return expanded


def completed(graph: StepGraph, passes: Iterable[Iterable[Op]]) -> tuple[Op, ...]:
    """Return a position's list: its passes one after another, with what follows from their order.

    - A piece of a head goes backward right after its forward, so that the logits of one piece exist at a time.
    - Gradients of weights that a backward leaves (W) are computed while the next op travels, and before the end of the pass.
      Those of a head need the gradients of its logits, so they come before its next piece. Those of several pieces (`whole`)
      wait for the last of these.
    """
    placed, left, missing = list[Op](), list[Op](), dict[Op, int]()

    def place(op: Op) -> None:
        placed.append(op)
        if op.direction == "B":
            for weights in graph.weights(op):
                missing[weights] = missing.get(weights, len(graph.left_by(weights))) - 1
                left.extend([weights] if not missing[weights] else [])

    def place_left(*, heads: bool = True) -> None:
        placed.extend(op for op in left if heads or op.kind != HEAD)
        left[:] = [op for op in left if not heads and op.kind == HEAD]

    for ops in passes:
        for op in ops:
            if op.kind != HEAD:
                place(op)
            elif op.direction == "F" or not graph.backward:
                place_left()
                place(op)
                if graph.backward:
                    place(op._replace(direction="B"))
            if graph.channel(op) is not None:
                place_left()
        place_left(heads=False)
    place_left()
    return tuple(placed)


def stage_order(graph: StepGraph, stage: int, direction: Direction, overlap: Overlap) -> tuple[Op, ...]:
    """Return the ops of one pass of a stage, with collectives, for the parts of the first micro-batch.

    Args:
        direction: F or B. A backward pass includes recomputation (R).
    """
    layers, row = list(graph.layers[stage]), overlap.row
    has_head = stage == len(graph.stages) - 1
    assert row.order is not None, f"{row.name} orders whole steps, not stages"
    order: list[Op] = []
    for blocks in [[layer] for layer in layers] if row.drains else [layers]:
        hands_over = not has_head and blocks[-1] == layers[-1]
        run = Run(graph, blocks, head=has_head and not row.drains, staggered=direction == "B" or hands_over)
        order += row.order(run, overlap.lag or USUAL_LAG)
        if row.drains and blocks[-1] in graph.heads:
            order += group(graph, HEAD, blocks[-1])
    return _with_collectives(graph, order if direction == "F" else list(graph.mirrored(order)))


def _handover(graph: StepGraph, stage: int, direction: Direction) -> tuple[Op, ...]:
    """Return the handover that a stage sends, in pieces, for the parts of the first micro-batch.

    Backward, a stage reaches the last part first.
    """
    last = len(graph.stages) - 1 if direction == "F" else 0
    parts = range(graph.batch_degree if stage != last else 0)
    return tuple(op for m in (parts if direction == "F" else reversed(parts)) for op in graph.handovers(direction, stage, m))


def _with_handover(graph: StepGraph, order: tuple[Op, ...], stage: int, direction: Direction) -> tuple[Op, ...]:
    """Insert every piece of a stage's handover right after the last op that it needs, but after all earlier pieces."""
    place, at, after = {op: i for i, op in enumerate(order)}, 0, dict[int, list[Op]]()
    for op in _handover(graph, stage, direction):
        at = max([at, *(place[need] for need in graph.needs(op))])
        after.setdefault(at, []).append(op)
    return tuple(placed for i, op in enumerate(order) for placed in (op, *after.get(i, ())))


def _with_collectives(graph: StepGraph, order: list[Op]) -> tuple[Op, ...]:
    """Insert every collective right after the last op that it needs."""
    after = {
        (ROUTE, "F"): (COUNTS, DISPATCH) if graph.ragged else (DISPATCH,),
        (EXPERT, "F"): (COMBINE,),
        (MERGE, "B"): (COMBINE,),
        (EXPERT, "B"): (DISPATCH,),
        (PROJECT, "F"): (GATHER,),
        (ATTENTION, "B"): (GATHER,) if graph.gathers else (),
    }
    return tuple(
        placed for op in order for placed in (op, *(op._replace(kind=kind) for kind in after.get((op.kind, op.direction), ())))
    )


def weave(graph: StepGraph, forward: Sequence[Op], backward: Sequence[Op]) -> tuple[Op, ...]:
    """Return the ops of two passes of stages in turns. A turn ends with an all-to-all of its pass. The backward begins.

    Each pass computes while rows of the other one travel. The two passes do not need each other, so all-to-alls are hidden
    without pieces: block i goes forward beside block n − 1 − i, which goes backward. This is one pair of blocks; what travels is
    below what computes meanwhile. A is attention with sums and routers, E the experts; large letters go forward, small ones
    backward:

        computes   e      A      a      E      e      A
        travels        d      D      c      C      d     …

    Sources: DualPipe (DeepSeek-V3, arXiv:2412.19437, figure 4) and Megatron-Core's overlap of expert parallelism weave two passes
    by a fixed plan. Here every pass is in the order of `stream`, and gradients of weights may be apart.

    Args:
        forward, backward: the ops of the two passes, with collectives and handovers.
    """
    turns = zip_longest(_turns(backward), _turns(forward), fillvalue=())
    woven = [op for pair in turns for turn in pair for op in turn]
    # Handovers of both passes on one channel go in the order of the passes, as the receiver has them.
    channels = {graph.channel(op) for op in forward if op.kind == HANDOVER}
    behind = [op for op in backward if op.kind == HANDOVER and graph.channel(op) in channels]
    return (*(op for op in woven if op not in behind), *behind)


def _turns(ops: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    turn: list[Op] = []
    for op in ops:
        turn.append(op)
        if op.kind in EXCHANGES:
            yield tuple(turn)
            turn = []
    if turn:
        yield tuple(turn)
