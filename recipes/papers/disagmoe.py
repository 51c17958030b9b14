"""Predict DisagMoE's experiments at the paper's scale with the planner: section 6.2, figures 10 and 12.

    python recipes/papers/disagmoe.py [--models MODEL …] [--lengths TOKENS …] [--gpus N] [--json FILE]

The cluster has 16 nodes of eight H800 (`--cluster`). The models are those of the paper's table 2, with 4K to 32K tokens and
equally many tokens for each GPU (the paper does not give its batches). Four ways to train are compared, each with the fold, the
schedule and the micro-batch that the planner finds best for it:

- *interleaved*: attention and experts on the same workers, EP16, nothing overlaps (the paper's Megatron-LM);
- *within MoE layers*: the same, with all-to-alls behind the experts (the paper's Tutel and Comet);
- *shared*: the best of all of foldray's folds and schedules for workers that have both;
- *own*: workers of their own for the experts, in the order of AF-Pipe.

The predicted times are not measurements. The paper also compares with DualPipe, which weaves forward and backward passes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from foldray.blueprint import ModelSpec
from foldray.errors import UserError
from foldray.planner.candidate import Job
from foldray.planner.hardware import load_hardware
from foldray.planner.nodes import Planned
from foldray.planner.placing import Placed, search_placements
from foldray.planner.report import schedule
from foldray.planner.search import search
from foldray.planner.space import Space

MODELS, LENGTHS, TOKENS = ("deepseek-moe", "gpt-oss-120b", "qwen3-235b-a22b"), (4096, 8192, 16384, 32768), 65536
PAPER = {"interleaved": "1.59–1.81", "within MoE layers": "1.2–1.5"}
WAYS: dict[str, dict[str, Any]] = {
    "interleaved": {"pins": {"ep": 16}, "kinds": ("sequential",), "batch_degrees": (1,)},
    "within MoE layers": {"pins": {"ep": 16}, "kinds": ("moe_only",), "batch_degrees": (1,)},
    "shared": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--cluster", default="h800")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = [compared(model, length, args.gpus, args.cluster) for model in args.models for length in args.lengths]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def compared(model: str, length: int, gpus: int, cluster: str) -> dict[str, Any]:
    """Predict and print all ways to train one model with one length."""
    spec, machines = ModelSpec.model_validate({"preset": model}), load_hardware(cluster)
    job = Job(spec, length, gpus * TOKENS // length)
    result: dict[str, Any] = {"model": model, "seq_len": length, "gpus": gpus}
    print(f"\n{model}, {length} tokens, {gpus} GPUs")
    for name, limits in WAYS.items():
        try:
            best = search(Space(job, machines, gpus, **limits), 1).best[0]
        except UserError as error:
            print(f"  {name:<18}{error.rule}")
            continue
        result[name] = shown(name, best)
    placed = search_placements(Space(job, machines, gpus), 5)
    result["own"] = [own(each) for each in placed]
    least = placed[0].seconds
    for name in WAYS:
        if name in result:
            paper = f" (paper: {PAPER[name]})" if name in PAPER else ""
            print(f"  workers of their own are {result[name]['seconds'] / least:.2f} × as fast as {name}{paper}")
    return result


def shown(name: str, planned: Planned) -> dict[str, Any]:
    fold, seconds = planned.candidate.fold, planned.prediction.seconds
    fits = "" if planned.fits else ", too little memory"
    print(f"  {name:<18}{seconds:>8.2f} s  {fold}, {schedule(planned)}{fits}")
    return {"seconds": seconds, "fold": str(fold), "schedule": schedule(planned), "fits": planned.fits}


def own(placed: Placed) -> dict[str, Any]:
    candidate = placed.candidate
    fold, fits = candidate.fold, "" if placed.fits else ", too little memory"
    split = f"{fold.attention_ranks}:{fold.moe_ranks}"
    print(
        f"  {'own, ' + split:<18}{placed.seconds:>8.2f} s  {fold}, b={candidate.micro_batch} v={candidate.virtual_stages}{fits}"
    )
    about: dict[str, Any] = {"recompute": candidate.ordering.recompute}
    about |= {"virtual_stages": candidate.virtual_stages, "micro_batch": candidate.micro_batch}
    return {"seconds": placed.seconds, "split": split, "fold": str(fold), "fits": placed.fits, **about}


if __name__ == "__main__":
    main()
