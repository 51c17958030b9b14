"""Compare workers of their own for the experts with workers that have both attention and experts: four hosts.

    python recipes/benchmarks/apart.py [--link MBIT] [--speeds S S S S] [--variants 2+2/af_pipe ep4/stream:4 …] [--json FILE]
    python recipes/benchmarks/apart.py --forecast [--picture FILE] …     # calibrates the hosts, and predicts all steps

The script uses four hosts (network namespaces on this machine, which needs root). Each host has a link of the given rate, and a
share of a core (control groups). `--speeds 1 1 0.5 0.5` halves the cores of the last two hosts.

A variant is A+F/KIND[-GRADIENTS][:DEGREE], with A workers for attention and F for the experts, or ep4/KIND[-GRADIENTS][:DEGREE],
with both on all four. GRADIENTS is `schedule.weight_gradients`, together or apart; without it, the kind's default.
All variants train the same number of sequences in a step: forward, backward and the sums of gradients. They take turns within
a round. A step takes as long as on the slowest host.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from turns import draw, forecast, in_turns, joined, on_lab  # noqa: E402

from foldray.recipe import Recipe  # noqa: E402
from foldray.runtime import Trace  # noqa: E402

HOSTS = 4
VARIANTS = ["ep4/sequential", "ep4/moe_only:4", "ep4/one_a_one_m:4", "ep4/stream:4", "2+2/af_pipe", "3+1/af_pipe"]


def main() -> None:
    args = arguments()
    if args.worker is not None:
        return work(args)
    on_lab(args, __file__, args.speeds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = {"blocks": 4, "length": 1024, "hidden": 256, "inner": 512, "topk": 2, "sequences": 24, "rounds": 5, "link": 200}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--share", type=float, default=0.9, help="share of all cores that the hosts get (default %(default)s)")
    parser.add_argument("--speeds", type=float, nargs=HOSTS, default=[1.0] * HOSTS, help="of the hosts' cores (default equal)")
    parser.add_argument("--forecast", action="store_true", help="calibrate the hosts first, and print predicted steps, too")
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    parser.add_argument("--picture", type=Path, help="draw the last variant's step, recorded and predicted, to this PNG")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def recipe_of(args: argparse.Namespace, variant: str) -> Recipe:
    where, _, how = variant.partition("/")
    kind, _, degree = how.partition(":")
    kind, _, gradients = kind.partition("-")
    attention, plus, experts = where.partition("+")
    placement = {"placement": {"attention": int(attention), "experts": int(experts)}} if plus else {}
    model = {"layers": args.blocks, "hidden": args.hidden, "heads": 8, "kv_heads": 8, "head_dim": args.hidden // 8,
             "moe_every": 1, "ffn_hidden": args.inner, "experts": 8, "topk": args.topk, "expert_hidden": args.inner,
             "vocab": 256}  # fmt: skip
    return Recipe.parse({
        "model": model, "fold": {"ep": int(experts) if plus else HOSTS}, **placement, "cluster": {"workers": HOSTS},
        "data": {"seq_len": args.length}, "training": {"global_batch": args.sequences, "micro_batch": 1},
        "engine": {"kind": "torch"}, "precision": "float32",
        "schedule": {"kind": kind, "degree": int(degree or 1), **({"weight_gradients": gradients} if gradients else {})},
    })  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """Run the variants on one host in turns, and let the first host write the result."""
    recipes = {name: recipe_of(args, name) for name in args.variants}
    traces = {args.variants[-1]: Trace()} if args.picture else {}
    with joined(args.store, args.worker, HOSTS):
        predicted = forecast(recipes, args.worker) if args.forecast or args.picture else {}
        steps = in_turns(recipes, args.worker, args.rounds, traces)
        for name, trace in traces.items():
            draw(recipes[name], trace, predicted[name], args.picture, args.worker)
    if args.worker == 0:
        seconds = {name: each.seconds for name, each in predicted.items()}
        args.result.write_text(json.dumps({"steps": steps, "predicted": seconds}))


if __name__ == "__main__":
    main()
