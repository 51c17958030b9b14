"""Measure how much of the all-to-alls each schedule hides, in a stack of blocks over a slow link.

    python benchmarks/overlap.py [--ratios 0.5 1 1.5] [--length 4096] [--variants stream:4:2 …] [--json FILE]
    python benchmarks/overlap.py --gradients --batch 4 --length 1024 --variants sequential flow@4+chunks=1000000 …

The script uses two hosts (network namespaces on this machine, which needs root) with one core each, and a link between them.
It chooses the rate of the link so that the all-to-alls alone take `ratio` times as long as computation alone; --links sets
the rate instead. Each host has one process. All measurements take turns within a round:

- C is the computation of the uncut blocks, without communication, on the rows that a variant has. Cores are shared with other
  machines, and may get a third slower or faster within a minute. So C is measured before and after every variant, and the
  variant is compared with the mean. If the two differ by more than a tenth, or if other machines took more than 5 % of a core
  meanwhile, the variant is measured again, up to three times. The measurement with the smallest disturbance counts.
- X is all all-to-alls of the uncut blocks, started at once, without computation. (One after another they would take half as
  long again, because gloo's ends agree on each message before it leaves. Pieces can overlap these pauses, too, so this would
  not be a limit.)
- G, with --gradients, is all reductions of gradients of a step, started at once. Then every variant has these reductions, too.
- Every variant KIND[:DEGREE[:LAG[:BACKWARD_LAG]]][@PARTS][+REDUCTION[=BYTES]] runs, in the given order. Routers are dropless,
  as they are by default. Their biases balance them, as training would. `stream:DEGREE` chooses its lags as training does, from op
  times of the warm-up rounds.

With --cp 2, every two hosts share their sequences, and X has their keys and values, too. `sequential` then sends them around a
ring, and C leaves them out.

With --hosts 1 there is no communication to hide, and the times show the cost of pieces. With --peaks, the script measures
memory instead of time, over the first link of --links (a found list depends on it), or over a fast one.

With --micro-batches, a step has several micro-batches of --batch sequences, all with the same text, so that all have the same
rows.

With --peers, the same blocks also run with the MoE layers of other projects (`peers.py`), as far as these are installed. All
routers then have a softmax, and a bias on logits that balances them, because every project can have these. Before the
measurement, each project must compute what foldray does.

Forward and backward have separate times, because the loss is a barrier between them. No schedule that runs one micro-batch
after the other can be faster than the limit max(C_f, X_f) + max(C_b, X_b + G). `weave` and `list` can. "× limit" and "× C" are
the medians over rounds of a step over its limit, and over its computation alone. "exposed" is the time in which a collective
runs and nothing computes. "simulated" is the step that the simulator predicts from the recorded op times. A list starts some
collectives ahead of computation; "seen" counts how many of these run during that computation, in the worst round. "found" is
what the simulator predicts for a found list, over the bound that no list can beat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from common import MALLOC, check_lab, on_hosts
from peers import PEERS, REMARK

from foldray.blueprint import ModelSpec
from foldray.runtime.peak import processor

SIZES = {
    "hosts": 2, "batch": 1, "length": 4096, "hidden": 512, "heads": 8, "kv_heads": 8, "inner": 1024, "shared": 0, "blocks": 4,
    "every": 1, "cp": 1, "micro_batches": 1,
}  # fmt: skip
WARM_UP = 2  # rounds
SIDES = ("forward_ms", "backward_ms")


def main() -> None:
    args = arguments()
    from tests.lab.hosts import hosts

    check_lab()
    runs: list[dict[str, Any]] = []
    if args.peaks or args.hosts == 1:
        with hosts(args.hosts, rate=f"{args.links[0] * 1e6:.0f}bit" if args.links else None) as lab:
            runs.append(_peaks(lab, args) if args.peaks else {"link_mbit": 0.0, **_run(lab, args)})
        (report_peaks if args.peaks else report)(runs[-1])
    else:
        runs = _over_links(args)
    if args.json:
        setting = {"cpu": processor(), "torch": torch.__version__, "command": " ".join(sys.argv), "rounds": args.rounds}
        args.json.write_text(json.dumps({**setting, "model": model_of(args).model_dump(), "runs": runs}, indent=1) + "\n")


def _over_links(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure on every link of --links, or of --ratios."""
    from tests.lab.hosts import hosts

    runs = []
    for rate in args.links or _rates(args):
        with hosts(args.hosts, rate=f"{rate * 1e6:.0f}bit") as lab:
            runs.append({"link_mbit": rate, **_run(lab, args)})
        report(runs[-1])
    return runs


def _rates(args: argparse.Namespace) -> list[float]:
    """Return the Mbit/s at which the bytes of a step take `--ratios` times as long as its computation."""
    from tests.lab.hosts import hosts

    with hosts(args.hosts) as lab:
        alone = _run(lab, args, rounds=3, variants=[])
    return [alone["bytes"] * 8e-3 / (alone["C"]["step_ms"]["median"] * times) for times in args.ratios]


def _peaks(lab: list, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant in new processes: the MiB of the larger process, at most during a step, and before it."""
    peaks: dict[str, Any] = {}
    for name in args.variants:
        measured = _run(lab, args, variants=[name])[name]
        peaks[name] = {key: measured[key] for key in ("peak_mib", "before_mib")}
    return {"peaks": peaks}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="communication to computation")
    parser.add_argument("--links", type=float, nargs="+", metavar="MBIT", help="rates in Mbit/s instead of ratios")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", nargs="*", default=["sequential", "moe_only:4", "aaam:4", "one_a_one_m:4", "stream:4"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="other projects' layers; all if none is named")
    parser.add_argument("--gradients", action="store_true", help="reduce gradients too")
    parser.add_argument("--peaks", action="store_true", help="measure memory instead, every variant in new processes")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--traces", type=Path, help="folder for a Perfetto trace and a picture of every variant's last step")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.peers = [] if args.peers is None else args.peers or list(PEERS)
    if args.peers and (args.peaks or args.gradients or args.hosts == 1 or args.shared or args.cp > 1 or args.micro_batches > 1):
        parser.error("--peers measures times of one micro-batch on several hosts, without --cp, --shared and --gradients")
    return args


def _run(lab: list, args: argparse.Namespace, rounds: int | None = None, variants: list[str] | None = None) -> dict[str, Any]:
    """Run a process on every host, each on its own core, and return the result of the first one."""
    variants = args.variants if variants is None else variants
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in SIZES]
    options += [f"--rounds={rounds or args.rounds}"]
    options += ["--peaks"] * args.peaks + ["--gradients"] * (args.gradients and bool(variants))
    options += ["--peers", *args.peers] if args.peers and variants else []
    options += [f"--traces={args.traces.absolute()}"] if args.traces else []
    # With --peaks, larger blocks come from the kernel and return to it at once, so the peak of the process is exact.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if args.peaks else MALLOC
    return on_hosts(lab, Path(__file__).with_name("overlap_worker.py"), [*options, "--variants", *variants], malloc)


def model_of(args: argparse.Namespace) -> ModelSpec:
    router: dict[str, Any] = {"balance_loss": 0.01, "score": "sigmoid", "bias_rate": 0.01}
    if args.peers:
        router = {"balance_loss": 0.01, "softmax": "before_topk", "logit_bias": True}
    return ModelSpec(
        layers=args.blocks, hidden=args.hidden, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.hidden // args.heads,
        ffn_hidden=args.inner, experts=max(args.hosts, 2), topk=1, expert_hidden=args.inner, vocab=64,
        moe_every=args.every, router=router, shared_hidden=args.shared,
    )  # fmt: skip


def limits(run: dict[str, Any], name: str) -> list[float]:
    """Return the limit of a variant in every round, in milliseconds. No schedule of one step can be faster."""
    alone, collectives = run[name], [run[key] for key in ("X", "G") if key in run]
    return [
        sum(max(alone[f"alone_{side}"]["rounds"][r], sum(part[side]["rounds"][r] for part in collectives)) for side in SIDES)
        for r in range(len(run["X"]["step_ms"]["rounds"]))
    ]


def over_limit(run: dict[str, Any], name: str) -> float:
    """Return a variant's step over its limit, the median over rounds."""
    return statistics.median(step / least for step, least in zip(run[name]["step_ms"]["rounds"], limits(run, name), strict=True))


def over_alone(run: dict[str, Any], name: str) -> float:
    """Return a variant's step over its computation alone, the median over rounds."""
    result = run[name]
    alone = zip(*(result[f"alone_{side}"]["rounds"] for side in SIDES), strict=True)
    return statistics.median(step / sum(sides) for step, sides in zip(result["step_ms"]["rounds"], alone, strict=True))


def measured(run: dict[str, Any]) -> dict[str, Any]:
    """Return the variants of a run, by name."""
    return {name: result for name, result in run.items() if isinstance(result, dict) and f"alone_{SIDES[0]}" in result}


def report_peaks(run: dict[str, Any]) -> None:
    print(f"{'MiB':<22}{'at most':>9}{'min':>9}{'max':>9}{'before':>9}{'× first':>9}")
    first = next(iter(run["peaks"].values()))["peak_mib"]["median"]
    for name, result in run["peaks"].items():
        peak = result["peak_mib"]
        line = f"{name:<22}{peak['median']:>9.0f}{peak['min']:>9.0f}{peak['max']:>9.0f}{result['before_mib']['median']:>9.0f}"
        print(f"{line}{peak['median'] / first:>9.3f}", flush=True)


def report(run: dict[str, Any]) -> None:
    link = f"link {run['link_mbit']:.0f} Mbit/s" if run["link_mbit"] else "no link"
    ratio = run["X"]["step_ms"]["median"] / run["C"]["step_ms"]["median"]
    print(f"{link}, all-to-alls alone {ratio:.2f} × computation alone")
    print(f"{'':<22}{'ms':>8}{'min':>8}{'max':>8}{'limit':>8}{'× limit':>9}{'× C':>8}", end="")
    print(f"{'forward':>9}{'backward':>9}{'exposed':>9}{'simulated':>10}{'seen':>9}")
    for name in (*(key for key in ("C", "X", "G") if key in run), *measured(run)):
        result = run[name]
        step = result["step_ms"]
        line = f"{name:<22}{step['median']:>8.0f}{step['min']:>8.0f}{step['max']:>8.0f}"
        is_variant = name in measured(run)
        line += (
            f"{statistics.median(limits(run, name)):>8.0f}{over_limit(run, name):>9.3f}{over_alone(run, name):>8.3f}"
            if is_variant
            else " " * 25
        )
        line += f"{result['forward_ms']['median']:>9.0f}{result['backward_ms']['median']:>9.0f}"
        if is_variant and "exposed_comm_ms" in result:
            total = result["comm_ms"]["median"]
            line += f"{result['exposed_comm_ms']['median'] / total:>9.1%}" if total > 1 else f"{'none':>9}"
            claimed, missed = result["claimed"]["median"], result["missed"]["max"]
            line += f"{result['simulated_ms']['median']:>10.0f}{f'{claimed - missed:.0f}/{claimed:.0f}':>9}"
        print(line)
    if run["fullest"] > 1:
        print(f"the fullest host has at most {run['fullest']:.2f} times the mean number of rows of a block")
    for name in ("C", "X", "G"):
        if "busy_ms" in run.get(name, {}):
            print(f"{name}: its core is busy for {run[name]['busy_ms']['median']:.0f} ms")
    for name, (forward, lag, backward, backward_lag) in run["chosen"].items():
        print(f"{name}: forward {forward} {lag}, backward {backward} {backward_lag}")
    for name, best in run["found"].items():
        print(f"{name}: found {best['seconds'] * 1e3:.0f} ms, {best['seconds'] / best['bound']:.3f} × the bound; ", end="")
        print(f"{best['named']} {best['named_seconds'] * 1e3:.0f} ms; keeps {best['kept']} blocks, sequential {best['own']}")
    if any(name in PEERS for name in run):
        print(REMARK)
    for name, command in run["missing"].items():
        print(f"{name}: not installed; install it with: {command}")
    print(flush=True)


if __name__ == "__main__":
    main()
