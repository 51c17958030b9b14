"""Recorded steps: run again on the simulator's clock, and what can be learnt from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple, cast

from foldray.planner.simulator import Simulation
from foldray.schedule import COMPUTE, Channel, Cost, Graph, Op, Schedule, Span, StepGraph, times
from foldray.timeline import queued, usage


class Recording(NamedTuple):
    """What one rank ran: its list, and the span of every op by a clock of its own."""

    order: tuple[Op, ...]
    spans: Mapping[Op, Span]


class _RankedOp(NamedTuple):
    """An op at a rank; of a collective, `rank` is -1 for all that share it, of a handover the pair of neighbours."""

    op: Op
    rank: int


class _Ranks:
    """A step's graph with a position for each rank, so that ranks wait for each other as they do when they run.

    Ranks of one pipeline position meet in every collective; their i-th members are neighbours along the pipeline.
    """

    def __init__(self, graph: Graph, recordings: Sequence[Recording]):
        self.graph = graph
        self.at: dict[int, list[int]] = defaultdict(list)  # pipeline position → ranks
        self.place: list[tuple[int, int]] = []  # rank → pipeline position, number there
        for rank, recording in enumerate(recordings):
            position = next(graph.where(op)[0] for op in recording.order if graph.channel(op) is None)
            self.place.append((position, len(self.at[position])))
            self.at[position].append(rank)
        self.lists = tuple(tuple(self.ranked(op, rank) for op in each.order) for rank, each in enumerate(recordings))

    @property
    def positions(self) -> int:
        return len(self.lists)

    def ops(self) -> Iterator[_RankedOp]:
        return iter({op for ops in self.lists for op in ops})

    def ranked(self, op: Op, rank: int) -> _RankedOp:
        if self.graph.channel(op) is None:
            return _RankedOp(op, rank)
        return _RankedOp(op, self.place[rank][1] if len(self.graph.where(op)) > 1 else -1)

    def where(self, ranked: _RankedOp) -> tuple[int, ...]:
        if self.graph.channel(ranked.op) is None:
            return (ranked.rank,)
        positions = self.graph.where(ranked.op)
        if len(positions) > 1:
            return tuple(self.at[position][ranked.rank] for position in positions)
        return tuple(self.at[positions[0]])

    def needs(self, ranked: _RankedOp) -> tuple[_RankedOp, ...]:
        found: dict[_RankedOp, None] = {}  # in order, each once
        for rank in self.where(ranked):
            for need in self.graph.needs(ranked.op):
                if self.place[rank][0] in self.graph.where(need):
                    found[self.ranked(need, rank)] = None
        return tuple(found)

    def channel(self, ranked: _RankedOp) -> tuple[Channel, int] | None:
        channel = self.graph.channel(ranked.op)
        return channel and (channel, ranked.rank)


def replay(graph: Graph, recordings: Sequence[Recording]) -> Simulation:
    """A recorded step on the simulator's clock; the spans are the first rank's.

    What computes takes as long as it did on its rank. A collective takes as long as where it was fastest: elsewhere it was in
    flight while others were late. Its time begins when the one before it on the same channel has arrived.
    """
    took, ranks = _took(graph, recordings), _Ranks(graph, recordings)

    def cost(ranked: _RankedOp) -> tuple[tuple[str, float], ...]:
        channel, seconds = graph.channel(ranked.op), took[ranked.op]
        return ((channel[0], min(seconds.values())),) if channel else ((COMPUTE, seconds[ranked.rank]),)

    # The clock asks a graph about whatever its lists hold.
    spans = times(cast(Graph, ranks), cast(Schedule, ranks.lists), cast(Callable, cost))
    own = [{each.op: spans[cast(Op, each)] for each in ops} for ops in ranks.lists]
    return Simulation(own[0], max(span.end for span in spans.values()), tuple(usage(graph, each) for each in own))


def recorded_cost(graph: Graph, recordings: Sequence[Recording]) -> Cost:
    """What ops cost, for other orders of the same: computation the mean over ranks, collectives as `replay` takes them."""
    took = _took(graph, recordings)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel, seconds = graph.channel(op), took[op].values()
        return ((channel[0], min(seconds)),) if channel else ((COMPUTE, fmean(seconds)),)

    return cost


def _took(graph: Graph, recordings: Sequence[Recording]) -> dict[Op, dict[int, float]]:
    """Op → rank → seconds; of a collective those since the one before it on its channel."""
    found: dict[Op, dict[int, float]] = defaultdict(dict)
    for rank, recording in enumerate(recordings):
        for op, span in queued(graph, recording.spans).items():
            found[op][rank] = span.end - span.start
    return found


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
