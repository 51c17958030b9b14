"""Training steps of several recipes, in turns on the same hosts."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import on_hosts

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.planner.apart import ApartWork, Sides
from foldray.planner.costs import OpWork
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware
from foldray.planner.whole import pass_seconds, simulate_step
from foldray.recipe import Recipe
from foldray.recipe.refold import as_candidate
from foldray.runtime import Trace
from foldray.runtime.peak import processor
from foldray.schedule import Op, Span, StepGraph
from trainers.measure.bench import shifted, shown
from trainers.measure.comparison import random_batches
from trainers.measure.meter import Meter
from trainers.measure.speeds import measured
from trainers.pictures.timeline import draw_timelines
from trainers.worker.engines import make_engine

WARM_UP = 3  # rounds. The last two are timed where times are needed: training finds a list twice


@contextmanager
def joined(store: str, rank: int, hosts: int) -> Iterator[None]:
    """Be one of the world of all hosts, with one thread.

    Args:
        store: HOST:PORT of the first host.
    """
    address, port = store.split(":")
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=hosts)
    yield
    dist.destroy_process_group()


def in_turns(
    recipes: Mapping[str, Recipe], rank: int, rounds: int, traces: Mapping[str, Trace] | None = None
) -> dict[str, list[float]]:
    """Return the seconds of each recipe's step in every round: forward, backward and the sums of gradients, on the slowest host.

    The recipes may have different folds. All of them have the torch engine.

    Args:
        traces: for some recipes, a trace that records one more step. This step does not count.
    """
    folds = dict.fromkeys(recipe.placed_fold for recipe in recipes.values())
    groups = {fold: Groups.create(fold, rank) for fold in folds}
    device, steps = torch.device("cpu"), dict[str, list[float]]({name: [] for name in recipes})
    made = {
        name: (make_engine(recipe, own, device), random_batches(recipe, own, device), own)
        for name, recipe in recipes.items()
        for own in [groups[recipe.placed_fold]]
    }

    def turn(name: str, trace: Trace | None) -> float:
        engine, batches, own = made[name]
        engine.execution.trace = trace
        dist.barrier()
        begin = time.perf_counter()
        engine.train(batches)
        took = own.control.all_reduce(torch.tensor([time.perf_counter() - begin], dtype=torch.float64), "max")
        engine.gradients.zero()  # type: ignore[attr-defined]
        return took.item()

    for number in range(WARM_UP + rounds):
        for name, (engine, _, _) in made.items():
            learns = 0 < number < WARM_UP
            took = turn(name, Trace() if learns else None)
            if learns and engine.execution.lacks_costs:
                engine.execution.learn_costs()
            if number >= WARM_UP:
                steps[name].append(took)
            if rank == 0:
                print(f"round {number}: {name} {took:.2f} s", file=sys.stderr, flush=True)
    for name, trace in (traces or {}).items():
        turn(name, trace)
    for own in groups.values():
        own.close()
    return steps


class Forecast(NamedTuple):
    """What the planner predicts for the steps of a recipe: op by op, and seconds, with what overlap costs."""

    graph: StepGraph
    spans: Mapping[Op, Span]
    seconds: float


def forecast(recipes: Mapping[str, Recipe], rank: int) -> dict[str, Forecast]:
    """Calibrate the hosts, and return the planner's prediction of each recipe's step, as far as `in_turns` measures it.

    All figures are those of the slowest host. If the first one is faster, so are the hosts of attention on workers of its
    own. How much faster they compute, a matrix product shows.
    """
    first, hosts = next(iter(recipes.values())), dist.get_world_size()
    groups = Groups.create(Fold(hosts, ep=hosts), rank)
    device = torch.device("cpu")
    slow = Hardware.model_validate(measured(first, groups, device, "lab", rank))  # each host is a node
    standard = groups.control.all_gather(torch.tensor([Meter(device, groups.control, torch.float32).standard]))
    groups.close()
    speed = float(standard.max() / standard[0])
    peak = {dtype: peak * speed for dtype, peak in slow.peak_tflops.items()}
    quick = slow.model_copy(update={
        "peak_tflops": peak, "memory_gb_s": slow.memory_gb_s * speed,
        "constants": {**slow.constants, "launch": slow.constants["launch"] / speed},
    })  # fmt: skip
    return {name: _predicted(recipe, quick, slow) for name, recipe in recipes.items()}


def _predicted(recipe: Recipe, quick: Hardware, slow: Hardware) -> Forecast:
    candidate = as_candidate(recipe)
    device = Device.of(candidate.job, slow)
    work = OpWork(candidate, device)
    if candidate.fold.disjoint:
        work = ApartWork(candidate, Sides(Device.of(candidate.job, quick), device))
    return Forecast(candidate.reducing, simulate_step(candidate, work).spans, pass_seconds(candidate, work))


def draw(recipe: Recipe, trace: Trace, predicted: Forecast, path: Path, rank: int) -> None:
    """Let the first host draw the recorded step of a recipe above the predicted one, the first worker of each half.

    All hosts must call this.
    """
    recorded: list[Mapping[Op, Span]] = [{}] * dist.get_world_size()
    dist.all_gather_object(recorded, dict(trace.spans))
    if rank:
        return
    begin, graph = min(span.start for spans in recorded for span in spans.values()), predicted.graph
    rows = {f"measured{name}": shifted(recorded[first], begin) for name, first in shown(recipe).items()}
    # The first worker is at the first position, and the first worker of the experts is at the one behind attention's.
    for name, place in zip(shown(recipe), (0, recipe.fold.pp), strict=False):
        rows[f"predicted{name}"] = {op: span for op, span in predicted.spans.items() if place in graph.where(op)}
    draw_timelines(graph, rows, path, "A training step, recorded and predicted")


def table(run: Mapping[str, list[float]], predicted: Mapping[str, float]) -> str:
    """Return a text with the median, the fastest and the slowest step of each recipe, and its speed over the first one.

    Args:
        run: recipe → seconds of its steps.
        predicted: recipe → predicted seconds, for those that have a prediction.
    """
    first = statistics.median(next(iter(run.values())))
    width = max(map(len, run)) + 2
    lines = [f"{'':<{width}}{'s':>8}{'min':>8}{'max':>8}{'× faster':>10}{'predicted' if predicted else '':>12}"]
    for name, steps in run.items():
        middle = statistics.median(steps)
        line = f"{name:<{width}}{middle:>8.2f}{min(steps):>8.2f}{max(steps):>8.2f}{first / middle:>10.2f}"
        lines.append(line + (f"{predicted[name]:>12.2f}{predicted[name] / middle - 1:>+7.0%}" if name in predicted else ""))
    return "\n".join(lines)


def on_lab(args: argparse.Namespace, script: str, speeds: Sequence[float], together: int = 1) -> dict[str, Any]:
    """Run a script on the hosts of a lab, and print, write and return what the first worker has measured.

    Args:
        args: `share` (of all cores, which the hosts get), `link` (Mbit/s) and `json` (a file to write, or None).
        script: the script. Its workers get `--worker`, `--store` and `--result`.
        speeds: for every worker, its share of a core over the usual one.
        together: number of workers on each host.
    """
    from tests.lab.cores import part_of_core
    from tests.lab.hosts import hosts, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        result, share = Path(folder) / "result.json", args.share * len(os.sched_getaffinity(0)) / len(speeds)
        parts = [stack.enter_context(part_of_core(share * speed)) for speed in speeds]
        own = stack.enter_context(hosts(len(speeds) // together, rate=f"{args.link}mbit"))
        lab = [host for host in own for _ in range(together)]
        command = [sys.executable, script, *sys.argv[1:], f"--store={lab[0].address}:29400", f"--result={result}"]
        with on_hosts(lab, command, parts=parts):
            pass
        run = json.loads(result.read_text())
    print(table(run["steps"], run["predicted"]))
    if args.json:
        setting = {"cpu": processor(), "torch": torch.__version__, "command": " ".join(sys.argv), "core": share}
        args.json.write_text(json.dumps({**setting, **run}, indent=1) + "\n")
    return run
