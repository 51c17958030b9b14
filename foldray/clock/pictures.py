"""Spans as a text drawing, like the figures of the papers, and as a trace for Perfetto and Chrome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foldray.clock.times import Span
from foldray.graph import Graph, Op
from foldray.kinds import OP_KINDS


def draw_text(graph: Graph, spans: Mapping[Op, Span], width: int = 110) -> str:
    """Draw all lanes on a common clock of `width` columns.

    An op is its letter and part, or its letter alone if it has too few columns. Backward has a prime after the part, and
    recomputation has an R before the letter.
    """
    if not spans:
        return ""
    begin, end = min(span.start for span in spans.values()), max(span.end for span in spans.values())
    scale = width / max(end - begin, 1e-12)
    lanes: dict[str, list[tuple[Span, Op]]] = {"compute": []}
    for op, span in spans.items():
        channel = graph.channel(op)
        lanes.setdefault(channel[0] if channel else "compute", []).append((span, op))
    label = max(map(len, lanes))
    lines = []
    for lane, held in lanes.items():
        cells = [" "] * width
        for span, op in sorted(held):
            first, last = round((span.start - begin) * scale), max(round((span.end - begin) * scale), 1)
            name = _name(op) if last - first > len(_name(op)) else OP_KINDS[op.kind].letter
            for column, letter in zip(range(first, min(last, width)), name.ljust(last - first, "─"), strict=False):
                cells[column] = letter
        lines.append(f"{lane:>{label}} │{''.join(cells).rstrip()}")
    kinds = {op.kind for op in spans}
    legend = "  ".join(f"{row.letter} {row.label}" for name, row in OP_KINDS.items() if name in kinds)
    apart = ", W of its weights" if any(op.direction == "W" for op in spans) else ""
    return "\n".join([*lines, f"{'':>{label}}  {legend}; ' is backward{apart}"])


def _name(op: Op) -> str:
    before, after = op.direction if op.direction in "RW" else "", "'" if op.direction == "B" else ""
    return f"{before}{OP_KINDS[op.kind].letter}{op.part}{after}"


def perfetto(graph: Graph, ranks: Sequence[Mapping[Op, Span]], begin: float = 0.0) -> dict:
    """Return a document in Chrome's trace event format, with times in microseconds.

    Every rank is a process. It has one track for computation and one for each class of traffic.

    Args:
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
