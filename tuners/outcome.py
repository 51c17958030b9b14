"""What a study tells: `Watcher` hears of it while it runs, `Outcome` is its result."""

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
        best: the fastest setting that is feasible.
        seconds: a step of the best setting, comparable with `reference_s`.
        reference_s: a step of the unchanged recipe, in seconds.
        trials: all trials in their order, lost ones included.
        gain: None if the unchanged recipe is the best, or if no setting kept its lead when it was measured once more.
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

    @property
    def counted(self) -> list[StoredTrial]:
        """The trials without those that were lost."""
        return [trial for trial in self.trials if not trial.record.lost]


class Watcher:
    """Is called while a study runs. Every method does nothing by default."""

    def on_study_start(
        self, study: optuna.Study, trials: list[StoredTrial], table: Settings, predictions: Predictions | None
    ) -> None:
        """The study was opened; `trials` are those that it has already."""

    def on_measured(self, trial: optuna.Trial, setting: Setting, measurement: Measurement) -> None:
        """A trial was measured, and has not ended yet."""

    def on_trial_end(self, study: optuna.Study, trial: StoredTrial) -> None:
        """A trial has ended, whether it was measured or not."""

    def on_study_end(self, study: optuna.Study, outcome: Outcome) -> None:
        """All trials are done, and the winner was measured once more."""
