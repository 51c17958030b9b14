"""FoldMoE's experiments at its own scale, as the planner predicts them: section 5.2, figures 8, 9 and 11.

    python recipes/papers/foldmoe.py [--json FILE] [--picture FILE]

Two nodes of eight A10G (`--cluster`), TP8 for attention inside a node, DP2 between them, EP16 for experts; GPT-MoE-S, M and L,
one sequence of 4K to 32K tokens for each data-parallel rank (the paper's batches are not published), fp16. The vocabulary is
padded to 50304, which TP8 divides. Every kind of schedule takes its best degree among 2, 4, 8 and 16, as in the paper.

*Bound* is what a step would gain over `sequential` if all that can overlap did: a MoE block then takes what it computes or what
travels, whichever is more, in each direction; for `stream`, which does not end blocks together, all blocks do. Predicted times
are no measurements: what can be held against the paper is their order, where a degree's peak lies, and that nothing beats its
bound.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foldray.blueprint import ModelSpec
from foldray.blueprint.layout import smallest_slice
from foldray.fold import Fold
from foldray.kinds import EXCHANGES
from foldray.planner import hardware, prediction
from foldray.planner.candidate import Candidate, Job
from foldray.planner.costs import OpWork
from foldray.planner.device import Device
from foldray.schedule import SliceCost, named_ordering

MODELS, LENGTHS, DEGREES = ("gpt-moe-s", "gpt-moe-m", "gpt-moe-l"), (4096, 8192, 16384, 32768), (2, 4, 8, 16)
FOLD = Fold(16, tp=8, ep=16)
KINDS = {
    "Tutel": "moe_only",
    "aAaM": "aaam",
    "1A1M, equal slices": "one_a_one_m-even",
    "1A1M (FoldMoE)": "one_a_one_m",
    "stream": "stream",
}
SWEEP = ("gpt-moe-m", 32768, (1, 2, 4, 8, 16, 32))


def step(model: str, length: int, schedule: str, machines: hardware.Hardware) -> prediction.Step:
    """One step of a schedule, by its short name."""
    spec = ModelSpec.model_validate({"preset": model, "vocab": 50304})
    cost = SliceCost.of_model(spec.hidden, spec.heads)
    ordering = named_ordering(schedule, length, cost, smallest_slice(FOLD.cp, FOLD.tp))
    candidate = Candidate(Job(spec, length, FOLD.dp, "fp16"), FOLD, ordering)
    return prediction.Step(candidate, OpWork(candidate, Device.of(candidate.job, machines)))


def seconds(model: str, length: int, kind: str, degree: int, machines: hardware.Hardware) -> float:
    """Of `stream` with its best lag, as training chooses it."""
    if degree == 1:
        return step(model, length, "sequential", machines).prediction().seconds
    names = [f"{kind}:{degree}:{lag}" for lag in range(1, min(degree, 4) + 1)] if kind == "stream" else [f"{kind}:{degree}"]
    return min(step(model, length, name, machines).prediction().seconds for name in names)


def bounds(model: str, length: int, machines: hardware.Hardware) -> tuple[float, float]:
    """Seconds of a step in which all overlaps that can: inside of blocks, and across them."""
    whole = step(model, length, "sequential", machines)
    took: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op in whole.graph.ops():
        took[op.direction, op.layer][op.kind in EXCHANGES] += sum(work.seconds for work in whole.work.work(op))
    apart = sum(map(sum, took.values()))
    inside = sum(map(max, took.values()))
    ways = [[sum(each[kind] for (way, _), each in took.items() if way == direction) for kind in (0, 1)] for direction in "FB"]
    base = whole.prediction().seconds
    return base - apart + inside, base - apart + sum(map(max, ways))


def speedups(model: str, length: int, machines: hardware.Hardware) -> dict[str, Any]:
    """Every kind at its best degree, over sequential."""
    base = seconds(model, length, "", 1, machines)
    inside, across = bounds(model, length, machines)
    best = {
        name: min((seconds(model, length, kind, degree, machines), degree) for degree in DEGREES) for name, kind in KINDS.items()
    }
    return {
        "model": model, "length": length, "sequential_s": base, "bound": base / inside, "bound_stream": base / across,
        "speedup": {name: base / took for name, (took, _) in best.items()},
        "degree": {name: degree for name, (_, degree) in best.items()},
    }  # fmt: skip


def sweep(machines: hardware.Hardware) -> dict[str, list[float]]:
    """Throughput over that of d = 1, by degree."""
    model, length, degrees = SWEEP
    base = seconds(model, length, "", 1, machines)
    return {name: [base / seconds(model, length, kind, degree, machines) for degree in degrees] for name, kind in KINDS.items()}


def draw(rows: Sequence[dict[str, Any]], swept: dict[str, list[float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), dpi=144, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    width = 0.8 / len(KINDS)
    for number, name in enumerate(KINDS):
        at = [place + width * number for place in range(len(rows))]
        left.bar(at, [row["speedup"][name] for row in rows], width, label=name)
    for place, row in enumerate(rows):
        stream = place + 0.8 - 3 * width / 2
        left.hlines(row["bound"], place - width / 2, stream, color="#b91c1c", label=None if place else "bound")
        left.hlines(row["bound_stream"], stream, stream + width, color="#b91c1c")
    left.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))])
    left.set_xticklabels([f"{row['model'][-1].upper()}\n{row['length'] // 1024}K" for row in rows])
    left.set_title("step over sequential's, each at its best degree", loc="left", fontsize=10)
    left.axhline(1, color="#6b7280", linewidth=0.8)
    least = min(value for row in rows for value in row["speedup"].values())
    left.set_ylim(least - 0.05, None)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=len(KINDS) + 1, frameon=False, fontsize=8)
    model, length, degrees = SWEEP
    for name, line in swept.items():
        right.plot(degrees, line, marker="o", label=name)
    right.set_xscale("log", base=2)
    right.set_xticks(degrees, [str(degree) for degree in degrees])
    right.set_xlabel("degree")
    right.set_title(f"throughput by degree, {model}, {length // 1024}K tokens", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", default="a10g-g5.48xlarge", help="as for `foldray plan` (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--exchange", type=float, metavar="SHARE", help="of nominal that all-to-alls reach; else the planner's")
    given = parser.parse_args()
    machines = hardware.load_hardware(given.cluster)
    if given.exchange is not None:
        machines = machines.model_copy(update={"constants": {**machines.constants, "exchange": given.exchange}})
    rows = [speedups(model, length, machines) for model in MODELS for length in LENGTHS]
    print(
        f"{'model':<12}{'tokens':>7}{'sequential':>12}" + "".join(f"{name:>22}" for name in KINDS) + f"{'bound':>8}{'stream':>8}"
    )
    for row in rows:
        cells = "".join(f"{row['speedup'][name]:>13.2f} × (d = {row['degree'][name]:>2})" for name in KINDS)
        bound = f"{row['bound']:>6.2f} ×{row['bound_stream']:>6.2f} ×"
        print(f"{row['model']:<12}{row['length']:>7}{row['sequential_s']:>10.3f} s{cells}{bound}")
        own = {name: row["bound_stream" if name == "stream" else "bound"] for name in KINDS}
        assert all(row["speedup"][name] <= own[name] * (1 + 1e-9) for name in KINDS), "nothing beats its bound"
    for name in list(KINDS)[1:]:
        lost = [
            f"{row['model'][-1].upper()} {row['length'] // 1024}K"
            for row in rows
            if row["speedup"][name] < row["speedup"]["Tutel"]
        ]
        print(f"{name} loses against Tutel at: {', '.join(lost) or 'none'}")
    swept = sweep(machines)
    model, length, degrees = SWEEP
    print(
        f"\n{model}, {length} tokens: throughput over d = 1\n"
        + " " * 22
        + "".join(f"{'d = ' + str(degree):>9}" for degree in degrees)
    )
    for name, line in swept.items():
        print(f"{name:<22}" + "".join(f"{value:>9.3f}" for value in line))
    if given.json:
        given.json.write_text(json.dumps({"speedups": rows, "sweep": swept}, indent=1))
    if given.picture:
        draw(rows, swept, given.picture)


if __name__ == "__main__":
    main()
