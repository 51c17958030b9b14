"""Check whether the tuner finds the best setting of a space, and whether it does so sooner than simpler searches.

    python recipes/benchmarks/tuned.py [--link MBIT] [--json FILE] [--picture FILE]

The script uses two hosts (network namespaces on this machine, which needs root) with two workers each, a Ray cluster over
both, and a link with the rate of --link. `foldray calibrate` measures the cluster for predictions. A Ray job then measures
every setting of the space in turns with the unchanged recipe. After that, the tuner runs with five seeds, and its choices
are measured in turns with the best setting.

Other searches are replayed with many seeds on the exhaustive measurement, and so is the tuner. These are random search, a
search without predictions, and the planner's order without a search.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from foldray.runtime.peak import processor  # noqa: E402

RECIPE = "recipes/quickstart.yaml"
SIZE = {
    "training.global_batch": 4, "training.micro_batch": 1, "engine.kind": "torch", "cluster.workers": 4,
    "cluster.placement": "PACK",
    "model.layers": 2, "model.hidden": 256, "model.heads": 4, "model.kv_heads": 4, "model.head_dim": 64, "model.ffn_hidden": 512,
    "model.experts": 4, "model.topk": 1, "model.expert_hidden": 512, "model.vocab": 256,
    "model.router": "{capacity_factor: 1.0, pad: true, balance_loss: 0.01}", "fold.ep": 4, "fold.tp": 1,
}  # fmt: skip
SPACE = {
    "tp": [1], "cp": [1], "pp": [1], "ep": [2, 4], "etp": [1, 2], "kind": ["sequential", "one_a_one_m", "stream"],
    "degree": [1, 2, 4], "sp_bytes": [32768, 131072, 524288, 2097152],
}  # fmt: skip
HIGHEST = 1.3  # upper end of the picture; the worst first trials are four times as slow as the best setting
WAYS = {"ratio": "tuner", "cold": "without predictions", "random": "random", "planner": "planner's best, no search"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", type=int, default=200, metavar="MBIT", help="rate of each host's link (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of the exhaustive measurement (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cluster", type=Path, metavar="FILE.yaml", help="an existing calibration")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = measure(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    report(results)
    if args.picture:
        draw(results, args.picture)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from tests.lab.hosts import hosts, why_not
    from tests.lab.ray_cluster import ray_cluster

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    with tempfile.TemporaryDirectory() as folder, hosts(2, rate=f"{args.link}mbit") as lab, ray_cluster(lab, cpus=2) as cluster:
        keys = {**SIZE, "data.seq_len": args.length, "cluster.storage": folder, "tune.hardware": Path(folder) / "lab.yaml"}
        overrides = [f"{key}={value}" for key, value in keys.items()] + [
            f"tune.space.{key}={value}" for key, value in SPACE.items()
        ]

        def run(*command: object, hours: float = 2.0) -> None:
            ray = [Path(sys.executable).parent / "ray", "job", "submit", "--address", cluster.address, "--working-dir", "."]
            done = lab[0].popen([*ray, "--", "python", *command], env=cluster.env, cwd=ROOT, stdout=sys.stderr)
            if done.wait(hours * 3600):
                raise SystemExit("the job failed")

        if args.cluster:
            (Path(folder) / "lab.yaml").write_text(args.cluster.read_text())
        else:
            run("-m", "foldray", "calibrate", RECIPE, "--out", f"{folder}/lab.yaml", *overrides)
        worker = "recipes/benchmarks/tuned_worker.py"
        run(worker, f"{folder}/results.json", args.turns, args.seeds, RECIPE, *overrides)
        results = json.loads((Path(folder) / "results.json").read_text())
        hardware = (Path(folder) / "lab.yaml").read_text()
    return {"cpu": processor(), "command": " ".join(sys.argv), "link_mbit": args.link, "hardware": hardware, **results}


def report(results: Mapping[str, Any]) -> None:
    rows = sorted(results["rows"], key=lambda row: row["ratio"])
    print(f"{len(rows)} settings; a step of the unchanged recipe takes {results['reference_s'] * 1e3:.0f} ms\n")
    print(f"{'× recipe':>9}{'predicted':>11}{'measured':>10}  setting")
    for row in [*rows[:8], *rows[-2:]]:
        measured = row["ratio"] * results["reference_s"] * 1e3
        print(f"{row['ratio']:>9.3f}{row['predicted_s'] * 1e3:>11.0f}{measured:>10.0f}  {row['setting']}")
    print("\nmeasured searches: the choice over the exhaustive best, in turns")
    for search in results["searches"]:
        print(f"  seed {search['seed']}: {search['over_best']:.3f}  {search['setting']} ({search['trials']} trials)")
    print("\nreplayed searches: the best setting so far over the exhaustive best, mean (worst) of seeds, by trials")
    print(f"{'':<28}" + "".join(f"{number:>16}" for number in _shown(results)))
    for way, curves in results["replays"].items():
        cells = [
            f"{statistics.mean(c[n - 1] for c in curves):.3f} ({max(c[n - 1] for c in curves):.3f})" for n in _shown(results)
        ]
        print(f"{WAYS[way]:<28}" + "".join(f"{cell:>16}" for cell in cells))


def _shown(results: Mapping[str, Any]) -> Sequence[int]:
    most = min(len(curve) for curves in results["replays"].values() for curve in curves)
    return [number for number in (1, 3, 5, 8, 10, 15) if number <= most]


def draw(results: Mapping[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=144, layout="constrained")
    axes = figure.subplots()
    colours = {"ratio": "#d9630b", "cold": "#2f855a", "random": "#9ca3af", "planner": "#2364aa"}
    for way, curves in results["replays"].items():
        trials = range(1, min(map(len, curves)) + 1)
        means = [statistics.mean(curve[number - 1] for curve in curves) for number in trials]
        worst = [max(curve[number - 1] for curve in curves) for number in trials]
        style = "--" if way == "planner" else "-"  # a dashed line leaves the tuner's line visible below it
        axes.plot(trials, means, color=colours[way], linewidth=2, linestyle=style, label=WAYS[way])
        axes.plot(trials, worst, color=colours[way], linewidth=0.8, linestyle=":")
    axes.plot([], [], color="#1f2937", linewidth=0.8, linestyle=":", label=f"worst of {len(curves)} seeds; lines: mean")
    axes.axhline(1.03, color="#1f2937", linewidth=0.8, linestyle="--", alpha=0.5, label="3 % from the best")
    axes.set(xlabel="trials", ylabel="best so far over the exhaustive best", ylim=(0.995, HIGHEST))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"a job took more than {error.timeout:.0f} s") from None
