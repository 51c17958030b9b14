"""Which tuner runs which trial: claims, heartbeats, and the release of trials whose tuner is gone.

A killed tuner leaves a running trial behind. A trial's tuner writes heartbeats, so other tuners notice when they stop.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.trial import TrialState

from foldray.urls import told_without
from tuners.record import StoredTrial, TrialRecord, read_trials, write_trial
from tuners.table import Table

_HEARTBEAT_S, _DOUBTFUL_S, _SILENT_S = 5.0, 15.0, 60.0
"""Seconds between heartbeats, and without a heartbeat until a tuner may be gone, and until it counts as gone."""

_log = logging.getLogger(__name__)


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
