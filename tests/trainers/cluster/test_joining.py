"""What foldray tells Ray before it joins."""

from __future__ import annotations

import os

import pytest
import ray

from tests.foldray.parity import make_recipe
from trainers.cluster.joining import connect

_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


@pytest.mark.parametrize(("workers", "given", "expected"), [(2, None, "0.5"), (2, "7", "7"), (128, None, None)])
def test_few_workers_are_asked_often(
    monkeypatch: pytest.MonkeyPatch, workers: int, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {_INTERVAL: given})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    connect(make_recipe(workers, training={"global_batch": 128, "micro_batch": 1}))
    assert os.environ.get(_INTERVAL) == expected
