"""Draw what overlap.py has measured.

    python recipes/benchmarks/overlap_picture.py RESULT.json … --picture FILE.png

A panel for every link: each variant's forward and backward, its range over the rounds, and the limit. If kinds ran at three
degrees or more, another one shows their speed over the degree (FoldMoE, figure 9).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from overlap import limits, over_limit

FORWARD, BACKWARD, LIMIT, INK = "#7aa6d6", "#2364aa", "#b91c1c", "#1f2937"
COLOURS = {"moe_only": "#6b7280", "aaam": "#8a6d00", "one_a_one_m": "#d9630b", "stream": "#2364aa"}
ALONE = {"C": "computation alone", "X": "all-to-alls alone"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="files of overlap.py --json")
    parser.add_argument("--picture", type=Path, required=True)
    given = parser.parse_args()
    runs = [run for path in given.results for run in json.loads(path.read_text())["runs"]]
    swept = [run for run in runs if len(_degrees(run)) > 2]
    rows = [len(_measured(run)) for run in runs]
    figure = Figure(figsize=(10, 0.9 * (len(runs) + 1) + 0.27 * sum(rows) + 3.6 * len(swept)), dpi=144, layout="constrained")
    panels = figure.subplots(len(runs) + len(swept), 1, height_ratios=[*rows, *[13] * len(swept)], squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=False):
        _bars(axes, run)
    for axes, run in zip(panels[len(runs) :], swept, strict=True):
        _over_degrees(axes, run)
    FigureCanvasAgg(figure).print_png(str(given.picture))


def _measured(run: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in run.items() if isinstance(each, dict) and "step_ms" in each}


def _ratio(run: dict[str, Any]) -> float:
    return run["X"]["step_ms"]["median"] / run["C"]["step_ms"]["median"]


def _bars(axes: Axes, run: dict[str, Any]) -> None:
    """One link."""
    least, found = median(limits(run)) / 1e3, _measured(run)
    for at, (name, each) in enumerate(found.items()):
        sides = [each[side]["median"] / 1e3 for side in ("forward_ms", "backward_ms")]
        step = {key: each["step_ms"][key] / 1e3 for key in ("median", "min", "max")}
        axes.barh([at, at], sides, left=[0, sides[0]], height=0.66, color=[FORWARD, BACKWARD])
        axes.hlines(at, step["min"], step["max"], color=INK, linewidth=1.2)
        text = f"{step['median']:.2f} s, {over_limit(run, name):.2f} × limit"
        if "exposed_comm_ms" in each and each["comm_ms"]["median"] > 1:
            text += f", {each['exposed_comm_ms']['median'] / each['comm_ms']['median']:.0%} exposed"
        axes.annotate(text, (step["max"], at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axes.axvline(least, color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.set_yticks(range(len(found)), [ALONE.get(name, name) for name in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(each["step_ms"]["max"] for each in found.values()) / 1e3)
    axes.set_title(f"all-to-alls {_ratio(run):.2f} × computation ({run['link_mbit']:.0f} Mbit/s): forward, backward, "
                   "and the limit", loc="left", fontsize=10, fontweight="bold", color=INK)  # fmt: skip
    axes.set_xlabel("seconds of a step, medians; lines are the range over the rounds")
    axes.spines[["top", "right"]].set_visible(False)


def _degrees(run: dict[str, Any]) -> set[int]:
    return {degree for name in _measured(run) if (degree := _degree(name)) is not None}


def _degree(name: str) -> int | None:
    """Of a variant that is nothing but a kind and its degree."""
    kind, _, degree = name.replace(":best", "").partition(":")
    return int(degree) if kind in COLOURS and degree.isdecimal() else None


def _over_degrees(axes: Axes, run: dict[str, Any]) -> None:
    """Speed against `sequential`, which is degree 1."""
    found = _measured(run)
    whole = found["sequential"]["step_ms"]["median"]
    for kind, colour in COLOURS.items():
        points = sorted(
            (_degree(name) or 1, each["step_ms"])
            for name, each in found.items()
            if name.split(":")[0] == kind and _degree(name) is not None
        )
        if not points:
            continue
        at = [1, *(degree for degree, _ in points)]
        axes.plot(at, [1.0, *(whole / step["median"] for _, step in points)], "o-", color=colour, label=kind)
        for degree, step in points:
            axes.vlines(degree, whole / step["max"], whole / step["min"], color=colour, linewidth=1)
    axes.axhline(whole / median(limits(run)), color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), label="limit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({1, *_degrees(run)}), [str(d) for d in sorted({1, *_degrees(run)})])
    axes.set_xlabel("degree")
    axes.set_ylabel("× as fast as sequential")
    axes.set_title(f"speed over the degree, all-to-alls {_ratio(run):.2f} × computation", loc="left", fontsize=10,
                   fontweight="bold", color=INK)  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
