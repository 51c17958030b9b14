"""The speed of a run over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainers.pictures.speed import draw_speed
from trainers.telemetry.history import Speed

FAILED = {"kind": "failed", "time": 5.0, "step": 3, "what": "node 10.0.0.4 was lost", "goes_on": True, "saved": 2}


def places(time: float, workers: int) -> list[dict[str, Any]]:
    return [{"kind": "place", "rank": rank, "time": time} for rank in range(workers)]


def steps(time: float, *numbers: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": number, "time": time + 0.1 * at, "tokens_per_s": 100.0} for at, number in enumerate(numbers)]


def speed_of(*records: Any) -> Speed:
    speed = Speed()
    for record in records:
        speed.take(record)
    return speed


def test_steps_that_ran_again_count_twice_and_workers_change() -> None:
    grows = {"kind": "grows", "time": 8.0, "step": 4}
    speed = speed_of(*places(0.0, 4), *steps(1.0, 1, 2, 3), FAILED, *places(6.0, 3), *steps(7.0, 3, 4), grows, *places(9.0, 4))
    assert len(speed.times) == 5
    assert speed.workers == [(0.0, 4), (5.0, 0), (6.0, 3), (8.0, 0), (9.0, 4)]
    assert [(event.step, event.what, event.stops) for event in speed.events] == [
        (3, "node 10.0.0.4 was lost; goes on from step 2", True),
        (4, "the cluster has room for more workers", True),
    ]


def test_an_attempt_whose_end_nobody_told() -> None:
    speed = speed_of(*places(0.0, 2), *steps(1.0, 1, 2), *places(4.0, 2))
    assert [(event.time, event.step, event.what) for event in speed.events] == [(4.0, 2, "the run was started again")]
    assert speed.workers == [(0.0, 2), (4.0, 2)]


def test_a_slow_rank_is_told_once() -> None:
    slow = {"kind": "slow", "time": 3.0, "rank": 1, "node_ip": "10.0.0.2", "goes_on": True}
    speed = speed_of(*steps(1.0, 1, 2), slow, {**slow, "goes_on": False, "time": 4.0})
    assert [tuple(event) for event in speed.events] == [(3.0, 2, "rank 1 on 10.0.0.2 is slow", False)]


@pytest.mark.parametrize(
    "speed",
    [
        speed_of(*steps(1.0, 1)),
        speed_of(*places(0.0, 4), *steps(1.0, *range(1, 200))),
        speed_of(*places(0.0, 4), *steps(1.0, 1, 2, 3), FAILED, *places(6.0, 3), *steps(7.0, 3, 4)),
        speed_of(*steps(1.0, 1), *({**FAILED, "time": 2.0 + number, "what": "x" * 300} for number in range(30))),
    ],
    ids=["one step", "quiet", "hurt", "often hurt"],
)
def test_every_run_has_its_picture(speed: Speed, tmp_path: Path) -> None:
    draw_speed(speed, tmp_path / "speed.png", "a-run")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1
