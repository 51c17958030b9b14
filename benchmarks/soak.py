"""Trains for half an hour, lets something fail every two minutes, and compares every loss with that of a quiet training.

    python benchmarks/soak.py --json soak.json --picture soak.png

The faults are those of `tests/lab/faults.py` that a training survives, drawn at random. The script prints what foldray told of
each, the seconds to the next new step, the steps that ran again, and the memory and the number of processes over time.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # noqa: F401
import psutil
from rich.console import Console
from rich.table import Table

from tests.lab.faults import FAULTS
from tests.lab.hurt import EVERY, Hurt, follow, place
from trainers.pictures.speed import draw_speed
from trainers.telemetry.history import History

_ENDLESS = ["training.steps=1000000", "training.eval_every=1000000"]
_LEFT_OUT = ("disk",)  # faults that need a small disk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to train (default: 30)")
    parser.add_argument("--every", type=float, default=120.0, metavar="S", help="seconds between two faults (default: 120)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the speed over time")
    given, console = parser.parse_args(), Console()
    with place(None) as folder:
        result = soak(folder, given.minutes * 60.0, given.every, random.Random(given.seed), console)
        if given.picture:
            draw_speed(History.read(folder / "metrics.jsonl").speed, given.picture, "half an hour of faults")
        result["differing"] = differing(folder)
    console.print(table(result["faults"]))
    for key in ("steps", "code", "left", "differing", "memory_mib", "processes"):
        console.print(f"{key}: {result[key]}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["code"] != 128 + signal.SIGTERM or bool(result["left"]) or bool(result["differing"]))


def soak(folder: Path, seconds: float, every: float, chance: random.Random, console: Console) -> dict[str, Any]:
    """Train, and hurt the training again and again. `metrics.jsonl` is in the folder afterwards."""
    survived = [name for name, fault in FAULTS.items() if fault.goes_on and fault.same]
    names = [name for name in survived if not any(word in name for word in _LEFT_OUT)]
    faults: list[dict[str, Any]] = []
    without: int | None = None  # the driver whose database is gone, which it has told
    with Hurt(folder, _ENDLESS) as training:
        training.wait_for("step")
        began = time.monotonic()
        samples, stop = list[tuple[float, float, int]](), threading.Event()
        sampler = threading.Thread(target=_sample, args=(training, began, samples, stop), daemon=True)
        sampler.start()
        while (at := time.monotonic() - began) < seconds and training.process.poll() is None:
            fault = FAULTS[chance.choice(names)]
            if "MLflow" in fault.name and training.driver == without:
                fault = replace(fault, told=None)
            without = training.driver if "database is deleted" in fault.name else without
            before = _again(training)
            told, took = follow(training, fault)
            training.kept.clear()
            time.sleep(max(0.0, every - (time.monotonic() - began - at)))
            lost = _again(training) - before
            faults.append({"at": at, "fault": fault.name, "told": told, "seconds": took, "lost": lost})
            console.print(f"{at / 60:4.1f} min  {fault.name}: {took:.0f} s, {lost} steps again")
        stop.set()
        sampler.join(10)
        training.process.send_signal(signal.SIGTERM)
        code = training.finish()
        steps, left = training.last_step, training.left()
        assert training.run is not None
        shutil.copy(training.run / "metrics.jsonl", folder / "metrics.jsonl")
    memory = [round(mib) for _, mib, _ in samples]
    return {
        "faults": faults, "steps": steps, "code": code, "left": left, "samples": samples,
        "memory_mib": _tenths(memory), "processes": _tenths([count for *_, count in samples]),
    }  # fmt: skip


def _again(training: Hurt) -> int:
    """Return how many steps have run again until now."""
    steps = [record["step"] for record in training.records("step")]
    return len(steps) - len(set(steps))


def _sample(training: Hurt, began: float, samples: list[tuple[float, float, int]], stop: threading.Event) -> None:
    """Note the time, the resident memory in MiB of all processes of the training, and their number."""
    while not stop.wait(5.0):
        resident, count = 0, 0
        training.look()
        for process in psutil.Process(training.process.pid).children(recursive=True):
            try:
                resident += process.memory_info().rss
                count += 1
            except psutil.Error:
                continue
        samples.append((round(time.monotonic() - began, 1), resident / 2**20, count))


def _tenths(values: list[int]) -> list[float]:
    """Return the median of each tenth of a course."""
    size = max(len(values) // 10, 1)
    return [statistics.median(values[start : start + size]) for start in range(0, len(values), size)]


def differing(folder: Path) -> list[int]:
    """Train undisturbed for as many steps, and return those whose loss is another."""
    hurt = {step: record["loss"] for step, record in History.read(folder / "metrics.jsonl").steps.items()}
    with place(None) as quiet, Hurt(quiet, [*_ENDLESS, f"training.stop_after={max(hurt)}"]) as training:
        if training.finish(patience=7200.0) != 0:
            raise RuntimeError(f"the undisturbed training failed: {training.errors[-2000:]}")
        expected = {record["step"]: record["loss"] for record in training.records("step")}
    return [step for step in sorted(hurt | expected) if hurt.get(step) != expected.get(step)]


def table(faults: list[dict[str, Any]]) -> Table:
    rows = Table(box=None, pad_edge=False)
    for name in ("minute", "fault", "told", "seconds", "steps lost"):
        rows.add_column(name, justify="left" if name in ("fault", "told") else "right")
    for fault in faults:
        lost = f"{fault['lost']}{' (!)' if fault['lost'] > 3 * EVERY else ''}"
        rows.add_row(f"{fault['at'] / 60:.1f}", fault["fault"], fault["told"] or "–", f"{fault['seconds']:.0f}", lost)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
