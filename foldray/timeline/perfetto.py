"""Spans as a trace that Perfetto and Chrome open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foldray.schedule import Graph, Op, Span


def perfetto(graph: Graph, ranks: Sequence[Mapping[Op, Span]], begin: float = 0.0) -> dict:
    """The document (Chrome's trace event format): a process for every rank, a track for what computes and for each channel.

    Args:
        ranks: spans of each, in seconds.
        begin: the time that is to be zero.
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
