"""Figures of a run as metrics of Ray, which its dashboard and Prometheus read."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray.util.metrics import Gauge

from trainers.records import Record

_STEP = {
    "foldray_step": ("step", "Finished optimizer steps"),
    "foldray_loss": ("loss", "Cross entropy of the last step, nats per token"),
    "foldray_step_time_s": ("step_time_s", "Seconds of the last step"),
    "foldray_tokens_per_s": ("tokens_per_s", "Tokens per second of the last step"),
    "foldray_mfu": ("mfu", "Model FLOPs of the last step over those of the GPUs' data sheets, from 0 to 1"),
    "foldray_product_share": ("product_share", "Model FLOPs of the last step over those of measured matrix products"),
    "foldray_expert_overload": ("load_max_over_mean", "Load of the fullest expert over the mean load, in the worst layer"),
    "foldray_rank_overload": ("rank_max_over_mean", "Load of the fullest rank over the mean load, in the worst layer"),
    "foldray_dead_experts": ("dead_experts", "Experts without a token in the last step"),
    "foldray_skipped_steps": ("skipped_steps", "Steps of the run that were skipped because their gradient was not finite"),
    "foldray_dropped_tokens": ("drop_rate", "Share of assignments that experts dropped in the last step"),
}
_OWN = {
    "foldray_checkpoint_age_s": "Seconds since the last checkpoint, or since the run began",
    "foldray_failed_attempts": "Attempts that failed",
    "foldray_waiting": "Share of its time that a rank waits for others: exposed communication, bubbles and stragglers",
}


class Gauges:
    """Sets a gauge of Ray for every figure. All of them have the tag `run`. Ray puts `ray_` before their names.

    Args:
        run: the run's id.
    """

    def __init__(self, run: str):
        self._run, self._saved, self._failed = run, time.time(), 0
        texts = {name: text for name, (_, text) in _STEP.items()} | _OWN
        self._gauges = {name: Gauge(name, text, ("run", "rank")) for name, text in texts.items()}

    def receive(self, record: Record) -> None:
        """Set the gauges to the figures of a record."""
        if record["kind"] == "step":
            for name, (key, _) in _STEP.items():
                self._set(name, record.get(key))
            self._age()
        elif record["kind"] == "checkpoint":
            self._saved = time.time()
        elif record["kind"] == "failed":
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
