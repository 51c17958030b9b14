"""Which order of a step's pieces is fastest at given costs."""

from __future__ import annotations

from foldray.kinds import EMBED, HEAD
from foldray.schedule import COMPUTE, ONE_A_ONE_M, STREAM, Cost, Op, OpCosts, Ordering, Overlap, StepGraph, step_schedule
from foldray.timeline.simulator import simulate

_BLOCKS = 4  # of a stage that are simulated; behind these, each takes as long as the one before


def best_overlaps(graph: StepGraph, cost: Cost) -> tuple[Overlap, Overlap]:
    """The fastest way forward and the fastest way backward: `one_a_one_m`, or `stream` with any lag.

    The loss stands between the two, so they are chosen one after the other.
    """

    def seconds(forward: Overlap, backward: Overlap) -> float:
        return simulate(graph, step_schedule(graph, forward, backward), cost).seconds

    lags = range(1, graph.slicing.degree + 1)
    candidates = [Overlap(ONE_A_ONE_M.name), *(Overlap(STREAM.name, lag) for lag in lags)]
    forward = min(candidates, key=lambda way: seconds(way, candidates[0]))
    backward = min(candidates, key=lambda way: seconds(forward, way))
    return forward, backward


def settle(ordering: Ordering, graph: StepGraph, stage: int, costs: OpCosts) -> Ordering:
    """The ordering of a stage whose ops take so long: with these costs, and with its open lags chosen.

    Ranks of a stage have the same costs, and so they choose the same.

    Args:
        graph: of the whole step.
    """
    ordering = ordering._replace(costs=costs)
    if not ordering.open:
        return ordering
    blocks = graph.stages[stage][:_BLOCKS]
    seconds, alone = dict(costs.seconds), StepGraph(
        (blocks,), graph.slicing, micro_batches=graph.batch_degree, ragged=graph.ragged, recompute=graph.recompute,
        batch_degree=graph.batch_degree,
    )  # fmt: skip

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel, outside = alone.channel(op), op.kind in (EMBED, HEAD)  # that may belong to other stages
        return ((channel[0] if channel else COMPUTE, 0.0 if outside else seconds.get((op.kind, op.direction, op.part), 0.0)),)

    forward, backward = best_overlaps(alone, cost)
    return ordering._replace(
        forward=forward if ordering.forward.open else ordering.forward,
        backward=backward if ordering.backward.open else ordering.backward,
    )
