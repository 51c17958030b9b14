"""The trials that a study hands out: the first ones, their number, and none for another recipe."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.tuners.test_space import recipe
from tuners import shared_study
from tuners.predictions import Predictions
from tuners.record import StudyRecord, TrialRecord, write_study, write_trial
from tuners.samplers import SAMPLERS
from tuners.shared_study import SharedStudy
from tuners.space import Settings
from tuners.study import could_be_best

SPACE: dict[str, Any] = {"tp": [1], "cp": [1], "pp": [1], "kind": ["sequential", "stream"], "degree": [2, 4]}


def given(**tune: Any) -> Recipe:
    base = recipe(2, **SPACE)
    return base.model_copy(update={"tune": base.tune.model_copy(update=tune)})


def opened(folder: Path, of: Recipe, predicted: bool = False) -> SharedStudy:
    table = Settings(of)
    seconds = [float(len(table.rows) - number) for number in range(len(table.rows))]
    return SharedStudy(of, table, Predictions(seconds, seconds) if predicted else None, f"sqlite:///{folder}/tune.db")


def claim_all(shared: SharedStudy, seconds: float = 1.0) -> list[int]:
    """Claim and end all trials. Return their rows in order."""
    rows = []
    while (trial := shared.claim_trial()) is not None:
        write_trial(trial, TrialRecord(seconds=seconds, ratio=seconds, feasible=True))
        rows.append(shared.read(shared.study.tell(trial, seconds)).row)
    return rows


def test_the_unchanged_recipe_is_first_where_nothing_is_predicted(tmp_path: Path) -> None:
    shared = opened(tmp_path, given(trials=3, sampler="random"))
    rows = claim_all(shared)
    table = Settings(given())
    assert rows[0] == table.number[table.default]
    assert len(set(rows)) == 3


@pytest.mark.parametrize(
    ("sampler", "first"), [("ratio", True), ("planner", True), ("gp", True), ("tpe", True), ("random", False)]
)
def test_the_planners_best_come_first(tmp_path: Path, sampler: str, first: bool) -> None:
    shared = opened(tmp_path, given(trials=3, starts=3, sampler=sampler), predicted=True)
    table = Settings(given())
    last = len(table.rows) - 1
    own, *others = claim_all(shared)
    assert own == table.number[table.default], "the recipe beside itself shows the noise"
    assert (others == [last, last - 1]) == first


def test_no_more_trials_than_rows_or_than_were_asked_for(tmp_path: Path) -> None:
    rows = Settings(given()).rows
    assert len(claim_all(opened(tmp_path, given(trials=2)))) == 2
    assert claim_all(opened(tmp_path, given(trials=2))) == [], "the same study is not begun anew"
    assert len(claim_all(opened(tmp_path, given(trials=100)))) == len(rows) - 2


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("predicted", [False, True])
def test_the_only_legal_setting_is_measured_once(tmp_path: Path, sampler: str, predicted: bool) -> None:
    base = recipe(2, tp=[1], cp=[1], pp=[1], ep=[1], etp=[1], kind=["sequential"], degree=[1])
    only = base.model_copy(update={"tune": base.tune.model_copy(update={"sampler": sampler})})
    shared = opened(tmp_path, only, predicted)
    assert claim_all(shared) == [0]
    assert could_be_best(shared.trials(), default=0) == [], "the recipe as it stands is not compared with itself"


def test_rows_are_compared_once_for_all_tuners(tmp_path: Path) -> None:
    seen: list[int] = []

    def measured(pairs: int) -> list[float]:
        seen.append(pairs)
        return [1.0 + len(seen)] * 2  # it stops early

    for row, pairs, times in [(0, 5, 2.0), (0, 5, 2.0), (0, 3, 2.0), (1, 5, 3.0), (0, 5, 2.0), (0, 9, 4.0), (1, 5, 3.0)]:
        found = opened(tmp_path, given()).pairs_of(row, pairs, lambda pairs=pairs: measured(pairs))
        assert list(found) == [times, times]
    assert seen == [5, 5, 9], "for every row, and for more pairs"


def test_a_study_of_another_recipe_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, given())
    other = recipe(2, **{**SPACE, "degree": [2]})
    with pytest.raises(UserError, match=r"^tune\.study=foldray: is a study of another recipe"):
        opened(tmp_path, other)
    with pytest.raises(UserError, match="study of another recipe"):
        opened(tmp_path, given(second="memory"))
    elsewhere = given()
    elsewhere = elsewhere.model_copy(update={"cluster": elsewhere.cluster.model_copy(update={"placement": "SPREAD"})})
    with pytest.raises(UserError, match="study of another recipe"):
        opened(tmp_path, elsewhere)


def test_a_damaged_trial_is_measured_again(tmp_path: Path) -> None:
    rows = claim_all(opened(tmp_path, given(trials=100, sampler="random")))
    with closing(sqlite3.connect(tmp_path / "tune.db")) as database, database:
        change = "UPDATE trial_user_attributes SET value_json = '\"half\"' WHERE key = 'ratio' AND trial_id = 2"
        assert database.execute(change).rowcount == 1
    again = opened(tmp_path, given(trials=100, sampler="random"))
    assert again.best_ratio() == 1.0
    assert claim_all(again, 0.5) == [rows[1]]
    assert again.best_ratio() == 0.5


def test_a_running_trial_that_cannot_be_read_is_released(tmp_path: Path) -> None:
    shared = opened(tmp_path, given(trials=1, sampler="random"))
    damaged = shared.claim_trial()
    assert damaged is not None
    assert shared.claim_trial() is None, "its tuner is alive"
    damaged.set_user_attr("seen", "now")
    again = shared.claim_trial()
    assert again is not None, "the damaged trial does not count"
    assert shared.trials()[0].state == TrialState.FAIL
    assert shared.trials()[0].row in claim_all(opened(tmp_path, given(trials=100, sampler="random")))


def test_the_last_trial_of_a_tuner_that_may_be_gone_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeats of another host have stopped. What its trial leaves is taken, once it counts as gone."""
    monkeypatch.setattr(shared_study, "_HEARTBEAT_S", 0.0)
    shared, seconds = opened(tmp_path, given(trials=1, sampler="random")), itertools.count(0.0, 10.0)
    left = shared.claim_trial()
    assert left is not None
    write_trial(left, TrialRecord(owner="another-host:1"))
    other = opened(tmp_path, given(trials=1, sampler="random"))
    other._claims = shared_study.Claims(lambda: next(seconds))
    assert other.claim_trial() is not None
    assert [trial.state for trial in other.trials()] == [TrialState.FAIL, TrialState.RUNNING]


def test_the_reference_is_measured_once(tmp_path: Path) -> None:
    assert opened(tmp_path, given()).reference_seconds(lambda: 2.0) == 2.0
    assert opened(tmp_path, given()).reference_seconds(lambda: 3.0) == 2.0
    write_study(opened(tmp_path, given()).study, StudyRecord(reference_s=4.0))
    assert opened(tmp_path, given()).reference_seconds(lambda: 3.0) == 4.0


def test_the_front_is_of_feasible_trials(tmp_path: Path) -> None:
    shared = opened(tmp_path, given(trials=4, second="memory", sampler="random"))
    told = [(2.0, 1.0, True), (1.0, 2.0, True), (3.0, 3.0, True), (0.5, 9.0, False)]
    for seconds, peak_gib, feasible in told:
        trial = shared.claim_trial()
        assert trial is not None
        write_trial(trial, TrialRecord(seconds=seconds, peak_gib=peak_gib, feasible=feasible))
        shared.study.tell(trial, [seconds, peak_gib])
    assert [trial.number for trial in shared.front()] == [1, 0]


def test_a_setting_that_does_not_fit_stops_no_other_one(tmp_path: Path) -> None:
    """Trials are stopped early against the best ratio, which must be one that may win."""
    shared = opened(tmp_path, given(trials=2, sampler="random"))
    for ratio, feasible in ((0.5, False), (0.9, True)):
        trial = shared.claim_trial()
        assert trial is not None
        write_trial(trial, TrialRecord(seconds=ratio, ratio=ratio, feasible=feasible))
        shared.study.tell(trial, ratio)
    assert shared.best_ratio() == 0.9
