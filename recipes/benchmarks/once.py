"""Compare tokens that travel once to each rank, or once to each node, with a row for each assignment, on four ranks.

    python recipes/benchmarks/once.py [--link MBIT] [--together 2] [--topk 2 4 8] [--kind stream] [--degree 4] [--json FILE]

The script uses network namespaces on this machine as hosts, which needs root. Each host has a link of the given rate, and each
rank a share of a core (control groups). `--together 2` puts two ranks on each of two hosts; then tokens also travel once to each
host. All variants train the same number of sequences in a step: forward, backward and the sums of gradients. They take turns
within a round, and a step takes as long as on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from turns import in_turns, joined, on_lab  # noqa: E402

from foldray.blueprint import visits_of_a_token  # noqa: E402
from foldray.recipe import Recipe  # noqa: E402

RANKS = 4
ASSIGNMENT, RANK, NODE = "assignment", "rank", "node"


def main() -> None:
    args = arguments()
    if args.worker is not None:
        return work(args)
    run = on_lab(args, __file__, [1.0] * RANKS, args.together)
    print(f"\n{'':<14}{'rows of a token to other hosts':>32}{'step, × faster':>36}")
    for topk, way in ((topk, way) for topk in args.topk for way in ways(args)[1:]):
        model, hosts = recipe_of(args, topk, way).model, RANKS // args.together
        rows = sum(visits_of_a_token(model, hosts if way == NODE else RANKS)) * (1 - 1 / hosts)
        pairs = zip(*(run["steps"][f"K={topk} {each}"] for each in (ASSIGNMENT, way)), strict=True)
        ratios = [usual / once for usual, once in pairs]
        name, usual = f"K={topk} {way}", topk * (1 - 1 / hosts)
        print(f"{name:<14}{usual:>18.2f} → {rows:>10.2f}{median(ratios):>20.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def ways(args: argparse.Namespace) -> list[str]:
    """Return what a token may travel for. With all ranks on one host, or one on each, there are no two levels."""
    return [ASSIGNMENT, RANK, *([NODE] if 1 < args.together < RANKS else [])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = {"blocks": 2, "length": 1024, "hidden": 256, "inner": 128, "experts": 32, "sequences": 8, "rounds": 7, "link": 200}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--topk", type=int, nargs="*", default=[2, 4, 8], metavar="K", help="experts per token (default 2 4 8)")
    parser.add_argument("--kind", default="sequential", help="schedule (default %(default)s)")
    parser.add_argument("--degree", type=int, default=1, help="pieces of a sequence (default %(default)s)")
    parser.add_argument("--together", type=int, choices=(1, 2, 4), default=1, help="ranks on each host (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.9, help="share of all cores that the ranks get (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def recipe_of(args: argparse.Namespace, topk: int, way: str) -> Recipe:
    model = {"layers": args.blocks, "hidden": args.hidden, "heads": 8, "kv_heads": 8, "head_dim": args.hidden // 8,
             "moe_every": 1, "ffn_hidden": args.inner, "experts": args.experts, "topk": topk, "expert_hidden": args.inner,
             "vocab": 256}  # fmt: skip
    return Recipe.parse({
        "model": model, "fold": {"ep": RANKS, "ep_inside": args.together if way == NODE else 1},
        "cluster": {"workers": RANKS}, "moe": {"dispatch": ASSIGNMENT if way == ASSIGNMENT else RANK},
        "data": {"seq_len": args.length}, "training": {"global_batch": args.sequences, "micro_batch": 1},
        "engine": {"kind": "torch"}, "precision": "float32", "schedule": {"kind": args.kind, "degree": args.degree},
    })  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """Run the variants on one rank in turns, and let the first rank write the result."""
    recipes = {f"K={topk} {way}": recipe_of(args, topk, way) for topk in args.topk for way in ways(args)}
    with joined(args.store, args.worker, RANKS):
        steps = in_turns(recipes, args.worker, args.rounds)
    if args.worker == 0:
        args.result.write_text(json.dumps({"steps": steps, "predicted": {}}))


if __name__ == "__main__":
    main()
