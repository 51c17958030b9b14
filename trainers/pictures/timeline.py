"""Draws a step: computation and communication over time, the recorded step above the simulated one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from foldray.clock import Span, length, merged
from foldray.graph import Graph, Op
from foldray.kinds import OP_KINDS
from trainers.pictures.canvas import INK, RED, panels, write

_HATCHES = {"B": "////", "W": "xxxx"}


def draw_timelines(graph: Graph, rows: Mapping[str, Mapping[Op, Span]], path: Path, title: str) -> None:
    """Draw the lanes of every row, all rows to one scale. A red line marks exposed communication.

    A box has the letter of the kind, the number of the block and that of the piece; below, that of the micro-batch.
    `rows` maps names to spans in seconds; the first span starts at zero.
    """
    end = max(span.end for spans in rows.values() for span in spans.values())
    figure, stacked = panels(14, 1.1 + 1.35 * len(rows), len(rows), sharex=True)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", color=INK)
    for axes, (name, spans) in zip(stacked, rows.items(), strict=True):
        _draw(axes, graph, name, spans, end)
    stacked[-1].set_xlabel("milliseconds")
    kinds = {op.kind for spans in rows.values() for op in spans}
    patches = [Patch(color=row.colour, label=row.label) for name, row in OP_KINDS.items() if name in kinds]
    patches += [
        Patch(facecolor="#ffffff", edgecolor=INK, hatch=_HATCHES["B"], label="backward"),
        Patch(color=RED, label="exposed"),
    ]
    if any(op.direction == "W" for spans in rows.values() for op in spans):
        patches.insert(-1, Patch(facecolor="#ffffff", edgecolor=INK, hatch=_HATCHES["W"], label="gradients of weights"))
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=8)
    write(figure, path)


def _draw(axes: Axes, graph: Graph, name: str, spans: Mapping[Op, Span], end: float) -> None:
    lanes = ["compute", *sorted({channel[0] for op in spans if (channel := graph.channel(op))})]
    several, cut = any(op.micro_batch for op in spans), any(op.part for op in spans)
    for op, span in spans.items():
        channel = graph.channel(op)
        at = lanes.index(channel[0]) if channel else 0
        width = (span.end - span.start) * 1e3
        axes.broken_barh(
            [(span.start * 1e3, width)], (at - 0.4, 0.8), facecolor=OP_KINDS[op.kind].colour, edgecolor="white",
            linewidth=0.3, hatch=_HATCHES.get(op.direction), alpha=0.6 if op.direction == "R" else 1.0,
        )  # fmt: skip
        if width > 0.012 * end * 1e3:
            piece = f".{op.part}" if cut else ""
            text = f"{OP_KINDS[op.kind].letter}{op.layer}{piece}" + (f"\n{op.micro_batch}" if several else "")
            axes.text((span.start + span.end) * 500, at, text, ha="center", va="center", fontsize=5, color="white", clip_on=True)
    computing = merged(span for op, span in spans.items() if graph.channel(op) is None)
    talking = merged(span for op, span in spans.items() if graph.channel(op) is not None)
    exposed = _without(talking, computing)
    axes.hlines([len(lanes) - 0.45] * len(exposed), [s.start * 1e3 for s in exposed], [s.end * 1e3 for s in exposed],
                color=RED, linewidth=2.5)  # fmt: skip
    step = max(span.end for span in spans.values())
    share = length(exposed) / step
    axes.set_title(f"{name}: {step * 1e3:.1f} ms, {share:.1%} exposed communication", loc="left", fontsize=9, color=INK)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.set_ylim(len(lanes) - 0.3, -0.6)
    axes.set_xlim(0, end * 1e3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _without(spans: list[Span], covers: list[Span]) -> list[Span]:
    """Return the parts of spans that no cover covers."""
    uncovered = []
    for span in spans:
        at = span.start
        for cover in covers:
            if cover.end <= at or cover.start >= span.end:
                continue
            if cover.start > at:
                uncovered.append(Span(at, cover.start))
            at = max(at, cover.end)
        if at < span.end:
            uncovered.append(Span(at, span.end))
    return uncovered
