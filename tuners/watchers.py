"""Who looks on while a study runs: the terminal, MLflow, the dashboard's notes and pictures."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import yaml
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foldray.recipe import Recipe
from foldray.schedule import Span
from trainers.driver.mlflow_server import TrackingServer, log_recipe
from trainers.pictures.timeline import draw_timelines
from tuners import report
from tuners.measure import Measured
from tuners.sampler import REASON
from tuners.space import Setting, Settings, changed
from tuners.study import Outcome, Predictions, Watcher

if TYPE_CHECKING:
    from mlflow.entities import Run

_PARENT = "mlflow_run_id"
_log = logging.getLogger(__name__)


class Console(Watcher):
    """A progress bar, and a line for every trial, on standard error."""

    def __init__(self, trials: int):
        self._terminal = Terminal(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._terminal)
        self._task = self._progress.add_task("tuning", total=trials)
        self._best: float | None = None

    def started(self, study: optuna.Study, table: Settings, predictions: Predictions | None) -> None:
        knows = "predicted" if predictions else "nothing predicted"
        done = sum(each.state.is_finished() for each in study.get_trials(deepcopy=False))
        self._terminal.print(f"{len(table.rows)} legal settings, {knows}" + (f"; {done} trials are done" if done else ""))
        self._progress.update(self._task, completed=done)
        self._progress.start()

    def finished(self, study: optuna.Study, trial: FrozenTrial) -> None:
        seconds, setting = trial.user_attrs.get("seconds"), trial.user_attrs.get("setting", "")
        if seconds is None:
            line = f"{'–':>10}     {setting}: {trial.user_attrs.get(REASON, 'failed')}"
        else:
            better = self._best is None or seconds < self._best
            if trial.state == TrialState.COMPLETE and trial.user_attrs.get("feasible") and better:
                self._best = seconds
            note = "  stopped early" if trial.state == TrialState.PRUNED else "  best so far" if self._best == seconds else ""
            line = f"{seconds * 1e3:>10.0f} ms  {setting}{note}"
        self._terminal.print(line, soft_wrap=True)
        self._progress.advance(self._task)

    def ended(self, study: optuna.Study, outcome: Outcome) -> None:
        self._progress.stop()

    def close(self) -> None:
        self._progress.stop()


class Dashboard(Watcher):
    """What the Optuna dashboard shows of a trial beside its numbers: its timeline, and a note in plain words.

    Args:
        folder: of pictures, and of the dashboard's copies.
    """

    def __init__(self, folder: Path):
        self._pictures, artifacts = folder / "timelines", artifact_folder(folder)
        for each in (self._pictures, artifacts):
            each.mkdir(parents=True, exist_ok=True)
        self._store = FileSystemArtifactStore(str(artifacts))

    def measured(self, trial: optuna.Trial, setting: Setting, found: Measured) -> None:
        path = timeline(self._pictures, trial.number, setting, found)
        if path is not None:
            upload_artifact(artifact_store=self._store, file_path=str(path), study_or_trial=trial)

    def finished(self, study: optuna.Study, trial: FrozenTrial) -> None:
        from optuna_dashboard import save_note

        told = trial.user_attrs
        text = report.note(
            told.get("setting", ""), told.get("seconds", 0.0), told.get("ratio", 0.0), told.get("predicted_s"), told.get(REASON)
        )
        save_note(optuna.trial.Trial(study, trial._trial_id), text)

    def ended(self, study: optuna.Study, outcome: Outcome) -> None:
        from optuna_dashboard import save_note

        save_note(study, f"**{outcome.best}**. {report.gain_line(outcome)}")


class Runs(Watcher):
    """MLflow: a run for the study, and one inside it for every trial. What fails here costs a warning, never the study."""

    def __init__(self, recipe: Recipe, storage: Path, pictures: Path):
        self._recipe, self._pictures, self._warned = recipe, pictures / "timelines", False
        self.server = TrackingServer(recipe, storage)
        self._client, self._at = self.server.client, self.server.experiment_id
        self._measured: dict[int, tuple[Setting, Measured]] = {}
        self.parent = ""

    def started(self, study: optuna.Study, table: Settings, predictions: Predictions | None) -> None:
        known = study.user_attrs.get(_PARENT)
        if known is not None:
            self.parent = known
            self._try(self._client.update_run, known, "RUNNING")
            return
        name = f"{self._recipe.name} tune {study.study_name}"
        self.parent = self._client.create_run(self._at, run_name=name, tags={"foldray.study": study.study_name}).info.run_id
        study.set_user_attr(_PARENT, self.parent)
        self._try(log_recipe, self._client, self.parent, self._recipe)

    def measured(self, trial: optuna.Trial, setting: Setting, found: Measured) -> None:
        self._measured[trial.number] = (setting, found)

    def finished(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._try(self._log, trial)

    def ended(self, study: optuna.Study, outcome: Outcome) -> None:
        values = {"best_step_time_s": outcome.seconds}
        if outcome.gain is not None:
            values |= {"gain": outcome.gain.times, "gain_low": outcome.gain.low, "gain_high": outcome.gain.high}
        for key, value in values.items():
            self._try(self._client.log_metric, self.parent, key, value)

    def close(self, status: str, files: list[Path]) -> None:
        """Store files and end the study's run."""
        for path in files:
            self._try(self._client.log_artifact, self.parent, str(path))
        self._try(self._client.set_terminated, self.parent, status)

    def _log(self, trial: FrozenTrial) -> None:
        tags = {"mlflow.parentRunId": self.parent, "foldray.trial": str(trial.number)}
        told = trial.user_attrs
        if reason := told.get(REASON):
            tags["foldray.reason"] = reason
        if hosts := told.get("hosts"):
            tags["foldray.hosts"] = ", ".join(hosts)
        name = f"trial {trial.number}: {told.get('setting', '')}"[:250]
        run: Run = self._client.create_run(self._at, start_time=_epoch_ms(trial.datetime_start), run_name=name, tags=tags)
        run_id = run.info.run_id
        for key, value in trial.params.items():
            self._client.log_param(run_id, key, value)
        for key in ("seconds", "predicted_s", "ratio", "peak_gib", "compute_ms", "exposed_comm_ms"):
            if told.get(key) is not None:
                self._client.log_metric(run_id, "step_time_s" if key == "seconds" else key, told[key])
        if trial.number in self._measured:
            setting, found = self._measured.pop(trial.number)
            for number, steps in enumerate(found.seconds):
                for place, seconds in enumerate(steps):
                    self._client.log_metric(run_id, "measured_step_s", seconds, step=number * len(steps) + place)
            recipe = changed(self._recipe, setting).model_dump(mode="json", exclude={"tune"})
            self._client.log_text(run_id, yaml.safe_dump(recipe, sort_keys=False), "recipe.yaml")
            picture = self._pictures / f"trial-{trial.number}.png"
            if picture.exists():
                self._client.log_artifact(run_id, str(picture))
        status = "FAILED" if trial.state == TrialState.FAIL else "FINISHED"
        self._client.set_terminated(run_id, status, end_time=_epoch_ms(trial.datetime_complete))

    def _try(self, call: Any, *given: Any) -> None:
        try:
            call(*given)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _log.warning("MLflow at %s fails (%s); the study goes on", self.server.uri, self.server.reason(error))


def _epoch_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1e3)


def timeline(folder: Path, number: int, setting: Setting, found: Measured) -> Path | None:
    """Draw a trial's recorded step; None where none was recorded."""
    if found.recorded is None:
        return None
    path = folder / f"trial-{number}.png"
    graph, recordings = found.recorded
    spans = recordings[0].spans
    begin = min(span.start for span in spans.values())
    rows = {"measured": {op: Span(span.start - begin, span.end - begin) for op, span in spans.items()}}
    draw_timelines(graph, rows, path, f"trial {number}: {setting}")
    return path


def artifact_folder(folder: Path) -> Path:
    """Where the dashboard finds the pictures of a study whose files are in a folder."""
    return folder / "artifacts"
