"""Halve the rate of a link in mid-run, and compare what training then finds with all fixed choices.

    python recipes/benchmarks/drift.py [--link 400] [--length 1024] [--json FILE]

The script uses two hosts (network namespaces on this machine, which needs root) with one core each. They train blocks of
attention and MoE with EP2, `one_a_one_m` and gradients in chunks. Training searches for the number of pieces and the size of the
chunks (`schedule.degrees`, `sp_bytes: auto`), and then watches its steps. After its first median, the script halves the rate of
the link. Training must notice that its steps drift, and search again.

Then every number of pieces runs with several sizes, in turns with what training has found, over the halved link. "× best" is
the median step with the found setting over the median step of the fastest fixed one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from common import on_hosts  # noqa: E402

from foldray.runtime.peak import processor  # noqa: E402

DEGREES = (1, 2, 4)
SIZES = (1 << 17, 1 << 19, 1 << 21, 1 << 23)  # bytes of a chunk, for the fixed choices


def main() -> None:
    args = arguments()
    if args.worker is not None:
        from drift_worker import Worker

        Worker(args).serve()
        return
    from tests.lab.hosts import hosts, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    with hosts(2, rate=f"{args.link}mbit") as lab, tempfile.TemporaryDirectory() as folder:
        result, found = Path(folder) / "result.json", Path(folder) / "found"
        command = [sys.executable, __file__, *sys.argv[1:], f"--store={lab[0].address}:29400", f"--folder={folder}"]
        with on_hosts(lab, command) as workers:
            while not found.exists() and all(worker.poll() is None for worker in workers):
                time.sleep(0.2)
            for host in lab:
                host.limit(f"{args.link / 2:.0f}mbit")
            print(f"the link now has {args.link / 2:.0f} Mbit/s", file=sys.stderr)
        document = json.loads(result.read_text())
    report(document)
    if args.json:
        args.json.write_text(json.dumps({"cpu": processor(), "command": " ".join(sys.argv), **document}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", type=float, default=400.0, metavar="MBIT", help="rate of the link before")
    for name, default in {"length": 1024, "hidden": 256, "heads": 4, "inner": 512, "blocks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the fixed choices")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def report(document: dict[str, Any]) -> None:
    """Print what was found before and after, and the fixed choices."""
    for record in document["records"]:
        if record["kind"] == "tried" and record["chosen"]:
            size = record["sp_bytes"] / 2**10
            print(f"found: {record['degree']} pieces, chunks of {size:.0f} KiB, {record['step_time_s'] * 1e3:.0f} ms per step")
        elif record["kind"] == "drifted":
            print(f"drifted: {record['step_time_s'] * 1e3:.0f} ms per step instead of {record['found_s'] * 1e3:.0f} ms")
    medians = {name: statistics.median(times) for name, times in document["fixed"].items()}
    best = min(name for name in medians if medians[name] == min(v for k, v in medians.items() if k != "found"))
    print(f"{'fixed choice':<24}{'ms':>8}{'min':>8}{'max':>8}{'× best':>8}")
    for name, times in sorted(document["fixed"].items(), key=lambda item: medians[item[0]]):
        figures = [f"{1e3 * each:>8.0f}" for each in (medians[name], min(times), max(times))]
        print(f"{name:<24}{''.join(figures)}{medians[name] / medians[best]:>8.3f}")


if __name__ == "__main__":
    main()
