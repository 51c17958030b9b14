"""Draws the health of a run's experts on one page: who gets the tokens, how evenly, and whether routing has settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainers.pictures.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    Box,
    dot,
    label_right,
    mark_restarts,
    new_figure,
    plain,
    save,
    share_bar,
    share_norm,
    smoothed,
)
from trainers.telemetry.expert_health import STARVED, Course, overlaps, similarity
from trainers.telemetry.history import LOAD_WINDOW, History

_MAPS, _ABREAST = 8, 4  # heat maps on the page, and in a row of it
_PIXELS = 1024  # most columns of a heat map
_CELL_NUMBERS = 8  # with more layers, cells are too small for numbers
_WIDTH, _HEAD, _MAP, _PANEL, _GAP = 14.0, 0.75, 1.55, 2.15, 1.0  # inches
_READ = """\
Counts are those before tokens are dropped. In grey: other layers.

fullest: every step waits for its fullest expert and rank.
dead: no token in {window} steps. starved: less than {starved:.0%} of
the even share in {window} steps; dead ones count too.

settled: how much of a column's load lies on the same
experts as in the column before. A column is {width}.

alike: do the same batches change the load of two layers?
1: the same ones; 0: no more than by chance. The number
of an expert means nothing in another layer, so experts
are not compared by their numbers."""


def draw_health(history: History, path: Path, title: str, layers: Sequence[int] | None = None) -> None:
    """Draw the load of every expert over the run, and below it what follows from it (`expert_health.py` has the formulas).

    With many MoE layers, the loads of eight are drawn: those with the most dead experts now, then those with the lowest
    entropy. All panels below cover all layers. `layers` has the numbers of the MoE layers in the model; None counts them from 0.
    """
    if not history.course.columns:
        save(new_figure(9.0, 3.0, title, "No expert loads have been recorded"), path)
        return
    count = len(history.course.columns[0].total)
    names = [f"layer {number}" for number in (layers or range(count))]
    shown = _worst(history, min(count, _MAPS))
    rows = math.ceil(len(shown) / _ABREAST)
    height = _HEAD + rows * (_MAP + _GAP) + 2 * (_PANEL + _GAP) + 0.1
    which = "every MoE layer" if len(shown) == count else f"the {len(shown)} least even of {count} MoE layers"
    subtitle = f"Health of the experts. Above: the load of every expert in {which}; white is the even share, black is no token"
    figure = new_figure(_WIDTH, height, title, subtitle)
    _heat_maps(figure, history.course, [(names[layer], layer) for layer in shown])
    top = _HEAD + rows * (_MAP + _GAP)
    boxes = [_box(row, column, top, _PANEL, 3, 0.66, height) for row in range(2) for column in range(3)]
    steps = history.imbalance.ends()
    _evenness(figure.add_axes(boxes[0]), history, steps, names)
    _fullest(figure.add_axes(boxes[1]), history, steps, names)
    _unused(figure.add_axes(boxes[2]), history, steps, count * history.course.columns[0].total.shape[1])
    _settled(figure.add_axes(boxes[3]), history, steps[-1], names)
    _alike(figure, boxes[4], history.course, names)
    width = "1 step" if history.course.width == 1 else f"{history.course.width} steps"
    figure.text(boxes[5][0] - 0.03, boxes[5][1] + boxes[5][3], _READ.format(window=LOAD_WINDOW, starved=STARVED, width=width),
                fontsize=9.5, color=INK, va="top", linespacing=1.25)  # fmt: skip
    save(figure, path)


def _worst(history: History, count: int) -> list[int]:
    """Return the layers that are least even in the newest steps, in the order of the model."""
    newest = history.health(ep=1)
    if newest is None:  # a run that was just rewound
        return list(range(count))
    return sorted(np.lexsort((newest.entropy, -newest.dead))[:count].tolist())


def _box(row: int, column: int, top: float, tall: float, abreast: int, wide: float, height: float) -> Box:
    """Return the place of a panel in a table of panels that begins `top` inches below the upper edge.

    `wide` is the share of a panel's column that its axes take.
    """
    left, whole = 0.05, 0.9 / abreast
    bottom = 1 - (top + row * (tall + _GAP) + tall + 0.35) / height
    return left + column * whole, bottom, whole * wide, tall / height


def _heat_maps(figure: Figure, course: Course, shown: list[tuple[str, int]]) -> None:
    load_TME = np.stack([column.total for column in course.columns])
    experts, last, height = load_TME.shape[-1], course.columns[-1].last, figure.get_figheight()
    share_TME = load_TME * experts / np.maximum(load_TME.sum(axis=-1, keepdims=True), 1)
    norm, most = share_norm(share_TME[:, [layer for _, layer in shown]])
    scale = ScalarMappable(norm, "RdBu_r")
    abreast = min(len(shown), _ABREAST)
    column_P = _columns(course, min(last, _PIXELS))
    for place, (name, layer) in enumerate(shown):
        box = _box(place // abreast, place % abreast, _HEAD, _MAP, abreast, 0.88 if abreast < 3 else 0.82, height)
        axes, share_EP = figure.add_axes(box), share_TME[column_P, layer].T
        colour_EPC = np.asarray(scale.to_rgba(share_EP))[..., :3]
        colour_EPC[share_EP == 0] = 0.0
        colour_EPC[:, column_P < 0] = 0.85
        axes.imshow(colour_EPC, extent=(0, last, experts - 0.5, -0.5), aspect="auto", interpolation="nearest")
        axes.set_title(name, loc="left", fontsize=10.5, color=INK)
        axes.set_ylabel("expert" if place % abreast == 0 else "")
        axes.set_xlabel("training step")
        plain(axes, ticks=4)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.grid(False)
    top = figure.axes[0].get_position()
    share_bar(figure, scale, (0.948, top.y0, 0.009, top.height), most)


def _columns(course: Course, pixels: int) -> np.ndarray:
    """Return the column that each of these pixels shows, [P]; −1 for steps that the run has repeated and forgotten."""
    first_T, last_T = (np.array([getattr(column, name) for column in course.columns]) for name in ("first", "last"))
    step_P = (np.arange(pixels) + 0.5) * (last_T[-1] / pixels)
    column_P = np.searchsorted(last_T, step_P)
    return np.where(step_P > first_T[column_P] - 1, column_P, -1)


def _evenness(axes: Axes, history: History, steps: np.ndarray, names: Sequence[str]) -> None:
    lines = [smoothed(column) for column in history.entropy.means().T]
    label = _lines(axes, steps, lines, int(np.argmin([line[-1] for line in lines])), names, BLUE)
    _limit(axes, min(0.95, float(np.min(lines))))
    label_right(axes, [label])
    _finish(axes, history, steps[-1], "entropy of the load", "by layer, the lowest in colour; 1 is even", "entropy / ln(experts)")


def _fullest(axes: Axes, history: History, steps: np.ndarray, names: Sequence[str]) -> None:
    lines = [smoothed(column) for column in history.imbalance.means().T]
    rank = smoothed(history.steps.column("rank_max_over_mean"))
    every = history.steps.column("step")
    axes.plot(every, rank, color=BLUE, linewidth=2.0, linestyle=(0, (3, 1.5)), marker=dot(every))
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
    axes.set_ylim(0.9, 1.05 * max(float(np.max(lines)), 1.2))
    label = _lines(axes, steps, lines, int(np.argmax([line[-1] for line in lines])), names, ORANGE, "expert {:.2f}")
    label_right(axes, [label, (float(rank[-1]), f"rank {rank[-1]:.2f}", "", BLUE)])
    _finish(axes, history, steps[-1], "fullest expert and rank", "of the worst layer; 1 is even", "load / mean load")


def _unused(axes: Axes, history: History, steps: np.ndarray, experts: int) -> None:
    dead, starved = history.unused.means().T
    axes.plot(steps, starved, color=ORANGE, linewidth=2.0, linestyle=(0, (3, 1.5)), clip_on=False, marker=dot(steps))
    axes.plot(steps, dead, color=INK, linewidth=2.0, clip_on=False, marker=dot(steps))
    axes.set_ylim(0, 1.08 * max(4, int(starved.max())))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    labels = [(dead[-1], f"dead {dead[-1]:.0f}", "", INK), (starved[-1], f"starved {starved[-1]:.0f}", "", ORANGE)]
    label_right(axes, labels)
    _finish(axes, history, steps[-1], "dead and starved experts", f"over {LOAD_WINDOW} steps, of {experts:,} in all layers",
            "experts")  # fmt: skip


def _settled(axes: Axes, history: History, last: int, names: Sequence[str]) -> None:
    full = [column for column in history.course.columns if column.steps >= history.course.width]
    if len(full) > 1:
        line_MT = overlaps(history.course.full()).T
        at = np.array([column.last for column in full[1:]])
        label = _lines(axes, at, list(line_MT), int(line_MT[:, -1].argmin()), names, GREEN)
        _limit(axes, min(0.9, float(line_MT.min())))
        label_right(axes, [label])
    else:
        axes.text(0.5, 0.5, "needs two columns", color=GREY, ha="center", transform=axes.transAxes)
    _finish(
        axes, history, last, "how settled routing is", "by layer, the lowest in colour; 1: it stays", "load on the same experts"
    )


def _alike(figure: Figure, box: Box, course: Course, names: Sequence[str]) -> None:
    alike_MM = similarity(course.full()) if len(course.columns) > 1 else None
    axes = figure.add_axes(box)
    _head(axes, "how alike layers change", "linear CKA of their changes of load")
    if alike_MM is None or len(names) < 2:
        axes.set_axis_off()
        what = "two MoE layers" if alike_MM is not None else "eight columns of time"
        axes.text(0.5, 0.5, f"needs {what}", color=GREY, ha="center", transform=axes.transAxes)
        return
    image = axes.imshow(np.clip(alike_MM, 0, 1), cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    every = math.ceil(len(names) / 8)
    numbers = [name.removeprefix("layer ") for name in names]
    axes.set_xticks(range(0, len(names), every), numbers[::every])
    axes.set_yticks(range(0, len(names), every), numbers[::every])
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(names) <= _CELL_NUMBERS:
        for row, column in np.ndindex(alike_MM.shape):
            value = alike_MM[row, column]
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=INK if value > 0.6 else "white", fontsize=8)
    bar = figure.colorbar(image, cax=figure.add_axes((box[0] + box[2] + 0.006, box[1], 0.007, box[3])), ticks=[0, 0.5, 1])
    bar.ax.spines[:].set_visible(False)


def _lines(axes: Axes, steps: np.ndarray, lines: Sequence[np.ndarray], worst: int, names: Sequence[str], colour: str,
           form: str = "{:.3f}") -> tuple[float, str, str, str]:  # fmt: skip
    """Draw a line for each layer, in grey but for the worst, and return the label at the end of the worst."""
    for line in lines:
        axes.plot(steps, line, color=GREY, linewidth=0.9, alpha=0.45, marker=dot(steps))
    axes.plot(steps, lines[worst], color=colour, linewidth=2.0, clip_on=False, marker=dot(steps))
    return float(lines[worst][-1]), form.format(lines[worst][-1]), names[worst], colour


def _limit(axes: Axes, low: float) -> None:
    """Limit the y-axis to values from `low` to 1."""
    margin = 0.05 * (1 - low)
    axes.set_ylim(max(0.0, low - margin), 1 + margin)


def _head(axes: Axes, title: str, hint: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, weight="bold", pad=20)
    axes.annotate(hint, (0, 1), fontsize=9, color=GREY, xycoords="axes fraction", xytext=(0, 7), textcoords="offset points")


def _finish(axes: Axes, history: History, last: int, title: str, hint: str, unit: str) -> None:
    _head(axes, title, hint)
    axes.set_xlim(0, last)
    axes.set_xlabel("training step")
    axes.set_ylabel(unit)
    mark_restarts(axes, history.resumes)
    plain(axes, ticks=5)
