"""Draws a plan: step time over memory."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from foldray.planner.hardware import Hardware
from foldray.planner.memory import GIB
from foldray.planner.report import schedule
from foldray.planner.search import Found

_BEST, _FRONT, _LIMIT, _INK = "#2364aa", "#d9630b", "#b91c1c", "#1f2937"


def draw_plan(found: Found, hardware: Hardware, path: Path) -> None:
    """Draw the best candidates and the front of time and memory.

    Args:
        path: the PNG to write.
    """
    figure = Figure(figsize=(11, 6), dpi=144, layout="constrained")
    axes = figure.subplots()
    for planned, colour, label, size in (
        (found.front, _FRONT, "no other candidate is better in both", 60),
        (found.best, _BEST, "best", 25),
    ):
        memory, seconds = [plan.memory.total / GIB for plan in planned], [plan.prediction.seconds for plan in planned]
        axes.scatter(memory, seconds, s=size, color=colour, label=label, zorder=3)
    axes.step([plan.memory.total / GIB for plan in found.front], [plan.prediction.seconds for plan in found.front],
              color=_FRONT, linewidth=1, where="post")  # fmt: skip
    axes.axvline(hardware.memory_gib, color=_LIMIT, linestyle=(0, (5, 3)), linewidth=1.2, label=f"{hardware.memory_gib:.0f} GiB")
    for plan in [found.best[0], *found.front[-1:]]:
        text = f"{plan.candidate.fold}\n{schedule(plan)}"
        point = plan.memory.total / GIB, plan.prediction.seconds
        axes.annotate(text, point, xytext=(8, 8), textcoords="offset points", fontsize=8, color=_INK)
    axes.set_xlabel("memory of the rank that needs most (GiB)")
    axes.set_ylabel("step (s), predicted")
    job = found.best[0].candidate.job
    name = job.model.preset or "model"
    title = f"{name} on {found.best[0].candidate.fold.world_size} × {hardware.name}: {found.legal} legal folds"
    axes.set_title(title, loc="left", fontweight="bold", color=_INK)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))
