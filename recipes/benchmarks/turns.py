"""Training steps of several recipes, in turns on the same hosts."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from common import on_hosts

from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import Trace
from foldray.runtime.peak import processor
from trainers.measure.comparison import random_batches
from trainers.worker.engines import make_engine

WARM_UP = 2  # rounds


def join(store: str, rank: int, hosts: int) -> None:
    """Join the world of all hosts, with one thread.

    Args:
        store: HOST:PORT of the first host.
    """
    address, port = store.split(":")
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=hosts)


def in_turns(recipes: Mapping[str, Recipe], rank: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each recipe's step in every round: forward, backward and the sums of gradients, on the slowest host.

    The recipes may have different folds. All of them have the torch engine.
    """
    folds = dict.fromkeys(recipe.placed_fold for recipe in recipes.values())
    groups = {fold: Groups.create(fold, rank) for fold in folds}
    device, steps = torch.device("cpu"), dict[str, list[float]]({name: [] for name in recipes})
    made = {
        name: (make_engine(recipe, own, device), random_batches(recipe, own, device), own)
        for name, recipe in recipes.items()
        for own in [groups[recipe.placed_fold]]
    }
    for number in range(WARM_UP + rounds):
        for name, (engine, batches, own) in made.items():
            execution = engine.execution
            execution.trace = Trace() if number == WARM_UP - 1 else None
            dist.barrier()
            begin = time.perf_counter()
            engine.train(batches)
            took = own.control.all_reduce(torch.tensor([time.perf_counter() - begin], dtype=torch.float64), "max")
            if number == WARM_UP - 1 and execution.lacks_costs:
                execution.learn_costs()
            if number >= WARM_UP:
                steps[name].append(took.item())
            engine.gradients.zero()  # type: ignore[attr-defined]
            if rank == 0:
                print(f"round {number}: {name} {took.item():.2f} s", file=sys.stderr, flush=True)
    for own in groups.values():
        own.close()
    dist.destroy_process_group()
    return steps


def table(run: Mapping[str, list[float]]) -> str:
    """Return a text with the median, the fastest and the slowest step of each recipe, and its speed over the first one."""
    first = statistics.median(next(iter(run.values())))
    width = max(map(len, run)) + 2
    lines = [f"{'':<{width}}{'s':>8}{'min':>8}{'max':>8}{'× faster':>10}"]
    for name, steps in run.items():
        middle = statistics.median(steps)
        lines.append(f"{name:<{width}}{middle:>8.2f}{min(steps):>8.2f}{max(steps):>8.2f}{first / middle:>10.2f}")
    return "\n".join(lines)


def on_lab(args: argparse.Namespace, script: str, speeds: Sequence[float]) -> None:
    """Run a script on the hosts of a lab, one worker each, and print and write what the first one has measured.

    Args:
        args: `share` (of all cores, which the hosts get), `link` (Mbit/s) and `json` (a file to write, or None).
        script: the script. Its workers get `--worker`, `--store` and `--result`.
        speeds: for every host, its share of a core over the usual one.
    """
    from tests.lab.cores import part_of_core
    from tests.lab.hosts import hosts, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        result, share = Path(folder) / "result.json", args.share * len(os.sched_getaffinity(0)) / len(speeds)
        parts = [stack.enter_context(part_of_core(share * speed)) for speed in speeds]
        lab = stack.enter_context(hosts(len(speeds), rate=f"{args.link}mbit"))
        command = [sys.executable, script, *sys.argv[1:], f"--store={lab[0].address}:29400", f"--result={result}"]
        with on_hosts(lab, command, parts=parts):
            pass
        run = json.loads(result.read_text())
    print(table(run))
    if args.json:
        setting = {"cpu": processor(), "torch": torch.__version__, "command": " ".join(sys.argv), "core": share}
        args.json.write_text(json.dumps({**setting, "steps": run}, indent=1) + "\n")
