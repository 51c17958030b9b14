"""Studies that outlive their tuners, and that several share.

Optuna's storages make each call safe by itself; choosing a row takes several (look at all trials, pick, write). `turn` lets one
tuner at a time do that, whatever the storage. A tuner that is killed leaves a trial behind that nobody finishes: every tuner
says now and then that it is alive, and what belongs to one that has been silent for long is given back.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from foldray.errors import MissingPackage, UserError, refuse_hidden
from foldray.urls import told_without
from tuners.sampler import LOST, REASON

_ALIVE_S, _SILENT_S, _CONNECT_S = 5.0, 60.0, 10
OWNER, SEEN = "owner", "seen"
"""User attributes of a running trial: HOST:PID of its tuner, and when that was last known to be alive."""
_EXAMPLES = ("sqlite:///PATH/tune.db", "journal:///PATH/tune.log", "postgresql+psycopg2://USER@HOST/DATABASE")


def open_storage(url: str) -> BaseStorage:
    """A storage by its URL.

    Raises:
        UserError: it cannot be opened, or stands without its secret.
        MissingPackage: its driver is not installed.
    """
    refuse_hidden("tune.storage", url)
    try:
        if url.startswith("journal://"):
            path = Path(url.removeprefix("journal://"))
            path.parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(JournalFileBackend(str(path)))
        if url.startswith("sqlite:///"):
            Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        with turn(url, "tables"):  # two that make the tables of a new database at once both fail
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True, **_in_time(url)})
    except ModuleNotFoundError as error:
        name = error.name or "its driver"
        raise MissingPackage(
            "tune.storage", url, name, f"pip install {name}-binary" if name == "psycopg2" else f"pip install {name}"
        ) from None
    except ImportError:
        raise MissingPackage("tune.storage", url, "psycopg2", "pip install psycopg2-binary") from None
    except Exception as error:
        reason = told_without(" ".join(str(error.__cause__ or error).split()), url)[:160]
        raise UserError("tune.storage", url, f"cannot be opened ({reason})", _EXAMPLES) from None


@contextmanager
def turn(url: str, what: str) -> Iterator[None]:
    """Alone among all who want the same thing of this storage: a study's next trial, say."""
    lock: AbstractContextManager[None]
    if _on_server(url):
        lock = _server_lock(url, what)
    else:
        lock = _file_lock(_lock_path(url)) if url.startswith(("sqlite:///", "journal://")) else nullcontext()
    with lock:
        yield


def give_back(study: optuna.Study) -> int:
    """Mark trials of tuners that are gone as lost, so that their rows are free again; how many."""
    host, lost = socket.gethostname(), 0
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        name, _, pid = str(trial.user_attrs.get(OWNER, "")).rpartition(":")
        silent = time.time() - float(trial.user_attrs.get(SEEN, 0.0)) > _SILENT_S
        gone = name == host and pid.isdigit() and not Path(f"/proc/{pid}").exists()
        if silent or gone:
            storage = study._storage
            storage.set_trial_user_attr(trial._trial_id, LOST, True)
            storage.set_trial_user_attr(trial._trial_id, REASON, "its tuner went away")
            study.tell(trial.number, state=TrialState.FAIL)
            lost += 1
    return lost


def claim(trial: optuna.Trial) -> None:
    """Write down whose trial it is; before anyone else looks."""
    trial.set_user_attr(OWNER, f"{socket.gethostname()}:{os.getpid()}")
    trial.set_user_attr(SEEN, time.time())


class Alive(threading.Thread):
    """Says for a trial, every few seconds, that somebody is at it."""

    def __init__(self, trial: optuna.Trial):
        super().__init__(name="foldray-trial-alive", daemon=True)
        self._trial, self._done = trial, threading.Event()

    def run(self) -> None:
        while not self._done.wait(_ALIVE_S):
            try:
                self._trial.set_user_attr(SEEN, time.time())
            except optuna.exceptions.UpdateFinishedTrialError:
                return

    def __enter__(self) -> Alive:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


@contextmanager
def _server_lock(url: str, what: str) -> Iterator[None]:
    """The server's own lock, given back when the connection ends, however that happens."""
    from sqlalchemy import create_engine, text

    number = zlib.crc32(what.encode())
    postgres = url.startswith("postgresql")
    take, leave = (
        ("SELECT pg_advisory_lock(:key)", "SELECT pg_advisory_unlock(:key)")
        if postgres
        else ("SELECT GET_LOCK(:key, 600)", "SELECT RELEASE_LOCK(:key)")
    )
    key = {"key": number if postgres else f"foldray-{number}"}
    with create_engine(url, isolation_level="AUTOCOMMIT", **_in_time(url)).connect() as connection:  # no open transaction
        connection.execute(text(take), key)
        try:
            yield
        finally:
            connection.execute(text(leave), key)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _on_server(url: str) -> bool:
    return url.startswith(("postgresql", "mysql"))


def _in_time(url: str) -> dict[str, Any]:
    """A server that does not answer is given up after some seconds; without that, minutes."""
    return {"connect_args": {"connect_timeout": _CONNECT_S}} if _on_server(url) else {}


def _lock_path(url: str) -> Path:
    path = url.removeprefix("sqlite:///").removeprefix("journal://")
    return Path(f"{path}.turn")  # Optuna's journal has a .lock of its own
