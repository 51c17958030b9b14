"""Which tuner runs which trial: claims, heartbeats, and the release of trials whose tuner is gone.

A killed tuner leaves a running trial behind. A trial's tuner writes heartbeats, so other tuners notice when they stop.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import optuna
from optuna.trial import TrialState

from tuners.record import TrialRecord, read_trials, write_trial
from tuners.table import Table

_HEARTBEAT_S, _SILENT_S = 5.0, 60.0  # seconds between heartbeats, and without a heartbeat until a tuner counts as gone


def claim(trial: optuna.Trial) -> None:
    """Write that this process runs the trial. The caller must hold the study's lock."""
    write_trial(trial, TrialRecord(owner=f"{socket.gethostname()}:{os.getpid()}", seen=time.time()))


def release_abandoned(study: optuna.Study, table: Table) -> int:
    """End the trials of tuners that are gone, so that their rows are free again. Return the number of these trials."""
    running = read_trials(study, table, [TrialState.RUNNING])
    abandoned = [trial for trial in running if _is_abandoned(trial.record)]
    for trial in abandoned:
        write_trial(optuna.Trial(study, trial.trial_id), TrialRecord(lost=True, reason="its tuner went away"))
        study.tell(trial.number, state=TrialState.FAIL)
    return len(abandoned)


def _is_abandoned(record: TrialRecord) -> bool:
    """Whether the trial's owner sent no heartbeat for long, or was a process of this host that has ended."""
    host, _, pid = (record.owner or "").rpartition(":")
    ended = host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists()
    return ended or time.time() - record.seen > _SILENT_S


class Heartbeat(threading.Thread):
    """A thread that writes the heartbeats of a trial. Use it as a context manager around the trial."""

    def __init__(self, trial: optuna.Trial):
        super().__init__(name="foldray-heartbeat", daemon=True)
        self._trial, self._ended = trial, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            try:
                write_trial(self._trial, TrialRecord(seen=time.time()))
            except optuna.exceptions.UpdateFinishedTrialError:
                return

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
