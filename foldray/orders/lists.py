"""The lists of pipeline positions: all ops of a position in a step, in the order in which they start.

The pipeline schedule orders the stages, and a generator (`overlaps.py`) orders the computation inside a stage. The backward
of a stage is the mirror image of a forward order. All else goes where the graph's edges say: what travels inside a pass as soon
as its data is ready (`stage_order`), and what belongs to several passes when the list is written (`PositionList`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest

from foldray.clock.times import OpCosts
from foldray.graph.chunks import Reduction
from foldray.graph.op import Direction, Op, Schedule
from foldray.graph.step_graph import StepGraph
from foldray.kinds import EXCHANGES, HANDOVER, HEAD, OFFLOAD, STAGE
from foldray.orders.af_pipe import af_pipe
from foldray.orders.generators import Run, group
from foldray.orders.ordering import Ordering
from foldray.orders.overlaps import USUAL_LAG, Overlap
from foldray.orders.pipeline import passes, pipeline
from foldray.orders.position import PositionList, goes_on


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
    written = PositionList(graph, position, ordering.reduction, ordering.costs)
    for ops in [af_pipe(graph, ordering.alive)[position]] if graph.apart else _passes(graph, position, ordering):
        written.write(ops)
    return written.end()


def _passes(graph: StepGraph, position: int, ordering: Ordering) -> Iterator[Sequence[Op]]:
    """Yield the ops of every pass of a position's stages, in the pipeline's order, and the handovers that it receives."""
    weaves, overlaps = ordering.forward.row.weaves, {"F": ordering.forward, "B": ordering.backward}
    stages = pipeline(graph.pipeline, weaves)[position]
    pairs = dict(passes(graph.pipeline, position, woven=True).pairs) if weaves else {}
    held, seconds = {op.layer for op in stages if op.kind == STAGE}, set(pairs.values())

    @cache
    def first(kind: str, direction: Direction, layer: int) -> tuple[Op, ...]:
        """Return the ops of the first micro-batch."""
        if kind == HANDOVER:
            return tuple(op for op in graph.travelling(layer, direction) if op.kind == HANDOVER)
        return stage_order(graph, layer, direction, overlaps[direction])

    def order(op: Op) -> list[Op]:
        ahead = op.micro_batch * graph.batch_degree
        return [inner._replace(micro_batch=ahead + inner.micro_batch) for inner in first(op.kind, op.direction, op.layer)]

    for op in stages:
        if op in pairs:
            yield weave(graph, order(op), order(pairs[op]))
        elif op not in seconds and not (op.kind == HANDOVER and op.layer in held):  # a stage here sends its pieces itself
            yield order(op)


def stage_order(graph: StepGraph, stage: int, direction: Direction, overlap: Overlap) -> tuple[Op, ...]:
    """Return the ops of one pass of a stage, for the parts of the first micro-batch, with the handover that the stage sends.

    What travels starts right after the last op that it needs. The pieces of a handover leave in order.

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
    if direction == "B":
        order = [back for op in reversed(order) for back in graph.backward_of(op)]
    index, after, handed_over = {op: i for i, op in enumerate(order)}, defaultdict[int, list[Op]](list), 0
    for op in graph.travelling(stage, direction):
        if op.kind == OFFLOAD:  # what it needs may belong to passes before, and then it begins as this pass does
            index[op] = max((index[need] for need in graph.needs(op) if need in index), default=-1)
        else:
            index[op] = max(index[need] for need in graph.needs(op))
        if op.kind == HANDOVER:
            index[op] = handed_over = max(handed_over, index[op])
        after[index[op]].append(op)
    return (*after[-1], *(placed for i, op in enumerate(order) for placed in (op, *after[i])))


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
    for op, following in zip_longest(ops, ops[1:]):
        turn.append(op)
        if op.kind in EXCHANGES and not goes_on(op, following):
            yield tuple(turn)
            turn = []
    if turn:
        yield tuple(turn)
