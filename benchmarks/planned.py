"""Compare predicted steps with measured ones. The planner knows the machines only from `foldray calibrate`.

    python benchmarks/planned.py [--link MBIT] [--rounds N] [--json FILE] [--picture FILE]

The script uses two hosts (network namespaces on this machine, which needs root) with one worker each, a Ray cluster over
both, and a link with the rate of --link. `foldray calibrate` measures the cluster. Then all recipes below are measured in
turns. The planner predicts each complete step, including the update, only from the calibrated hardware.

Processors may change their speed between calibration and measurement, which is not a mistake of the planner. So every rank
times a matrix product before and after each step. If it takes 1.3 times as long as during calibration, the prediction for
the computation of this rank's pipeline position is 1.3 times as long, too. The slowest rank of a position counts. The script
also prints the errors without this correction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, check_lab

from foldray.clock import LaneSeconds
from foldray.costs.candidate import Candidate
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, load_hardware
from foldray.costs.ops import OpWork
from foldray.costs.whole import whole_seconds
from foldray.graph import Op
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from foldray.runtime.peak import processor

RECIPE = "recipes/quickstart.yaml"
SCHEDULES = ("sequential", "moe_only:4", "aaam:4", "one_a_one_m:2", "one_a_one_m:4", "one_a_one_m:8", "stream:4")
FOLDS: dict[str, tuple[dict[str, int], Sequence[str]]] = {
    "EP2": ({"ep": 2}, SCHEDULES),
    "TP2 EP2": ({"tp": 2, "ep": 2}, ("sequential", "one_a_one_m:4")),
    "CP2 EP2": ({"cp": 2, "ep": 2}, ("sequential", "one_a_one_m:4")),
    "TP2 ETP2": ({"tp": 2, "etp": 2}, ("sequential",)),
    "PP2": ({"pp": 2}, ("sequential",)),
    "DP2": ({}, ("sequential",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", type=int, default=200, metavar="MBIT", help="rate of each host's link (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence (default %(default)s)")
    parser.add_argument(
        "--folds", nargs="*", default=list(FOLDS), choices=list(FOLDS), metavar="FOLD", help=f"folds among {', '.join(FOLDS)}"
    )
    parser.add_argument("--cluster", type=Path, metavar="FILE.yaml", help="an existing calibration")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = measure(args)
    report(results["rows"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.picture:
        draw(results["rows"], args.picture)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from tests.lab.hosts import hosts
    from tests.lab.ray_cluster import ray_cluster

    check_lab()
    with tempfile.TemporaryDirectory() as folder, hosts(2, rate=f"{args.link}mbit") as lab, ray_cluster(lab) as cluster:

        def run(*command: object) -> None:
            ray = [Path(sys.executable).parent / "ray", "job", "submit", "--address", cluster.address, "--working-dir", "."]
            if lab[0].popen([*ray, "--", "python", *command], env=cluster.env, cwd=ROOT, stdout=sys.stderr).wait(7200):
                raise SystemExit("the job failed")

        path = args.cluster or Path(folder) / "lab.yaml"
        if not args.cluster:
            changes = [*overrides(args.length, {"ep": 2}), f"cluster.storage={folder}", "cluster.placement=SPREAD"]
            run("-m", "foldray", "calibrate", RECIPE, "--out", path, *changes)
        run("benchmarks/planned_worker.py", f"{folder}/results.json", args.rounds, path, args.length, *args.folds)
        results, machines = json.loads((Path(folder) / "results.json").read_text()), load_hardware(str(path))
    rows = [row(result, machines, args.length) for result in results]
    about = {"cpu": processor(), "command": " ".join(sys.argv), "link_mbit": args.link}
    return {**about, "hardware": machines.model_dump(), "rows": rows}


def overrides(length: int, fold: dict[str, int]) -> list[str]:
    model = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 1024, "experts": 2, "topk": 1,
             "expert_hidden": 1024, "vocab": 256, "router": "{capacity_factor: 1.0, pad: true, balance_loss: 0.01}"}  # fmt: skip
    changed: dict[str, object] = {"training.global_batch": 2, "training.micro_batch": 1, "data.seq_len": length, "fold.ep": 1}
    changed |= {f"model.{key}": value for key, value in model.items()} | {f"fold.{axis}": size for axis, size in fold.items()}
    return [f"{key}={value}" for key, value in changed.items()]


class Paced(OpWork):
    """The costs of a candidate whose pipeline positions compute at a pace each.

    The pace is the time of computation over that during calibration.
    """

    def __init__(self, candidate: Candidate, machines: Hardware, paces: Sequence[float]):
        super().__init__(candidate, Device.of(candidate.job, slowed(machines, max(paces))))
        self._works = [OpWork(candidate, Device.of(candidate.job, slowed(machines, pace))) for pace in paces]

    def cost(self, op: Op) -> LaneSeconds:
        """Return the lanes and seconds of an op, at the pace of the position that computes or sends."""
        return self._works[self.candidate.reducing.where(op)[0]].cost(op)


def slowed(machines: Hardware, pace: float) -> Hardware:
    """Return machines whose computation takes `pace` times as long."""
    slower = {dtype: peak / pace for dtype, peak in machines.peak_tflops.items()}
    constants = {**machines.constants, "launch": machines.constants["launch"] * pace}
    return machines.model_copy(update={"peak_tflops": slower, "memory_gb_s": machines.memory_gb_s / pace, "constants": constants})


def predicted(recipe: Recipe, machines: Hardware, ranks: Sequence[float]) -> float:
    """Predict the milliseconds of a step, with the paces of all ranks."""
    candidate, fold = as_candidate(recipe), recipe.placed_fold
    positions: list[list[float]] = [[] for _ in range(fold.pp)]
    for rank, pace in enumerate(ranks):
        positions[fold.coordinate(rank)["attention"]["pp"]].append(pace)
    return whole_seconds(candidate, Paced(candidate, machines, [max(paces) for paces in positions])) * 1e3


def row(result: dict[str, Any], machines: Hardware, length: int) -> dict[str, Any]:
    from planned_worker import recipe

    planned = recipe(result["fold"], result["schedule"], length)
    steps = [step["ms"] for step in result["steps"]]
    predictions = [predicted(planned, machines, step["paces"]) for step in result["steps"]]
    plain = predicted(planned, machines, [1.0] * planned.placed_fold.world_size)
    return {
        "fold": result["fold"], "schedule": result["schedule"], "steps": result["steps"],
        "measured_ms": {"min": min(steps), "median": statistics.median(steps), "max": max(steps)},
        "predicted_ms": statistics.median(predictions), "plain_ms": plain,
        "error": statistics.median(value / step - 1 for value, step in zip(predictions, steps, strict=True)),
        "plain_error": plain / statistics.median(steps) - 1,
    }  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'fold':<10}{'schedule':<16}{'measured':>10}{'min':>8}{'max':>8}{'predicted':>11}{'error':>8}{'as calibrated':>15}")
    for result in rows:
        step = result["measured_ms"]
        line = f"{result['fold']:<10}{result['schedule']:<16}{step['median']:>10.0f}{step['min']:>8.0f}{step['max']:>8.0f}"
        print(f"{line}{result['predicted_ms']:>11.0f}{result['error']:>+8.1%}{result['plain_error']:>+15.1%}")
    right, pairs = order(rows)
    for key, name in (("error", "at the pace of each turn"), ("plain_error", "as calibrated")):
        errors = [abs(result[key]) for result in rows]
        print(f"{name}: median error {statistics.median(errors):.1%}, most {max(errors):.1%}")
    print(f"{len(rows)} recipes; the planner knows the faster one in {right} of {pairs} pairs of a fold's schedules")


def order(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Count the pairs of schedules of one fold whose order the planner predicts, and all such pairs, without the pace."""
    pairs = [pair for pair in itertools.combinations(rows, 2) if pair[0]["fold"] == pair[1]["fold"]]
    right = sum((a["measured_ms"]["median"] < b["measured_ms"]["median"]) == (a["plain_ms"] < b["plain_ms"]) for a, b in pairs)
    return right, len(pairs)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from trainers.pictures.canvas import BLUE, one_panel, write

    figure, axes = one_panel(7, 6)
    most = 1.1 * max(max(result["measured_ms"]["max"], result["predicted_ms"]) for result in rows) / 1e3
    axes.fill_between([0, most], [0, 0.85 * most], [0, 1.15 * most], color=BLUE, alpha=0.1, label="15 % either way")
    axes.plot([0, most], [0, most], color=BLUE, linewidth=1)
    for fold in dict.fromkeys(result["fold"] for result in rows):
        rows_of_fold = [result for result in rows if result["fold"] == fold]
        seconds = [result["measured_ms"]["median"] / 1e3 for result in rows_of_fold]
        axes.plot(seconds, [result["predicted_ms"] / 1e3 for result in rows_of_fold], "o", label=fold)
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="measured step (s), medians", ylabel="predicted step (s)")
    axes.legend(frameon=False, fontsize=8)
    write(figure, path)


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"a job took more than {error.timeout:.0f} s") from None
