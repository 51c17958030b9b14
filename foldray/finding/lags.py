"""The choice of the fastest order of a step's pieces at given costs."""

from __future__ import annotations

from foldray.clock import COMPUTE, Cost, OpCosts
from foldray.clock.simulator import simulate
from foldray.graph import Op, StepGraph
from foldray.kinds import EMBED, HEAD
from foldray.orders import ONE_A_ONE_M, STREAM, Ordering, Overlap, step_schedule

_BLOCKS = 4  # simulated blocks of a stage; every further block takes as long as the one before


def best_overlaps(graph: StepGraph, cost: Cost) -> tuple[Overlap, Overlap]:
    """Return the fastest overlap of the forward and of the backward: `one_a_one_m`, or `stream` with any lag.

    The loss separates the two directions, so the forward is chosen first and the backward second.
    """

    def seconds(forward: Overlap, backward: Overlap) -> float:
        return simulate(graph, step_schedule(graph, forward, backward), cost).seconds

    lags = range(1, len(graph.slicing.attention) + 1)
    candidates = [Overlap(ONE_A_ONE_M.name), *(Overlap(STREAM.name, lag) for lag in lags)]
    forward = min(candidates, key=lambda way: seconds(way, candidates[0]))
    backward = min(candidates, key=lambda way: seconds(forward, way))
    return forward, backward


def settle(ordering: Ordering, graph: StepGraph, stage: int, costs: OpCosts) -> Ordering:
    """Return the ordering of a stage with the measured costs, and with a choice for every lag that is open.

    All ranks of a stage must pass the same costs. Then they make the same choice.

    Args:
        ordering: the ordering so far. An overlap with an open lag is replaced by the fastest one (`best_overlaps`).
    """
    ordering = ordering._replace(costs=costs)
    if not ordering.open:
        return ordering
    alone = graph.alone((graph.stages[stage][:_BLOCKS],), graph.later)
    seconds = dict(costs.seconds)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel, outside = alone.channel(op), op.kind in (EMBED, HEAD)  # they may belong to other stages
        return ((channel[0] if channel else COMPUTE, 0.0 if outside else seconds.get((op.kind, op.direction, op.part), 0.0)),)

    forward, backward = best_overlaps(alone, cost)
    return ordering._replace(
        forward=forward if ordering.forward.open else ordering.forward,
        backward=backward if ordering.backward.open else ordering.backward,
    )
