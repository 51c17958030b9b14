"""The result of a study (`Outcome`), and the interface of objects that follow a study while it runs (`Watcher`)."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from foldray.recipe import Recipe
from tuners.measure import Gain, Measurement
from tuners.predictions import Predictions
from tuners.record import StoredTrial
from tuners.space import Setting, Settings


@dataclass(frozen=True)
class Outcome:
    """The result of a study.

    Args:
        recipe: the recipe with the best setting.
        best: the setting that won the run-off, or that of the unchanged recipe if none is surely faster.
        seconds: time of a step with the best setting, in seconds, comparable with `reference_s`.
        reference_s: time of a step of the unchanged recipe at the start of the study, in seconds.
        trials: all trials in their order, lost ones included.
        gain: the winner's result in the run-off; None if the unchanged recipe is the best.
        table: all legal settings.
        run_off: the trials that could be the best, the fastest first, each with its result, or with why it has none.
        front: trials that no other trial beats at both time and memory, the fastest first; empty if memory was no objective.
    """

    recipe: Recipe
    best: Setting
    seconds: float
    reference_s: float
    trials: list[StoredTrial]
    gain: Gain | None
    table: Settings
    front: tuple[StoredTrial, ...] = ()
    run_off: tuple[tuple[StoredTrial, Gain | str], ...] = ()

    @property
    def winner(self) -> StoredTrial | None:
        """The trial of the best setting; None if it was not tried."""
        best = self.table.number[self.best]
        return next((trial for trial in self.counted if trial.row == best), None)

    @property
    def counted(self) -> list[StoredTrial]:
        """The trials without those that were lost."""
        return [trial for trial in self.trials if not trial.record.lost]


class Watcher:
    """The interface of objects that follow a study. Every method does nothing by default."""

    def on_predicted(self, done: int, total: int) -> None:
        """Called when the planner has predicted `done` of `total` settings, before the study starts."""

    def on_study_start(
        self, study: optuna.Study, trials: list[StoredTrial], table: Settings, predictions: Predictions | None
    ) -> None:
        """Called when the study has been opened. `trials` are the trials that it has already."""

    def on_measured(self, trial: optuna.Trial, setting: Setting, measurement: Measurement) -> None:
        """Called when a trial has been measured, before it ends."""

    def on_trial_end(self, study: optuna.Study, trial: StoredTrial) -> None:
        """Called when a trial has ended, measured or failed."""

    def on_study_end(self, study: optuna.Study, outcome: Outcome) -> None:
        """Called when all trials are done and the winner has been compared with the unchanged recipe."""
