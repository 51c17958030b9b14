"""Shared studies and killed tuners: every trial counts once, and no row is measured twice."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState

from foldray.recipe import Recipe
from tests.tuners.postgres import new_database, server
from tests.tuners.test_sampler import predictions, table
from tuners import shared_study
from tuners.record import StoredTrial, TrialRecord, read_trials, write_trial
from tuners.samplers import PlannerOrder, TableSampler
from tuners.shared_study import Claims, Heartbeat
from tuners.storage import open_storage, storage_lock, study_url
from tuners.study import FoldTuner


class Slow(TableSampler):
    """A sampler that waits before it chooses a row, so that without a lock another tuner would choose the same row."""

    def untried_rows(self, trials: Sequence[StoredTrial]) -> list[int]:
        found = super().untried_rows(trials)
        time.sleep(0.1)
        return found


def study_at(url: str) -> optuna.Study:
    rows = table()
    sampler = Slow(rows, PlannerOrder(rows, 0, predictions()))
    storage = open_storage(url)
    with storage_lock(url, "s"):
        return optuna.create_study(storage=storage, study_name="s", sampler=sampler, load_if_exists=True)


def work(url: str, trials: int, each_s: float) -> None:
    """Run a tuner that measures nothing, until the study has `trials` trials."""
    study, rows, own = study_at(url), table(), Claims()
    while True:
        with storage_lock(url, "s"):
            own.release_abandoned(study, rows)
            counted = [each for each in read_trials(study, rows) if not each.record.lost]
            if len(counted) >= trials:
                return
            trial = study.ask(rows.distributions)
            own.claim(trial)
        with Heartbeat(trial):
            time.sleep(each_s)
            study.tell(trial, 1.0)


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server for this module, without a database."""
    with server(tmp_path_factory) as url:
        yield url


_SERVER = pytest.mark.nightly("starts a PostgreSQL server")
_FILE = pytest.param("journal", marks=pytest.mark.nightly("the same as with SQLite"))


@pytest.fixture(params=["sqlite", _FILE, pytest.param("postgresql", marks=_SERVER)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new storage."""
    if request.param == "postgresql":
        return new_database(request.getfixturevalue("postgres"))
    return {"sqlite": f"sqlite:///{tmp_path}/tune.db", "journal": f"journal://{tmp_path}/tune.log"}[request.param]


@pytest.mark.gate(1 / 4)
def test_two_tuners_share_a_study(url: str) -> None:
    processes = [multiprocessing.get_context("spawn").Process(target=work, args=(url, 12, 0.5)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    trials = read_trials(study_at(url), table())
    assert [each.state for each in trials] == [TrialState.COMPLETE] * 12
    assert len({tuple(each.params.items()) for each in trials}) == 12, "no row is measured twice"
    assert len({each.record.owner for each in trials}) == 2, "both had some"


@pytest.mark.gate(1 / 4)
def test_a_killed_tuner_costs_its_trial_and_nothing_else(url: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=(url, 8, 0.5))
    process.start()
    end, study = time.monotonic() + 100, study_at(url)
    while time.monotonic() < end:
        time.sleep(0.2)
        trials = read_trials(study, table())
        claimed = [each for each in trials if each.state == TrialState.RUNNING and each.record.owner]  # its row is chosen
        if claimed and sum(each.state == TrialState.COMPLETE for each in trials) >= 2:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    before = study_at(url).trials
    done = [each.number for each in before if each.state == TrialState.COMPLETE]
    work(url, 8, 0.0)
    after = read_trials(study_at(url), table())
    lost = [each for each in after if each.record.lost]
    kept = [each for each in after if not each.record.lost]
    assert len(lost) <= 1
    assert all(each.state == TrialState.FAIL for each in lost)
    assert len(kept) == 8
    assert {each.number for each in kept} >= set(done), "what was measured stays"
    assert len({tuple(each.params.items()) for each in kept}) == 8
    assert all(each.params in [other.params for other in kept] for each in lost), "a lost row is measured after all"


@_SERVER
def test_a_lock_leaves_no_connection(postgres: str) -> None:
    from sqlalchemy import create_engine, text

    url = new_database(postgres)
    with create_engine(url).connect() as connection:
        for _ in range(20):
            with storage_lock(url, "s"):
                pass
            others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            time.sleep(0.05)  # the server ends a connection a moment after it is closed
            connection.rollback()
            assert connection.execute(text(others)).scalar() == 0


def test_a_trial_of_a_living_tuner_stays() -> None:
    seconds, rows = [0.0], table()
    study = optuna.create_study(sampler=TableSampler(rows, PlannerOrder(rows, 0, predictions())))
    watching = Claims(lambda: seconds[0])
    mine, slow, fast, ended = (study.ask(rows.distributions) for _ in range(4))
    watching.claim(mine)
    for number, (trial, clock) in enumerate([(slow, -3600.0), (fast, 3600.0), (ended, 3600.0)]):
        write_trial(trial, TrialRecord(owner=f"another-host:{number}", seen=time.time() + clock))
    for seconds[0] in range(0, 120, 10):
        doubtful = watching.release_abandoned(study, rows)
        assert doubtful == (seconds[0] <= 40), "one may be gone, until it counts as gone"
        for trial, clock in ((slow, -3600), (fast, 3600)):
            write_trial(trial, TrialRecord(seen=clock + seconds[0]))
    assert [each.state.name for each in study.trials] == ["RUNNING", "RUNNING", "RUNNING", "FAIL"]
    assert read_trials(study, rows)[0].record.owner == f"{socket.gethostname()}:{os.getpid()}"
    for later, doubtful in ((5, False), (30, True), (40, False)):
        seconds[0] += later
        assert watching.release_abandoned(study, rows) == doubtful
    assert [each.state.name for each in study.trials] == ["RUNNING", "FAIL", "FAIL", "FAIL"]


def test_heartbeats_go_on_after_errors_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    study, tried, enough = study_at(f"sqlite:///{tmp_path}/tune.db"), list[float](), threading.Event()

    def write(trial: optuna.Trial, record: TrialRecord) -> None:
        tried.append(record.seen)
        if len(tried) < 4:
            raise optuna.exceptions.StorageInternalError("postgresql://me:hush@host/db does not answer")
        enough.set()

    monkeypatch.setattr(shared_study, "write_trial", write)
    monkeypatch.setattr(shared_study, "_HEARTBEAT_S", 0.01)
    with Heartbeat(study.ask(table().distributions)):
        assert enough.wait(60)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "the heartbeat of trial 0 cannot be written (postgresql://***@host/db does not answer); it is tried again"
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "sqlite:///{0}/runs/tune/s/tune.db"),
        ("sqlite:///study.db", "sqlite:///{0}/study.db"),
        ("sqlite:///~/study.db", "sqlite:///{0}/home/study.db"),
        ("journal://logs/study.log", "journal://{0}/logs/study.log"),
        ("sqlite:////abs/study.db", "sqlite:////abs/study.db"),
        ("sqlite:///a%20b.db?timeout=5", "sqlite:///{0}/a b.db?timeout=5"),
        ("sqlite:///50%25.db", "sqlite+pysqlite:///{0}/50%25.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("postgresql+psycopg2://me@host/db", "postgresql+psycopg2://me@host/db"),
    ],
)
def test_a_storage_in_a_file_has_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = Recipe.parse({"model": {"preset": "tiny"}, "tune": {"storage": given, "study": "s", "space": {"degree": [1, 2]}}})
    folders: list[str | Path | None] = [None, "runs/tune/s", Path("runs/tune/s")]
    assert {FoldTuner(recipe, folder).url for folder in folders} == {expected.format(tmp_path)}


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a%3Fb#c", "{x} ü@b"])
def test_a_study_is_in_its_folder_whatever_that_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    open_storage(study_url(Recipe.parse({"model": {"preset": "tiny"}}), folder)).create_new_study([StudyDirection.MINIMIZE])
    assert sorted(path.name for path in folder.iterdir()) == ["tune.db", "tune.db.turn"]
    assert list(tmp_path.iterdir()) == [folder]
