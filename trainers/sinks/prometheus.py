"""Figures of a run as metrics of Ray, which its dashboard and Prometheus read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

from ray.util.metrics import Gauge

from trainers.telemetry.metrics import Metric
from trainers.telemetry.records import Failed, Saved, Sink, Step

_OWN = {
    "foldray_step": "Finished optimizer steps",
    "foldray_checkpoint_age_s": "Seconds since the last checkpoint, or since the run began",
    "foldray_failed_attempts": "Attempts that failed",
    "foldray_waiting": "Share of its time that a rank waits for others: exposed communication, bubbles and stragglers",
}


class Gauges(Sink):
    """Sets a gauge of Ray for every figure. All of them have the tag `run`, the run's id. Ray puts `ray_` before their names."""

    def __init__(self, run: str, metrics: Sequence[Metric]):
        self._run, self._saved, self._failed = run, time.time(), 0
        self._of_steps = {f"foldray_{metric.gauge}": metric for metric in metrics if metric.gauge}
        texts = {name: metric.about for name, metric in self._of_steps.items()} | _OWN
        self._gauges = {name: Gauge(name, text, ("run", "rank")) for name, text in texts.items()}

    def take_step(self, record: Step) -> None:
        self._set("foldray_step", record["step"])
        for name, metric in self._of_steps.items():
            self._set(name, cast(Mapping[str, object], record).get(metric.name))
        self._age()

    def take_checkpoint(self, record: Saved) -> None:
        self._saved = time.time()

    def take_failed(self, record: Failed) -> None:
        self._failed += 1
        self._set("foldray_failed_attempts", self._failed)

    def look(self, waiting: Mapping[int, float]) -> None:
        """Set what also changes while no step ends: the age of the checkpoint, and the share of its time that each rank waits."""
        self._age()
        for rank, share in waiting.items():
            self._set("foldray_waiting", share, rank)

    def _age(self) -> None:
        self._set("foldray_checkpoint_age_s", time.time() - self._saved)

    def _set(self, name: str, value: object, rank: int | None = None) -> None:
        if isinstance(value, int | float):
            self._gauges[name].set(float(value), {"run": self._run, "rank": "" if rank is None else str(rank)})
