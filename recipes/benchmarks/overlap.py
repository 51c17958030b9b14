"""A stack of attention and MoE blocks over a slow link: how much of the all-to-all each schedule hides.

    python recipes/benchmarks/overlap.py [--ratios 0.5 1 1.5] [--length 4096] [--variants stream:4:2 …] [--json FILE]
    python recipes/benchmarks/overlap.py --gradients --batch 4 --length 1024 --variants sequential flow@4+chunks=1000000 …

Two hosts (network namespaces on this machine, which needs root), one core each, joined by a link whose rate is chosen so that the
all-to-alls alone take `ratio` times as long as computation alone, or is given. Everything alternates within a round, in one
process per host:

- C: the same blocks, uncut, without communication. Experts have room for a fixed number of rows (capacity factor 1), so leaving
  the network out changes no shape. Cores are shared with other machines, and get a third slower or faster within a minute: so C
  is measured before and after every variant, and the mean of the two is what the variant is held against. Where the two differ by
  more than a tenth, or the machine below took more than 5 % of a core meanwhile, the variant is measured again, up to three
  times; the least disturbed measurement counts.
- X: the same all-to-alls, uncut, all started at once, with nothing else to do. (Over gloo, whose ends agree on each message
  before it leaves, they take half as long again one after another. Pieces overlap these pauses too: that would be no limit.)
- G, with --gradients: the step's reductions of gradients, all started at once; then every variant has them too.
- every variant KIND[:DEGREE[:LAG[:BACKWARD_LAG]]][@PARTS][+REDUCTION[=BYTES]] in the given order, and, with --peers, the same
  blocks around other MoE layers. `+chunks=auto` is searched for as training does it, before anything is measured.
  `stream:DEGREE` chooses its lags as training does, after rounds of warming up have told what ops cost.

With --hosts 1 there is nothing to hide, and what pieces cost shows. With --peaks, memory is measured instead of time.

Forward and backward are told apart, for the loss is a barrier between them. No schedule of one step can be faster than
max(C_f, X_f) + max(C_b, X_b + G), the limit. "exposed" is time in which a collective was in flight and nothing was computed.
"× limit" is the median over rounds of a step against its own limit. "simulated" is the step that the simulator expects when it
is fed with the recorded op times. "seen" is how many of the collectives that a list starts ahead of computation were in flight
during some of it, in the worst round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import MALLOC, processor  # noqa: E402
from overlap_sweep import report_sweep  # noqa: E402

from foldray.blueprint import ModelSpec  # noqa: E402

SIZES = {
    "hosts": 2, "batch": 1, "length": 4096, "hidden": 512, "heads": 8, "inner": 1024, "shared": 0, "blocks": 4, "every": 1,
}  # fmt: skip
WARM_UP = 2  # rounds
SIDES = ("forward_ms", "backward_ms")


def main() -> None:
    given = arguments()
    from tests.lab.hosts import hosts, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    found: list[dict[str, Any]] = []
    if given.peaks or given.hosts == 1:
        with hosts(given.hosts) as lab:
            found.append(_peaks(lab, given) if given.peaks else {"link_mbit": 0.0, **_run(lab, given)})
        (report_peaks if given.peaks else report)(found[-1])
    else:
        found = _over_links(given)
    if given.json:
        setting = {"cpu": processor(), "torch": torch.__version__, "command": " ".join(sys.argv), "rounds": given.rounds}
        given.json.write_text(json.dumps({**setting, "model": model_of(given).model_dump(), "runs": found}, indent=1) + "\n")


def _over_links(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every link of `given.links`, or of `given.ratios`."""
    from tests.lab.hosts import hosts

    found = []
    for rate in given.links or _rates(given):
        with hosts(given.hosts, rate=f"{rate * 1e6:.0f}bit") as lab:
            found.append({"link_mbit": rate, **_run(lab, given)})
        if given.sweep:
            report_sweep(found[-1], given.picture)
        else:
            report(found[-1])
    return found


def _rates(given: argparse.Namespace) -> list[float]:
    """Mbit/s at which a step's bytes alone take so many times as long as its computation."""
    from tests.lab.hosts import hosts

    with hosts(given.hosts) as lab:
        alone = _run(lab, given, rounds=3, variants=[])
    return [alone["bytes"] * 8e-3 / (alone["C"]["step_ms"]["median"] * each) for each in given.ratios]


def _peaks(lab: list, given: argparse.Namespace) -> dict[str, Any]:
    """Every variant in processes of its own: what the larger one holds at most during a step, and before it, in MiB."""
    found: dict[str, Any] = {}
    for name in given.variants:
        measured = _run(lab, given, variants=[name])[name]
        found[name] = {key: measured[key] for key in ("peak_mib", "before_mib")}
    return {"peaks": found}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="communication to computation")
    parser.add_argument("--links", type=float, nargs="+", metavar="MBIT", help="rates in Mbit/s instead of ratios")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", nargs="*", default=["sequential", "moe_only:4", "aaam:4", "one_a_one_m:4", "stream:4"])
    parser.add_argument("--gradients", action="store_true", help="reduce gradients too")
    parser.add_argument("--peaks", action="store_true", help="measure memory instead, every variant in processes of its own")
    parser.add_argument("--peers", action="store_true", help="also DeepSpeed's MoE layer")
    parser.add_argument("--sweep", metavar="VARIANT", help="measure sizes of gradient chunks instead (overlap_sweep.py)")
    parser.add_argument("--picture", type=Path, help="of the sweep")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--traces", type=Path, help="folder for a Perfetto trace of every variant's last step")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(lab: list, given: argparse.Namespace, rounds: int | None = None, variants: list[str] | None = None) -> dict[str, Any]:
    """One process on every host, each on a core of its own; what the first one found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        variants = given.variants if variants is None else variants
        own = [f"--{name}={getattr(given, name)}" for name in SIZES]
        own += [f"--rounds={rounds or given.rounds}", f"--store={lab[0].address}:29400", f"--result={result}"]
        own += ["--peaks"] * given.peaks + ["--peers"] * (given.peers and bool(variants))
        own += ["--gradients"] * ((given.gradients or bool(given.sweep)) and bool(variants))
        own += [f"--sweep={given.sweep}"] * (bool(given.sweep) and bool(variants))
        own += [f"--traces={given.traces.absolute()}"] if given.traces else []
        command = [sys.executable, Path(__file__).with_name("overlap_worker.py"), *own, "--variants", *variants]
        # To tell what a process holds at most, all its larger blocks come from the kernel and go back at once.
        malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if given.peaks else MALLOC
        cores = sorted(os.sched_getaffinity(0))
        workers = [host.popen([*command, f"--worker={i}"], env=malloc, cpu=cores[i % len(cores)]) for i, host in enumerate(lab)]
        try:
            codes = [worker.wait(timeout=3600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            raise SystemExit(f"the hosts ended with {codes}")
        return json.loads(result.read_text())


def model_of(given: argparse.Namespace) -> ModelSpec:
    router = {"capacity_factor": 1.0, "pad": True, "balance_loss": 0.01}
    return ModelSpec(
        layers=given.blocks, hidden=given.hidden, heads=given.heads, kv_heads=given.heads, head_dim=given.hidden // given.heads,
        ffn_hidden=given.inner, experts=max(given.hosts, 2), topk=1, expert_hidden=given.inner, vocab=64,
        moe_every=given.every, router=router, shared_hidden=given.shared,
    )  # fmt: skip


def limits(run: dict[str, Any], name: str) -> list[float]:
    """The least that any schedule of one step could have taken when a variant was measured, in milliseconds, round by round."""
    alone, talking = run[name], [run[each] for each in ("X", "G") if each in run]
    return [
        sum(max(alone[f"alone_{side}"]["rounds"][r], sum(each[side]["rounds"][r] for each in talking)) for side in SIDES)
        for r in range(len(run["X"]["step_ms"]["rounds"]))
    ]


def over_limit(run: dict[str, Any], name: str) -> float:
    """A variant's step against its limit, the median over rounds."""
    return statistics.median(step / least for step, least in zip(run[name]["step_ms"]["rounds"], limits(run, name), strict=True))


def measured(run: dict[str, Any]) -> dict[str, Any]:
    """The variants and peers of a run, by name."""
    return {name: each for name, each in run.items() if isinstance(each, dict) and f"alone_{SIDES[0]}" in each}


def report_peaks(run: dict[str, Any]) -> None:
    """The table of what processes hold."""
    print(f"{'MiB':<22}{'at most':>9}{'min':>9}{'max':>9}{'before':>9}{'× first':>9}")
    first = next(iter(run["peaks"].values()))["peak_mib"]["median"]
    for name, each in run["peaks"].items():
        peak = each["peak_mib"]
        line = f"{name:<22}{peak['median']:>9.0f}{peak['min']:>9.0f}{peak['max']:>9.0f}{each['before_mib']['median']:>9.0f}"
        print(f"{line}{peak['median'] / first:>9.3f}", flush=True)


def report(run: dict[str, Any]) -> None:
    """The table of one link."""
    print(f"{link_of(run)}, all-to-alls alone {ratio(run):.2f} × computation alone")
    print(f"{'':<22}{'ms':>8}{'min':>8}{'max':>8}{'limit':>8}{'× limit':>9}", end="")
    print(f"{'forward':>9}{'backward':>9}{'exposed':>9}{'simulated':>10}{'seen':>9}")
    for name in (*(each for each in ("C", "X", "G") if each in run), *measured(run)):
        each = run[name]
        step = each["step_ms"]
        line = f"{name:<22}{step['median']:>8.0f}{step['min']:>8.0f}{step['max']:>8.0f}"
        held = name in measured(run)
        line += f"{statistics.median(limits(run, name)):>8.0f}{over_limit(run, name):>9.3f}" if held else " " * 17
        line += f"{each['forward_ms']['median']:>9.0f}{each['backward_ms']['median']:>9.0f}"
        if held and "exposed_comm_ms" in each:
            talked = each["comm_ms"]["median"]
            line += f"{each['exposed_comm_ms']['median'] / talked:>9.1%}" if talked > 1 else f"{'none':>9}"
            claimed, missed = each["claimed"]["median"], each["missed"]["max"]
            line += f"{each['simulated_ms']['median']:>10.0f}{f'{claimed - missed:.0f}/{claimed:.0f}':>9}"
        print(line)
    for name in ("C", "X", "G"):
        if "busy_ms" in run.get(name, {}):
            print(f"{name}: its core is busy for {run[name]['busy_ms']['median']:.0f} ms")
    for name, seconds in run["held_up"].items():
        if any(seconds):
            figures = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1], max(seconds)
            middle, high, most = (f"{figure * 1e3:.0f}" for figure in figures)
            print(f"{name}: chunks ahead hold all-to-alls up for {middle} ms (median), {high} (95 %), {most} (most)")
    for name, (forward, lag, backward, backward_lag) in run["chosen"].items():
        print(f"{name}: forward {forward} {lag}, backward {backward} {backward_lag}")
    for name, found in run["picked"].items():
        print(f"{name}: {found['pick'] / 2**10:.0f} KiB")
    print(flush=True)


def ratio(run: dict[str, Any]) -> float:
    """All-to-alls alone over computation alone."""
    return run["X"]["step_ms"]["median"] / run["C"]["step_ms"]["median"]


def link_of(run: dict[str, Any]) -> str:
    return f"link {run['link_mbit']:.0f} Mbit/s" if run["link_mbit"] else "no link"


if __name__ == "__main__":
    main()
