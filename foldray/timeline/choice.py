"""Which order of a step's pieces is fastest at given costs."""

from __future__ import annotations

from foldray.schedule import ONE_A_ONE_M, STREAM, Cost, Overlap, StepGraph, step_schedule
from foldray.timeline.simulator import simulate


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
