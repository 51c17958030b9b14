"""Draws the roofline of workers of their own: what a GPU of either side reaches, over FLOPs per byte (DisagMoE, figure 9)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from foldray.planner.device import Device
from foldray.planner.placing import adapters
from foldray.planner.report import Comparison
from foldray.planner.space import Space

_ATTENTION, _EXPERTS, _SHARED, _INK = "#2364aa", "#d9630b", "#9ca3af", "#1f2937"


def draw_roofline(found: Comparison, space: Space, path: Path) -> None:
    """Draw one roof for equal adapters and one for each side's own, with the point at which each side works.

    Args:
        found: the demand of a layer, and the allocation.
        space: the job and the cluster.
        path: the PNG to write.
    """
    demand, allocation, device = found.demand, found.allocation, Device.of(space.job, space.hardware)
    speed, nic_rate = device.peak * device.share["gemm"], space.hardware.inter.gb_s * 1e9 * device.share["exchange"]
    title = f"{space.job.model.preset or 'model'} on {space.gpus} × {space.hardware.name}, {space.job.seq_len} tokens"
    figure = Figure(figsize=(8, 5), dpi=144, layout="constrained")
    axes = figure.subplots()
    own = adapters(allocation)
    intensities = [flops / demand.bytes for flops in (demand.attention, demand.experts)]
    x = np.geomspace(min(intensities) / 8, 8 * max(*intensities, speed / nic_rate), 400)

    def roof(nics: float) -> np.ndarray:
        return np.minimum(speed, x * nics * nic_rate) / 1e12

    axes.plot(x, roof(1.0), color=_SHARED, linewidth=1.5, label="one adapter per GPU")
    for name, colour, nics, intensity in zip(("attention", "experts"), (_ATTENTION, _EXPERTS), own, intensities, strict=True):
        axes.plot(x, roof(nics), color=colour, linewidth=1.5, linestyle=(0, (5, 2)), label=f"{name}: {nics:.2f} adapters per GPU")
        reached = min(speed, intensity * nics * nic_rate) / 1e12
        axes.plot([intensity], [reached], "o", color=colour, markersize=7)
        axes.annotate(name, (intensity, reached), xytext=(6, -14), textcoords="offset points", fontsize=9, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte that a side sends", ylabel="TFLOP/s of one GPU, at most")
    axes.set_title(title, loc="left", fontweight="bold", color=_INK)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))
