"""Compare training steps of several recipes, in turns on the same hosts.

    python benchmarks/steps.py "fold.ep=4" "fold.ep=4 schedule.kind=stream schedule.degree=4" [--link MBIT] [--json FILE]
    python benchmarks/steps.py --set fold.pp=2 fold.ep=2 -- "schedule.kind=sequential" "schedule.kind=list"
    python benchmarks/steps.py --forecast -- "fold.ep=4" "placement.attention=2 placement.experts=2 fold.ep=2"
    python benchmarks/steps.py --together 2 --set fold.ep=4 moe.dispatch=rank -- "fold.ep_inside=1" "fold.ep_inside=2"

The script uses network namespaces on this machine as hosts, which needs root. Each host has a link of the given rate, and each
worker a share of a core (control groups). Without this share, hosts on one core would run faster while their neighbour waits, and
no bubble of a pipeline would cost time. `--speeds 1 1 0.5 0.5` halves the cores of the last two workers, `--together 2` puts two
workers on each host.

A variant has changes to the recipe of `--base`, as `foldray train` takes them. A step is forward, backward and the sums of
gradients of all micro-batches. The variants take turns within a round. A step takes as long as on the slowest worker.
`stream` chooses its lags as training does, and `auto` its order, before the first round. A variant that records routes
(`routes.record`) writes a file after each step; one that moves experts (`moe.place_every`) does so between steps, which is not
timed. `--forecast` calibrates the hosts first, and predicts all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import check_lab, on_hosts

from foldray.clock import Span
from foldray.comm import Groups
from foldray.costs.apart import ApartWork, Sides
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.ops import OpWork
from foldray.costs.whole import pass_seconds, simulate_step
from foldray.fold import Fold
from foldray.graph import Op, StepGraph
from foldray.model import all_losses
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from foldray.runtime import Engine, Trace
from foldray.runtime.peak import processor
from trainers.data.order import NEWEST
from trainers.folders import Folder
from trainers.measure.bench import shifted, shown
from trainers.measure.comparison import random_batches
from trainers.measure.meter import Meter
from trainers.measure.speeds import measured
from trainers.pictures.timeline import draw_timelines
from trainers.routes.files import About
from trainers.worker.engines import make_engine
from trainers.worker.orders import online_search
from trainers.worker.placing import ExpertPlacing
from trainers.worker.routes import StepRoutes

FOLDER = Path(__file__).parent
WARM_UP = 3  # rounds. The last two are timed where times are needed: training finds a list twice


def main() -> None:
    args = arguments()
    on_lab(args) if args.worker is None else work(args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("variants", nargs="+", metavar="KEY=VALUE …", help="changes to the recipe, one text for each variant")
    parser.add_argument("--base", default=FOLDER / "steps.yaml", help="the recipe (default %(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes for all variants")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--link", type=int, default=200, metavar="MBIT", help="rate of each link (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.9, help="share of all cores that the workers get (default %(default)s)")
    parser.add_argument("--speeds", type=float, nargs="*", help="of the workers' cores, over the usual one (default equal)")
    parser.add_argument("--together", type=int, default=1, help="workers on each host (default %(default)s)")
    parser.add_argument("--forecast", action="store_true", help="calibrate the hosts first, and print predicted steps, too")
    parser.add_argument("--picture", type=Path, help="draw the last variant's step, recorded and predicted, to this PNG")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    for hidden in ("--worker", "--store", "--result"):
        parser.add_argument(hidden, type={"--worker": int, "--result": Path}.get(hidden, str), help=argparse.SUPPRESS)
    return parser.parse_args()


def recipes_of(args: argparse.Namespace) -> dict[str, Recipe]:
    return {changes: Recipe.load(args.base, [*args.set, *changes.split()]) for changes in args.variants}


def work(args: argparse.Namespace) -> None:
    """Run the variants on one worker in turns, and let the first one write the result."""
    recipes = recipes_of(args)
    traces = {args.variants[-1]: Trace()} if args.picture else {}
    with joined(args.store, args.worker, next(iter(recipes.values())).cluster.workers):
        predicted = forecast(recipes, args.worker) if args.forecast or args.picture else {}
        steps = in_turns(recipes, args.worker, args.rounds, traces)
        for name, trace in traces.items():
            draw(recipes[name], trace, predicted[name], args.picture, args.worker)
    if args.worker == 0:
        seconds = {name: forecast.seconds for name, forecast in predicted.items()}
        args.result.write_text(json.dumps({"steps": steps, "predicted": seconds}))


@contextmanager
def joined(store: str, rank: int, hosts: int) -> Iterator[None]:
    """Be one of the world of all hosts, with one thread. `store` is HOST:PORT of the first host."""
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
    engines = {name: make_engine(recipe, groups[recipe.placed_fold], device) for name, recipe in recipes.items()}
    batches = {name: random_batches(recipe, groups[recipe.placed_fold], device) for name, recipe in recipes.items()}
    ran = dict.fromkeys(recipes, 0)
    movers = {
        name: ExpertPlacing(recipe, groups[recipe.placed_fold], engines[name], partial(_tell, name))
        for name, recipe in recipes.items()
    }
    routes = {name: recording(recipe, engines[name], groups[recipe.placed_fold]) for name, recipe in recipes.items()}

    def turn(name: str, trace: Trace | None) -> float:
        engine, control = engines[name], groups[recipes[name].placed_fold].control
        engine.execution.trace = trace
        dist.barrier()
        begin, ran[name] = time.perf_counter(), ran[name] + 1
        routes[name].begin(ran[name])
        routes[name].record(ran[name], losses := engine.train(batches[name]))
        routes[name].flush()
        took = control.all_reduce(torch.tensor([time.perf_counter() - begin], dtype=torch.float64), "max")
        engine.gradients.zero()  # type: ignore[attr-defined]
        movers[name].after(ran[name], all_losses(losses, control).count_ME)
        return took.item()

    for name, recipe in recipes.items():
        told: list[Any] = []
        search, online = online_search(recipe, engines[name].execution, device, None, lambda: 0)
        searching = online.steps(search, told.append)
        next(searching, None)
        steps_of_search: list[float] = []
        while search is not None and online.chosen is None:
            steps_of_search.append(turn(name, engines[name].execution.trace))
            searching.send(steps_of_search[-1])
        if rank == 0 and online.chosen is not None:
            found = ", ".join(f"{record['order']} {record['step_time_s']:.2f} s" for record in told if record["kind"] == "tried")
            line = f"{name}: {len(steps_of_search)} steps in {sum(steps_of_search):.1f} s, {found}"
            print(line, file=sys.stderr, flush=True)
    for number in range(WARM_UP + rounds):
        for name, engine in engines.items():
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
    for communicators in groups.values():
        communicators.close()
    return steps


def _tell(name: str, record: Mapping[str, Any]) -> None:
    what = f"{record['experts']} experts move, overload {record['overload']:.2f} → {record['expected']:.2f}"
    print(f"{name}: {what}", file=sys.stderr, flush=True)


def recording(recipe: Recipe, engine: Engine, groups: Groups) -> StepRoutes:
    """Return what records the routes of steps, if a variant asks for it (`routes.record`), in a temporary folder."""
    about = About.of(recipe, NEWEST, None)
    return StepRoutes(recipe, groups, engine.execution, Folder(tempfile.mkdtemp(prefix="foldray-routes-")), about)


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

    `run` has the seconds of steps, and `predicted` the predicted seconds of the recipes that have a prediction.
    """
    first = statistics.median(next(iter(run.values())))
    width = max(map(len, run)) + 2
    lines = [f"{'':<{width}}{'s':>8}{'min':>8}{'max':>8}{'× faster':>10}{'predicted' if predicted else '':>12}"]
    for name, steps in run.items():
        middle = statistics.median(steps)
        line = f"{name:<{width}}{middle:>8.2f}{min(steps):>8.2f}{max(steps):>8.2f}{first / middle:>10.2f}"
        lines.append(line + (f"{predicted[name]:>12.2f}{predicted[name] / middle - 1:>+7.0%}" if name in predicted else ""))
    return "\n".join(lines)


def on_lab(args: argparse.Namespace) -> None:
    """Run this script on the hosts of a lab, and print and write what the first worker has measured."""
    from tests.lab.cores import part_of_core
    from tests.lab.hosts import hosts

    check_lab()
    workers = next(iter(recipes_of(args).values())).cluster.workers
    speeds = args.speeds or [1.0] * workers
    share = args.share * len(os.sched_getaffinity(0)) / workers
    with ExitStack() as stack:
        parts = [stack.enter_context(part_of_core(share * speed)) for speed in speeds]
        machines = stack.enter_context(hosts(workers // args.together, rate=f"{args.link}mbit"))
        lab = [host for host in machines for _ in range(args.together)]
        run = on_hosts(lab, Path(__file__), sys.argv[1:], parts=parts)
    print(table(run["steps"], run["predicted"]))
    if args.json:
        setting = {"cpu": processor(), "torch": torch.__version__, "command": " ".join(sys.argv), "core": share}
        args.json.write_text(json.dumps({**setting, **run}, indent=1) + "\n")


if __name__ == "__main__":
    main()
