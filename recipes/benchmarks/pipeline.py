"""Measure schedules under pipeline parallelism: four hosts, two pipeline positions with two EP ranks each.

    python recipes/benchmarks/pipeline.py [--link MBIT] [--rounds N] [--variants stream:4/2 …] [--json FILE]

The script uses four hosts (network namespaces on this machine, which needs root). Each host has a link of the given rate and
the same share of a core (control groups). Without this share, hosts on one core would run faster while their neighbour waits,
and no bubble of a pipeline would cost time.

A variant KIND[:DEGREE][/VIRTUAL_STAGES] is a whole training step: forward, backward and the sums of gradients of all
micro-batches. The variants take turns within a round. A step takes as long as on the slowest host. `stream` chooses its lags
as training does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from turns import in_turns, joined, on_lab  # noqa: E402

from foldray.recipe import Recipe  # noqa: E402

HOSTS = 4
VARIANTS = ["sequential", "sequential/2", "one_a_one_m:4/2", "stream:4", "stream:4/2", "stream:4/4"]


def main() -> None:
    args = arguments()
    if args.worker is not None:
        return work(args)
    on_lab(args, __file__, [1.0] * HOSTS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = {"blocks": 8, "length": 1024, "hidden": 256, "inner": 512, "micro-batches": 4, "rounds": 5, "link": 200}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--share", type=float, default=0.9, help="share of all cores that the hosts get (default %(default)s)")
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def recipe_of(args: argparse.Namespace, variant: str) -> Recipe:
    how, _, virtual_stages = variant.partition("/")
    kind, _, degree = how.partition(":")
    model = {"layers": args.blocks, "hidden": args.hidden, "heads": 8, "kv_heads": 8, "head_dim": args.hidden // 8,
             "ffn_hidden": args.inner, "experts": 8, "topk": 2, "expert_hidden": args.inner, "vocab": 256}  # fmt: skip
    return Recipe.parse({
        "model": model, "fold": {"pp": 2, "ep": 2}, "cluster": {"workers": HOSTS}, "data": {"seq_len": args.length},
        "training": {"global_batch": 2 * args.micro_batches, "micro_batch": 1}, "engine": {"kind": "torch"},
        "precision": "float32",
        "schedule": {"kind": kind, "degree": int(degree or 1), "virtual_stages": int(virtual_stages or 1)},
    })  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """Run the variants on one host in turns, and let the first host write the result."""
    with joined(args.store, args.worker, HOSTS):
        steps = in_turns({name: recipe_of(args, name) for name in args.variants}, args.worker, args.rounds)
    if args.worker == 0:
        args.result.write_text(json.dumps({"steps": steps, "predicted": {}}))


if __name__ == "__main__":
    main()
