"""Opens a study that several tuners may work on at once, and hands out its trials.

A killed tuner leaves a running trial behind. A trial's tuner writes heartbeats, so other tuners notice when they stop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.urls import told_without
from tuners.predictions import Predictions
from tuners.record import (
    Comparison,
    StoredTrial,
    StudyRecord,
    TrialRecord,
    read_study,
    read_trial,
    read_trials,
    write_study,
    write_trial,
)
from tuners.samplers import SAMPLERS, make_sampler
from tuners.space import Settings
from tuners.storage import open_storage, storage_lock
from tuners.table import Table

_HEARTBEAT_S, _DOUBTFUL_S, _SILENT_S = 5.0, 15.0, 60.0
"""Seconds between heartbeats, and without a heartbeat until a tuner may be gone, and until it counts as gone."""
_OBJECTIVE, _SECOND_OBJECTIVE = "step time (s)", "memory (GiB)"  # as Optuna's dashboard shows them

_log = logging.getLogger(__name__)


class SharedStudy:
    """The study of a recipe. It is created if it does not exist.

    The first trial of a new study measures the unchanged recipe beside itself, which shows the noise (an A/A trial). If there are
    predictions, the rows with the best ones are next.
    `url` is that of the storage.
    """

    def __init__(self, recipe: Recipe, table: Settings, predictions: Predictions | None, url: str):
        self._spec, self._table, self._predictions, self._url = recipe.tune, table, predictions, url
        self._claims = Claims()
        storage, with_memory = open_storage(url), recipe.tune.second is not None
        self._sampler = make_sampler(self._spec.sampler, table, self._spec.seed, predictions, with_memory)
        objectives = [_OBJECTIVE, _SECOND_OBJECTIVE] if with_memory else [_OBJECTIVE]
        with self._lock():
            self.study = optuna.create_study(
                storage=storage, study_name=self._spec.study, sampler=self._sampler, load_if_exists=True,
                directions=["minimize"] * len(objectives),
            )  # fmt: skip
            self._begin()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.set_metric_names(objectives)

    def trials(self, states: Sequence[TrialState] | None = None) -> list[StoredTrial]:
        """Return all trials of all tuners, or those in some states."""
        return read_trials(self.study, self._table, states)

    def read(self, trial: FrozenTrial) -> StoredTrial:
        return read_trial(trial, self._table)

    def claim_trial(self) -> optuna.Trial | None:
        """Take the next trial. Return None if all trials are spent, or no row is left.

        If another tuner may be gone, wait until this is known, because its trial is then free again.
        """
        while True:
            with self._lock():
                doubtful = self._claims.release_abandoned(self.study, self._table)
                counted = [trial for trial in self.trials() if trial.state != TrialState.WAITING and not trial.record.lost]
                if len(counted) < self._spec.trials and self._sampler.untried_rows(counted):
                    trial = self.study.ask(self._table.distributions)
                    self._claims.claim(trial)
                    return trial
            if not doubtful:
                return None
            self._claims.wait()

    def reference_seconds(self, measure: Callable[[], float]) -> float:
        """Return the seconds of a step of the unchanged recipe. The first tuner calls `measure` for all tuners."""
        with self._lock():
            known = read_study(self.study).reference_s
            if known is None:
                known = measure()
                write_study(self.study, StudyRecord(reference_s=known))
        return known

    def pairs_of(self, row: int, asked: int, measure: Callable[[], list[float]]) -> Sequence[float]:
        """Return how many times as fast as the unchanged recipe a row is, by pair of turns of the run-off.

        The first tuner calls `measure` for all tuners. For more pairs than were asked for then, it is called again.
        """
        with self._lock():
            known = {compared.row: compared for compared in read_study(self.study).comparisons}
            if row not in known or known[row].asked < asked:
                known[row] = Comparison(row=row, asked=asked, times=tuple(measure()))
                write_study(self.study, StudyRecord(comparisons=tuple(known.values())))
        return known[row].times

    def best_ratio(self) -> float | None:
        """Return the smallest ratio of all feasible trials that were measured to their end; None if there are none."""
        records = [trial.record for trial in self.trials([TrialState.COMPLETE])]
        return min((record.ratio for record in records if record.feasible and record.ratio is not None), default=None)

    def front(self) -> tuple[StoredTrial, ...]:
        """Return the feasible trials that no other trial beats at both objectives, the fastest first; () without memory."""
        if self._spec.second is None:
            return ()
        best = [self.read(trial) for trial in self.study.best_trials]
        return tuple(sorted((trial for trial in best if trial.record.feasible), key=lambda trial: trial.record.seconds or 0.0))

    def _begin(self) -> None:
        """Enqueue the first trials of a new study. Refuse a study of another recipe or space."""
        fingerprint, known = _fingerprint(self._table, self._spec.second), read_study(self.study).space
        if known == fingerprint:
            return
        if known is not None:
            rule = "is a study of another recipe or another space; choose another name"
            raise UserError("tune.study", self._spec.study, rule)
        write_study(self.study, StudyRecord(space=fingerprint))
        first = [self._table.default]
        if self._predictions is not None and SAMPLERS[self._spec.sampler].starts:
            starts = min(self._spec.starts, self._spec.trials)
            fastest = self._predictions.fastest(starts, self._sampler.untried_rows([]))
            first += [self._table.rows[number] for number in fastest]
        for row in first:
            self.study.enqueue_trial(self._table.params(row), skip_if_exists=True)

    def _lock(self) -> AbstractContextManager[None]:
        return storage_lock(self._url, self._spec.study)


def _fingerprint(table: Settings, second: str | None) -> str:
    """Hash what the times of a trial depend on: the recipe, its workers, the table, and the second objective."""
    about = table.recipe.model_dump(mode="json", exclude={"tune", "name", "tracking", "cluster"})
    about["cluster"] = table.recipe.cluster.model_dump(mode="json", include={"workers", "gpu", "placement"})
    return hashlib.sha256(json.dumps([about, table.rows, *([second] if second else [])]).encode()).hexdigest()[:16]


class Claims:
    """The trials that this tuner runs, and what it has seen of the heartbeats of others.

    The clocks of two hosts may differ by minutes. So only the clock of this process says how long another tuner has been silent.
    `clock` returns the seconds of a clock that is never set.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._own: set[int] = set()
        self._seen: dict[int, tuple[float, float]] = {}  # by trial: its newest heartbeat, and when this tuner saw it first

    def claim(self, trial: optuna.Trial) -> None:
        """Write that this process runs the trial. The caller must hold the study's lock."""
        write_trial(trial, TrialRecord(owner=f"{socket.gethostname()}:{os.getpid()}", seen=time.time()))
        self._own.add(trial._trial_id)

    def release_abandoned(self, study: optuna.Study, table: Table) -> bool:
        """End the trials of tuners that are gone, so that their rows are free again. The caller must hold the study's lock.

        Return whether some other tuner may be gone; later calls will tell.
        """
        doubtful = False
        for trial in read_trials(study, table, [TrialState.RUNNING]):
            silent_s = self._silent_s(trial)
            doubtful |= _DOUBTFUL_S <= silent_s <= _SILENT_S
            if silent_s > _SILENT_S:
                write_trial(optuna.Trial(study, trial.trial_id), TrialRecord(lost=True, reason="its tuner went away"))
                study.tell(trial.number, state=TrialState.FAIL)
        return doubtful

    def wait(self) -> None:
        """Wait until the tuners that are alive have written their next heartbeats."""
        time.sleep(_HEARTBEAT_S)

    def _silent_s(self, trial: StoredTrial) -> float:
        """Return for how many seconds the owner of a trial has been silent; infinity if it has surely ended."""
        record, now = trial.record, self._clock()
        host, _, pid = (record.owner or "").rpartition(":")
        on_this_host = host == socket.gethostname() and pid.isdigit()
        if record.owner is None or (on_this_host and not Path(f"/proc/{pid}").exists()):
            return math.inf
        if trial.trial_id in self._own:
            return 0.0
        beat, since = self._seen.get(trial.trial_id, (record.seen, now if on_this_host else now - _DOUBTFUL_S))
        self._seen[trial.trial_id] = (record.seen, since if beat == record.seen else now)
        return now - self._seen[trial.trial_id][1]


class Heartbeat(threading.Thread):
    """A thread that writes the heartbeats of a trial. Use it as a context manager around the trial."""

    def __init__(self, trial: optuna.Trial):
        super().__init__(name="foldray-heartbeat", daemon=True)
        self._trial, self._ended = trial, threading.Event()

    def run(self) -> None:
        failed = False
        while not self._ended.wait(_HEARTBEAT_S):
            try:
                write_trial(self._trial, TrialRecord(seen=time.time()))
                failed = False
            except optuna.exceptions.UpdateFinishedTrialError:
                return
            except Exception as error:  # the storage may answer again before others take the trial
                if not failed:
                    reason = told_without(" ".join(str(error).split()))[:160]
                    _log.warning(
                        "the heartbeat of trial %d cannot be written (%s); it is tried again", self._trial.number, reason
                    )
                failed = True

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
