"""Predict DisagMoE's experiments at the paper's scale with the planner: figures 3 and 6 of section 3, 10 to 14 of section 6.

    python recipes/papers/disagmoe.py [EXPERIMENT] [--models MODEL …] [--lengths TOKENS …] [--gpus N] [--most N]

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

`exposed` (figure 11) shows what a step is busy with: those of `speed`, a woven one, and that of workers of their own. `splits`
(figure 12) takes workers of their own with other numbers of GPUs for the experts, beside the even split. `nodes` (figure 3) shows
the share of all-to-alls in a step in sequence, as EP covers more nodes, and for more experts per token. `intensity` (figure 6)
shows what attention and the experts compute for the bytes that they send, on EP groups of two nodes.

The predicted times are not measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foldray.blueprint import ModelSpec
from foldray.clock import Busy, busy_table
from foldray.costs.apart import ApartWork
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import GIB
from foldray.costs.ops import OpWork
from foldray.costs.prediction import predict
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.kinds import EXPERT, HEAD, OP_KINDS
from foldray.plan.listed import with_kind
from foldray.plan.placing import Placed, apart_seconds, busy_placement, busy_shared, roofline, search_placements, sides
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
NODES = (1, 2, 4, 8)  # figure 3
SPLITS = (8, 6, 5, 4, 3, 2)  # figure 12: of sixteen parts of the GPUs, those of the experts
PIPELINES = (2, 4, 8)  # the paper's baselines have a pipeline; the fastest one counts
WAYS: dict[str, dict[str, Any]] = {
    "interleaved": {"kinds": ("sequential",), "batch_degrees": (1,)},
    "within MoE layers": {"kinds": ("moe_only",), "batch_degrees": (1,)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiment", nargs="?", default="speed", choices=EXPERIMENTS)
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--cluster", default="h800")
    parser.add_argument("--most", type=int, default=64, metavar="N", help="placements of workers of their own that are simulated")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    run = EXPERIMENTS[args.experiment]
    if args.experiment in ("speed", "exposed", "splits"):
        run = partial(run, most=args.most)
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


def exposed(space: Space, most: int) -> dict[str, Any]:
    """Predict and print what a step is busy with, and the communication that nothing hides."""
    columns: dict[str, Busy] = {}
    for name in WAYS:
        if planned := baselines(space, name, 16):
            candidate = fastest(planned).candidate
            columns[name] = busy_shared(candidate, space.hardware)
            columns.setdefault("woven", busy_shared(with_kind(candidate, "weave", 1, space.hardware).candidate, space.hardware))
    columns["own"] = busy_placement(search_placements(space, 1, most)[0], space)
    print(busy_table({name: used.ranks for name, used in columns.items()}))
    rows = {}
    for name, used in columns.items():
        talking = sum(seconds for kind, seconds in used.ranks.items() if kind in OP_KINDS and OP_KINDS[kind].travels)
        rows[name] = {"exposed": talking / sum(used.ranks.values()), "shares": used.ranks}
        print(f"  {name:<18}{rows[name]['exposed']:>7.1%} of a step is communication that nothing hides", flush=True)
    return {"rows": rows}


def by_split(space: Space, most: int) -> dict[str, Any]:
    """Predict workers of their own with several numbers of GPUs for the experts."""
    rows: list[dict[str, Any]] = []
    for parts in SPLITS:
        experts = space.gpus * parts // 16
        with contextlib.suppress(UserError):
            placed = search_placements(replace(space, expert_gpus=experts), 1, most)[0]
            rows.append({"experts": experts, "seconds": placed.seconds, "fits": placed.fits, "fold": str(placed.candidate.fold)})
            fits = "" if placed.fits else ", too little memory"
            gain = (
                f"{rows[0]['seconds'] / placed.seconds:.2f} × the speed of {space.gpus - rows[0]['experts']}:{rows[0]['experts']}"
            )
            print(
                f"  {space.gpus - experts}:{experts:<6}{placed.seconds:>8.2f} s  {gain}  {placed.candidate.fold}{fits}",
                flush=True,
            )
    return {"rows": rows}


def by_nodes(space: Space) -> dict[str, Any]:
    """Predict the share of all-to-alls in a step in sequence, with EP over several nodes, and several experts per token."""
    together, length, rows = space.hardware.gpus_per_node, space.job.seq_len, []
    topk = space.job.model.topk
    for nodes, chosen in [*((nodes, topk) for nodes in NODES), *((NODES[-2], chosen) for chosen in TOPKS if chosen != topk)]:
        ep = nodes * together
        model = space.job.model.model_copy(update={"topk": chosen})
        if model.experts % ep:
            continue
        predicted = predict(Candidate(Job(model, length, ep * TOKENS // length), Fold(ep, ep=ep)), space.hardware)
        share = predicted.breakdown.get("exposed_ep", 0.0) / predicted.seconds
        print(f"  {nodes} nodes, top-{chosen}: {share:>6.1%} of a step is all-to-alls", flush=True)
        rows.append({"nodes": nodes, "topk": chosen, "share": share})
    return {"rows": rows}


def intensity(space: Space) -> dict[str, Any]:
    """Predict what both halves of a layer compute for the bytes that they send, on EP groups of two nodes."""
    ep = 2 * space.hardware.gpus_per_node
    job = replace(space.job, global_batch=ep)
    work = OpWork(Candidate(job, Fold(ep, ep=ep)), Device.of(job, space.hardware))
    layer = max(job.model.moe_layers)
    seconds = defaultdict[str, float](float)
    for op in work.candidate.graph.ops():
        if op.layer == layer and op.micro_batch == 0:
            half = "traffic" if OP_KINDS[op.kind].travels else "experts" if op.kind == EXPERT else "attention"
            seconds[half] += sum(each.seconds for each in work.work(op)) if op.kind != HEAD else 0.0
    demand, _ = roofline(space)
    row: dict[str, Any] = {}
    for half, flops in (("attention", demand.attention), ("experts", demand.experts)):
        share, ratio = seconds[half] / sum(seconds.values()), seconds[half] / seconds["traffic"]
        row[half] = {"share": share, "over_traffic": ratio, "flops_per_byte": flops / demand.bytes}
        print(
            f"  {half:<10}{share:>7.1%} of a layer, {ratio:.2f} × its all-to-alls, {flops / demand.bytes:,.0f} FLOPs per byte",
            flush=True,
        )
    return row


EXPERIMENTS: dict[str, Any] = {
    "speed": compared, "woven": woven, "exposed": exposed, "splits": by_split, "topk": by_topk, "stages": by_stages,
    "nodes": by_nodes, "intensity": intensity,
}  # fmt: skip


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
