"""Measure how a step depends on the size of gradient chunks, and how near the search comes to the best (FlowMoE, section
4.1).

    python recipes/benchmarks/overlap.py --sweep one_a_one_m:4 --ratios 0.5 --batch 4 --length 256 --hidden 256 --inner 512

Sizes take turns in every round. Then training's own search runs with five seeds. The choice of each search and the best size
of the sweep take turns once more, and the median of the ratios of neighbours counts.
"""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainers.worker.online import Online
from tuners import OnlineSearch

if TYPE_CHECKING:
    from overlap_worker import Worker

    from trainers.records import Tried

SIZES, SEEDS, PAIRS, SMALLEST = 12, 5, 15, 4 << 10


def sweep(worker: Worker, variant: str) -> dict[str, Any]:
    """Measure all sizes, in milliseconds of the slower host. Both hosts return the same."""

    def took(size: int) -> float:
        return worker.slowest(f"{variant}+chunks={size}")

    largest = max(chunk.bytes for chunk in worker.gradients.chunks(None))
    steps = (SIZES - 1) / math.log(largest / SMALLEST)
    sizes = sorted({round(SMALLEST * math.exp(i / steps)) for i in range(SIZES)})
    by_size: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(2 + worker.args.rounds):
        worker.measuring = number >= 2
        worker.tell(f"round {number - 1} of {worker.args.rounds}")
        for size in sizes:
            if (milliseconds := took(size)) and worker.measuring:
                by_size[size].append(milliseconds)
    medians = {size: statistics.median(times) for size, times in by_size.items()}
    best = min(medians, key=medians.__getitem__)
    searches = []
    for seed in range(SEEDS):
        worker.tell(f"search {seed + 1} of {SEEDS}")
        searches.append(search(worker, seed))
    for outcome in searches:
        worker.tell(f"{outcome['pick']} bytes against {best}")
        for worker.measuring in (False, False, True):  # the first steps measure the times of ops again
            took(outcome["pick"])
        times = [took(size) for _ in range(PAIRS + 1) for size in (best, outcome["pick"])][2:]
        pairs = [other / one for one, other in list(pairwise(times))[::2]]
        outcome["over_best"] = statistics.median(pairs)
    return {"sizes": by_size, "best": best, "searches": searches}


def search(worker: Worker, seed: int) -> dict[str, Any]:
    """Run one search for the size of chunks, as training does it, from the present ordering, and use its choice."""
    records: list[Tried] = []
    worker.measuring = True  # from now on, steps do not measure the times of ops
    now = worker.execution.ordering
    orderings = {now.degree: now}
    online = Online(worker.execution, worker.groups, torch.device("cpu"), orderings, sizes=True)
    steps = online.search(partial(OnlineSearch, seed=seed), records.append)
    with suppress(StopIteration):
        next(steps)
        while True:
            steps.send(worker.slowest(None) / 1e3)
    result = [{"seed": seed, "pick": worker.execution.ordering.reduction.bytes,
               "measured": [(record["sp_bytes"], record["step_time_s"] * 1e3) for record in records]}]  # fmt: skip
    dist.broadcast_object_list(result, 0)
    return result[0]


def report_sweep(run: dict[str, Any], picture: Path | None) -> None:
    """Print the table, and draw the curve."""
    print(f"link {run['link_mbit']:.0f} Mbit/s\n{'bytes':>10}{'ms':>9}{'min':>9}{'max':>9}")
    for size, times in run["sizes"].items():
        mark = "  best" if int(size) == run["best"] else ""
        print(f"{int(size):>10}{statistics.median(times):>9.1f}{min(times):>9.1f}{max(times):>9.1f}{mark}")
    for outcome in run["searches"]:
        print(f"seed {outcome['seed']}: picks {outcome['pick']}, {outcome['over_best']:.3f} × the sweep's best")
    if picture is not None:
        _draw(run, picture)


def _draw(run: dict[str, Any], picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=144, layout="constrained")
    axes = figure.subplots()
    sizes = [int(size) for size in run["sizes"]]
    columns = list(run["sizes"].values())
    axes.plot(sizes, [statistics.median(column) for column in columns], "o-", color="#2364aa", label="sweep, medians and range")
    axes.vlines(sizes, [min(column) for column in columns], [max(column) for column in columns], color="#2364aa", linewidth=0.8)
    for number, outcome in enumerate(run["searches"]):
        axes.plot(
            *zip(*outcome["measured"], strict=True), ".", color="#6b7280", label=None if number else "tried by the searches"
        )
        axes.axvline(outcome["pick"], color="#d9630b", linewidth=1, label=None if number else "picked")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a chunk of gradients")
    axes.set_ylabel("step (ms)")
    axes.legend(facecolor="white", framealpha=1.0, edgecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(picture))
