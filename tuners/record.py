"""The attributes of studies and trials in the storage. No other module uses their names.

Optuna stores user attributes, which are JSON values by name, and its dashboard shows them. `TrialRecord` and `StudyRecord`
list the attributes with their types. `write_trial` and `write_study` write them; `read_trials` and `read_study` read them.
Another version of foldray may have written the storage, or it may be damaged, so attributes are checked when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple, Self

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foldray.errors import UserError
from trainers.cluster.actors import MEMORY
from trainers.folders import first_fault
from tuners.table import Table

Positive = Annotated[float, Field(gt=0)]
Step = Annotated[tuple[float, ...], Field(strict=False)]  # JSON has no tuples


class _Record(BaseModel):
    """Attributes by name. Only fields that were set are written, so a record may hold some of the facts."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of_attributes(cls, attributes: Mapping[str, Any]) -> Self:
        """Read a record. Attributes that this version does not know are ignored."""
        return cls(**{name: attributes[name] for name in cls.model_fields if name in attributes})

    def as_attributes(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True)


class TrialRecord(_Record):
    """The facts about one trial.

    Args:
        owner: the tuner that runs the trial, as HOST:PID.
        seen: when that tuner last said that it is alive, in seconds since 1970 by its host's clock. Other tuners only look
            whether it changes.
        lost: whether the tuner went away before the trial ended, or the trial cannot be read. Its row is then free again.
        setting: the trial's row in words.
        predicted_s: the planner's prediction of a step, in seconds.
        hosts: addresses of the nodes on which the trial was measured.
        seconds: seconds of a step of the setting: `ratio` times a step of the unchanged recipe at the study's start.
        ratio: the step's duration relative to the unchanged recipe, measured side by side.
        ratio_half_interval: from the ratio to the farther end of its 95 % interval; None after a single turn.
        peak_gib: memory of the fullest rank, in GiB.
        compute_ms: computation in one step, in milliseconds; the largest of all ranks.
        exposed_comm_ms: exposed communication in one step, in milliseconds; the largest of all ranks.
        over_bound: the recorded step over the time that no order of its ops can beat.
        steps_s: seconds of every step on its slowest rank, by turn.
        feasible: whether the setting ran and stayed within the memory limit.
        reason: why the trial failed, was lost or is not feasible. It starts with `MEMORY` if memory was the cause.
    """

    owner: str | None = None
    seen: float = 0.0
    lost: bool = False
    setting: str | None = None
    predicted_s: Positive | None = None
    hosts: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    seconds: Positive | None = None
    ratio: Positive | None = None
    ratio_half_interval: Annotated[float, Field(ge=0)] | None = None
    peak_gib: float | None = None
    compute_ms: float | None = None
    exposed_comm_ms: float | None = None
    over_bound: Positive | None = None
    steps_s: Annotated[tuple[Step, ...], Field(strict=False)] = ()
    feasible: bool | None = None
    reason: str | None = None

    @property
    def needs_too_much_memory(self) -> bool:
        return (self.reason or "").startswith(MEMORY)

    def summary(self) -> dict[str, Any]:
        """Return the facts for `foldray tune --json`."""
        names = {"setting", "seconds", "ratio", "predicted_s", "peak_gib", "over_bound", "feasible", "hosts", "reason"}
        return self.model_dump(mode="json", include=names)

    def metrics(self) -> dict[str, float]:
        """Return the known numbers by the names of their MLflow metrics."""
        names = {"predicted_s", "ratio", "peak_gib", "compute_ms", "exposed_comm_ms", "over_bound"}
        known = {"step_time_s": self.seconds, **self.model_dump(include=names)}
        return {name: value for name, value in known.items() if value is not None}


class Comparison(_Record):
    """A comparison in a study's run-off.

    Args:
        row: the table's row that was compared with the unchanged recipe.
        asked: number of pairs of turns that were asked for. There are fewer if the row was surely not the best.
        times: step time of the unchanged recipe over that of the row, by pair.
    """

    row: int
    asked: int
    times: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]


class StudyRecord(_Record):
    """The facts about a study.

    Args:
        space: hash of the study's recipe and table of settings.
        reference_s: seconds of a step of the unchanged recipe at the study's start.
        comparisons: those of the run-off, of the settings that could be the best.
    """

    space: str | None = None
    reference_s: Positive | None = None
    comparisons: Annotated[tuple[Comparison, ...], Field(strict=False)] = ()
    mlflow_run_id: str | None = None


class StoredTrial(NamedTuple):
    """A trial as the storage has it.

    Args:
        row: index into the table's rows; None if Optuna has not written the trial's parameters yet, or no row has them.
    """

    number: int
    state: TrialState
    row: int | None
    params: Mapping[str, Any]
    record: TrialRecord
    started: datetime | None
    ended: datetime | None
    trial_id: int

    @property
    def has_row(self) -> bool:
        """Whether the trial's row is measured, or is being measured."""
        return self.row is not None and not self.record.lost

    @property
    def was_measured(self) -> bool:
        """Whether the trial has a step time, from all of its turns or from the first ones."""
        return self.state in (TrialState.COMPLETE, TrialState.PRUNED) and self.record.seconds is not None


def read_trials(study: optuna.Study, table: Table[Any], states: Sequence[TrialState] | None = None) -> list[StoredTrial]:
    """Read all trials of a study, or those in some states, in the order of their numbers."""
    return [read_trial(trial, table) for trial in study.get_trials(deepcopy=False, states=states)]


def read_trial(trial: FrozenTrial, table: Table[Any]) -> StoredTrial:
    """Read one trial. A trial that cannot be read counts as lost, with a reason, so its row can be measured again."""
    # The only row of a table has no parameters, so empty ones name it. In other tables they have not been written yet.
    row = table.find(trial.params) if trial.params or not table.distributions else None
    try:
        record = TrialRecord.of_attributes(trial.user_attrs)
        if trial.params and row is None:
            record = TrialRecord(lost=True, reason="its parameters are no row of the table")
    except ValidationError as error:
        record = TrialRecord(lost=True, reason=f"its attributes cannot be read ({first_fault(error)})")
    return StoredTrial(
        trial.number, trial.state, row, trial.params, record, trial.datetime_start, trial.datetime_complete, trial._trial_id
    )


def write_trial(trial: optuna.Trial, record: TrialRecord) -> None:
    """Write the fields of a record that were set. Other attributes of the trial stay.

    Raises:
        optuna.exceptions.UpdateFinishedTrialError: the trial has ended.
    """
    for name, value in record.as_attributes().items():
        trial.set_user_attr(name, value)


def write_constraints(trial: optuna.Trial, ran: bool, excess_gib: float | None = None) -> None:
    """Tell Optuna whether a trial is feasible, for its dashboard and its front of best trials.

    `excess_gib` is above the memory limit, negative below it, and None if there is no limit.
    """
    trial.set_constraint("runs", -1.0 if ran else 1.0)
    if excess_gib is not None:
        trial.set_constraint("memory", excess_gib)


def read_study(study: optuna.Study) -> StudyRecord:
    """Read the facts about a study. Refuse attributes of other types than this version writes."""
    try:
        return StudyRecord.of_attributes(study.user_attrs)
    except ValidationError as error:
        rule = f"is a study whose attributes cannot be read ({first_fault(error)}); choose another name"
        raise UserError("tune.study", study.study_name, rule) from None


def write_study(study: optuna.Study, record: StudyRecord) -> None:
    """Write the fields of a record that were set. Other attributes of the study stay."""
    for name, value in record.as_attributes().items():
        study.set_user_attr(name, value)
