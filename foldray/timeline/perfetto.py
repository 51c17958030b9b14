"""Spans as a trace for Perfetto and Chrome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foldray.schedule import Graph, Op, Span


def perfetto(graph: Graph, ranks: Sequence[Mapping[Op, Span]], begin: float = 0.0) -> dict:
    """Return a document in Chrome's trace event format, with times in microseconds.

    Every rank is a process. It has one track for computation and one for each class of traffic.

    Args:
        graph: the graph of the ops.
        ranks: the spans of every rank, in seconds.
        begin: the time that becomes zero, in seconds.
    """
    lanes = ["compute", *sorted({channel[0] for spans in ranks for op in spans if (channel := graph.channel(op))})]
    events: list[dict] = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(lanes)
        ]
        for op, span in spans.items():
            channel = graph.channel(op)
            events.append(
                {
                    "ph": "X", "name": str(op), "cat": op.kind, "pid": rank, "tid": lanes.index(channel[0]) if channel else 0,
                    "ts": (span.start - begin) * 1e6, "dur": (span.end - span.start) * 1e6, "args": op._asdict(),
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
