"""The watchers of a study: the terminal, MLflow, and the notes and pictures of Optuna's dashboard."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import yaml
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.trial import TrialState
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from foldray.recipe import Recipe
from trainers.measure.bench import shifted
from trainers.pictures.timeline import draw_timelines
from trainers.sinks.mlflow_server import TrackingServer, log_recipe
from tuners import report
from tuners.measure import Measurement
from tuners.outcome import Outcome, Watcher
from tuners.predictions import Predictions
from tuners.record import StoredTrial, StudyRecord, read_study, write_study
from tuners.space import Setting, Settings, apply_setting

if TYPE_CHECKING:
    from mlflow.entities import Run

_log = logging.getLogger(__name__)


class Console(Watcher):
    """Shows a progress bar and a line for every trial on standard error."""

    def __init__(self, trials: int):
        self._terminal = Terminal(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._terminal)
        self._task = self._progress.add_task("tuning", total=trials)
        self._predicting: TaskID | None = None
        self._best: float | None = None

    def on_predicted(self, done: int, total: int) -> None:
        if self._predicting is None:
            self._predicting = self._progress.add_task("predicting", total=total)
            self._progress.update(self._task, visible=False)
            self._progress.start()
        self._progress.update(self._predicting, completed=done, visible=done < total)

    def on_study_start(
        self, study: optuna.Study, trials: list[StoredTrial], table: Settings, predictions: Predictions | None
    ) -> None:
        done = sum(trial.state.is_finished() and not trial.record.lost for trial in trials)
        settings = f"{len(table.rows)} legal setting{'s' * (len(table.rows) > 1)}"
        parts = [f"{settings}, {'predicted' if predictions else 'nothing predicted'}"]
        parts += [f"{done} trials are done"] if done else []
        self._terminal.print("; ".join(parts))
        for trial in trials:
            if trial.record.lost and trial.state != TrialState.RUNNING:
                self._terminal.print(f"trial {trial.number} does not count: {trial.record.reason}", soft_wrap=True)
        self._progress.update(self._task, completed=done, visible=True)
        self._progress.start()

    def on_trial_end(self, study: optuna.Study, trial: StoredTrial) -> None:
        record = trial.record
        if record.seconds is None:
            line = f"{'–':>10}     {record.setting}: {record.reason or 'failed'}"
        else:
            better = self._best is None or record.seconds < self._best
            if trial.state == TrialState.COMPLETE and record.feasible and better:
                self._best = record.seconds
            stopped = trial.state == TrialState.PRUNED
            note = "  stopped early" if stopped else "  best so far" if self._best == record.seconds else ""
            line = f"{record.seconds * 1e3:>10.0f} ms  {record.setting}{note}"
        self._terminal.print(line, soft_wrap=True)
        self._progress.advance(self._task)

    def close(self) -> None:
        self._progress.stop()


class DashboardNotes(Watcher):
    """Adds a note and a picture of the timeline to every trial in Optuna's dashboard.

    `folder` is the study's. It holds the pictures and the dashboard's copies of them.
    """

    def __init__(self, folder: Path):
        self._folder, artifacts = folder, artifact_folder(folder)
        _picture_of_trial(folder, 0).parent.mkdir(parents=True, exist_ok=True)
        artifacts.mkdir(parents=True, exist_ok=True)
        self._store = FileSystemArtifactStore(str(artifacts))

    def on_measured(self, trial: optuna.Trial, setting: Setting, measurement: Measurement) -> None:
        """Draw the trial's recorded step on the first rank, if a step was recorded."""
        if measurement.recorded is None:
            return
        path = _picture_of_trial(self._folder, trial.number)
        graph, recordings = measurement.recorded
        spans = recordings[0].spans
        rows = {"measured": shifted(spans, min(span.start for span in spans.values()))}
        draw_timelines(graph, rows, path, f"trial {trial.number}: {setting}")
        upload_artifact(artifact_store=self._store, file_path=str(path), study_or_trial=trial)

    def on_trial_end(self, study: optuna.Study, trial: StoredTrial) -> None:
        from optuna_dashboard import save_note

        save_note(optuna.Trial(study, trial.trial_id), report.trial_note(trial.record))

    def on_study_end(self, study: optuna.Study, outcome: Outcome) -> None:
        from optuna_dashboard import save_note

        save_note(study, f"**{outcome.best}**. {report.gain_line(outcome)}")
        for trial, result in outcome.run_off:
            save_note(optuna.Trial(study, trial.trial_id), report.trial_note(trial.record, result))


class MlflowRuns(Watcher):
    """Logs to MLflow: a run for the study, and inside it a run for every trial.

    After the study's run has been created, the first failure of MLflow causes a warning, and the study goes on.
    `storage` is the run storage, and `folder` the study's folder, which holds the pictures.
    """

    def __init__(self, recipe: Recipe, storage: Path, folder: Path):
        self._recipe, self._folder, self._warned = recipe, folder, False
        self.server = TrackingServer(recipe, storage)
        self._client, self._experiment_id = self.server.client, self.server.experiment_id
        self._measurements: dict[int, tuple[Setting, Measurement]] = {}
        self.study_run_id = ""

    def on_study_start(
        self, study: optuna.Study, trials: list[StoredTrial], table: Settings, predictions: Predictions | None
    ) -> None:
        known = read_study(study).mlflow_run_id
        if known is not None:
            self.study_run_id = known
            self._try(self._client.update_run, known, "RUNNING")
            return
        name, tags = f"{self._recipe.name} tune {study.study_name}", {"foldray.study": study.study_name}
        self.study_run_id = self._client.create_run(self._experiment_id, run_name=name, tags=tags).info.run_id
        write_study(study, StudyRecord(mlflow_run_id=self.study_run_id))
        self._try(log_recipe, self._client, self.study_run_id, self._recipe)

    def on_measured(self, trial: optuna.Trial, setting: Setting, measurement: Measurement) -> None:
        self._measurements[trial.number] = (setting, measurement)

    def on_trial_end(self, study: optuna.Study, trial: StoredTrial) -> None:
        self._try(self._log_trial, trial)

    def on_study_end(self, study: optuna.Study, outcome: Outcome) -> None:
        metrics = {"best_step_time_s": outcome.seconds, "reference_step_time_s": outcome.reference_s}
        if outcome.gain is not None:
            metrics |= {"gain": outcome.gain.times, "gain_low": outcome.gain.low, "gain_high": outcome.gain.high}
        metrics |= {f"importance_{name}": share for name, share in report.knob_importance(study).items()}
        for name, value in metrics.items():
            self._try(self._client.log_metric, self.study_run_id, name, value)
        from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

        line = report.gain_line(outcome)
        tags = {"foldray.best": str(outcome.best), "foldray.outcome": line, MLFLOW_RUN_NOTE: line}
        tags |= {"foldray.best_trial": str(outcome.winner.number)} if outcome.winner else {}
        for name, text in tags.items():
            self._try(self._client.set_tag, self.study_run_id, name, text)

    def close(self, status: str, files: list[Path]) -> None:
        """Store files and end the study's run, if the run has been created."""
        if not self.study_run_id:
            return
        for path in files:
            self._try(self._client.log_artifact, self.study_run_id, str(path))
        self._try(self._client.set_terminated, self.study_run_id, status)

    def _log_trial(self, trial: StoredTrial) -> None:
        record = trial.record
        tags = {"mlflow.parentRunId": self.study_run_id, "foldray.trial": str(trial.number)}
        if record.reason:
            tags["foldray.reason"] = record.reason
        if record.hosts:
            tags["foldray.hosts"] = ", ".join(record.hosts)
        name = f"trial {trial.number}: {record.setting or ''}"[:250]
        run: Run = self._client.create_run(self._experiment_id, start_time=_epoch_ms(trial.started), run_name=name, tags=tags)
        run_id = run.info.run_id
        for key, value in trial.params.items():
            self._client.log_param(run_id, key, value)
        for key, number in record.metrics().items():
            self._client.log_metric(run_id, key, number)
        if trial.number in self._measurements:
            self._log_measurement(run_id, trial.number, *self._measurements.pop(trial.number))
        status = "FAILED" if trial.state == TrialState.FAIL else "FINISHED"
        self._client.set_terminated(run_id, status, end_time=_epoch_ms(trial.ended))

    def _log_measurement(self, run_id: str, trial: int, setting: Setting, measurement: Measurement) -> None:
        steps = [seconds for turn in measurement.seconds for seconds in turn]
        for number, seconds in enumerate(steps):
            self._client.log_metric(run_id, "measured_step_s", seconds, step=number)
        recipe = apply_setting(self._recipe, setting).model_dump(mode="json", exclude={"tune"})
        self._client.log_text(run_id, yaml.safe_dump(recipe, sort_keys=False), "recipe.yaml")
        picture = _picture_of_trial(self._folder, trial)
        if picture.exists():
            self._client.log_artifact(run_id, str(picture))

    def _try(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _log.warning("MLflow at %s fails (%s); the study goes on", self.server.uri, self.server.reason(error))


def _epoch_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1e3)


def _picture_of_trial(folder: Path, trial: int) -> Path:
    return folder / "timelines" / f"trial-{trial}.png"


def artifact_folder(folder: Path) -> Path:
    return folder / "artifacts"
