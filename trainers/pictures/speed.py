"""Draws a run's tokens per second over time, with the number of workers and what happened."""

from __future__ import annotations

import math
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainers.pictures.canvas import BELOW_TOP, BLUE, GREY, INK, ORANGE, RED, dot, new_figure, plain, save
from trainers.telemetry.history import Speed

_LISTED = 8  # events with a line of text; all have a mark
_POINTS = 4096  # of the line of an attempt
_UNITS = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def draw_speed(speed: Speed, path: Path, title: str) -> None:
    """Draw tokens per second over the time since the run began. Steps that ran again are in it, and so are pauses.

    The run has at least one step.
    """
    listed = min(len(speed.events), _LISTED)
    height = 4.6 + 0.24 * listed
    figure = new_figure(10.0, height, title, "Tokens per second over time; higher is better")
    bottom = (0.75 + 0.24 * listed) / height
    axes = figure.add_axes((0.08, bottom, 0.88, 1 - bottom - 0.95 / height))
    begin = min([speed.times[0], *(time for time, _ in speed.workers[:1])])
    end = max(speed.times[-1], *(event.time for event in speed.events[-1:]), begin)
    _, unit, name = next(row for row in _UNITS if end - begin >= row[0])
    times, values = np.array(speed.times), np.array(speed.tokens_per_s)
    for part in _attempts(speed, times):
        at = (times[part] - begin) / unit
        axes.plot(at, values[part], color=BLUE, linewidth=0.6, alpha=0.3)
        every = math.ceil(len(at) / _POINTS)
        axes.plot(at[::every], _medians(values[part], every), color=BLUE, linewidth=2.0, marker=dot(at), clip_on=False)
    axes.set_xlim(0, max((end - begin) / unit, 1.0))
    axes.set_ylim(0, 1.25 * float(np.percentile(values, 99)))
    axes.set_xlabel(f"{name} since the run began")
    axes.set_ylabel("tokens per second")
    plain(axes)
    _mark_workers(axes, speed, begin, end, unit)
    _mark_events(figure, axes, speed, begin, unit)
    save(figure, path)


def _attempts(speed: Speed, times: np.ndarray) -> list[slice]:
    """Return the steps of every attempt that has some."""
    cuts = np.searchsorted(times, [event.time for event in speed.events if event.stops], side="right")
    ends = [0, *cuts.tolist(), len(times)]
    return [slice(first, last) for first, last in pairwise(ends) if last > first]


def _medians(values: np.ndarray, every: int) -> np.ndarray:
    """Return the median of every so many values and their neighbours. One slow step, such as one that saves, does not show."""
    reach = min(len(values) // 60 + 2, 50, len(values))
    padded = np.pad(values, reach, mode="symmetric")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)[::every], axis=1)


def _mark_workers(axes: Axes, speed: Speed, begin: float, end: float, unit: float) -> None:
    """Write the number of workers above each stretch of time, if it ever changed."""
    changes = [*speed.workers, (end, 0)]
    if len({workers for _, workers in speed.workers if workers}) < 2:
        return
    for (start, workers), (stop, _) in pairwise(changes):
        if workers and stop > start:
            axes.axvspan((start - begin) / unit, (stop - begin) / unit, ymin=0.975, color=GREY, alpha=0.15 + 0.1 * (workers % 3))
            first = start == begin and stop - start < 0.1 * (end - begin)  # words in its middle would cross the axis
            middle = start if first else (start + stop) / 2
            axes.annotate(f"{workers} workers", ((middle - begin) / unit, 0.965), xytext=(3 if first else 0, 0), va="top",
                          ha="left" if first else "center", fontsize=9.5, color=INK, **BELOW_TOP)  # fmt: skip


def _mark_events(figure: Figure, axes: Axes, speed: Speed, begin: float, unit: float) -> None:
    for number, event in enumerate(speed.events, 1):
        at, colour = (event.time - begin) / unit, RED if event.stops else ORANGE
        axes.axvline(at, color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
        if number <= _LISTED:
            axes.annotate(str(number), (at, 0.0), xytext=(3, 3), color=colour, weight="bold", fontsize=10, **BELOW_TOP)
            line = f"{number}   after step {event.step}: {event.what}"
            place = (0.24 * (min(len(speed.events), _LISTED) - number) + 0.12) / figure.get_figheight()
            figure.text(0.08, place, textwrap.shorten(line, 130, placeholder=" …"), fontsize=9, color=colour)
