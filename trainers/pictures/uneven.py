"""Draws what a step costs over the overload factor of its ranks (`trainers/measure/uneven.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import AutoLocator

from trainers.pictures.canvas import BLUE, INK, ORANGE, label_right, new_figure, plain, save


def draw_uneven(results: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw measured steps with their range, and predicted ones, relative to the step of an even routing.

    There is a result for each pattern, the even one first, as `bench_uneven` reports them.
    """
    figure = new_figure(8, 5, title, "step time over the rows of the fullest rank, relative to even routing")
    axes = figure.add_axes((0.09, 0.13, 0.72, 0.66))
    plain(axes)
    axes.xaxis.set_major_locator(AutoLocator())
    even, overloads = results[0]["step_ms"]["median"], [result["overload"] for result in results]
    low, measured, high = ([result["step_ms"][key] / even for result in results] for key in ("min", "median", "max"))
    axes.fill_between(overloads, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(overloads, measured, color=BLUE, marker="o", linewidth=2)
    predicted = [result["predicted_ratio"] for result in results]
    axes.plot(overloads, predicted, color=ORANGE, marker="o", markersize=4, linewidth=2, linestyle="--")
    axes.set_ylim(bottom=min(*low, 1.0) - 0.02)
    for result in results:
        place = (result["overload"], 0.02)
        name = result["pattern"] if result["skew"] is None else f"skew {result['pattern']}"
        axes.annotate(name, place, xycoords=("data", "axes fraction"), color=INK, fontsize=8, ha="center")
    label_right(axes, [(measured[-1], "measured", "", BLUE), (predicted[-1], "predicted", "from the even step", ORANGE)])
    axes.set_xlabel("overload factor: rows of the fullest rank over the mean")
    axes.set_ylabel("step over even step")
    save(figure, path)
