"""Draws plans: step time over memory; and the roofline of workers of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foldray.costs.hardware import Hardware
from foldray.costs.memory import GIB
from foldray.plan.allocator import Kind
from foldray.plan.placing import adapters, kinds
from foldray.plan.report import schedule
from foldray.plan.report_placements import Comparison
from foldray.plan.search import Found
from foldray.plan.space import Space
from trainers.pictures.canvas import BLUE, INK, ORANGE, PALE_GREY, RED, one_panel, write


def draw_plan(plans: Found, hardware: Hardware, path: Path) -> None:
    """Draw the best candidates and the front of time and memory."""
    figure, axes = one_panel(11, 6)
    for planned, colour, label, size in (
        (plans.front, ORANGE, "no other candidate is better in both", 60),
        (plans.best, BLUE, "best", 25),
    ):
        memory, seconds = [plan.memory.total / GIB for plan in planned], [plan.prediction.seconds for plan in planned]
        axes.scatter(memory, seconds, s=size, color=colour, label=label, zorder=3)
    axes.step([plan.memory.total / GIB for plan in plans.front], [plan.prediction.seconds for plan in plans.front],
              color=ORANGE, linewidth=1, where="post")  # fmt: skip
    axes.axvline(hardware.memory_gib, color=RED, linestyle=(0, (5, 3)), linewidth=1.2, label=f"{hardware.memory_gib:.0f} GiB")
    for plan in [plans.best[0], *plans.front[-1:]]:
        text = f"{plan.candidate.fold}\n{schedule(plan)}"
        point = plan.memory.total / GIB, plan.prediction.seconds
        axes.annotate(text, point, xytext=(8, 8), textcoords="offset points", fontsize=8, color=INK)
    axes.set_xlabel("memory of the rank that needs most (GiB)")
    axes.set_ylabel("step (s), predicted")
    job = plans.best[0].candidate.job
    name = job.model.preset or "model"
    title = f"{name} on {plans.best[0].candidate.fold.world_size} × {hardware.name}: {plans.legal} legal folds"
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.legend(frameon=False)
    write(figure, path)


def draw_roofline(comparison: Comparison, space: Space, path: Path) -> None:
    """Draw what a GPU of either side reaches, over FLOPs per byte (DisagMoE, figure 9).

    There is one roof for equal adapters and one for each side's own, with the point at which each side works.
    """
    allocation = comparison.allocation
    ours, theirs = kinds(space)
    on = space.hardware.name + (f" and {space.experts.name}" if space.experts else "")
    title = f"{space.job.model.preset or 'model'} on {space.gpus} × {on}, {space.job.seq_len} tokens"
    figure, axes = one_panel(8, 5)
    knees = [kind.flops / kind.nic_rate for kind in (ours, theirs)]
    x = np.geomspace(min(comparison.intensities) / 8, 8 * max(*comparison.intensities, *knees), 400)

    def roof(kind: Kind, nics: float) -> np.ndarray:
        return np.minimum(kind.flops, x * nics * kind.nic_rate) / 1e12

    if not space.experts:
        axes.plot(x, roof(ours, 1.0), color=PALE_GREY, linewidth=1.5, label="one adapter per GPU")
    names, colours = ("attention", "experts"), (BLUE, ORANGE)
    for name, colour, kind, nics, intensity in zip(
        names, colours, (ours, theirs), adapters(allocation), comparison.intensities, strict=True
    ):
        label = f"{name}: {nics:.2f} adapters per GPU"
        axes.plot(x, roof(kind, nics), color=colour, linewidth=1.5, linestyle=(0, (5, 2)), label=label)
        reached = min(kind.flops, intensity * nics * kind.nic_rate) / 1e12
        axes.plot([intensity], [reached], "o", color=colour, markersize=7)
        axes.annotate(name, (intensity, reached), xytext=(6, -14), textcoords="offset points", fontsize=9, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte that a side sends", ylabel="TFLOP/s of one GPU, at most")
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    write(figure, path)
