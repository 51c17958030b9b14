"""Samplers choose no row twice, start with the best predictions, and learn the errors of the planner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from foldray.recipe.bounds import SamplerName
from tests.tuners.test_space import recipe
from tuners.predictions import Predictions
from tuners.record import TrialRecord, read_trials, write_trial
from tuners.samplers import (
    SAMPLERS,
    MeasuredOverPredicted,
    MeasuredTime,
    OptunaGP,
    OptunaTPE,
    PlannerOrder,
    TimeAndMemory,
    UniformRandom,
    expected_improvement,
    make_sampler,
)  # fmt: skip
from tuners.space import Setting, Settings


def table() -> Settings:
    return Settings(
        recipe(tp=[1], cp=[1], pp=[1], etp=[1, 2], kind=["sequential", "moe_only", "stream"], sp_bytes=[None, 1 << 18, 1 << 20])
    )


def seconds(row: Setting) -> float:
    """Return the made-up seconds of a row. Degree 4 and chunks of 256 KiB are the best."""
    hidden = {"sequential": 0.0, "moe_only": 0.25, "stream": 0.4}[row.kind] * (1 - abs(math.log2(row.degree) - 2) / 4)
    return 1.0 / row.ep**0.2 * (1 - hidden) * (1.1 if row.etp > 1 else 1.0) * (0.95 if row.sp_bytes == 1 << 18 else 1.0)


def guessed(row: Setting) -> float:
    """Return the prediction of a planner that underestimates the costs of ETP and of many pieces."""
    return seconds(row) * (0.85 if row.etp > 1 else 1.0) * (1 - 0.15 * math.log2(row.degree))


def predictions(guess: Callable[[Setting], float] = guessed) -> Predictions:
    rows = table().rows
    return Predictions([guess(row) for row in rows], [0.8 * gib(row) * 2**30 for row in rows])


def run(
    kind: str, trials: int, seed: int = 0, predicted: bool = True, guess: Callable[[Setting], float] = guessed
) -> optuna.Study:
    rows = table()
    study = optuna.create_study(sampler=make_sampler(kind, rows, seed, predictions(guess) if predicted else None))
    for _ in range(trials):
        trial = study.ask(rows.distributions)
        took = seconds(rows.row(trial.params))
        write_trial(trial, TrialRecord(seconds=took))
        study.tell(trial, took)
    return study


WAYS = {
    ("ratio", True, False): MeasuredOverPredicted, ("ratio", False, False): MeasuredTime,
    ("ratio", True, True): TimeAndMemory, ("ratio", False, True): TimeAndMemory,
    ("planner", True, False): PlannerOrder, ("planner", False, False): UniformRandom,
    ("planner", True, True): PlannerOrder, ("planner", False, True): UniformRandom,
    **{(name, told, second): way for name, way in (("gp", OptunaGP), ("tpe", OptunaTPE), ("random", UniformRandom))
       for told in (True, False) for second in (True, False)},
}  # fmt: skip


@pytest.mark.gate(8)
@pytest.mark.parametrize(("name", "told", "second"), WAYS)
def test_every_way_of_choosing_hands_out_what_fits_once(name: SamplerName, told: bool, second: bool) -> None:
    """Test with and without predictions, for one and two objectives, beside a running trial and one that did not fit."""
    rows = Settings(recipe(tp=[1], cp=[1], pp=[1], etp=[1], kind=["sequential", "stream"], degree=[2, 4]))
    held = [1.0 + number for number in range(len(rows.rows))]
    known = Predictions([guessed(row) for row in rows.rows], held) if told else None
    sampler = make_sampler(name, rows, 0, known, second)
    assert type(sampler.sampler) is WAYS[name, told, second]
    study = optuna.create_study(directions=["minimize"] * (1 + second), sampler=sampler)
    study.enqueue_trial(rows.params(rows.rows[-1]))
    too_large, running = (study.ask(rows.distributions) for _ in range(2))
    write_trial(too_large, TrialRecord(reason="memory: out of it"))
    study.tell(too_large, state=TrialState.FAIL)
    asked = [rows.row(too_large.params), rows.row(running.params)]
    for _ in range(len(rows.rows) - 2):
        trial = study.ask(rows.distributions)
        row = rows.row(trial.params)
        write_trial(trial, TrialRecord(seconds=seconds(row), peak_gib=gib(row)))
        study.tell(trial, [seconds(row), gib(row)] if second else seconds(row))
        asked.append(row)
    assert set(asked) == set(rows.rows)
    assert sampler.untried_rows(read_trials(study, rows)) == []


def test_every_sampler_of_a_recipe_is_there() -> None:
    assert set(SAMPLERS) == set(get_args(SamplerName)) == {name for name, _, _ in WAYS}


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.nightly("a minute of fits")) if k == "gp" else k for k in SAMPLERS]
)
def test_no_row_is_measured_twice_until_all_are(kind: str) -> None:
    rows = table()
    trials = min(len(rows.rows), 30)
    found = [rows.row(trial.params) for trial in run(kind, trials).trials]
    assert len(set(found)) == trials


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_seed_tells_all(kind: str) -> None:
    assert [each.params for each in run(kind, 8, seed=3).trials] == [each.params for each in run(kind, 8, seed=3).trials]


def test_the_planner_goes_by_its_order() -> None:
    rows = table()
    order = sorted(rows.rows, key=guessed)
    assert [guessed(rows.row(each.params)) for each in run("planner", 5).trials] == [guessed(row) for row in order[:5]]


WRONG = {
    "slices of experts": lambda row: seconds(row) * (0.6 if row.etp > 1 else 1.0),
    "degree": lambda row: seconds(row) * 0.7 ** math.log2(row.degree),
    "experts over ranks": lambda row: seconds(row) * row.ep**0.5,
}
"""Predictions of planners that have a wrong factor for one knob."""


@pytest.mark.gate(1)
@pytest.mark.parametrize("knob", WRONG)
def test_the_ratio_finds_the_best_where_the_planner_is_wrong(knob: str) -> None:
    """`ratio` finds the best row within eight trials, and the planner's order does not."""
    best = min(map(seconds, table().rows))
    assert run("planner", 8, guess=WRONG[knob]).best_value > 1.1 * best
    for seed in range(3):
        assert run("ratio", 8, seed, guess=WRONG[knob]).best_value == pytest.approx(best)


def gib(row: Setting) -> float:
    """Return the made-up memory of a row. Kinds that hide more communication need more memory."""
    return {"sequential": 1.0, "moe_only": 1.3, "stream": 1.8}[row.kind] / row.ep**0.3 * (1.2 if row.sp_bytes == 0 else 1.0)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("told", [True, False], ids=["predicted", "cold"])
def test_both_time_and_memory_are_looked_for(told: bool) -> None:
    """Trials of a third of the table include the fastest row and the row with the least memory, which differ."""
    rows = table()
    fastest, least = min(map(seconds, rows.rows)), min(map(gib, rows.rows))
    assert not any(seconds(row) == fastest and gib(row) == least for row in rows.rows)
    sampler = make_sampler("ratio", rows, 0, predictions() if told else None, second=True)
    study = optuna.create_study(directions=["minimize"] * 2, sampler=sampler)
    for _ in range(len(rows.rows) // 3):
        trial = study.ask(rows.distributions)
        row = rows.row(trial.params)
        write_trial(trial, TrialRecord(seconds=seconds(row), peak_gib=gib(row)))
        study.tell(trial, [seconds(row), gib(row)])
    assert min(each.values[0] for each in study.best_trials) == pytest.approx(fastest)
    assert min(each.values[1] for each in study.best_trials) == pytest.approx(least)


def test_a_row_that_is_being_measured_is_not_taken() -> None:
    rows = table()
    study = optuna.create_study(sampler=make_sampler("ratio", rows, 0, predictions()))
    asked = [study.ask(rows.distributions) for _ in range(6)]
    assert len({rows.row(trial.params) for trial in asked}) == 6


def test_a_lost_trial_frees_its_row_and_a_failed_one_does_not() -> None:
    rows = table()
    study = optuna.create_study(sampler=make_sampler("planner", rows, 0, predictions()))
    first, second = (study.ask(rows.distributions) for _ in range(2))
    write_trial(first, TrialRecord(lost=True))
    study.tell(first, state=TrialState.FAIL)
    study.tell(second, state=TrialState.FAIL)
    assert study.ask(rows.distributions).params == first.params
    assert second.params not in [study.ask(rows.distributions).params for _ in range(3)]


def test_what_needs_as_much_memory_as_a_row_that_did_not_fit_is_left_out() -> None:
    rows = table()
    held = [float(row.degree * row.etp) for row in rows.rows]
    sampler = make_sampler("random", rows, 0, Predictions([1.0] * len(held), held))
    study = optuna.create_study(sampler=sampler)
    trial = study.ask(rows.distributions)
    least = held[rows.number[rows.row(trial.params)]]
    write_trial(trial, TrialRecord(reason="memory: out of it"))
    study.tell(trial, state=TrialState.FAIL)
    free = sampler.untried_rows(read_trials(study, rows))
    assert sorted(free) == [number for number in range(len(held)) if held[number] < least]


def test_expected_improvement_is_that_of_draws() -> None:
    mean, deviation, best = np.array([0.0, 1.0, -0.5]), np.array([1.0, 0.5, 0.1]), 0.2
    drawn = np.random.default_rng(0).normal(mean, deviation, (400_000, 3))
    assert expected_improvement(mean, deviation, best) == pytest.approx(np.maximum(0, best - drawn).mean(axis=0), abs=5e-3)
