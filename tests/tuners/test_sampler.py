"""Choosing rows: never one twice, best first, and learning what the planner has wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from tests.tuners.test_space import recipe
from tuners.sampler import LOST, REASON, TableSampler, expected_improvement
from tuners.space import Setting, Settings

KINDS = ("ratio", "gp", "tpe", "random", "planner")


def table() -> Settings:
    return Settings(
        recipe(tp=[1], cp=[1], pp=[1], etp=[1, 2], kind=["sequential", "moe_only", "stream"], sp_bytes=[None, 1 << 18, 1 << 20])
    )


def seconds(row: Setting) -> float:
    """A made-up truth with its best inside."""
    hidden = {"sequential": 0.0, "moe_only": 0.25, "stream": 0.4}[row.kind] * (1 - abs(math.log2(row.degree) - 2) / 4)
    return 1.0 / row.ep**0.2 * (1 - hidden) * (1.1 if row.etp > 1 else 1.0) * (0.95 if row.sp_bytes == 1 << 18 else 1.0)


def guessed(row: Setting) -> float:
    """What a planner might say that takes experts' slices for free and longs for many pieces."""
    return seconds(row) * (0.85 if row.etp > 1 else 1.0) * (1 - 0.15 * math.log2(row.degree))


def run(
    kind: str, trials: int, seed: int = 0, predicted: bool = True, guess: Callable[[Setting], float] = guessed
) -> optuna.Study:
    rows = table()
    sampler = TableSampler(rows, kind, seed, [guess(row) for row in rows.rows] if predicted else None)
    study = optuna.create_study(sampler=sampler)
    for _ in range(trials):
        trial = study.ask(rows.distributions)
        took = seconds(rows.row(trial.params))
        trial.set_user_attr("seconds", took)
        study.tell(trial, took)
    return study


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_measured_twice_until_all_are(kind: str) -> None:
    rows = table()
    trials = min(len(rows.rows), 30)
    found = [rows.row(trial.params) for trial in run(kind, trials).trials]
    assert len(set(found)) == trials


@pytest.mark.parametrize("kind", KINDS)
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
"""What a planner might say that has one knob wrong by a factor."""


@pytest.mark.parametrize("knob", WRONG)
def test_the_ratio_finds_the_best_where_the_planner_is_wrong(knob: str) -> None:
    """Within eight trials, in which the planner's order does not."""
    best = min(map(seconds, table().rows))
    assert run("planner", 8, guess=WRONG[knob]).best_value > 1.1 * best
    for seed in range(3):
        assert run("ratio", 8, seed, guess=WRONG[knob]).best_value == pytest.approx(best)


def gib(row: Setting) -> float:
    """Made up: what hides most needs most."""
    return {"sequential": 1.0, "moe_only": 1.3, "stream": 1.8}[row.kind] / row.ep**0.3 * (1.2 if row.sp_bytes == 0 else 1.0)


@pytest.mark.parametrize("told", [True, False], ids=["predicted", "cold"])
def test_both_time_and_memory_are_looked_for(told: bool) -> None:
    """Within a third of the table: the fastest row and the least, which are not the same."""
    rows = table()
    fastest, least = min(map(seconds, rows.rows)), min(map(gib, rows.rows))
    assert not any(seconds(row) == fastest and gib(row) == least for row in rows.rows)
    given = ([guessed(row) for row in rows.rows], [0.8 * gib(row) * 2**30 for row in rows.rows]) if told else (None, None)
    study = optuna.create_study(directions=["minimize"] * 2, sampler=TableSampler(rows, "ratio", 0, *given, both=True))
    for _ in range(len(rows.rows) // 3):
        trial = study.ask(rows.distributions)
        row = rows.row(trial.params)
        trial.set_user_attr("seconds", seconds(row))
        trial.set_user_attr("peak_gib", gib(row))
        study.tell(trial, [seconds(row), gib(row)])
    assert min(each.values[0] for each in study.best_trials) == pytest.approx(fastest)
    assert min(each.values[1] for each in study.best_trials) == pytest.approx(least)


def test_a_row_that_is_being_measured_is_not_taken() -> None:
    rows = table()
    sampler = TableSampler(rows, "ratio", 0, [guessed(row) for row in rows.rows])
    study = optuna.create_study(sampler=sampler)
    asked = [study.ask(rows.distributions) for _ in range(6)]
    assert len({rows.row(trial.params) for trial in asked}) == 6


def test_a_lost_trial_frees_its_row_and_a_failed_one_does_not() -> None:
    rows = table()
    sampler = TableSampler(rows, "planner", 0, [guessed(row) for row in rows.rows])
    study = optuna.create_study(sampler=sampler)
    first, second = (study.ask(rows.distributions) for _ in range(2))
    first.set_user_attr(LOST, True)
    study.tell(first, state=TrialState.FAIL)
    study.tell(second, state=TrialState.FAIL)
    assert study.ask(rows.distributions).params == first.params
    assert second.params not in [study.ask(rows.distributions).params for _ in range(3)]


def test_what_needs_as_much_memory_as_a_row_that_did_not_fit_is_left_out() -> None:
    rows = table()
    held = [float(row.degree * row.etp) for row in rows.rows]
    sampler = TableSampler(rows, "random", 0, None, held)
    study = optuna.create_study(sampler=sampler)
    trial = study.ask(rows.distributions)
    least = held[rows.number[rows.row(trial.params)]]
    trial.set_user_attr(REASON, "memory: out of it")
    study.tell(trial, state=TrialState.FAIL)
    free = sampler.free(study.trials)
    assert sorted(free) == [number for number in range(len(held)) if held[number] < least]


def test_expected_improvement_is_that_of_draws() -> None:
    mean, deviation, best = np.array([0.0, 1.0, -0.5]), np.array([1.0, 0.5, 0.1]), 0.2
    drawn = np.random.default_rng(0).normal(mean, deviation, (400_000, 3))
    assert expected_improvement(mean, deviation, best) == pytest.approx(np.maximum(0, best - drawn).mean(axis=0), abs=5e-3)
