"""A pipeline's clock: when each position ends, at given seconds of its stages. Its lists are looked at once for all costs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from foldray.kinds import HANDOVER, STAGE
from foldray.schedule import Op, PipelineGraph, computed, one_order


class Move(NamedTuple):
    """An op of a pipeline's lists, so that its time can be told from what stands before it in `compiled`.

    Args:
        place, other: the position that computes, twice; or sender and receiver.
        needs: number of the op that makes what this one works on; -1 for none.
        stage: what is computed: number of the stage, backwards behind all forwards; -1 for a handover.
        channel: number of a handover's.
    """

    place: int
    other: int
    needs: int
    stage: int
    channel: int


@lru_cache(maxsize=64)
def compiled(graph: PipelineGraph) -> tuple[Move, ...]:
    """A pipeline's lists as one, in which every op stands behind all that it waits for."""
    number: dict[Op, int] = {}
    found: list[Move] = []
    channels: dict[object, int] = {}
    for op in one_order(graph, tuple(computed(graph, place) for place in range(graph.pp))):
        places = graph.where(op)
        needs = [number[need] for need in graph.needs(op) if HANDOVER in (op.kind, need.kind)]
        stage = op.layer + graph.stages * (op.direction == "B") if op.kind == STAGE else -1
        channel = -1 if stage >= 0 else channels.setdefault(graph.channel(op), len(channels))
        number[op] = len(found)
        found.append(Move(places[0], places[-1], max(needs, default=-1), stage, channel))
    return tuple(found)


@lru_cache(maxsize=1024)
def pipeline_ends(
    graph: PipelineGraph, seconds: tuple[tuple[float, ...], ...], handover: float
) -> list[tuple[float, list[float]]]:
    """When each position of a pipeline ends, and when the last backward of each of its stages does.

    What the clock (`times`) finds where handovers each way have a link of their own; the lists are looked at once for all costs.

    Args:
        seconds: of every stage, forward and backward.
        handover: seconds from a stage to the next, once both ends are there.
    """
    takes = [*seconds[0], *seconds[1]]
    free = [0.0] * graph.pp
    ends: list[float] = []
    quiet = [0.0] * (2 * graph.stages)
    last = [0.0] * len(takes)
    for place, other, needs, stage, channel in compiled(graph):
        # Comparisons, not max(): there are a hundred thousand of these in a second of searching.
        at = free[place]
        if needs >= 0 and ends[needs] > at:
            at = ends[needs]
        if stage >= 0:
            at += takes[stage]
            free[place] = last[stage] = at
        else:
            if free[other] > at:
                at = free[other]
            if quiet[channel] > at:
                at = quiet[channel]
            at += handover
            quiet[channel] = at
        ends.append(at)
    backwards = [[last[graph.stages + stage] for stage in graph.stages_at(place)] for place in range(graph.pp)]
    return [(max(each), each) for each in backwards]
