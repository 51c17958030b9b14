"""Intervals hold as often as they say, and the run-off of a study compares all settings that could be the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState

from foldray.recipe import Recipe
from tests.tuners.test_space import recipe
from trainers.cluster.actors import RankFailure
from tuners import report
from tuners.measure import Gain, Measurement, interval, measure_pairs
from tuners.outcome import Outcome
from tuners.record import TrialRecord
from tuners.space import Setting
from tuners.study import AS_IT_STANDS, FoldTuner, could_be_best
from tuners.watchers import DashboardNotes, MlflowRuns


@pytest.mark.gate(4)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 20])
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
def test_an_interval_holds_the_true_ratio_in_95_percent_of_cases(count: int, heavy: bool) -> None:
    chances = np.random.default_rng(count)
    noise = chances.standard_t(2, (2000, count)) if heavy else chances.normal(size=(2000, count))
    held = sum(low <= 1.3 <= high for low, high in (interval(list(row)) for row in 1.3 * np.exp(0.03 * noise)))
    assert held >= 0.94 * 2000


@pytest.mark.parametrize("count", [2, 9])
def test_intervals_of_a_run_off_hold_together(count: int) -> None:
    """The best of five equal settings is chosen. Its interval holds the truth as often as a single one would."""
    chances, held = np.random.default_rng(count), 0
    for _ in range(2000):
        gains = [Gain.of(list(np.exp(0.03 * chances.normal(size=count))), among=5) for _ in range(5)]
        best = max(gains, key=lambda gain: gain.times)
        held += best.low <= 1 <= best.high
    assert held >= 0.94 * 2000


def test_an_interval_of_one_ratio_is_endless_and_more_make_it_narrower() -> None:
    assert interval([1.2]) == (0.0, math.inf)
    widths = [high / low for low, high in (interval([1.0, 1.02] * half) for half in (1, 2, 4))]
    assert widths == sorted(widths, reverse=True)
    assert Measurement(ratios=[1.5, 1.52]).half_interval > 0.14, "two turns may agree by chance"


class MadeUpBench:
    """Takes turns by a table of seconds, without ranks. What is not in the table fails."""

    hosts = ("here",)

    def __init__(self, reference: Recipe, seconds: dict[Setting, float | list[float] | Exception]):
        self.reference, self.seconds, self.asked = reference, seconds, list[Setting]()
        self.closed = 0

    def measure_step(self, recipe: Recipe) -> float:
        row = Setting.of(recipe)
        self.asked.append(row)
        found = self.seconds.get(row, 1.0)
        if isinstance(found, Exception):
            raise found
        return found.pop() if isinstance(found, list) else found

    def measure(self, recipe: Recipe) -> Iterator[Measurement]:
        ratio = self.measure_step(recipe)
        yield Measurement([[ratio]] * 2, [ratio, ratio * 1.001], 1 << 30)

    def close(self) -> None:
        self.closed += 1


def tuner_of(folder: Path, **tune: Any) -> FoldTuner:
    base = recipe(2, tp=[1], cp=[1], pp=[1], etp=[1], kind=["sequential", "stream"], degree=[1, 2, 4])
    given = {"pairs": 9, "prune": None, "sampler": "random", "trials": 50, **tune}
    tuner = FoldTuner(base.model_copy(update={"tune": base.tune.model_copy(update=given)}), folder)
    tuner._reference_s = 1.0
    return tuner


def run_trials(tuner: FoldTuner, bench: Any) -> None:
    while (trial := tuner.shared.claim_trial()) is not None:
        tuner._run_trial(bench, trial)


def rows_of(tuner: FoldTuner) -> dict[str, Setting]:
    return {str(row): row for row in tuner.table.rows}


def test_whatever_a_row_fails_of_costs_a_trial(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path)
    rows = rows_of(tuner)
    failing = {
        rows["EP2 stream d=2"]: IndexError("list index\nout of range"),
        rows["EP2 stream d=4"]: RankFailure("lost a worker"),
    }
    bench = MadeUpBench(tuner.recipe, {**failing, rows["EP2 sequential"]: 0.5})
    run_trials(tuner, bench)
    trials = tuner.shared.trials()
    assert len(trials) == len(tuner.table.rows)
    reasons = {trial.record.setting: trial.record.reason for trial in trials if trial.state == TrialState.FAIL}
    assert reasons == {"EP2 stream d=2": "failed: IndexError: list index out of range", "EP2 stream d=4": "lost a worker"}
    assert bench.closed == 2, "the ranks may be in any state"
    assert str(tuner._conclude(bench).best) == "EP2 sequential"


def test_the_first_trial_is_the_recipe_beside_itself(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path, trials=2)
    run_trials(tuner, MadeUpBench(tuner.recipe, {}))
    first, other = tuner.shared.trials()
    assert first.record.setting == f"{tuner.table.default}{AS_IT_STANDS}"
    assert AS_IT_STANDS not in (other.record.setting or "")
    assert tuner._recipe_of(tuner.table.default) is tuner.recipe


def test_the_run_off_has_all_that_could_be_the_best(tmp_path: Path) -> None:
    """The shortest trial was luck. Of three that could be the best, the second one wins. The unchanged recipe has no part."""
    tuner = tuner_of(tmp_path)
    rows = rows_of(tuner)
    lucky, good, fair = (rows[name] for name in ("EP2 stream d=2", "EP2 stream d=4", "EP2 sequential"))
    run_trials(tuner, MadeUpBench(tuner.recipe, {lucky: 0.70, good: 0.71, fair: 0.72}))
    bench = MadeUpBench(tuner.recipe, {lucky: 0.99, good: 0.7, fair: 0.8})
    outcome = tuner._conclude(bench)
    assert outcome.best == good
    assert outcome.gain is not None
    assert (outcome.gain.pairs, outcome.gain.times) == (9, pytest.approx(1 / 0.7))
    assert {trial.row for trial, _ in outcome.run_off} == {tuner.table.number[row] for row in (lucky, good, fair)}
    assert outcome.seconds == pytest.approx(0.7)
    again = MadeUpBench(tuner.recipe, {})
    assert tuner._conclude(again).best == good
    assert not again.asked, "the study knows the comparisons"
    assert_all_say_the_same(tuner, outcome, tmp_path)


def assert_all_say_the_same(tuner: FoldTuner, outcome: Outcome, folder: Path) -> None:
    """The report, the JSON document, the dashboard's notes, its importance and MLflow name one winner and the same numbers."""
    line, winner = report.gain_line(outcome), outcome.winner
    assert winner is not None
    assert f"It was trial {winner.number}." in line
    shortest = tuner.study.best_trial
    assert f"Trial {shortest.number} had the shortest step of all trials, but did not win." in line
    files = report.write_report(outcome, tuner.study, folder / "report")
    assert line in files["report"].read_text()
    assert report.summary(outcome)["best_trial"] == winner.number
    DashboardNotes(folder).on_study_end(tuner.study, outcome)
    attributes = tuner.study._storage.get_study_system_attrs(tuner.study._study_id)
    notes = " ".join(str(text) for text in attributes.values())
    assert line in notes
    assert "In the run-off: 1.43 times as fast" in notes
    runs = MlflowRuns(tuner.recipe, folder / "runs", folder)
    runs.on_study_start(tuner.study, [], tuner.table, None)
    runs.on_study_end(tuner.study, outcome)
    logged = runs.server.client.get_run(runs.study_run_id).data
    assert logged.tags["mlflow.note.content"] == line  # what MLflow's page of the run shows as its description
    assert logged.tags["foldray.best_trial"] == str(winner.number)
    assert outcome.gain is not None
    assert logged.metrics["gain"] == pytest.approx(outcome.gain.times)
    from optuna_dashboard._importance import get_param_importance_from_trials_cache
    from optuna_dashboard._inmemory_cache import InMemoryCache

    shown = get_param_importance_from_trials_cache(
        InMemoryCache(), tuner.study._storage, tuner.study._study_id, 0, tuner.study.get_trials()
    )
    assert {row["name"]: row["importance"] for row in shown} == pytest.approx(report.knob_importance(tuner.study))


def test_what_needs_too_much_memory_is_nobodys_best_trial(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path, memory_gib=0.5)
    run_trials(tuner, MadeUpBench(tuner.recipe, {}))
    assert {trial.state for trial in tuner.shared.trials()} == {TrialState.PRUNED}
    with pytest.raises(ValueError, match="Record does not exist"):
        _ = tuner.study.best_trial


def test_no_winner_is_told_where_the_run_off_confirms_none(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path)
    row = rows_of(tuner)["EP2 stream d=2"]
    run_trials(tuner, MadeUpBench(tuner.recipe, {row: 0.9}))
    noisy = MadeUpBench(tuner.recipe, {row: [0.9, 1.1] * 5})
    outcome = tuner._conclude(noisy)
    assert (outcome.best, outcome.gain, outcome.recipe) == (tuner.table.default, None, tuner.recipe)
    assert outcome.seconds == outcome.reference_s
    assert report.gain_line(outcome).startswith("No setting is surely faster than the recipe as it stands. The nearest, trial ")


def test_a_candidate_that_fails_leaves_the_run_off_to_the_others(tmp_path: Path) -> None:
    tuner = tuner_of(tmp_path)
    rows = rows_of(tuner)
    fast, good = rows["EP2 stream d=2"], rows["EP2 stream d=4"]
    run_trials(tuner, MadeUpBench(tuner.recipe, {fast: 0.5, good: 0.51}))
    outcome = tuner._conclude(MadeUpBench(tuner.recipe, {fast: RankFailure("lost a worker"), good: 0.51}))
    assert outcome.best == good
    assert [result for trial, result in outcome.run_off if trial.row == tuner.table.number[fast]] == ["lost a worker"]
    other = tuner_of(tmp_path / "other")
    run_trials(other, MadeUpBench(other.recipe, {fast: 0.5}))
    lost = MadeUpBench(other.recipe, {fast: RankFailure("lost a worker")})
    with pytest.raises(RuntimeError, match=r"could not be compared .*: lost a worker; the same command tries it again"):
        other._conclude(lost)


def test_what_is_surely_slower_leaves_the_run_off_early() -> None:
    base = recipe(2)
    slow = MadeUpBench(base, {})
    slow.seconds = {Setting.of(base): 1.0}
    assert len(measure_pairs(slow, base, 9, among=3, enough=1.5)) < 9
    assert len(measure_pairs(slow, base, 9, among=3, enough=0.9)) == 9


def test_trials_within_their_noise_could_be_the_best() -> None:
    def trial(row: int, ratio: float, half: float | None, state: TrialState = TrialState.COMPLETE) -> Any:
        record = TrialRecord(seconds=ratio, ratio=ratio, ratio_half_interval=half, feasible=True)
        return SimpleNamespace(row=row, record=record, state=state, was_measured=True)

    given = [
        trial(1, 0.8, 0.05),
        trial(2, 0.9, 0.04),
        trial(3, 0.9, 0.06),
        trial(4, 0.7, 0.2, TrialState.PRUNED),
        trial(5, 2.0, None),
    ]
    assert [each.row for each in could_be_best(given, default=0)] == [1, 3, 5]
    assert [each.row for each in could_be_best(given, default=1)] == [3, 5]
    assert [each.row for each in could_be_best([trial(0, 1.0, 0.3), trial(1, 1.2, 0.15)], default=0)] == [], (
        "slower than the recipe"
    )
