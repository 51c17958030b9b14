"""A rank that stands still is ended by its pulse, whatever else does not answer, and orders of the driver reach it."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import ray

from foldray.comm import Activity
from trainers.faults.watch import STALLED, Pulse
from trainers.telemetry.mailbox import Outbox


class Telling:
    """An outbox that keeps what is sent."""

    stops = False

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, record: dict[str, Any]) -> None:
        self.sent.append(record)

    def flush(self, timeout: float = 10.0) -> bool:
        return True


@ray.remote(num_cpus=0)
class Slow:
    """A queue that takes its time."""

    def __init__(self, answer_s: float, stops: bool) -> None:
        self.answer_s, self.stops = answer_s, stops

    def put(self, records: list[dict[str, Any]]) -> bool:
        time.sleep(self.answer_s)
        return self.stops


def until(done: Any, patience: float = 120.0) -> None:
    deadline = time.monotonic() + patience
    while not done():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the pulse would have ended this process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_rank_that_stands_still_is_ended_although_the_driver_does_not_answer(
    ray_session, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outbox.flush, "__defaults__", (0.5,))  # otherwise it tries for ten seconds to tell the driver
    queue = Slow.remote(3600.0, True)
    with Pulse(0, Activity(), Outbox(queue, limit=1), patience=1.0, period=0.2) as pulse:
        until(lambda: ends)
    assert set(ends) == {STALLED}
    assert not pulse.stops
    ray.kill(queue)


def test_a_rank_shows_signs_of_life_while_it_is_built(ends: list[int]) -> None:
    activity, telling = Activity(), Telling()
    with Pulse(0, activity, telling, patience=0.1, period=0.02) as pulse:  # type: ignore[arg-type]
        with activity.during("building", 60.0):
            activity.waited_s = 5.0
            time.sleep(0.5)
        assert not ends, "building may take longer than a step"
        built = telling.sent[-1]
        assert (built["doing"], built["trained_s"]) == ("building", 0.0)
        began = time.monotonic()
        pulse.trains()
        activity.doing = "route"
        activity.waited_s = 5.25
    assert 0.0 < telling.sent[-1]["trained_s"] <= time.monotonic() - began
    assert telling.sent[-1]["waited_s"] == 0.25


def test_an_order_to_stop_is_read(ray_session, ends: list[int]) -> None:
    queue = Slow.remote(0.5, True)
    with Pulse(0, Activity(), Outbox(queue, limit=1), patience=60.0, period=0.2) as pulse:
        until(lambda: pulse.stops)
    assert not ends
    ray.kill(queue)
