"""Measure what an uneven use of experts costs, beside two predictions: from the even step, and of the planner.

    python recipes/benchmarks/uneven.py [--link MBIT] [--rounds N] [--json FILE] [--picture FILE]

The script uses two hosts (network namespaces on this machine, which needs root) with one worker each, a Ray cluster over
both, and a link with the rate of --link. `foldray calibrate` measures the cluster, and `foldray bench --skew` measures routing
patterns in turns. The planner predicts each step from the calibrated hardware alone. All figures are relative to the step with
even routing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from foldray.planner.costs import OpWork  # noqa: E402
from foldray.planner.device import Device  # noqa: E402
from foldray.planner.hardware import Hardware, load_hardware  # noqa: E402
from foldray.planner.whole import whole_seconds  # noqa: E402
from foldray.recipe import Recipe  # noqa: E402
from foldray.recipe.refold import as_candidate  # noqa: E402
from foldray.runtime.peak import processor  # noqa: E402

RECIPE = "recipes/quickstart.yaml"
SKEWS = (0.0, 0.25, 0.5, 1.0, 2.0, 8.0)
CHANGES = [
    "model.layers=4", "model.hidden=512", "model.heads=8", "model.kv_heads=8", "model.head_dim=64", "model.experts=8",
    "model.topk=2", "model.expert_hidden=1024", "model.vocab=264", "data.seq_len=2048", "training.global_batch=2",
    "training.micro_batch=1", "fold.ep=2", "engine.kind=torch", "cluster.placement=SPREAD",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", type=int, default=1000, metavar="MBIT", help="rate of each host's link (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--schedule", default="sequential", metavar="KIND:DEGREE", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    found = measure(args)
    report(found["results"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture:
        from trainers.pictures.uneven import draw_uneven

        title = f"EP2 over {args.link} Mbit/s, {args.schedule}"
        draw_uneven(found["results"], args.picture, title)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from tests.lab.hosts import hosts, why_not
    from tests.lab.ray_cluster import ray_cluster

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    kind, _, degree = args.schedule.partition(":")
    changes = [*CHANGES, f"schedule.kind={kind}", f"schedule.degree={degree or 1}"]
    with tempfile.TemporaryDirectory() as folder, hosts(2, rate=f"{args.link}mbit") as lab, ray_cluster(lab) as cluster:

        def run(*command: object) -> None:
            ray = [Path(sys.executable).parent / "ray", "job", "submit", "--address", cluster.address, "--working-dir", "."]
            foldray = ["python", "-m", "foldray", *map(str, command), *changes, f"cluster.storage={folder}"]
            shell = ["sh", "-c", f"{shlex.join(foldray)} > {folder}/out"]
            if lab[0].popen([*ray, "--", *shell], env=cluster.env, cwd=ROOT, stdout=sys.stderr).wait(7200):
                raise SystemExit("the job failed")

        run("calibrate", RECIPE, "--out", f"{folder}/lab.yaml")
        patterns = [word for skew in SKEWS for word in ("--skew", skew)]
        run("bench", RECIPE, "--json", "--rounds", args.rounds, *patterns)
        results = json.loads(Path(folder, "out").read_text())["results"]
        machines = load_hardware(f"{folder}/lab.yaml")
    planned = [seconds(changes, result["skew"], machines) for result in results]
    for result, each in zip(results, planned, strict=True):
        result["planned_ratio"] = each / planned[0]
    about = {"cpu": processor(), "command": " ".join(sys.argv), "link_mbit": args.link}
    return {**about, "hardware": machines.model_dump(), "results": results}


def seconds(changes: list[str], skew: float, machines: Hardware) -> float:
    """Return the step that the planner predicts."""
    candidate = as_candidate(Recipe.load(ROOT / RECIPE, [*changes, f"model.router.skew={skew}"]))
    return whole_seconds(candidate, OpWork(candidate, Device.of(candidate.job, machines)))


def report(results: list[dict[str, Any]]) -> None:
    print(f"{'skew':<8}" + "".join(f"{name:>10}" for name in ("overload", "step ms", "min", "max", "× even", "bench", "planner")))
    even = results[0]["step_ms"]["median"]
    for result in results:
        step = result["step_ms"]
        times = "".join(f"{step[key]:>10.0f}" for key in ("median", "min", "max"))
        ratios = "".join(
            f"{ratio:>10.2f}" for ratio in (step["median"] / even, result["predicted_ratio"], result["planned_ratio"])
        )
        print(f"{result['skew']:<8g}{result['overload']:>10.2f}{times}{ratios}")


if __name__ == "__main__":
    main()
