"""MLflow: one run, written by the driver alone, through a client that names the run in every call.

MLflow's fluent functions keep an active run in global state; nothing here uses them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shlex
import shutil
import socket
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.telemetry import Record, Step

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_STEP_METRICS = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "tokens_per_s": "tokens_per_s",
    "step_time_s": "step_time_s",
    "mfu": "mfu",
    "balance_loss": "balance_loss",
    "z_loss": "z_loss",
    "drop_rate": "drop_rate",
    "expert_load/max_over_mean": "load_max_over_mean",
    "expert_load/dead": "dead_experts",
}
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_URI_EXAMPLES = ["sqlite:////folder/mlflow.db", "http://host:5000", "null"]

Status = Literal["FINISHED", "FAILED", "KILLED"]

_log = logging.getLogger(__name__)


class Tracker:
    """The MLflow run of a training.

    Metrics travel in the background; a server that stops answering costs one warning, and what it missed is sent when it
    answers again. MLflow's histories cannot be rewritten: of a step that is run again after a restart, the first value stays.

    Args:
        recipe: what is trained; becomes the run's parameters.
        name: the run's name.
        storage: local folder for the database, where the recipe names none, and for artifacts, where no server keeps them.
        mlflow_run_id: the run to go on with; one that the server does not know is begun anew.

    Raises:
        UserError: the tracking server does not answer, or refuses.
    """

    def __init__(self, recipe: Recipe, name: str, storage: Path, mlflow_run_id: str | None = None):
        self.uri = _absolute(recipe.tracking.uri) if recipe.tracking.uri else default_uri(storage)
        self.experiment = recipe.tracking.experiment
        self._artifacts = storage.absolute() / "mlartifacts"
        self._layers = recipe.model.moe_layers
        self._logged: dict[str, int] = {}
        self._warned, self._tried = False, 0  # sizes of gradient chunks
        with _told_as_user_error(self.uri):
            self._client = _connect(self.uri)
            self.experiment_id = self._find_experiment()
            self.run_id = self._reopen(mlflow_run_id) or self._create(recipe, name)
        self._sender = _Sender(lambda metrics: self._client.log_batch(self.run_id, metrics=metrics), self._warn)
        self._sender.start()

    def receive(self, record: Record) -> None:
        """Log what a record holds."""
        if record["kind"] == "step":
            values = {name: record[key] for name, key in _STEP_METRICS.items()}  # type: ignore[literal-required]
            self._send("loss", record["step"], values | self._per_layer(record) | _traffic(record))
        elif record["kind"] == "validation":
            name = "validation/bits_per_byte"
            self._send(name, record["step"], {name: record["bits_per_byte"], "validation/loss": record["loss"]})
        elif record["kind"] == "chunks":
            self._tried += 1
            values = {"gradient_chunks/sp_bytes": record["sp_bytes"], "gradient_chunks/step_time_s": record["step_time_s"]}
            self._send("gradient_chunks/sp_bytes", self._tried, values)

    def store(self, paths: Iterable[Path]) -> None:
        """Copy the files that exist to the run's artifacts; never raises."""
        try:
            for path in paths:
                if path.exists():
                    self._client.log_artifact(self.run_id, str(path))
        except Exception as error:
            self._warn(error)

    def close(self, status: Status) -> None:
        """Send what is left and end the run; never raises."""
        self._sender.close()
        try:
            self._client.set_terminated(self.run_id, status)
        except Exception as error:
            self._warn(error)

    @property
    def view_url(self) -> str:
        """Where a browser shows the run: on the tracking server, or on the one that `view_command` starts."""
        server = self.uri.rstrip("/") if _is_http(self.uri) else "http://127.0.0.1:5000"
        return f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def view_command(self) -> str | None:
        """The command that starts a server showing the run, on this machine only; None where a server runs already."""
        if _is_http(self.uri):
            return None
        options = ["--backend-store-uri", self.uri, "--artifacts-destination", str(self._artifacts)]
        return shlex.join([*_mlflow(), "server", *options, "--host", "127.0.0.1", "--port", "5000", "--workers", "1"])

    def _find_experiment(self) -> str:
        known = self._client.get_experiment_by_name(self.experiment)
        if known is not None and known.lifecycle_stage == "deleted":
            rule = "is deleted in MLflow; restore it (mlflow experiments restore) or choose another name"
            raise UserError("tracking.experiment", self.experiment, rule)
        if known is not None:
            return known.experiment_id
        try:
            # A server keeps artifacts where it was told to; without one they lie beside the runs.
            location = None if _is_http(self.uri) else self._artifacts.as_uri()
            return self._client.create_experiment(self.experiment, artifact_location=location)
        except Exception:
            known = self._client.get_experiment_by_name(self.experiment)  # another driver may have been faster
            if known is None:
                raise
            return known.experiment_id

    def _create(self, recipe: Recipe, name: str) -> str:
        from mlflow.entities import Param

        run = self._client.create_run(self.experiment_id, run_name=name)
        params = [Param(key, value) for key, value in flatten(recipe.model_dump(mode="json")).items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[first : first + 100])
        return run.info.run_id

    def _reopen(self, run_id: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            self.experiment_id = self._client.get_run(run_id).info.experiment_id
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        self._client.update_run(run_id, status="RUNNING")
        for name in ("loss", "validation/bits_per_byte"):
            self._logged[name] = max((metric.step for metric in self._client.get_metric_history(run_id, name)), default=-1)
        return run_id

    def _per_layer(self, record: Step) -> dict[str, float]:
        return {
            f"expert_load/layer_{layer}/max_over_mean": max(load) * len(load) / max(sum(load), 1)
            for layer, load in zip(self._layers, record["load"] or [], strict=False)
        }

    def _send(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        from mlflow.entities import Metric

        if step <= self._logged.get(name, -1):
            return
        self._logged[name] = step
        now = int(time.time() * 1000)
        # Infinity would be stored as 1.8e308 and flatten every chart.
        known = {key: float(value) for key, value in values.items() if value is not None}
        finite = {key: value if math.isfinite(value) else math.nan for key, value in known.items()}
        self._sender.put([Metric(key, value, now, step) for key, value in finite.items()])

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("MLflow at %s fails (%s); training goes on, metrics.jsonl has everything", self.uri, _line(error))


class _Sender(threading.Thread):
    """Sends metrics in batches, some seconds late, and keeps for later what could not be sent.

    Ours rather than MLflow's asynchronous logging, which gives up a batch at its first failure, reports each, and makes the
    process wait at exit for a server that is gone.
    """

    def __init__(self, send: Callable[[list[Metric]], object], warn: Callable[[Exception], None]):
        super().__init__(name="foldray-mlflow", daemon=True)
        self._send, self._warn = send, warn
        self._pending: deque[Metric] = deque(maxlen=500_000)  # a server may be gone for days
        self._closing = threading.Event()

    def put(self, metrics: list[Metric]) -> None:
        self._pending.extend(metrics)

    def close(self, timeout: float = 30.0) -> None:
        self._closing.set()
        self.join(timeout)

    def run(self) -> None:
        while not self._closing.wait(1.0):
            if not self._send_pending():
                self._closing.wait(30.0)
        self._send_pending()

    def _send_pending(self) -> bool:
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(len(self._pending), 1000))]
            try:
                self._send(batch)
            except Exception as error:
                self._pending.extendleft(reversed(batch))
                self._warn(error)
                return False
        return True


def _traffic(record: Step) -> dict[str, int]:
    """Bytes that a step's collectives sent inside of nodes and across, by class of traffic."""
    sides = ("inside_bytes", "across_bytes")
    return {f"traffic/{name}/{side}": count[side] for name, count in record.get("traffic", {}).items() for side in sides}


def default_uri(storage: Path) -> str:
    """SQLite in the run storage; absolute, because Ray changes the workers' directory."""
    return f"sqlite:///{storage.absolute()}/mlflow.db"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and texts of a nested mapping, as MLflow's parameters want them."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _connect(uri: str) -> MlflowClient:
    _check_reachable(uri)
    # MLflow reads these from the environment alone, the first one while it is imported. Standard output may be promised to
    # one JSON document; the defaults for HTTP would try a dead server for many minutes, and the sender comes back by itself.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    if _is_http(uri):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with _alone(uri):
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    return client


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """One driver at a time: two that create the tables of a new database at once both fail."""
    if not uri.startswith("sqlite:"):
        yield
        return
    with Path(f"{_sqlite_path(uri)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_reachable(uri: str) -> None:
    """Fail in seconds on a database that cannot be opened: SQLAlchemy's engine is tried for an hour."""
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme == "sqlite":
        if not uri.startswith("sqlite:///"):
            raise ValueError("a SQLite URI has three slashes before its path")
        _sqlite_path(uri).parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(_sqlite_path(uri), timeout=5) as database:
            database.execute("PRAGMA schema_version")
        database.close()
    elif scheme in _DATABASE_PORTS:
        socket.create_connection((parts.hostname or "localhost", parts.port or _DATABASE_PORTS[scheme]), timeout=5).close()


@contextmanager
def _told_as_user_error(uri: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError("tracking.uri", uri, f"no MLflow tracking there ({_line(error)})", _URI_EXAMPLES) from error


def _absolute(uri: str) -> str:
    return f"sqlite:///{_sqlite_path(uri)}" if uri.startswith("sqlite:///") else uri


def _sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///")).absolute()


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _mlflow() -> list[str]:
    beside = Path(sys.executable).parent / "mlflow"
    if shutil.which("mlflow") == str(beside):
        return ["mlflow"]
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "mlflow"]


def _line(error: BaseException, limit: int = 160) -> str:
    """The innermost reason, which says more than what was wrapped around it."""
    while (inner := error.__cause__ or error.__context__) and not isinstance(inner, KeyError):
        error = inner
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
