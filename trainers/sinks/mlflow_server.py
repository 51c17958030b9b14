"""The MLflow server or database of a recipe, and the experiment of the recipe's runs."""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import shlex
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from foldray.errors import UserError, refuse_hidden
from foldray.recipe import Recipe
from foldray.urls import sqlite_parts, sqlite_url, told_without, without_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433, "http": 80, "https": 443}
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's page then shows the runs first, and not traces
_URI_EXAMPLES = ["sqlite:////folder/mlflow.db", "http://host:5000", "null"]


class TrackingServer:
    """The MLflow server or database that tracks a recipe. `uri` is its address without secrets, for messages and files.

    The storage is a local folder for the database if the recipe names none, and for artifacts if no server stores them.
    """

    def __init__(self, recipe: Recipe, storage: Path):
        self._secret_uri = _absolute(recipe.tracking.uri) if recipe.tracking.uri else default_uri(storage)
        self.uri = without_secrets(self._secret_uri)
        self.experiment = recipe.tracking.experiment
        self._artifacts = storage.absolute() / "mlartifacts"
        refuse_hidden("tracking.uri", self._secret_uri)
        with self.told_as_user_error():
            self.client = _connect(self._secret_uri)
            self.experiment_id = self._find_experiment()

    def view_url(self, run_id: str) -> str:
        """Return the URL of a run's page, on the tracking server or on the server that `view_command` starts."""
        server = self.uri.rstrip("/") if _is_http(self.uri) else "http://127.0.0.1:5000"
        return f"{server}/#/experiments/{self.experiment_id}/runs/{run_id}"

    def view_command(self) -> str | None:
        """Return a command that starts a server for the runs, for this machine only; None if a server runs already."""
        if _is_http(self.uri):
            return None
        options = ["--backend-store-uri", self.uri, "--artifacts-destination", self._artifacts.as_uri()]
        return shlex.join([*_mlflow(), "server", *options, "--host", "127.0.0.1", "--port", "5000", "--workers", "1"])

    def reason(self, error: Exception) -> str:
        """Return the reason of an error in one line, without secrets."""
        return told_without(line(error), self._secret_uri)

    def told_as_user_error(self) -> AbstractContextManager[None]:
        """Turn the errors of MLflow's client into a UserError."""
        return _told(self._secret_uri)

    def _find_experiment(self) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            rule = "is deleted in MLflow; restore it (mlflow experiments restore) or choose another name"
            raise UserError("tracking.experiment", self.experiment, rule)
        if experiment is not None:
            return experiment.experiment_id
        try:
            # A server has its own place for artifacts. Without a server, artifacts lie beside the runs.
            location = None if _is_http(self.uri) else self._artifacts.as_uri()
            return self.client.create_experiment(self.experiment, artifact_location=location, tags=_KIND)
        except Exception:
            experiment = self.client.get_experiment_by_name(self.experiment)  # another driver may have created it meanwhile
            if experiment is None:
                raise
            return experiment.experiment_id


def begin_import(recipe: Recipe) -> None:
    """Import MLflow in a thread, while this process waits for Ray. It takes two seconds."""
    names = ["mlflow"] if _is_http(recipe.tracking.uri or "") else ["mlflow", "mlflow.store.tracking.sqlalchemy_store"]
    threading.Thread(target=lambda: list(map(importlib.import_module, names)), name="foldray-mlflow", daemon=True).start()


def check_reachable(recipe: Recipe) -> None:
    """Refuse a server or database that nobody answers for. This takes seconds at most, and starts and writes nothing."""
    if recipe.tracking.uri is None:
        return
    uri = _absolute(recipe.tracking.uri)
    refuse_hidden("tracking.uri", uri)
    with _told(uri):
        if _scheme(uri) == "sqlite":
            _check_database(_sqlite_path(uri))
        elif _scheme(uri) in _PORTS:
            _knock(uri)
        else:
            _connect(uri)  # only MLflow and its plugins know what this is


@contextmanager
def _told(uri: str) -> Iterator[None]:
    """Turn the errors of MLflow's client into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        rule = f"cannot be used for MLflow tracking ({told_without(line(error), uri)})"
        raise UserError("tracking.uri", without_secrets(uri), rule, _URI_EXAMPLES) from None


def default_uri(storage: Path) -> str:
    """Return the URI of a SQLite database in the run storage. It is absolute, because Ray changes the workers' directory."""
    return sqlite_url(storage.absolute() / "mlflow.db")


def log_recipe(client: MlflowClient, run_id: str, recipe: Recipe) -> None:
    """Log all keys of a recipe as parameters of a run."""
    from mlflow.entities import Param

    params = [Param(key, value) for key, value in flatten(recipe.model_dump(mode="json")).items()]
    for first in range(0, len(params), 100):
        client.log_batch(run_id, params=params[first : first + 100])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Turn a nested mapping into dotted keys and texts, the form of MLflow's parameters."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _connect(uri: str) -> MlflowClient:
    _knock(uri)
    # MLflow reads these settings only from the environment. URLs must not be printed, because standard output may be reserved
    # for a JSON document. The default HTTP settings would retry a dead server for many minutes, which is not needed, because the
    # tracker's thread tries again later.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    if _is_http(uri):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs the stack of every error that it also raises: 90 lines every half minute while a database does not answer.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    with _alone(uri):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Lock a SQLite database for one driver, because two drivers that create its tables at the same time both fail."""
    if _scheme(uri) != "sqlite":
        yield
        return
    with Path(f"{_sqlite_path(uri)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _knock(uri: str) -> None:
    """Fail in seconds if nobody answers at the address. MLflow takes seconds to import, and would try a database for an hour."""
    parts, scheme = urlsplit(uri), _scheme(uri)
    if scheme == "sqlite":
        _sqlite_path(uri).parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(_sqlite_path(uri), timeout=5) as database:
            database.execute("PRAGMA schema_version")
        database.close()
    elif scheme in _PORTS and not _through_proxy(scheme, parts.hostname):
        socket.create_connection((parts.hostname or "localhost", parts.port or _PORTS[scheme]), timeout=5).close()


def _through_proxy(scheme: str, host: str | None) -> bool:
    """Return whether the environment names a proxy for a host. Then only the proxy can tell whether the host answers."""
    return bool({scheme, "all"} & getproxies().keys()) and not proxy_bypass(host or "")


def _absolute(uri: str) -> str:
    parts = sqlite_parts(uri)
    return uri if parts is None else sqlite_url(parts[0].absolute()) + parts[1]


def _scheme(uri: str) -> str:
    """Return the kind of a server or database, without the driver of a database behind it."""
    return urlsplit(uri).scheme.split("+")[0]


def _check_database(path: Path) -> None:
    """Raise sqlite3.Error or ValueError for a file that is no database of SQLite, or a place where none can be written."""
    if path.exists():
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5)) as database:
            database.execute("PRAGMA schema_version")
        return
    existing = next(parent for parent in path.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{existing} is not a writable folder ({error.strerror})") from None


def _sqlite_path(uri: str) -> Path:
    if (parts := sqlite_parts(uri)) is None:
        raise ValueError("a SQLite URI has three slashes before its path")
    return parts[0].absolute()


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _mlflow() -> list[str]:
    program = Path(sys.executable).parent / "mlflow"
    if shutil.which("mlflow") == str(program):
        return ["mlflow"]
    return [str(program)] if program.exists() else [sys.executable, "-m", "mlflow"]


def line(error: BaseException) -> str:
    """Return the message of the innermost exception in one line. It says more than the exceptions around it."""
    while (inner := error.__cause__ or error.__context__) and not isinstance(inner, KeyError):
        error = inner
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:159] + "…"
