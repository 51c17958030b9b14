"""The Ray job of `tuned.py`: `tuned_worker.py FOUND.json TURNS SEEDS RECIPE key=value …`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

from foldray.planner.hardware import load_hardware
from foldray.recipe import Recipe
from trainers.cluster import joining
from tuners.measure import Bench, measure_gain
from tuners.predictions import Predictions, predict_rows
from tuners.record import TrialRecord, write_trial
from tuners.samplers import MeasuredOverPredicted, MeasuredTime, PlannerOrder, TableSampler, UniformRandom
from tuners.space import Settings, apply_setting
from tuners.study import FoldTuner

TRIALS, PAIRS, STEPS, REPLAYS = 15, 9, 2, 25
WAYS = {"ratio": MeasuredOverPredicted, "cold": MeasuredTime, "random": UniformRandom, "planner": PlannerOrder}


def main(path: str, turns: str, seeds: str, recipe: str, *overrides: str) -> None:
    base = Recipe.load(recipe, [*overrides, f"tune.turns={turns}", f"tune.steps={STEPS}", "tune.prune=null"])
    joining.connect(base)
    table = Settings(base)
    known = predict_rows(table, load_hardware(str(base.tune.hardware)))
    tell(f"{len(table.rows)} settings")
    bench = Bench(base)
    reference = bench.measure_step(base)
    rows = [exhaustive(bench, table, known, number) for number in range(len(table.rows))]
    best = min(range(len(rows)), key=lambda number: rows[number]["ratio"])
    results: dict[str, Any] = {"reference_s": reference, "rows": rows, "best": best, "searches": []}
    bench.close()
    results["replays"] = {way: replayed(way, table, known, rows) for way in WAYS}
    Path(path).write_text(json.dumps(results))
    for seed in range(int(seeds)):
        results["searches"].append(searched(base, seed, apply_setting(base, table.rows[best]), Path(path).parent))
        Path(path).write_text(json.dumps(results))


def exhaustive(bench: Bench, table: Settings, known: Predictions, number: int) -> dict[str, Any]:
    """Measure one setting in turns with the unchanged recipe."""
    row = table.rows[number]
    *_, pair = bench.measure(apply_setting(table.recipe, row), record=False)
    tell(f"{number + 1}: {pair.ratio:.3f} {row}")
    return {"setting": str(row), "row": row._asdict(), "ratio": pair.ratio, "ratios": pair.ratios, "steps_s": pair.seconds,
            "peak": pair.peak_bytes, "predicted_s": known.seconds[number]}  # fmt: skip


def searched(base: Recipe, seed: int, best: Recipe, folder: Path) -> dict[str, Any]:
    """Run a complete study, and measure its choice in turns with the best setting."""
    recipe = base.model_copy(
        update={"tune": base.tune.model_copy(update={"seed": seed, "trials": TRIALS, "study": f"seed{seed}", "turns": 3})}
    )
    outcome = FoldTuner(recipe, folder).fit()
    bench = Bench(best)
    try:
        gain = measure_gain(bench, outcome.recipe, PAIRS)
    finally:
        bench.close()
    tell(f"seed {seed}: {1 / gain.times:.3f} {outcome.best}")
    return {"seed": seed, "setting": str(outcome.best), "trials": len(outcome.trials), "over_best": 1 / gain.times,
            "low": 1 / gain.high, "high": 1 / gain.low}  # fmt: skip


def replayed(way: str, table: Settings, known: Predictions, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Replay a search on measured times with many seeds. Return the best setting so far over the best setting, by trial.

    A search gets the ratio of one turn, which its seed picks. The result counts with the median of all turns.
    """
    import random

    best, curves = min(row["ratio"] for row in rows), []
    for seed in range(REPLAYS):
        draw = random.Random(seed)
        study = optuna.create_study(sampler=TableSampler(table, WAYS[way](table, seed, None if way == "cold" else known)))
        order = sorted(range(len(rows)), key=known.seconds.__getitem__)
        starts = order[: table.recipe.tune.starts] if way == "ratio" else draw.sample(order, 3) if way == "cold" else []
        for number in starts:
            study.enqueue_trial(table.params(table.rows[number]))
        results: list[tuple[float, float]] = []
        curve = []
        for _ in range(min(TRIALS, len(rows))):
            trial = study.ask(table.distributions)
            row = rows[table.number[table.row(trial.params)]]
            seen = draw.choice(row["ratios"])
            write_trial(trial, TrialRecord(seconds=seen))
            study.tell(trial, seen)
            results.append((seen, row["ratio"]))
            curve.append(min(results)[1] / best)
        curves.append(curve)
    return curves


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    main(*sys.argv[1:])
