"""A schedule as text, drawn like the pipeline figures of the papers."""

from __future__ import annotations

from foldray.schedule.clock import unit_times
from foldray.schedule.graph import Graph
from foldray.schedule.op import Schedule


def show(graph: Graph, schedule: Schedule) -> str:
    """Return one line per position, for a clock on which a forward takes 1 and a backward 2. A dot is a unit of waiting.

    The drawing leaves out handovers. This is 1F1B with two positions and two micro-batches:

        0 | F0.0 F0.1 .    .    B0.0----- .    B0.1-----
        1 | .    F1.0 B1.0----- F1.1 B1.1-----

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    times = unit_times(graph, schedule)
    width = max((len(str(op)) for op in times if graph.channel(op) is None), default=0) + 1
    lines = []
    for position, ops in enumerate(schedule):
        cells, now = [], 0
        for op in ops:
            if graph.channel(op) is None:
                start, end = times[op]
                cells += [".".ljust(width)] * round(start - now)
                cells.append(_cell(str(op), round(end - start) * width))
                now = round(end)
        lines.append(f"{position:>{len(str(len(schedule) - 1))}} | {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _cell(name: str, width: int) -> str:
    """Return the name, padded with dashes to `width` columns; the last column is a space."""
    return name + "-" * (width - 1 - len(name)) + " "
