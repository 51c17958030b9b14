"""Predict DisagMoE's experiments at the paper's scale with the planner: section 6.2, figures 10, 12, 13 and 14.

    python recipes/papers/disagmoe.py [speed|woven|topk|stages] [--models MODEL …] [--lengths TOKENS …] [--gpus N] [--most N]

The cluster has nodes of eight H800 (`--cluster`). The models are those of the paper's table 2. Every GPU has equally many
tokens (the paper does not give its batches). `speed` (figures 10 and 12) compares four ways to train, each with the fold, the
schedule and the micro-batch that the planner finds best for it:

- *interleaved*: attention and experts on the same workers, EP16 and a pipeline, nothing overlaps (the paper's Megatron-LM);
- *within MoE layers*: the same, with all-to-alls behind the experts (the paper's Tutel and Comet);
- *shared*: the best of all of foldray's folds and schedules for workers that have both;
- *own*: workers of their own for the experts, with the best split of the GPUs, in the order of AF-Pipe, with gradients of weights
  apart, or in the order of a found list.

`topk` (figure 13) does so for several numbers of experts per token and sizes of EP. `stages` (figure 14) takes the best fold
of workers of their own, and changes its number of virtual stages.

`woven` takes the folds of the first two ways, and lets them run other schedules: `weave`, which runs a forward beside a backward
as DualPipe does (the paper compares with it), and found lists. Where memory is short, they recompute more.

The predicted times are not measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foldray.blueprint import ModelSpec
from foldray.costs.apart import ApartWork
from foldray.costs.candidate import Job
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import GIB
from foldray.errors import UserError
from foldray.plan.listed import with_kind
from foldray.plan.placing import Placed, apart_seconds, search_placements, sides
from foldray.plan.report import order, schedule
from foldray.plan.search import Planned, search
from foldray.plan.space import Space

MODELS, LENGTHS, TOKENS = ("deepseek-moe", "gpt-oss-120b", "qwen3-235b-a22b"), (4096, 8192, 16384, 32768), 65536
# The paper's table has sizes alone, so the models leave out what else the released ones have.
SIZES_ALONE = {
    "windows": ["full"], "attention_bias": "none", "attention_sinks": False, "expert_bias": False, "ffn": "gated_silu",
    "qk_norm": "none", "rope_scaling": None, "router": {"logit_bias": False},
}  # fmt: skip
PAPER = {"interleaved": "1.59–1.81", "within MoE layers": "1.2–1.5"}
TOPKS, EPS, EXPERTS = (2, 4, 6, 8), (8, 16, 32), 64  # figure 13
STAGES = (1, 2, 4, 8, 16, 32)  # figure 14
PIPELINES = (2, 4, 8)  # the paper's baselines have a pipeline; the fastest one counts
WAYS: dict[str, dict[str, Any]] = {
    "interleaved": {"kinds": ("sequential",), "batch_degrees": (1,)},
    "within MoE layers": {"kinds": ("moe_only",), "batch_degrees": (1,)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiment", nargs="?", default="speed", choices=("speed", "woven", "topk", "stages"))
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--cluster", default="h800")
    parser.add_argument("--most", type=int, default=64, metavar="N", help="placements of workers of their own that are simulated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    compare = partial(compared, most=args.most)
    run = {"speed": compare, "woven": woven, "topk": by_topk, "stages": by_stages}[args.experiment]
    machines = load_hardware(args.cluster)
    results = []
    for model, length in itertools.product(args.models, args.lengths):
        print(f"\n{model}, {length} tokens, {args.gpus} GPUs", flush=True)
        job = Job(ModelSpec.model_validate({"preset": model, **SIZES_ALONE}), length, args.gpus * TOKENS // length)
        result = run(Space(job, machines, args.gpus))
        results.append({"model": model, "seq_len": length, "gpus": args.gpus, **result})
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


def compared(space: Space, most: int) -> dict[str, Any]:
    """Predict and print all ways to train."""
    result: dict[str, Any] = {}
    for name in WAYS:
        if planned := baselines(space, name, 16):
            result[name] = shown(name, fastest(planned))
    result["shared"] = shown("shared", search(space, 1).best[0])
    placed = search_placements(space, 5, most)
    result["own"] = [shown_placement(placement) for placement in placed]
    for name in (*WAYS, "shared"):
        if name in result:
            paper = f" (paper: {PAPER[name]})" if name in PAPER else ""
            print(f"  workers of their own are {result[name]['seconds'] / placed[0].seconds:.2f} × as fast as {name}{paper}")
    return result


def woven(space: Space) -> dict[str, Any]:
    """Predict and print woven and found lists on the folds of the baselines."""
    by_way = {name: baselines(space, name, 16) for name in WAYS}
    result: dict[str, Any] = {name: shown(name, fastest(planned)) for name, planned in by_way.items() if planned}
    candidates = [plan.candidate for planned in by_way.values() for plan in planned]
    folds = {(each.fold, each.virtual_stages, each.micro_batch, each.ordering.recompute): each for each in candidates}
    for kind, degree in itertools.product(("weave", "list"), (1, 2)):
        listed = [with_kind(candidate, kind, degree, space.hardware) for candidate in folds.values()]
        best = min(listed, key=lambda each: (not each.fits, each.seconds))
        fits = "" if best.fits else ", too little memory"
        fold, name = str(best.candidate.fold), f"{kind}, d = {degree}"
        ahead = best.candidate.ordering.ahead if kind == "list" else None
        about = f"{fold}, {best.over_bound:.3f} × the bound" + (f", ahead {ahead:g}" if ahead is not None else "")
        print(f"  {name:<18}{best.seconds:>8.2f} s  {about}, {best.memory_gib:.0f} GiB{fits}", flush=True)
        result[name] = {"seconds": best.seconds, "over_bound": best.over_bound, "fold": fold, "fits": best.fits, "ahead": ahead}
    return result


def fastest(planned: list[Planned]) -> Planned:
    """Return the fastest candidate that fits or, if none fits, the fastest one."""
    return min(planned, key=lambda plan: (not plan.fits, plan.prediction.seconds))


def baselines(space: Space, way: str, ep: int) -> list[Planned]:
    """Return the fastest candidate for every depth of the pipeline that has a legal one."""
    planned: list[Planned] = []
    for pp in PIPELINES:
        with contextlib.suppress(UserError):
            planned += search(replace(space, pins={"ep": ep, "pp": pp}, **WAYS[way]), 1).best
    return planned


def by_topk(space: Space) -> dict[str, Any]:
    """Predict workers that share and workers of their own, for models with 64 experts."""
    rows: list[dict[str, Any]] = []
    print(f"  {'top-k':>7}{'EP':>5}{'interleaved':>14}{'within':>10}{'own':>10}{'× as fast':>16}")
    for topk, ep in itertools.product(TOPKS, EPS):
        model = space.job.model.model_copy(update={"topk": topk, "experts": EXPERTS})
        changed = replace(space, job=replace(space.job, model=model))
        plain, within = (baselines(changed, way, ep) for way in WAYS)
        try:
            placed = search_placements(replace(changed, pins={"ep": ep}), 1)[0]
        except UserError:
            continue  # too few GPUs for this EP
        if not plain or not within:
            continue
        seconds = [fastest(plain).prediction.seconds, fastest(within).prediction.seconds, placed.seconds]
        gains = f"{seconds[0] / placed.seconds:.2f} {seconds[1] / placed.seconds:.2f}"
        print(f"  {topk:>7}{ep:>5}{seconds[0]:>12.2f} s{seconds[1]:>8.2f} s{seconds[2]:>8.2f} s{gains:>16}", flush=True)
        rows.append({"topk": topk, "ep": ep, "seconds": seconds, "fold": str(placed.candidate.fold)})
    return {"rows": rows}


def by_stages(space: Space) -> dict[str, Any]:
    """Predict the best fold of workers of their own with every number of virtual stages."""
    rows: list[dict[str, Any]] = []
    for pp in PIPELINES:
        best = search_placements(replace(space, pins={"pp": pp}), 1)[0].candidate
        most = min(space.job.model.layers, len(space.job.model.moe_layers)) // pp  # a stage has at least one block
        for stages in (count for count in STAGES if count <= most):
            work = ApartWork(replace(best, virtual_stages=stages), sides(space))
            held = max(memory.total for memory in work.memory()) / GIB
            row = {"pp": pp, "fold": str(best.fold), "stages": stages, "seconds": apart_seconds(work), "memory_gib": held}
            print(f"  pp={pp} {best.fold}: {stages:>3} stages {row['seconds']:>8.2f} s {held:>7.0f} GiB", flush=True)
            rows.append(row)
    return {"rows": rows}


def shown(name: str, planned: Planned) -> dict[str, Any]:
    fold, seconds = planned.candidate.fold, planned.prediction.seconds
    fits = "" if planned.fits else ", too little memory"
    print(f"  {name:<18}{seconds:>8.2f} s  {fold}, {schedule(planned)}{fits}")
    return {"seconds": seconds, "fold": str(fold), "schedule": schedule(planned), "fits": planned.fits}


def shown_placement(placed: Placed) -> dict[str, Any]:
    candidate = placed.candidate
    fold, fits = candidate.fold, "" if placed.fits else ", too little memory"
    split = f"{fold.attention_ranks}:{fold.moe_ranks}"
    print(f"  {'own, ' + split:<18}{placed.seconds:>8.2f} s  {fold}, {order(placed)}{fits}", flush=True)
    about = {"schedule": order(placed), "virtual_stages": candidate.virtual_stages, "micro_batch": candidate.micro_batch}
    return {"seconds": placed.seconds, "split": split, "fold": str(fold), "fits": placed.fits, **about}


if __name__ == "__main__":
    main()
