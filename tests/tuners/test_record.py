"""The records of trials and studies: they are read as they were written, and unreadable ones do no harm."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from foldray.errors import UserError
from foldray.recipe.bounds import SamplerName
from tests.tuners.test_space import recipe
from tuners.record import (
    Comparison,
    StudyRecord,
    TrialRecord,
    read_study,
    read_trials,
    write_constraints,
    write_study,
    write_trial,
)
from tuners.samplers import SAMPLERS, make_sampler
from tuners.space import Settings
from tuners.storage import open_storage

TABLE = Settings(recipe(2, tp=[1], cp=[1], pp=[1], etp=[1], kind=["sequential", "stream"], degree=[2, 4]))
FULL = TrialRecord(
    owner="host:17", seen=1e9, setting="EP2 stream d=4", predicted_s=0.25, hosts=("10.0.0.1", "10.0.0.2"), seconds=0.5, ratio=0.8,
    ratio_half_interval=0.01, peak_gib=-0.5, compute_ms=1.0, exposed_comm_ms=0.0, over_bound=1.2,
    steps_s=((0.4, 0.5), (0.5, 0.6)), feasible=True,
    reason="none", lost=False,
)  # fmt: skip
ATTRIBUTES: dict[str, Any] = {
    "owner": "host:17", "seen": 1e9, "setting": "EP2 stream d=4", "predicted_s": 0.25, "hosts": ["10.0.0.1", "10.0.0.2"],
    "seconds": 0.5, "ratio": 0.8, "ratio_half_interval": 0.01, "peak_gib": -0.5, "compute_ms": 1.0, "exposed_comm_ms": 0.0,
    "over_bound": 1.2,
    "steps_s": [[0.4, 0.5], [0.5, 0.6]], "feasible": True, "reason": "none", "lost": False,
}  # fmt: skip
"""The attributes of `FULL`, with the names that dashboards show and studies of earlier versions have."""


@pytest.fixture(params=["sqlite", "journal"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> optuna.Study:
    url = {"sqlite": f"sqlite:///{tmp_path}/tune.db", "journal": f"journal://{tmp_path}/tune.log"}[request.param]
    return optuna.create_study(storage=open_storage(url), study_name="s", sampler=make_sampler("random", TABLE, 0))


def memory_study() -> optuna.Study:
    return optuna.create_study(study_name="s", sampler=make_sampler("random", TABLE, 0))


def test_a_trial_is_read_as_it_was_written(study: optuna.Study) -> None:
    trial = study.ask(TABLE.distributions)
    write_trial(trial, FULL)
    write_constraints(trial, ran=True, excess_gib=-1.0)
    study.tell(trial, 0.5)
    again = optuna.load_study(study_name="s", storage=study._storage)
    (stored,) = read_trials(again, TABLE)
    assert stored.record == FULL
    assert (stored.number, stored.state, stored.trial_id) == (0, TrialState.COMPLETE, trial._trial_id)
    assert stored.row is not None
    assert TABLE.params(TABLE.rows[stored.row]) == stored.params == trial.params
    assert again.trials[0].user_attrs == ATTRIBUTES
    assert again.trials[0].constraints == {"runs": -1.0, "memory": -1.0}
    assert set(ATTRIBUTES) == set(TrialRecord.model_fields)


def test_a_study_is_read_as_it_was_written(study: optuna.Study) -> None:
    assert read_study(study) == StudyRecord()
    write_study(study, StudyRecord(space="abc"))
    write_study(study, StudyRecord(reference_s=2.0, mlflow_run_id="r"))
    assert read_study(study) == StudyRecord(space="abc", reference_s=2.0, mlflow_run_id="r")
    assert study.user_attrs == {"space": "abc", "reference_s": 2.0, "mlflow_run_id": "r"}
    comparison = {"row": 3, "asked": 9, "times": [1.1, 1.2]}
    write_study(study, StudyRecord(comparisons=(Comparison(**comparison),)))
    assert read_study(study).comparisons == (Comparison(row=3, asked=9, times=(1.1, 1.2)),)
    assert study.user_attrs["comparisons"] == [comparison]


def test_what_is_not_set_is_not_written_and_leaves_what_was(study: optuna.Study) -> None:
    trial = study.ask(TABLE.distributions)
    write_trial(trial, TrialRecord(owner="host:1", seen=1.0))
    write_trial(trial, TrialRecord(seen=2.0))
    assert study.trials[0].user_attrs == {"owner": "host:1", "seen": 2.0}
    assert read_trials(study, TABLE)[0].record == TrialRecord(owner="host:1", seen=2.0)


DAMAGES: tuple[dict[str, Any], ...] = (
    {"seconds": "fast"}, {"seconds": -1.0}, {"seconds": 0}, {"seconds": float("nan")}, {"ratio": [1.0]}, {"hosts": "10.0.0.1"},
    {"hosts": [1]}, {"steps_s": [["x"]]}, {"steps_s": 3}, {"seen": "yesterday"}, {"lost": "no"}, {"feasible": 1},
    {"reason": {}}, {"peak_gib": None, "predicted_s": float("inf")},
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_trial_that_cannot_be_read_is_lost(damage: dict[str, Any]) -> None:
    """The row of the trial is free again, and no search learns from the trial. Other trials stay."""
    study = memory_study()
    whole, damaged = (study.ask(TABLE.distributions) for _ in range(2))
    for trial in (whole, damaged):
        write_trial(trial, FULL)
    for name, value in damage.items():
        damaged.set_user_attr(name, value)
    for trial in (whole, damaged):
        study.tell(trial, 0.5)
    kept, lost = read_trials(study, TABLE)
    assert kept.record == FULL
    assert lost.record.lost
    assert str(lost.record.reason).startswith(f"its attributes cannot be read ({list(damage)[-1]}")
    assert not lost.was_measured
    untried = make_sampler("ratio", TABLE, 0).untried_rows([kept, lost])
    assert lost.row in untried
    assert kept.row not in untried


def test_attributes_of_another_version_are_ignored() -> None:
    study = memory_study()
    trial = study.ask(TABLE.distributions)
    write_trial(trial, FULL)
    trial.set_user_attr("colour", "green")
    assert read_trials(study, TABLE)[0].record == FULL


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_trial_of_another_table_is_passed_over(name: SamplerName) -> None:
    study = optuna.create_study(sampler=make_sampler(name, TABLE, 0))
    foreign = {"ep": CategoricalDistribution(["eight"])}
    study.add_trial(optuna.trial.create_trial(value=1.0, params={"ep": "eight"}, distributions=foreign))
    study.add_trial(optuna.trial.create_trial(value=1.0))
    trials = [study.ask(TABLE.distributions) for _ in TABLE.rows]
    assert len({tuple(trial.params.items()) for trial in trials}) == len(TABLE.rows)
    stored = read_trials(study, TABLE)
    assert [trial.record.lost for trial in stored] == [True] + [False] * (1 + len(TABLE.rows))
    assert stored[0].record.reason == "its parameters are no row of the table"


@pytest.mark.parametrize(
    "damage",
    [{"reference_s": "slow"}, {"reference_s": -1.0}, {"space": 3}, {"mlflow_run_id": ["r"]}, {"comparisons": [{"times": 1.0}]}],
    ids=str,
)
def test_a_study_that_cannot_be_read_is_refused_in_one_line(damage: dict[str, Any]) -> None:
    study = memory_study()
    for name, value in damage.items():
        study.set_user_attr(name, value)
    with pytest.raises(UserError) as caught:
        read_study(study)
    (name,) = damage
    assert re.match(rf"tune\.study=s: is a study whose attributes cannot be read \({name}(\.0\.\w+)?: ", str(caught.value))
    assert str(caught.value).endswith("; choose another name")
    assert "\n" not in str(caught.value)


_OPTUNAS = {"user_attrs", "set_user_attr", "set_trial_user_attr", "set_study_user_attr", "set_constraint", "set_system_attr"}


def mentions(source: str) -> list[str]:
    """Return the uses of attribute names as strings, and of Optuna's functions for attributes."""
    names = {*TrialRecord.model_fields, *StudyRecord.model_fields} - set(get_args(SamplerName))
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in names:
            found.append(f"{node.lineno}: {node.value!r}")
        if isinstance(node, ast.Attribute) and node.attr in _OPTUNAS:
            found.append(f"{node.lineno}: .{node.attr}")
    return found


def test_no_other_module_knows_an_attribute_by_name() -> None:
    folder = Path(__file__).parents[2] / "tuners"
    found = {path.name: lines for path in sorted(folder.glob("*.py")) if (lines := mentions(path.read_text()))}
    assert set(found) == {"record.py"}
    assert sorted(mentions("trial.user_attrs.get('seconds')")) == ["1: 'seconds'", "1: .user_attrs"]
    assert mentions("trial.set_user_attr(NAME, 1)") == ["1: .set_user_attr"]
