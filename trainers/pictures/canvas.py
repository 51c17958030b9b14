"""What pictures of runs share: colours, headings, axes, labels at the ends of lines, and the scale of loads.

This module does not use matplotlib.pyplot, which keeps figures in global state and may need a display.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, GREY, RED, INK = "#2364aa", "#d9630b", "#2f855a", "#6b7280", "#b91c1c", "#1f2937"
PALE_GREY = "#9ca3af"
Box = tuple[float, float, float, float]
"""Left, bottom, width and height, as shares of the figure."""
BELOW_TOP: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
"""Arguments of annotations at an x of the data and a height of the axes, moved by points."""
_DPI = 144


def one_panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches, and axes that fill it. `write` writes it."""
    figure, (axes,) = panels(width, height)
    return figure, axes


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size in inches, and its axes in rows and columns. `options` are those of `Figure.subplots`."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.subplots(rows, columns, **options)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, figure.axes


def write(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(str(path))


def new_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """Return a figure of this size in inches, with a title and a subtitle at its top."""
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.18 / height, title, fontsize=15, weight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.50 / height, subtitle, fontsize=11, color=GREY, va="top")
    return figure


def plain(axes: Axes, ticks: int = 6) -> None:
    """Give axes the looks of all pictures: no frame, a quiet grid, about `ticks` whole numbers below."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE_GREY)
    axes.tick_params(colors=INK, labelsize=10)
    axes.xaxis.label.set(fontsize=11, color=INK)
    axes.yaxis.label.set(fontsize=11, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True))
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Average over neighbours with Gaussian weights. Infinite values and NaN are left out."""
    if not len(values):
        return values
    width = max(len(values) / 60, 1.0)
    reach = int(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    finite, size = np.isfinite(values), len(values) + 2 * reach
    both = np.stack([finite.astype(float), np.where(finite, values, 0.0)])
    # The kernel grows with the values, so a plain convolution would take the square of their number.
    spread = np.fft.irfft(np.fft.rfft(both, size) * np.fft.rfft(kernel, size), size)
    weights, sums = spread[:, reach : reach + len(values)]
    return np.where(finite, sums / np.maximum(weights, 1e-12), math.nan)


def mark_restarts(axes: Axes, resumes: list[int]) -> None:
    """Draw a dotted line at every step from which the run was resumed."""
    for step in resumes:
        axes.axvline(step, color=GREY, linewidth=0.8, linestyle=":")
    for step in resumes[:1]:
        axes.annotate("resumed", (step, 1), xytext=(4, -4), color=GREY, va="top", **BELOW_TOP)


def dot(steps: Sequence[float] | np.ndarray) -> str | None:
    """Return the marker of a line: a single point would be invisible without one."""
    return "o" if len(steps) == 1 else None


def label_right(axes: Axes, labels: list[tuple[float, str, str, str]]) -> None:
    """Write (value, name, hint below it, colour) at the right ends of lines. Labels that would overlap move apart."""
    low, high = axes.get_ylim()
    line = 14 / (axes.bbox.height * 72 / axes.figure.dpi)  # 14 points, as a share of the axes' height
    floor = -math.inf
    for value, text, hint, color in sorted(label for label in labels if math.isfinite(label[0])):
        lines = 2 if hint else 1
        place = max((min(value, high) - low) / (high - low), floor + line * (lines - 0.5))
        at: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (9, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (1, place), color=color, weight="bold", fontsize=10.5, **at)
        axes.annotate(hint, (1, place - line), color=color, fontsize=9, **at)
        floor = place + line * 0.5


def share_norm(share: np.ndarray) -> tuple[TwoSlopeNorm, float]:
    """Return the scale of loads over the even share, and its end: 1 is white, less is blue and more is red."""
    most = max(2.0, float(share.max()))
    return TwoSlopeNorm(1.0, vmin=0.0, vmax=most), most


def share_bar(figure: Figure, image: ScalarMappable, box: Box, most: float) -> None:
    """Draw the colours of loads up to `most` times the even share, and say what they mean."""
    scale = figure.add_axes(box)
    above = [tick for tick in MaxNLocator(nbins=3, steps=[1, 2, 5, 10]).tick_values(1.0, most) if 1.0 < tick <= most]
    figure.colorbar(image, cax=scale, ticks=[0.0, 0.5, 1.0, *above], format="%g").set_label("tokens / even share", color=INK)
    scale.spines[:].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a draft and rename it, so that a reader of the file always sees a complete picture."""
    draft = path.with_name(f".{path.name}")
    figure.savefig(draft, format="png")
    draft.replace(path)
