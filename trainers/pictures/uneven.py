"""Draws what a step costs over the overload factor of its ranks (`trainers/measure/uneven.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import AutoLocator

from trainers.pictures.canvas import BLUE, INK, ORANGE, new_figure, plain


def draw_uneven(results: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw measured steps with their range, and predicted ones, relative to the step of an even routing.

    Args:
        results: one for each pattern, the even one first, as `bench_skews` reports them.
        path: the PNG to write.
        title: title of the picture.
    """
    figure = new_figure(8, 5, title, "step time over the rows of the fullest rank, relative to an even routing")
    axes = figure.add_axes((0.1, 0.13, 0.76, 0.66))
    plain(axes)
    axes.xaxis.set_major_locator(AutoLocator())
    even, overloads = results[0]["step_ms"]["median"], [each["overload"] for each in results]
    measured = [each["step_ms"]["median"] / even for each in results]
    low = [value - each["step_ms"]["min"] / even for value, each in zip(measured, results, strict=True)]
    high = [each["step_ms"]["max"] / even - value for value, each in zip(measured, results, strict=True)]
    predicted = [each["predicted_ratio"] for each in results]
    axes.errorbar(overloads, measured, (low, high), color=BLUE, marker="o", capsize=3, linewidth=2)
    axes.plot(overloads, predicted, color=ORANGE, marker="o", linewidth=2, linestyle="--")
    ends = [("measured", measured[-1], BLUE), ("predicted", predicted[-1], ORANGE)]
    room = 0.05 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    near = abs(measured[-1] - predicted[-1]) < room
    for name, value, colour in ends:
        moved = room / 2 * (1 if value == max(measured[-1], predicted[-1]) else -1) * near
        axes.annotate(name, (overloads[-1], value + moved), (12, 0), textcoords="offset points", color=colour, va="center")
    for each, value in zip(results, measured, strict=True):
        below = (each["overload"], value), (0, -16)
        axes.annotate(f"skew {each['skew']:g}", *below, textcoords="offset points", color=INK, fontsize=8, ha="center")
    axes.set_xlabel("overload factor: rows of the fullest rank over the mean")
    axes.set_ylabel("step, × even")
    figure.savefig(path)
