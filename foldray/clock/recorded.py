"""Recorded steps: their replay on the simulator's clock, and the op times that they give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from statistics import fmean, median
from typing import NamedTuple, cast

from foldray.clock.compiled import COMPUTE
from foldray.clock.simulator import Simulation, usage
from foldray.clock.times import Cost, OpCosts, Span, times
from foldray.graph import Channel, Graph, Op, Schedule, StepGraph
from foldray.kinds import ATTENTION, HANDOVER, REDUCE


class Recording(NamedTuple):
    """A step of one rank: its list, and the span of every op in seconds of the rank's own clock."""

    order: tuple[Op, ...]
    spans: Mapping[Op, Span]


class RankedOp(NamedTuple):
    """An op at a rank.

    Args:
        rank: the rank of an op that computes; for a handover, the number of the pair of ranks within their positions; -1 for a
            collective, which all ranks of a position share, and for rows between attention and experts, which all ranks of
            two positions share.
    """

    op: Op
    rank: int


class Ranks:
    """A graph of the same step with one position per rank, so that ranks wait for each other as in the recorded step.

    All ranks of a pipeline position take part in every collective of this position. The i-th ranks of two positions exchange
    handovers. If the experts have ranks of their own, all ranks of two positions take part when rows travel between them.
    """

    def __init__(self, graph: Graph, recordings: Sequence[Recording]):
        self.graph = graph
        self.at: dict[int, list[int]] = defaultdict(list)  # pipeline position → ranks
        self.place: list[tuple[int, int]] = []  # rank → (pipeline position, number within this position)
        for rank, recording in enumerate(recordings):
            position = next(graph.where(op)[0] for op in recording.order if graph.channel(op) is None)
            self.place.append((position, len(self.at[position])))
            self.at[position].append(rank)
        self.lists = tuple(tuple(self.ranked(op, rank) for op in each.order) for rank, each in enumerate(recordings))

    @property
    def positions(self) -> int:
        return len(self.lists)

    def ops(self) -> Iterator[RankedOp]:
        return iter({op for ops in self.lists for op in ops})

    def ranked(self, op: Op, rank: int) -> RankedOp:
        if self.graph.channel(op) is None:
            return RankedOp(op, rank)
        return RankedOp(op, self.place[rank][1] if op.kind == HANDOVER else -1)

    def where(self, ranked: RankedOp) -> tuple[int, ...]:
        if self.graph.channel(ranked.op) is None:
            return (ranked.rank,)
        positions = self.graph.where(ranked.op)
        if ranked.op.kind == HANDOVER:
            return tuple(self.at[position][ranked.rank] for position in positions)
        return tuple(rank for position in positions for rank in self.at[position])

    def needs(self, ranked: RankedOp) -> tuple[RankedOp, ...]:
        needs: dict[RankedOp, None] = {}  # an ordered set
        for rank in self.where(ranked):
            for need in self.graph.needs(ranked.op):
                if self.place[rank][0] in self.graph.where(need):
                    needs[self.ranked(need, rank)] = None
        return tuple(needs)

    def channel(self, ranked: RankedOp) -> tuple[Channel, int] | None:
        channel = self.graph.channel(ranked.op)
        return channel and (channel, ranked.rank)

    def travel(self, recordings: Sequence[Recording]) -> dict[RankedOp, float]:
        """Return the seconds of every collective and handover, on one clock for all ranks."""
        whole = self.travelling([each.spans for each in self.on_one_clock(recordings)])
        arrived: dict[object, float] = {}
        seconds = {}
        for ranked, span in sorted(whole.items(), key=lambda item: item[1].end):
            channel = self.channel(ranked)
            # On a GPU, rows that go on have a span from when they line up behind what brings them.
            needs = () if self._is_message(ranked.op) else self.needs(ranked)
            begins = max([span.start, arrived.get(channel, span.start), *(whole[need].end for need in needs if need in whole)])
            seconds[ranked] = max(0.0, span.end - begins)
            arrived[channel] = span.end
        return seconds

    def travelling(self, ranks: Sequence[Mapping[Op, Span]]) -> dict[RankedOp, Span]:
        """Return the span of every collective and handover, from the moment when its last rank has started it.

        Args:
            ranks: the spans of every rank, on one clock.
        """
        spans: dict[RankedOp, list[Span]] = defaultdict(list)
        for rank, of_rank in enumerate(ranks):
            for op, span in of_rank.items():
                if self.graph.channel(op) is not None:
                    spans[self.ranked(op, rank)].append(span)
        return {
            # A sender is done before its message arrives.
            op: Span(
                max(span.start for span in of_ranks), (max if self._is_message(op.op) else fmean)(span.end for span in of_ranks)
            )
            for op, of_ranks in spans.items()
        }

    def on_one_clock(self, recordings: Sequence[Recording]) -> list[Recording]:
        """Return the recordings with the spans of all ranks on the clock of rank 0."""
        return [
            Recording(each.order, {op: Span(span.start - ahead, span.end - ahead) for op, span in each.spans.items()})
            for each, ahead in zip(recordings, self._ahead(recordings), strict=True)
        ]

    def _is_message(self, op: Op) -> bool:
        """Whether an op goes from one position to another."""
        return len(self.graph.where(op)) > 1

    def _ahead(self, recordings: Sequence[Recording]) -> list[float]:
        """Return the seconds by which each rank's clock is ahead of the clock of rank 0. Hosts may count from other moments.

        Within a pipeline position, this assumes that a collective ends at the same time on all ranks.
        """
        ahead = []
        between = self._between_positions(recordings)
        for rank, recording in enumerate(recordings):
            position, _ = self.place[rank]
            first = recordings[self.at[position][0]].spans
            shared = [op for op in first if self.graph.channel(op) and not self._is_message(op)]
            apart = [recording.spans[op].end - first[op].end for op in shared]
            ahead.append(between[position] + (median(apart) if apart else 0.0))
        return ahead

    def _between_positions(self, recordings: Sequence[Recording]) -> dict[int, float]:
        """Return the seconds by which the clock of each position's first rank is ahead of the clock of the first position's.

        The clocks of two neighbours count as equal unless a message seems to arrive before it leaves. Then the fastest messages
        of both directions count as equally fast, as in the Network Time Protocol.
        """
        fastest: dict[tuple[int, int], float] = {}  # (sender, receiver) → seconds by two clocks
        for position, (first, *_) in self.at.items():
            for op in recordings[first].order:
                sender, receiver = self.graph.where(op)[0], self.graph.where(op)[-1]
                if self._is_message(op) and sender == position and receiver in self.at:
                    took = recordings[self.at[receiver][0]].spans[op].end - recordings[first].spans[op].start
                    fastest[sender, receiver] = min(fastest.get((sender, receiver), inf), took)
        ahead = {min(self.at): 0.0}
        for _ in self.at:  # each time at least one position farther
            for (known, new), there in fastest.items():
                if known in ahead and new not in ahead:
                    back = fastest.get((new, known), max(-there, 0.0))
                    ahead[new] = ahead[known] + ((there - back) / 2 if min(there, back) < 0 else 0.0)
        return {position: ahead.get(position, 0.0) for position in self.at}


Scale = Callable[[Op, int], float]
"""(op, rank) → factor on the seconds of an op; the rank is -1 for an op that several ranks share."""


def replay(graph: Graph, recordings: Sequence[Recording], shown: int = 0, scale: Scale = lambda op, rank: 1.0) -> Simulation:
    """Run a recorded step again on the simulator's clock.

    An op that computes takes as long as it did on its rank. A collective takes the time until its end, from the moment when
    the last rank had started it, and the collective before it on the same channel and those that it needs had ended.

    Args:
        shown: the rank whose spans the result has.
        scale: factors on the recorded seconds, to ask what the step would take with other ops.

    Raises:
        ScheduleError: the recorded lists cannot finish.
    """
    ranks = Ranks(graph, recordings)
    travel = ranks.travel(recordings)

    def cost(ranked: RankedOp) -> tuple[tuple[str, float], ...]:
        channel = graph.channel(ranked.op)
        if channel is not None:
            return ((channel[0], travel[ranked] * scale(ranked.op, -1)),)
        span = recordings[ranked.rank].spans[ranked.op]
        return ((COMPUTE, (span.end - span.start) * scale(*ranked)),)

    # The clock only passes the entries of its lists to the graph, so these entries may be ranked ops.
    spans = times(cast(Graph, ranks), cast(Schedule, ranks.lists), cast(Callable, cost))
    by_rank = [{each.op: spans[cast(Op, each)] for each in ops} for ops in ranks.lists]
    return Simulation(by_rank[shown], max(span.end for span in spans.values()), tuple(usage(graph, each) for each in by_rank))


def recorded_cost(graph: Graph, recordings: Sequence[Recording]) -> Cost:
    """Return the costs of the recorded ops, to simulate other orders of them: means over ranks, or over pairs of ranks."""
    ranks = Ranks(graph, recordings)
    seconds: dict[Op, list[float]] = defaultdict(list)
    for ranked, took in ranks.travel(recordings).items():
        seconds[ranked.op].append(took)
    for recording in recordings:
        for op, span in recording.spans.items():
            if graph.channel(op) is None:
                seconds[op].append(span.end - span.start)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel = graph.channel(op)
        return ((channel[0] if channel else COMPUTE, fmean(seconds[op])),)

    return cost


def message_seconds(graph: StepGraph, recordings: Sequence[Recording]) -> dict[tuple[str, str, int], float]:
    """Return the seconds of what travels between positions, by (kind, direction, part): medians over blocks and micro-batches.

    Args:
        recordings: for every position, recorded messages of one rank, after one op that computes there.
    """
    took: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    if len(recordings) > 1:
        for ranked, seconds in Ranks(graph, recordings).travel(recordings).items():
            took[ranked.op.kind, ranked.op.direction, ranked.op.part].append(seconds)
    return {key: median(seconds) for key, seconds in took.items()}


def op_costs(graph: StepGraph, recordings: Sequence[Recording]) -> OpCosts:
    """Return the times of a recorded step's ops, for `Ordering.costs` and `settle`: medians over blocks and micro-batches.

    Args:
        recordings: recordings of the ranks of one pipeline position.
    """
    cost = recorded_cost(graph, recordings)
    took: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    reductions = []
    for op in recordings[0].order:
        ((_, seconds),) = cost(op)
        if op.kind == REDUCE:
            reductions.append((graph.chunk(op).bytes, seconds))
        elif op.kind != HANDOVER:
            took[op.kind, op.direction, op.part].append(seconds)
    return OpCosts(tuple((key, median(took[key])) for key in sorted(took)), *fitted_line(reductions))


def fitted_line(timings: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds to start an op and seconds per unit of its work to (work, seconds). No coefficient becomes negative."""
    from scipy.optimize import nnls

    if len({size for size, _ in timings}) < 2:
        return 0.0, median([seconds / size for size, seconds in timings]) if timings else 0.0
    startup, per_byte = nnls([(1.0, size) for size, _ in timings], [seconds for _, seconds in timings])[0]
    return float(startup), float(per_byte)


def slice_timings(graph: StepGraph, spans: Mapping[Op, Span], ranks: int) -> list[tuple[int, int, float]]:
    """Return all recorded slices of attention for `SliceCost.measured`, with medians over blocks and micro-batches.

    Args:
        spans: the recorded spans, with forward and backward of every slice.
        ranks: number of ranks that share a sequence (cp·tp).

    Returns:
        (tokens of the slice, tokens up to its end, seconds of forward and backward together). Tokens are those of the whole
        sequence.
    """
    timings: dict[tuple[int, int], list[float]] = defaultdict(list)
    for op in spans:
        if op.kind == ATTENTION and op.direction == "F":
            tokens = graph.tokens(op)
            kinds = [op._replace(kind=kind) for kind in {ATTENTION, graph.entry}]
            parts = [part._replace(direction=way) for part in kinds for way in ("F", "B")]
            parts += [left for part in kinds for left in graph.weights(part)]  # perhaps of all slices
            shares = [(spans[part], len(tokens) / len(graph.tokens(part))) for part in parts if part in spans]
            timings[len(tokens) * ranks, tokens.stop * ranks].append(
                sum(share * (span.end - span.start) for span, share in shares)
            )
    return [(tokens, context, median(took)) for (tokens, context), took in timings.items()]
