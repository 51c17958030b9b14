"""The gauges of a run, as Prometheus reads them from a node of Ray."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from tests.trainers.telemetry.records import saved, step
from trainers.sinks.prometheus import _OWN, Gauges
from trainers.telemetry.metrics import METRICS


def scraped(port: int, run: str) -> dict[str, dict[str, float]]:
    """Return the values that a node exports for a run, by the name of the metric, then by rank."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_foldray") and sample.labels["run"] == run:  # other tests may have had runs, too
                assert family.type == "gauge"
                found.setdefault(sample.name, {})[sample.labels["rank"]] = sample.value
    return found


@pytest.mark.nightly("waits until Ray exports its metrics")
def test_prometheus_reads_the_figures_of_a_run(ray_session) -> None:
    gauges, port = Gauges("run-7", METRICS), ray.nodes()[0]["MetricsExportPort"]
    record: Any = {**step(3, loss=2.5), "mfu": None}
    gauges.take(saved(2))
    gauges.take(record)
    gauges.take(
        {"kind": "failed", "step": 3, "failure": "lost", "what": "", "ranks": [], "goes_on": True, "saved": 2, "reason": ""}
    )
    gauges.look({1: 0.25})
    deadline = time.monotonic() + 90
    while "ray_foldray_waiting" not in (found := scraped(port, "run-7")):
        assert time.monotonic() < deadline, "no gauge of the run came"
        time.sleep(0.2)
    key = ""  # the run as a whole
    assert found["ray_foldray_step"][key] == 3
    assert found["ray_foldray_loss"][key] == 2.5
    assert found["ray_foldray_tokens_per_s"][key] == pytest.approx(record["tokens_per_s"])
    assert found["ray_foldray_failed_attempts"][key] == 1
    assert 0 <= found["ray_foldray_checkpoint_age_s"][key] < 90
    assert found["ray_foldray_waiting"]["1"] == 0.25
    of_steps = {f"ray_foldray_{metric.gauge}": metric.name for metric in METRICS if metric.gauge}
    known = {*of_steps, *(f"ray_{name}" for name in _OWN)}
    assert known - set(found) == {name for name, field in of_steps.items() if record.get(field) is None}
    assert set(found) <= known


def test_a_checkpoint_grows_older_while_no_step_ends(ray_session, monkeypatch: pytest.MonkeyPatch) -> None:
    now, gauges = time.time(), Gauges("run-8", METRICS)
    monkeypatch.setattr(time, "time", lambda: now)
    seen: dict[str, object] = {}
    monkeypatch.setattr(Gauges, "_set", lambda self, name, value, rank=None: seen.update({name: value}))
    gauges.take(saved(2))
    monkeypatch.setattr(time, "time", lambda: now + 100.0)
    gauges.look({})
    assert seen["foldray_checkpoint_age_s"] == pytest.approx(100.0, abs=5.0)
