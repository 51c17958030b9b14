"""The columns of steps: they give back what they took, and a long run stays small and quick to draw."""

from __future__ import annotations

import math
import time
import tracemalloc

import pytest

from tests.trainers.telemetry.records import step
from trainers.pictures.health import draw_health
from trainers.pictures.speed import draw_speed
from trainers.pictures.training import draw_expert_load, draw_loss
from trainers.telemetry.history import History, Steps
from trainers.telemetry.metrics import METRICS
from trainers.telemetry.records import Step

ELSEWHERE = {"kind", "load", "by_layer", "traffic"}


def steps_of(*records: Step) -> Steps:
    steps = Steps()
    for record in records:
        steps.add(record)
    return steps


def test_records_come_back_as_they_were() -> None:
    first, second = step(3, loss=1.25, load=[[1, 2]]), step(4, loss=math.inf)
    steps = steps_of(first, second)
    assert list(steps) == [3, 4]
    for record in (first, second):
        found = steps[record["step"]]
        for name in {*Step.__annotations__, *(metric.name for metric in METRICS)} - ELSEWHERE:
            assert found[name] == record.get(name), name  # type: ignore[literal-required]
            assert type(found[name]) is type(record.get(name)), name  # type: ignore[literal-required]
        assert found["load"] is None
    assert steps.column("loss").tolist() == [1.25, math.inf]


def test_a_loss_that_is_no_number_stays_one() -> None:
    steps = steps_of(step(1, loss=math.nan), {**step(2), "loss": None, "mfu": math.nan})  # type: ignore[typeddict-item]
    assert math.isnan(steps[1]["loss"])
    assert math.isnan(steps[2]["loss"])
    assert steps[2]["mfu"] is None


def test_steps_are_forgotten_from_the_end() -> None:
    steps = steps_of(*(step(number) for number in (1, 2, 5, 6)))
    steps.rewind(4)
    assert (list(steps), steps.last, len(steps.column("lr"))) == ([1, 2], 2, 2)
    for missing in (0, 5, 6):
        with pytest.raises(KeyError):
            steps[missing]
    steps.rewind(0)
    assert (len(steps), steps.last) == (0, 0)


@pytest.mark.nightly("draws 320,000 steps")
def test_a_long_run_stays_small_and_quick_to_draw(tmp_path) -> None:
    history, record = History(), step(1, load=[[3, 1, 2, 2], [1, 1, 1, 0]])
    begun = {}
    tracemalloc.start()
    try:
        for number in range(1, 20_001):
            history.take({**record, "step": number, "time": 1e9 + number})
            if number in (10_000, 20_000):
                begun[number] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert begun[20_000] - begun[10_000] < 10_000 * 250
    # 300,000 further steps. Receiving them would take minutes, so that they are copied into the columns.
    for column in history.steps._columns.values():
        column.extend(column * 15)
    history.steps._columns["step"][:] = type(column)("d", range(1, 320_001))
    history.speed.times.extend(1e9 + number for number in range(20_001, 320_001))
    history.speed.tokens_per_s.extend([1e4] * 300_000)
    started = time.process_time()
    draw_loss(history, {"unigram": 4.0}, tmp_path / "loss.png", "run")
    draw_speed(history.speed, tmp_path / "speed.png", "run")
    draw_expert_load(history, tmp_path / "load.png", "run")
    draw_health(history, tmp_path / "health.png", "run")
    assert time.process_time() - started < 60
