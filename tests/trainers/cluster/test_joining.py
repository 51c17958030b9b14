"""What foldray tells Ray before it joins."""

from __future__ import annotations

import os

import pytest
import ray

from tests.foldray.parity import make_recipe
from trainers.cluster.joining import connect, start_ray

_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


@pytest.mark.parametrize(("workers", "given", "expected"), [(2, None, "0.5"), (2, "7", "7"), (128, None, None)])
def test_few_workers_are_asked_often(
    monkeypatch: pytest.MonkeyPatch, workers: int, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {_INTERVAL: given})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    connect(make_recipe(workers, training={"global_batch": 128, "micro_batch": 1}))
    assert os.environ.get(_INTERVAL) == expected


def test_ray_has_a_second_try_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives its processes half a minute, whatever else the machine does."""
    tries: list[str] = []

    def init(**options: object) -> None:
        tries.append("start")
        if tries.count("start") <= late:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: tries.append("end"))
    late = 1
    start_ray(num_cpus=1)
    assert tries == ["start", "end", "start"]
    late = 9
    with pytest.raises(Exception, match="timed out"):
        start_ray(num_cpus=1)
