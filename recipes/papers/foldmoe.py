"""Predict FoldMoE's experiments at the paper's scale with the planner: section 5.2, figures 8, 9 and 11.

    python recipes/papers/foldmoe.py [--micro-batches N] [--json FILE] [--picture FILE]

The cluster has two nodes of eight A10G (`--cluster`). Attention has TP8 inside a node and DP2 between nodes, and experts
have EP16. The models are GPT-MoE-S, M and L in fp16, with one sequence of 4K to 32K tokens for each data-parallel place (the
paper does not give its batches). The vocabulary is padded to 50304, which TP8 divides. Every kind of schedule uses its best
degree among 2, 4, 8 and 16, as in the paper.

*Bound* is the speed over `sequential` if computation and communication overlap completely. Then a MoE block takes the longer
one of computation and communication, in each direction. `stream` does not drain between blocks, so for `stream` the longer
one counts for all blocks together. The predicted times are not measurements. Their order and the best degree can be compared
with the paper, and no schedule may exceed its bound.

`weave` and `list` are not in the paper. They have gradients of weights apart, and the best degree among 1, 2 and 4. They run
ops of a backward beside a forward, so the bounds do not hold for them; the script prints their step over the bound that no list
can beat.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from foldray.blueprint import ModelSpec
from foldray.blueprint.layout import smallest_slice
from foldray.costs import hardware
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.ops import OpWork
from foldray.costs.prediction import straggling
from foldray.costs.whole import whole_seconds
from foldray.fold import Fold
from foldray.graph import SliceCost
from foldray.kinds import EXCHANGES
from foldray.orders import named_ordering
from foldray.plan.listed import with_kind

MODELS, LENGTHS, DEGREES = ("gpt-moe-s", "gpt-moe-m", "gpt-moe-l"), (4096, 8192, 16384, 32768), (2, 4, 8, 16)
FOLD = Fold(16, tp=8, ep=16)
KINDS = {
    "Tutel": "moe_only",
    "aAaM": "aaam",
    "1A1M, equal slices": "one_a_one_m-even",
    "1A1M (FoldMoE)": "one_a_one_m",
    "stream": "stream",
}
WHOLE, WHOLE_DEGREES = ("weave", "list"), (1, 2, 4)
SWEEP = ("gpt-moe-m", 32768, (1, 2, 4, 8, 16, 32))


def candidate_of(model: str, length: int, schedule: str, micro_batches: int) -> Candidate:
    """Return a candidate with a schedule by its short name."""
    spec = ModelSpec.model_validate({"preset": model, "vocab": 50304})
    cost = SliceCost.of_model(spec.hidden, spec.heads)
    ordering = named_ordering(schedule, length, cost, smallest_slice(FOLD.cp, FOLD.tp))
    return Candidate(Job(spec, length, FOLD.dp * micro_batches, "fp16"), FOLD, ordering)


def step_seconds(candidate: Candidate, machines: hardware.Hardware) -> float:
    """Simulate all ops of a step, and return its seconds."""
    device = Device.of(candidate.job, machines)
    return whole_seconds(candidate, OpWork(candidate, device)) * (1 + straggling(FOLD.world_size, device))


def seconds(model: str, length: int, kind: str, degree: int, machines: hardware.Hardware, micro_batches: int = 1) -> float:
    """Predict the seconds of a step. `stream` gets its best lag."""
    if degree == 1:
        return step_seconds(candidate_of(model, length, "sequential", micro_batches), machines)
    names = [f"{kind}:{degree}:{lag}" for lag in range(1, min(degree, 4) + 1)] if kind == "stream" else [f"{kind}:{degree}"]
    return min(step_seconds(candidate_of(model, length, name, micro_batches), machines) for name in names)


def bounds(model: str, length: int, machines: hardware.Hardware, micro_batches: int) -> tuple[float, float]:
    """Return the seconds of a step with complete overlap inside blocks, and with complete overlap across all blocks."""
    sequential = candidate_of(model, length, "sequential", micro_batches)
    work = OpWork(sequential, Device.of(sequential.job, machines))
    took: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op in sequential.graph.ops():
        took[op.direction, op.layer][op.kind in EXCHANGES] += sum(part.seconds for part in work.work(op))
    apart = sum(map(sum, took.values()))
    inside = sum(map(max, took.values()))
    ways = [[sum(pair[kind] for (way, _), pair in took.items() if way == direction) for kind in (0, 1)] for direction in "FB"]
    base = step_seconds(sequential, machines)
    return base - apart + inside, base - apart + sum(map(max, ways))


def speedups(model: str, length: int, machines: hardware.Hardware, micro_batches: int = 1) -> dict[str, Any]:
    """Return the speed of every kind at its best degree, over sequential."""
    base = seconds(model, length, "", 1, machines, micro_batches)
    inside, across = bounds(model, length, machines, micro_batches)
    best = {
        name: min((seconds(model, length, kind, degree, machines, micro_batches), degree) for degree in DEGREES)
        for name, kind in KINDS.items()
    }
    plain, over_bound = candidate_of(model, length, "sequential", micro_batches), dict[str, float]()
    for kind in WHOLE:
        fastest = min((with_kind(plain, kind, degree, machines) for degree in WHOLE_DEGREES), key=attrgetter("seconds"))
        best[kind] = fastest.seconds, fastest.candidate.ordering.degree
        over_bound[kind] = fastest.over_bound
    return {
        "over_bound": over_bound,
        "model": model, "length": length, "sequential_s": base, "bound": base / inside, "bound_stream": base / across,
        "speedup": {name: base / took for name, (took, _) in best.items()},
        "degree": {name: degree for name, (_, degree) in best.items()},
    }  # fmt: skip


def sweep(machines: hardware.Hardware) -> dict[str, list[float]]:
    """Return the throughput by degree, over the throughput of d = 1."""
    model, length, degrees = SWEEP
    base = seconds(model, length, "", 1, machines)
    return {name: [base / seconds(model, length, kind, degree, machines) for degree in degrees] for name, kind in KINDS.items()}


def draw(rows: Sequence[dict[str, Any]], swept: dict[str, list[float]], path: Path) -> None:
    from trainers.pictures.canvas import panels, write

    figure, (left, right) = panels(13, 5, 1, 2, width_ratios=(3, 2))
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
    left.set_title("speed over sequential, each kind at its best degree", loc="left", fontsize=10)
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
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", default="a10g-g5.48xlarge", help="as for `foldray plan` (default %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=1, help="of every data-parallel place (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    about = "share of nominal bandwidth that all-to-alls reach; default: the planner's"
    parser.add_argument("--exchange", type=float, metavar="SHARE", help=about)
    args = parser.parse_args()
    machines = hardware.load_hardware(args.cluster)
    if args.exchange is not None:
        machines = machines.model_copy(update={"constants": {**machines.constants, "exchange": args.exchange}})
    names = (*KINDS, *WHOLE)
    heads = "".join(f"{name:>22}" for name in names)
    print(f"{'model':<12}{'tokens':>7}{'sequential':>12}{heads}{'bound':>8}{'stream':>8}")
    rows = []
    for model, length in itertools.product(MODELS, LENGTHS):
        rows.append(row := speedups(model, length, machines, args.micro_batches))
        cells = "".join(f"{row['speedup'][name]:>13.2f} × (d = {row['degree'][name]:>2})" for name in names)
        bound = f"{row['bound']:>6.2f} ×{row['bound_stream']:>6.2f} ×"
        print(f"{row['model']:<12}{row['length']:>7}{row['sequential_s']:>10.3f} s{cells}{bound}", end="")
        print(f", list {row['over_bound']['list']:.2f} × its bound", flush=True)
        limit = {name: row["bound_stream" if name == "stream" else "bound"] for name in KINDS}
        assert all(row["speedup"][name] <= limit[name] * (1 + 1e-9) for name in KINDS), "a schedule exceeds its bound"
    for name in list(KINDS)[1:]:
        slower = (row for row in rows if row["speedup"][name] < row["speedup"]["Tutel"])
        lost = [f"{row['model'][-1].upper()} {row['length'] // 1024}K" for row in slower]
        print(f"{name} is slower than Tutel at: {', '.join(lost) or 'none'}")
    swept = sweep(machines)
    model, length, degrees = SWEEP
    print(f"\n{model}, {length} tokens: throughput over d = 1")
    print(" " * 22 + "".join(f"{f'd = {degree}':>9}" for degree in degrees))
    for name, line in swept.items():
        print(f"{name:<22}" + "".join(f"{value:>9.3f}" for value in line))
    if args.json:
        args.json.write_text(json.dumps({"speedups": rows, "sweep": swept}, indent=1))
    if args.picture:
        draw(rows, swept, args.picture)


if __name__ == "__main__":
    main()
