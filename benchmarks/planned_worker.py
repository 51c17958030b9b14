"""The Ray job of `planned.py`: `planned_worker.py FOUND.json ROUNDS HARDWARE.yaml LENGTH FOLD…`.

All recipes take turns on the same ranks. Processors change their speed, so every rank times a matrix product before and after
every turn. The pace of a rank is the mean time of this product over its time during calibration.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from planned import FOLDS, RECIPE, overrides

from foldray.costs.hardware import load_hardware
from foldray.recipe import Recipe
from trainers.cluster import joining
from trainers.cluster.actors import Ranks
from trainers.measure.trial import measure_turn

_PRODUCTS = 31  # about a second


def main(path: str, rounds: str, hardware: str, length: str, *folds: str) -> None:
    machines = load_hardware(hardware)
    side = 1024
    (share,) = [share for flops, share in machines.gemm if flops == 2.0 * side**3]
    standard = 2.0 * side**3 / (machines.peak("fp32") * share)
    recipes = {(fold, schedule): recipe(fold, schedule, int(length)) for fold in folds for schedule in FOLDS[fold][1]}
    first = next(iter(recipes.values()))
    joining.connect(first)
    ranks = Ranks(first)
    rows: list[dict[str, Any]] = [{"fold": fold, "schedule": schedule, "steps": []} for fold, schedule in recipes]
    try:
        for number in range(1 + int(rounds)):
            for row, planned in zip(rows, recipes.values(), strict=True):
                begin = time.perf_counter()
                before = ranks.call(product, side, timeout=60)
                took = ranks.call(measure_turn, planned.model_dump(mode="json"), 1, len(rows), number == int(rounds), timeout=600)
                after = ranks.call(product, side, timeout=60)
                line = f"round {number} of {rounds}: {row['fold']} {row['schedule']}, {time.perf_counter() - begin:.0f} s"
                print(line, file=sys.stderr, flush=True)
                if number:
                    seconds = max(rank.seconds[0] for rank in took)
                    paces = [statistics.mean(both) / standard for both in zip(before, after, strict=True)]
                    row["steps"].append({"ms": seconds * 1e3, "paces": paces})
                    row["compute_ms"] = max(rank.compute for rank in took)
        Path(path).write_text(json.dumps(rows))
    finally:
        ranks.close()


def recipe(fold: str, schedule: str, length: int) -> Recipe:
    kind, _, degree = schedule.partition(":")
    order = [f"schedule.kind={kind}", f"schedule.degree={degree or 1}", "schedule.lag=1", "schedule.backward_lag=1"]
    return Recipe.load(RECIPE, [*overrides(length, FOLDS[fold][0]), *order, "engine.kind=torch"])


def product(state: dict[str, Any], side: int) -> float:
    """Return the mean seconds of a matrix product on a rank. A step meets fast and slow moments alike, so both count."""
    a, b = (torch.randn(side, side, device=state["device"]) for _ in range(2))
    a @ b
    begin = time.perf_counter()
    for _ in range(_PRODUCTS):
        a @ b
    return (time.perf_counter() - begin) / _PRODUCTS


if __name__ == "__main__":
    main(*sys.argv[1:])
