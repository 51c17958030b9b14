"""`foldray tune` killed in the middle of a study that another `foldray tune` shares, on a real PostgreSQL server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from tests.pool import repository
from tests.tuners.postgres import new_database, server
from tuners.record import TrialRecord
from tuners.storage import open_storage

_TRIALS, _SECONDS = 8, 400
_SPACE = (
    "{tp: [1], cp: [1], pp: [1], ep: [1, 2], etp: [1], kind: [sequential, one_a_one_m], degree: [1, 2], "
    "sp_bytes: [null, 16384, 65536]}"
)
_RECIPE = [
    "model.layers=2", "engine.kind=torch", "data.seq_len=64", "cluster.workers=2", "tune.study=shared", f"tune.trials={_TRIALS}",
    "tune.turns=3", "tune.steps=1", "tune.pairs=2", "tune.prune=null", "tune.sampler=random", f"tune.space={_SPACE}",
]  # fmt: skip

pytestmark = [pytest.mark.nightly("two tuners on a PostgreSQL server"), pytest.mark.timeout(900)]


@contextmanager
def tuning(url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `foldray tune` on a Ray cluster of its own, with its output in files. At the end, nothing of it is left."""
    folder.mkdir()
    given = ["recipes/quickstart.yaml", "--json", *_RECIPE, f"cluster.storage={folder}", f"tune.storage={url}"]
    with (folder / "out").open("w") as out, (folder / "error").open("w") as error:
        command = [sys.executable, "-m", "foldray", "tune", *given]
        process = subprocess.Popen(command, stdout=out, stderr=error, text=True, cwd=repository(), start_new_session=True)
    try:
        yield process
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            each.kill()
        process.wait(30)


def trials_of(storage: BaseStorage) -> list[optuna.trial.FrozenTrial]:
    """Return the trials of the study, or none if there is no study yet."""
    try:
        return optuna.load_study(study_name="shared", storage=storage).get_trials()
    except KeyError:
        return []


def _pid(trial: optuna.trial.FrozenTrial) -> int | None:
    """Return the process that claimed a trial, if one has."""
    owner = TrialRecord.of_attributes(trial.user_attrs).owner
    return None if owner is None else int(owner.rpartition(":")[2])


def test_a_killed_tune_costs_its_trial_and_the_other_one_finishes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with server(tmp_path_factory) as postgres:
        url = new_database(postgres)
        storage = open_storage(url)  # once: a server has few connections, and every storage keeps one
        with tuning(url, tmp_path / "one") as one, tuning(url, tmp_path / "other") as other:
            children = _kill_in_a_trial(storage, one)
            assert other.wait(_SECONDS) == 0, (tmp_path / "other/error").read_text()
            _, alive = psutil.wait_procs(children, timeout=150)  # Ray's agents look for its server for a minute
            assert not alive, "processes of the killed tuner are left"
        trials = trials_of(storage)
        lost = [trial for trial in trials if TrialRecord.of_attributes(trial.user_attrs).lost]
        kept = [trial for trial in trials if trial not in lost]
        assert [trial.state for trial in kept] == [TrialState.COMPLETE] * _TRIALS
        assert len({json.dumps(trial.params, sort_keys=True) for trial in kept}) == _TRIALS, "a setting was measured twice"
        assert [_pid(trial) for trial in lost] == [one.pid], "the killed tuner lost the trial that it was in, and no other one"
        assert {_pid(trial) for trial in kept} <= {one.pid, other.pid}
        before = _winner(tmp_path / "other/out")
        with tuning(url, tmp_path / "again") as again:  # a finished study: the same command only tells what was found
            assert again.wait(_SECONDS) == 0, (tmp_path / "again/error").read_text()
        assert len(trials_of(storage)) == len(trials)
        assert _winner(tmp_path / "again/out") == before


def _kill_in_a_trial(storage: BaseStorage, tuner: subprocess.Popen[str]) -> list[psutil.Process]:
    """Kill a tuner once the study has two results and this tuner is in a trial. Return the processes that it had started."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        assert tuner.poll() is None, "the tuner ended before it was killed"
        trials = trials_of(storage)
        done = sum(trial.state == TrialState.COMPLETE for trial in trials)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING and _pid(trial) == tuner.pid]
        if done >= 2 and running:
            children = psutil.Process(tuner.pid).children(recursive=True)
            os.kill(tuner.pid, signal.SIGKILL)
            tuner.wait(30)
            return children
        time.sleep(0.2)
    raise AssertionError(f"the study did not get so far in {_SECONDS} s")


def _winner(out: Path) -> Any:
    found = json.loads(out.read_text())
    return {key: found[key] for key in ("best", "step_time_s", "gain", "trials")}
