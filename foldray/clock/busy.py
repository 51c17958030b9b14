"""What a recorded step was busy with: the time of its ranks by cause, and its critical path.

A moment of a rank counts for the op that computes, or else for an operation that travels to or from the rank, or else for the
wait for other ranks, or else for the host. So hidden communication counts nowhere, and the causes sum to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from foldray.clock.compiled import CompiledSchedule
from foldray.clock.recorded import RankedOp, Ranks, Recording
from foldray.clock.times import Span
from foldray.graph import Graph, Op
from foldray.kinds import OP_KINDS

OTHERS, HOST = "others", "host"
CAUSES: Mapping[str, str] = {
    **{name: row.label for name, row in OP_KINDS.items()},
    OTHERS: "waits for other workers",
    HOST: "between ops",
}
"""What the time of a step goes to, with labels: kinds of ops (those that travel, where nothing computes), the wait for ranks that
have not come so far, and the time in which no op runs, because the host has not started one yet."""


class Busy(NamedTuple):
    """Seconds of a recorded step by cause (`CAUSES`), without causes that take no time.

    Both sum to the seconds of the step, from the start of its first op to the end of its last one.

    Args:
        ranks: mean over the ranks.
        path: along the critical path. It goes from the op that ended last to whatever this op waited for longest, and on from
            there, from rank to rank. So it has no wait for other ranks: it shows what these did meanwhile.
    """

    ranks: dict[str, float]
    path: dict[str, float]


def busy(graph: Graph, recordings: Sequence[Recording]) -> Busy:
    """Return what a recorded step was busy with."""
    ranks = Ranks(graph, recordings)
    aligned = ranks.on_one_clock(recordings)
    travelling = ranks.travelling([each.spans for each in aligned])
    step = Span(
        min(span.start for each in aligned for span in each.spans.values()),
        max(span.end for each in aligned for span in each.spans.values()),
    )
    means: dict[str, float] = defaultdict(float)
    for rank, recording in enumerate(aligned):
        begun = {op: travelling[ranks.ranked(op, rank)].start for op in recording.order if graph.channel(op) is not None}
        for cause, seconds in _of_rank(graph, recording, begun, step):
            means[cause] += seconds / len(aligned)
    return Busy(_in_order(means), _in_order(_path(ranks, aligned, travelling, step)))


def _of_rank(graph: Graph, recording: Recording, begun: Mapping[Op, float], step: Span) -> Iterator[tuple[str, float]]:
    """Yield (cause, seconds) of a rank's step.

    Args:
        recording: its list and its spans, on the clock of all ranks.
        begun: for each of its operations that travel, the moment when its last rank has started it.
    """
    spans = recording.spans
    computing = sorted((op for op in recording.order if op not in begun), key=lambda op: spans[op])
    coming = sorted(begun, key=lambda op: spans[op], reverse=True)
    near: list[Op] = []
    done, free = max(span.end for span in spans.values()), step.start
    for op in [*computing, None]:
        until = step.end if op is None else spans[op].start
        if until > free:
            while coming and spans[coming[-1]].start < until:
                near.append(coming.pop())
            near = [other for other in near if spans[other].end > free]
            needed = set() if op is None else _needed(graph, op, begun)
            near.sort(key=lambda other: (other not in needed, spans[other].end))
            for gap in _parts(Span(free, until), near, spans, begun):
                yield _cause(gap, near, spans, begun, done), gap.end - gap.start
        if op is not None and spans[op].end > free:
            yield op.kind, spans[op].end - max(free, spans[op].start)
            free = spans[op].end


def _needed(graph: Graph, op: Op, travels: Mapping[Op, float]) -> set[Op]:
    """Return the ops that travel and that an op needs, at once or through other ops that travel."""
    found, left = set[Op](), [op]
    while left:
        more = [need for need in graph.needs(left.pop()) if need in travels and need not in found]
        found.update(more)
        left += more
    return found


def _parts(gap: Span, near: Iterable[Op], spans: Mapping[Op, Span], begun: Mapping[Op, float]) -> Iterator[Span]:
    """Yield the parts of a stretch of time, cut wherever an operation is started, begins to travel or ends."""
    moments = {moment for op in near for moment in (*spans[op], begun[op]) if gap.start < moment < gap.end}
    yield from map(Span, [gap.start, *sorted(moments)], [*sorted(moments), gap.end])


def _cause(gap: Span, near: Iterable[Op], spans: Mapping[Op, Span], begun: Mapping[Op, float], done: float) -> str:
    """Return what a rank did in a stretch of time in which it computed nothing.

    Args:
        near: its operations that travel, the most urgent first: those that its next op needs, and then what ends first.
        done: when its last op ended.
    """
    started = [op for op in near if spans[op].start <= gap.start and gap.end <= spans[op].end]
    travels = next((op.kind for op in started if begun[op] <= gap.start), None)
    return travels or (OTHERS if started or gap.start >= done else HOST)


def _path(ranks: Ranks, aligned: Sequence[Recording], travelling: Mapping[RankedOp, Span], step: Span) -> dict[str, float]:
    """Return the seconds of the critical path by cause."""
    # The compiler only passes the entries of its lists to the graph, so these entries may be ranked ops.
    compiled = CompiledSchedule(cast(Graph, ranks), cast(Iterable, ranks.lists), lambda op: op)
    ops = [cast(RankedOp, op) for op in compiled.ops]
    spans = [travelling[op] if op in travelling else aligned[op.rank].spans[op.op] for op in ops]
    before = compiled.predecessors()
    seconds: dict[str, float] = defaultdict(float)
    at, until = max(range(len(ops)), key=lambda i: spans[i].end), step.end
    while True:
        last = max(before[at], key=lambda i: spans[i].end, default=None)
        free = step.start if last is None else min(spans[last].end, until)
        start = min(max(spans[at].start, free), until)
        seconds[ops[at].op.kind] += until - start
        seconds[HOST] += start - free
        if last is None:
            return seconds
        at, until = last, free


def _in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    return {cause: seconds[cause] for cause in CAUSES if seconds.get(cause, 0.0) > 0}


def busy_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return a text with a row for each cause and a column for each of several steps, in shares of the step.

    Args:
        columns: heading → seconds by cause.
    """
    causes = [cause for cause in CAUSES if any(cause in seconds for seconds in columns.values())]
    width = max(map(len, (CAUSES[cause] for cause in causes))) + 2
    wide = {heading: max(8, len(heading)) + 2 for heading in columns}
    lines = [f"{'':<{width}}" + "".join(f"{heading:>{wide[heading]}}" for heading in columns)]
    for cause in causes:
        shares = (
            f"{seconds.get(cause, 0.0) / sum(seconds.values()):>{wide[heading]}.1%}" for heading, seconds in columns.items()
        )
        lines.append(f"{CAUSES[cause]:<{width}}" + "".join(shares))
    return "\n".join(lines)
