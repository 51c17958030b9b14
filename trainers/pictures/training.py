"""Draws a run: the loss and the byte baselines, the balance of experts, and the trials of the first steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from trainers.pictures.canvas import (
    BELOW_TOP,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
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
from trainers.telemetry.history import History
from trainers.telemetry.records import number

_CELL_NUMBERS = 16  # with more experts, cells are too small for numbers
_HINTS = {"unigram": "knows how frequent each byte is", "bigram": "knows the byte before"}


def draw_loss(
    history: History, baselines: Mapping[str, float], path: Path, title: str, bytes_per_token: float | None = 1.0
) -> None:
    """Draw training and validation loss over the steps, with the baselines as labelled lines.

    The loss is in bits per byte, or in nats per token without `bytes_per_token`.

    Args:
        baselines: bits per byte of simple models on the validation text, by name.
        bytes_per_token: mean length of a token; 1 for the byte tokenizer. None for conversations.
    """
    in_bits = bytes_per_token is not None
    steps, nats = history.steps.column("step").astype(int), history.steps.column("loss")
    training = nats / (math.log(2) * bytes_per_token) if bytes_per_token is not None else nats
    measured = ((at, record["bits_per_byte"] if in_bits else record["loss"]) for at, record in history.validations.items())
    validation = sorted((at, number(value)) for at, value in measured)

    what = "byte" if in_bits else "token, of those that count"
    figure = new_figure(10.0, 5.4, title, f"How well the model predicts the next {what}; lower is better")
    axes = figure.add_axes((0.07, 0.11, 0.69, 0.72))
    smooth = smoothed(training)
    axes.plot(steps, training, color=BLUE, linewidth=0.7, alpha=0.3)
    axes.plot(steps, smooth, color=BLUE, linewidth=2.2, marker=dot(steps), clip_on=False)
    at, values = [at for at, _ in validation], [value for _, value in validation]
    axes.plot(at, values, color=ORANGE, linewidth=1.2, marker="o", markersize=6, clip_on=False, zorder=3)
    for value in baselines.values():
        axes.axhline(value, color=GREY, linewidth=1.2, linestyle=(0, (5, 3)))

    _limit(axes, training, values + list(baselines.values()))
    axes.set_xlim(0, max([1, *steps.tolist(), *at]))
    axes.set_ylabel(f"loss ({'bits per byte' if in_bits else 'nats per token'})")
    axes.set_xlabel("training step")
    mark_restarts(axes, history.resumes)
    _mark_not_finite(axes, steps[~np.isfinite(training)])
    plain(axes)
    labels = [(value, f"{name}  {value:.2f}", _HINTS.get(name, ""), GREY) for name, value in baselines.items()]
    labels += [(_last(smooth), f"training  {_last(smooth):.2f}", "", BLUE)]
    labels += [(value, f"validation  {value:.2f}", "text never trained on", ORANGE) for value in values[-1:]]
    label_right(axes, labels)
    save(figure, path)


def draw_expert_load(history: History, path: Path, title: str, layers: Sequence[int] | None = None) -> None:
    """Draw the load of every expert in the newest steps. The page of the experts' health has the busiest ones of all steps.

    `layers` has the numbers of the MoE layers in the model; None counts them from 0.
    """
    load = history.load
    if load is None:
        save(new_figure(9.0, 3.0, title, "No expert loads have been recorded"), path)
        return
    names = [f"layer {number}" for number in (layers or range(len(load)))]
    rows, experts = load.shape
    height = min(max(0.42 * rows, 2.4), 9.0)
    subtitle = "How evenly the newest steps' tokens spread over each layer's experts; 1.0 is the even share"
    if dead := int((load == 0).sum()):
        subtitle += f"; {dead} dead expert{'s' if dead > 1 else ''} (black) got none"
    figure = new_figure(11.0, height + 1.85, title, subtitle)
    bottom, top = 0.85 / (height + 1.85), 1 - 1.0 / (height + 1.85)
    share = load * experts / np.maximum(load.sum(axis=1, keepdims=True), 1)
    _heat_map(figure, (0.075, bottom, 0.83, top - bottom), share, load, names)
    save(figure, path)


def draw_tried(history: History, path: Path, title: str) -> None:
    """Draw the time of a step with each order, or degree and size of gradient chunks, and mark the choice."""
    if any(record["order"] for record in history.tried):
        _draw_orders(history, path, title)
        return
    sized = any(record["sp_bytes"] for record in history.tried)
    degrees = sorted({record["degree"] for record in history.tried})
    x_axis = "size of gradient chunks" if sized else "number of pieces of a sequence"
    figure = new_figure(8.0, 4.6, title, f"Time of a step over the {x_axis}; lower is better")
    axes = figure.add_axes((0.1, 0.13, 0.85, 0.67))
    # In MiB, or in pieces, and in milliseconds.
    places = [
        (number(record["sp_bytes"]) / 2**20 if sized else float(record["degree"]), number(record["step_time_s"]) * 1e3)
        for record in history.tried
    ]
    for record, (place, _) in zip(history.tried, places, strict=True):
        if record["chosen"]:
            words = [f"d={record['degree']}"] * (len(degrees) > 1) + [f"{place:.3g} MiB"] * sized
            axes.axvline(place, color=ORANGE, linewidth=1.6)
            chosen = f"chosen: {', '.join(words)}"
            axes.annotate(chosen, (place, 1.0), xytext=(4, -4), color=ORANGE, fontsize=9, va="top", **BELOW_TOP)
    tried = [(record["degree"], *at) for record, at in zip(history.tried, places, strict=True) if not record["chosen"]]
    for shade, degree in enumerate(degrees if sized else [None]):
        points = sorted((place, took) for of, place, took in tried if degree in (None, of))
        colour = (BLUE, GREEN, RED, GREY)[shade % 4]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=colour, linewidth=1.0, alpha=0.7, markersize=6, label=f"d={degree}")
    for order, (_, place, took) in enumerate(tried, 1):
        axes.annotate(str(order), (place, took), xytext=(0, 7), textcoords="offset points", ha="center", color=INK, fontsize=8)
    if sized and len(degrees) > 1:
        axes.legend(frameon=False, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of gradients that travel at once (MiB)" if sized else "degree: pieces of a sequence")
    axes.set_ylabel("step (ms), median")
    plain(axes)
    save(figure, path)


def _draw_orders(history: History, path: Path, title: str) -> None:
    """Draw a bar for each order, in the order of trials."""
    tried = [(str(record["order"]), number(record["step_time_s"]) * 1e3, record["chosen"]) for record in history.tried]
    chosen = {order for order, _, final in tried if final}
    bars = [(order, took) for order, took, final in tried if not final]
    height = 1.6 + 0.34 * len(bars)
    figure = new_figure(8.0, height, title, "Time of a step with each order that was measured; lower is better")
    axes = figure.add_axes((0.2, 0.62 / height, 0.72, 1 - 1.5 / height))
    names, took = zip(*bars, strict=True)
    shown = axes.barh(range(len(bars)), took, color=[ORANGE if order in chosen else BLUE for order in names], height=0.62)
    axes.bar_label(
        shown, [f"{each:.4g}" + (" (chosen)" if order in chosen else "") for order, each in bars], padding=4, color=INK
    )
    axes.set_yticks(range(len(bars)), names)
    axes.set_xlim(0, 1.25 * max(took))
    axes.invert_yaxis()
    axes.set_xlabel("step (ms), median")
    plain(axes)
    axes.grid(visible=False, axis="y")
    save(figure, path)


def _heat_map(figure: Figure, box: Box, share: np.ndarray, load: np.ndarray, names: list[str]) -> None:
    axes = figure.add_axes(box)
    rows, experts = share.shape
    norm, most = share_norm(share)
    image = axes.imshow(share, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    every = math.ceil(rows / 40)
    axes.set_yticks(range(0, rows, every), names[::every])
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.set_xticks(np.arange(experts + 1) - 0.5, minor=True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(experts, 16), integer=True))
    axes.set_xlabel("expert")
    axes.grid(which="minor", color="white", linewidth=1.5 if experts <= 64 else 0.4)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    for row, expert in np.ndindex(rows, experts):
        if load[row, expert] == 0:
            axes.add_patch(Rectangle((expert - 0.5, row - 0.5), 1, 1, facecolor="black", edgecolor="white"))
            word = "dead" if experts <= _CELL_NUMBERS else ""
            axes.text(expert, row, word, ha="center", va="center", color="white", weight="bold")
        elif experts <= _CELL_NUMBERS:
            dark = abs(float(norm(share[row, expert])) - 0.5) > 0.3
            axes.text(expert, row, f"{share[row, expert]:.2f}", ha="center", va="center", color="white" if dark else INK)
    share_bar(figure, image, (box[0] + box[2] + 0.012, box[1], 0.011, box[3]), most)


def _limit(axes: Axes, training: np.ndarray, values: list[float]) -> None:
    """Limit the y-axis, so that a spike or the first steps do not squeeze the other values into the bottom."""
    finite = training[np.isfinite(training)]
    shown = [value for value in values if math.isfinite(value)]
    if finite.size:
        shown += [float(finite.min()), float(np.percentile(finite, 98)), min(float(finite[0]), 8.5)]
    if shown:
        low, high = min(shown), max(shown)
        margin = 0.06 * max(high - low, 0.5)
        axes.set_ylim(max(low - margin, 0.0), high + margin)


def _mark_not_finite(axes: Axes, steps: np.ndarray) -> None:
    if len(steps):
        axes.plot(steps, np.full(len(steps), 0.90), "x", color=RED, transform=axes.get_xaxis_transform())
        axes.text(steps[0], 0.86, "loss is not finite", color=RED, transform=axes.get_xaxis_transform(), va="top", weight="bold")


def _last(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan
