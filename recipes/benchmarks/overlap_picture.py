"""Draw the results of overlap.py.

    python recipes/benchmarks/overlap_picture.py RESULT.json … --picture FILE.png

A panel for every link shows each variant's forward and backward, its range over the rounds, and the limit. If kinds ran at
three degrees or more, another panel shows their speed over the degree (FoldMoE, figure 9).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from overlap import limits, link_of, measured, over_limit, ratio

FORWARD, BACKWARD, LIMIT, INK = "#7aa6d6", "#2364aa", "#b91c1c", "#1f2937"
COLOURS = {"moe_only": "#6b7280", "aaam": "#8a6d00", "one_a_one_m": "#d9630b", "stream": "#2364aa", "flow": "#2f855a"}
ALONE = {"C": "computation alone", "X": "all-to-alls alone", "G": "reductions alone"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="files of overlap.py --json; runs over the same link share a curve")
    parser.add_argument("--picture", type=Path, required=True)
    args = parser.parse_args()
    runs = [run for path in args.results for run in json.loads(path.read_text())["runs"]]
    same_link: dict[tuple[float, int], list[dict[str, Any]]] = {}  # runs by the link's rate and the bytes of a step
    for run in (run for run in runs if "sequential" in run):
        same_link.setdefault((run["link_mbit"], run["bytes"]), []).append(run)
    swept = [same for same in same_link.values() if len({degree for run in same for degree in _degrees(run)}) > 2]
    rows = [len(measured(run)) + 2 for run in runs]
    figure = Figure(figsize=(10, 0.9 * (len(runs) + 1) + 0.27 * sum(rows) + 3.6 * len(swept)), dpi=144, layout="constrained")
    panels = figure.subplots(len(runs) + len(swept), 1, height_ratios=[*rows, *[13] * len(swept)], squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=False):
        _bars(axes, run)
    for axes, same in zip(panels[len(runs) :], swept, strict=True):
        _over_degrees(axes, same)
    FigureCanvasAgg(figure).print_png(str(args.picture))


def _bars(axes: Axes, run: dict[str, Any]) -> None:
    """Draw the panel of one link."""
    names = [*(name for name in ALONE if name in run), *measured(run)]
    for at, name in enumerate(names):
        result = run[name]
        sides = [result[side]["median"] / 1e3 for side in ("forward_ms", "backward_ms")]
        step = {key: result["step_ms"][key] / 1e3 for key in ("median", "min", "max")}
        axes.barh([at, at], sides, left=[0, sides[0]], height=0.66, color=[FORWARD, BACKWARD])
        axes.hlines(at, step["min"], step["max"], color=INK, linewidth=1.2)
        text, right = f"{step['median']:.2f} s", step["max"]
        if name in measured(run):
            least = median(limits(run, name)) / 1e3
            axes.vlines(least, at - 0.45, at + 0.45, color=LIMIT, linewidth=2)
            right = max(right, least)
            text += f", {over_limit(run, name):.2f} × limit"
        if name in measured(run) and "exposed_comm_ms" in result and result["comm_ms"]["median"] > 1:
            text += f", {result['exposed_comm_ms']['median'] / result['comm_ms']['median']:.0%} exposed"
        axes.annotate(text, (right, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(names)), [ALONE.get(name, name) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(run[name]["step_ms"]["max"] for name in names) / 1e3)
    title = f"{link_of(run)}, all-to-alls {ratio(run):.2f} × computation: forward, backward, and the limit in red"
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.set_xlabel("seconds of a step, medians; lines are the range over the rounds")
    axes.spines[["top", "right"]].set_visible(False)


def _degrees(run: dict[str, Any]) -> set[int]:
    return {degree for name in measured(run) if (degree := _degree(name)) is not None}


def _degree(name: str) -> int | None:
    """Return the degree of a variant whose name is a kind and a degree; None for other variants."""
    kind, _, degree = name.partition(":")
    return int(degree) if kind in COLOURS and degree.isdecimal() else None


def _over_degrees(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    """Draw the speed over that of `sequential`, which has degree 1.

    Steps are divided by their own limits, so runs over the same link can be compared.
    """
    ticks = {1}
    for kind, colour in COLOURS.items():
        points = {1: 1.0}
        for run in runs:
            base = over_limit(run, "sequential")
            for name in measured(run):
                if name.split(":")[0] == kind and (degree := _degree(name)) is not None:
                    points[degree] = base / over_limit(run, name)
        if len(points) > 1:
            axes.plot(sorted(points), [points[degree] for degree in sorted(points)], "o-", color=colour, label=kind)
            ticks |= points.keys()
    axes.axhline(over_limit(runs[0], "sequential"), color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), label="limit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(degree) for degree in sorted(ticks)])
    axes.set_xlabel("degree")
    axes.set_ylabel("× as fast as sequential")
    title = f"speed over the degree, {link_of(runs[0])}, all-to-alls {ratio(runs[0]):.2f} × computation"
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
