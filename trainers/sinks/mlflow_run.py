"""Writes a run to MLflow. Only the driver does this, with a client that names the run in every call.

MLflow's fluent functions keep an active run in global state, so this module does not use them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from foldray.recipe import Recipe
from trainers.sinks.mlflow_server import TrackingServer, log_recipe
from trainers.telemetry.metrics import metrics_of
from trainers.telemetry.records import Sink, Step, Tried, Validation

if TYPE_CHECKING:
    from mlflow.entities import Metric

Status = Literal["FINISHED", "FAILED", "KILLED"]

_log = logging.getLogger(__name__)


class Tracker(Sink):
    """The MLflow run of a training.

    A thread sends the metrics. If the server stops answering, the driver warns, and when the server answers again, the driver
    says so and sends the missed metrics. MLflow's histories cannot be rewritten: if a step runs again after a restart, its
    first values stay.

    It continues the run `mlflow_run_id`. If the server does not know it, or if it is deleted, a new run is created, and a warning
    says so. The recipe's keys become the run's parameters.
    """

    def __init__(self, recipe: Recipe, name: str, storage: Path, mlflow_run_id: str | None = None):
        self._server = TrackingServer(recipe, storage)
        self.uri = self._server.uri  # without secrets
        self._layers, self._metrics = recipe.model.moe_layers, metrics_of(recipe)
        self._logged: dict[str, int] = {}
        self._fails, self._tried = False, 0
        self._client, self.experiment_id = self._server.client, self._server.experiment_id
        with self._server.told_as_user_error():
            self.run_id = self._reopen(mlflow_run_id) or self._create(recipe, name)
        self._sender = _Sender(self._log_batch, self._warn)
        self._sender.start()

    def take_step(self, record: Step) -> None:
        step = cast(Mapping[str, float | None], record)
        values = {metric.outside: step.get(metric.name) for metric in self._metrics}
        self._send("loss", record["step"], values | self._per_layer(record) | _traffic(record))

    def take_validation(self, record: Validation) -> None:
        values = {"validation/loss": record["loss"], "validation/bits_per_byte": record["bits_per_byte"]}
        for name, part in record.get("sources", {}).items():
            values |= {f"validation/{name}/loss": part["loss"], f"validation/{name}/bits_per_byte": part["bits_per_byte"]}
        self._send("validation/loss", record["step"], values)

    def take_tried(self, record: Tried) -> None:
        self._tried += 1
        values = {"degree": record["degree"], "step_time_s": record["step_time_s"], "sp_bytes": record["sp_bytes"]}
        self._send("online/step_time_s", self._tried, {f"online/{name}": value for name, value in values.items()})

    def store(self, paths: Iterable[Path]) -> None:
        """Copy the files that exist to the run's artifacts. Errors become a warning."""
        try:
            for path in paths:
                if path.exists():
                    self._client.log_artifact(self.run_id, str(path))
        except Exception as error:
            self._warn(error)

    def close(self, status: Status) -> None:
        """Send the remaining metrics and end the run. Errors become a warning."""
        self._sender.close()
        try:
            self._client.set_terminated(self.run_id, status)
        except Exception as error:
            self._warn(error)

    @property
    def view_url(self) -> str:
        """The URL of the run's page."""
        return self._server.view_url(self.run_id)

    def view_command(self) -> str | None:
        """The command of `TrackingServer.view_command`."""
        return self._server.view_command()

    def _create(self, recipe: Recipe, name: str) -> str:
        run = self._client.create_run(self.experiment_id, run_name=name)
        try:
            log_recipe(self._client, run.info.run_id, recipe)
        except BaseException:
            with suppress(Exception):  # the first error says more
                self._client.set_terminated(run.info.run_id, "FAILED")
            raise
        return run.info.run_id

    def _reopen(self, run_id: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
            deleted = run.info.lifecycle_stage == "deleted"
            lost = deleted and f"is deleted (mlflow runs restore --run-id {run_id} brings it back)"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            lost = "is not there"
        if lost:
            _log.warning("MLflow's run %s %s; training goes on with a new one", run_id, lost)
            return None
        self.experiment_id = run.info.experiment_id
        self._client.update_run(run_id, status="RUNNING")
        # MLflow keeps the metric of the last step apart. A history has all steps, and takes minutes to read.
        self._logged = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._tried = self._logged.get("online/step_time_s", 0)
        return run_id

    def _per_layer(self, record: Step) -> dict[str, float]:
        """Return two measures of every layer. A server stores each value of each step, so metrics.jsonl alone has all."""
        measures = record.get("by_layer")
        if measures is None:
            return {}
        return {
            f"expert_load/layer_{layer}/{name}": value
            for name, values in (("max_over_mean", measures["max_over_mean"]), ("entropy", measures["entropy"]))
            for layer, value in zip(self._layers, values, strict=True)
        }

    def _send(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        from mlflow.entities import Metric

        if step <= self._logged.get(name, -1):
            return
        self._logged[name] = step
        now = int(time.time() * 1000)
        # MLflow would store infinity as 1.8e308, which flattens every chart.
        numbers = {key: float(value) for key, value in values.items() if value is not None}
        finite = {key: value if math.isfinite(value) else math.nan for key, value in numbers.items()}
        self._sender.put([Metric(key, value, now, step) for key, value in finite.items()])

    def _log_batch(self, metrics: list[Metric]) -> None:
        self._client.log_batch(self.run_id, metrics=metrics)
        if self._fails:
            self._fails = False
            _log.warning("MLflow at %s answers again, and gets the metrics that it missed", self.uri)

    def _warn(self, error: Exception) -> None:
        if not self._fails:
            self._fails = True
            reason = self._server.reason(error)
            _log.warning("MLflow at %s fails (%s); training continues, and metrics.jsonl has all metrics", self.uri, reason)


class _Sender(threading.Thread):
    """A thread that sends metrics in batches, and keeps metrics that could not be sent for later.

    MLflow's own asynchronous logging is not used. It drops a batch at the first failure, reports every failure, and at exit
    makes the process wait for a server that does not answer.
    """

    def __init__(self, send: Callable[[list[Metric]], object], warn: Callable[[Exception], None]):
        super().__init__(name="foldray-mlflow", daemon=True)
        self._send, self._warn = send, warn
        self._pending: deque[Metric] = deque(maxlen=500_000)  # bounded, because a server may not answer for days
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
    sides = ("inside_bytes", "across_bytes")
    return {f"traffic/{name}/{side}": count[side] for name, count in record.get("traffic", {}).items() for side in sides}
