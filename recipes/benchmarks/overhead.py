"""What foldray costs beside plain Ray Train: the time to the first step, and the watchdog, counters and logs of every step.

    python recipes/benchmarks/overhead.py --rounds 7

The first part starts `foldray train` and a `TorchTrainer` that runs one step of the same model on random tokens, in turns.
Both have their own Ray, and the data is packed before. The second part trains on two workers, and takes turns between blocks
of steps as `foldray train` runs them and blocks of steps of the engine alone: without signs of life, counters, records and
sums of losses over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from foldray.recipe import Recipe

_BLOCK = 6  # steps in a turn
_TURNS = 6  # turns of both kinds of steps in a round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml", help="default: recipes/quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plain", metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        return plain(given.recipe, given.plain)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, measure in (("first step", first_steps), ("step", watched_steps)):
        found[name] = ours, theirs = measure(given.recipe, given.rounds)
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        print(f"{name}: foldray {told(ours)} s, plain {told(theirs)} s, ratio {told(ratios)}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def told(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def first_steps(recipe: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds from the start of the command to the end of the first step, for foldray and for plain Ray Train."""
    ours, theirs = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="overhead-") as place:
        one = [f"cluster.storage={place}", "training.stop_after=1", "training.eval_every=null", "training.eval_sequences=1"]
        train = [sys.executable, "-m", "foldray", "train", recipe, *one, "checkpoint.every=null", "--json"]
        for number in range(rounds + 1):
            began = time.time()
            done = subprocess.run(train, check=True, capture_output=True, text=True)
            lines = (Path(json.loads(done.stdout)["run_dir"]) / "metrics.jsonl").read_text().splitlines()
            ours.append(next(record["time"] for record in map(json.loads, lines) if record["kind"] == "step") - began)
            file, began = Path(place, f"plain{number}"), time.time()
            subprocess.run([sys.executable, __file__, recipe, "--plain", str(file)], check=True, capture_output=True)
            theirs.append(float(file.read_text()) - began)
    return ours[1:], theirs[1:]  # the first round packs the data and makes MLflow's database


def plain(recipe: str, file: str) -> int:
    """Train one step with plain Ray Train, and write when it was over."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            _one_step,
            train_loop_config={"recipe": str(Path(recipe).absolute()), "file": file, "path": os.getcwd()},
            scaling_config=ScalingConfig(num_workers=Recipe.load(recipe).cluster.workers),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    return 0


def _one_step(config: dict[str, Any]) -> None:
    import ray.train
    import torch

    from foldray.comm import Groups
    from trainers.measure.comparison import random_batches
    from trainers.worker.engines import make_engine

    torch.set_num_threads(1)
    recipe, rank = Recipe.load(config["recipe"]), ray.train.get_context().get_world_rank()
    groups = Groups.create(recipe.placed_fold, rank)
    engine = make_engine(recipe, groups, torch.device("cpu"))
    engine.train(random_batches(recipe, groups, torch.device("cpu")))
    engine.update(1e-3)
    if rank == 0:
        Path(config["file"]).write_text(str(time.time()))


def watched_steps(recipe: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the median seconds of a step of each block, as `foldray train` runs it and by the engine alone."""
    from trainers.cluster.joining import connect
    from trainers.cluster.mailbox import Inbox
    from trainers.cluster.workers import on_workers
    from trainers.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="overhead-") as place:
        loaded = Recipe.load(recipe)
        connect(loaded)
        found = prepare(loaded.data, loaded.model.vocab, Path(place), None)
        with Inbox([]) as inbox:
            done = on_workers(loaded, _blocks, "overhead", data=str(found.folder), queue=inbox.queue, rounds=rounds)
    return done["ours"], done["theirs"]


def _blocks(config: dict[str, Any]) -> dict[str, Any]:
    import torch

    from foldray.comm import Activity
    from trainers.cluster.mailbox import Outbox
    from trainers.data.packed import PackedData
    from trainers.worker.loop import Worker
    from trainers.worker.pulse import Pulse

    recipe = Recipe.parse(config["recipe"])
    torch.set_num_threads(recipe.cluster.cpus_per_worker)
    worker = Worker(recipe, PackedData.open(config["data"]), Outbox(config["queue"]), Activity())
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * (_TURNS * config["rounds"] + 1)):
        watched = number % 2 == 0
        beats = Outbox(config["queue"], limit=1)
        pulse = Pulse(worker.rank, worker.activity, beats, 3600.0) if watched else nullcontext()
        seconds = []
        with pulse, nullcontext() if watched else _unwatched(worker):
            for step in range(_BLOCK):
                worker.groups.control.all_reduce(torch.zeros(1))  # both kinds of steps begin together
                began = time.perf_counter()
                if watched:
                    worker._step(step, False)
                else:
                    worker.engine.train([worker._train_batch(step, m) for m in range(recipe.accumulation)])
                    worker.engine.update(1e-3)
                seconds.append(time.perf_counter() - began)
        times[watched].append(statistics.median(seconds))
    return {"ours": times[True][1:], "theirs": times[False][1:]}


@contextmanager
def _unwatched(worker: Any) -> Iterator[None]:
    """Take the counters away for a while."""
    from foldray.comm import Activity
    from foldray.comm.communicator import Traffic

    before = Activity.start, Activity.waiting, Traffic.add
    Activity.start = lambda *_: None  # type: ignore[method-assign]
    Activity.waiting = lambda *_: nullcontext()  # type: ignore[method-assign,assignment]
    Traffic.add = lambda *_: None  # type: ignore[method-assign]
    yield
    Activity.start, Activity.waiting, Traffic.add = before  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
