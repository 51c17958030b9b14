"""The lists that training runs, on a clock: what they would take at given costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from foldray.schedule import COMPUTE, Cost, Graph, Op, Schedule, Span, StepGraph, times
from foldray.timeline import Usage, queued, usage


class Simulation(NamedTuple):
    """A simulated step.

    Args:
        spans: of every op, in the unit of the costs.
        seconds: from the first op's start to the last one's end.
        usage: of every position.
    """

    spans: dict[Op, Span]
    seconds: float
    usage: tuple[Usage, ...]


def simulate(graph: Graph, schedule: Schedule, cost: Cost) -> Simulation:
    """Run a schedule at given costs.

    Raises:
        ScheduleError: it cannot finish.
    """
    spans = times(graph, schedule, cost)
    own = tuple(usage(graph, {op: spans[op] for op in ops}) for ops in schedule)
    return Simulation(spans, max(span.end for span in spans.values()), own)


def slice_timings(graph: StepGraph, spans: Mapping[Op, Span], ranks: int) -> list[tuple[int, int, float]]:
    """Every recorded slice of attention as `SliceCost.measured` takes it: tokens, context, seconds forward and backward.

    Args:
        ranks: how many share a sequence (cp·tp).
    """
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for op, span in spans.items():
        if op.kind == "attention" and op.direction == "F":
            tokens, backward = graph.tokens(op), spans[op._replace(direction="B")]
            took = span.end - span.start + backward.end - backward.start
            found[len(tokens) * ranks, tokens.stop * ranks].append(took)
    return [(tokens, context, median(took)) for (tokens, context), took in found.items()]


def recorded_costs(graph: Graph, ranks: Sequence[Mapping[Op, Span]]) -> Cost:
    """What every op took when it was recorded, on ranks that run the same list.

    Computation is the mean over ranks. A collective is as fast as where it was fastest: elsewhere it was in flight while others
    were late. Its time begins when the one before it on the same channel has arrived.
    """
    found = [queued(graph, spans) for spans in ranks]
    seconds: dict[Op, float] = {}
    for op in found[0]:
        took = [spans[op].end - spans[op].start for spans in found if op in spans]
        seconds[op] = fmean(took) if graph.channel(op) is None else min(took)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel = graph.channel(op)
        return ((channel[0] if channel else COMPUTE, seconds[op]),)

    return cost
