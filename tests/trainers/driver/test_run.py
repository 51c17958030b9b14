"""What the driver asks of the workers: to stop, and to make room for more of them."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foldray import Recipe
from tests.trainers.faults.test_watch import beat
from tests.trainers.telemetry.records import place, step
from trainers.driver import run as module
from trainers.driver.run import Run
from trainers.faults.watch import Watch
from trainers.telemetry.history import History


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of two workers that may have four, in a cluster that has room for them."""
    monkeypatch.setattr(module, "larger_world", lambda need, worlds, now: max(worlds))
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    folder = SimpleNamespace(history=History(), write_ranks=lambda beats, paces: None)
    found: Any = SimpleNamespace(
        folder=folder, watch=Watch(), stopped=False, grows=False, asked=False, _worlds=(2, 4), _need={}, _sees_room=0,
        _grew_from=0, _grew=-math.inf, _looked=-math.inf, _gauges=SimpleNamespace(look=lambda waiting: None),
        _inbox=SimpleNamespace(stops=False, delivering=threading.RLock()), _ended=None, _patience=lambda: 60.0,
    )  # fmt: skip
    found._grow = lambda workers: Run._grow(found, workers)
    return found


@pytest.mark.parametrize("fails", ["RunFolder", "Gauges"])
def test_a_start_that_fails_ends_the_run_in_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str) -> None:
    """Otherwise it would be told to be running for ever."""
    told: list[str] = []

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    tracker = SimpleNamespace(
        uri="", run_id="", view_command=lambda: "", store=lambda files: None, close=told.append, receive=lambda record: None
    )
    monkeypatch.setattr(module, "Tracker", lambda *_: tracker)
    monkeypatch.setattr(module, "baselines", lambda *_: (None, None))
    monkeypatch.setattr(module, "counts_by_source", lambda data: {})
    monkeypatch.setattr(module, fails, full)
    recipe = Recipe.parse({"name": "r", "model": {"preset": "tiny"}})
    with pytest.raises(OSError, match="No space left"), Run(recipe, "r-1", tmp_path, None, None):  # type: ignore[arg-type]
        pass
    assert told == ["FAILED"]


def test_how_long_a_rank_may_be_silent_follows_the_steps() -> None:
    cluster = Recipe.parse({"name": "r", "model": {"preset": "tiny"}}).cluster
    found: Any = SimpleNamespace(folder=SimpleNamespace(history=History()), _recipe=SimpleNamespace(cluster=cluster))
    assert Run._patience(found) == cluster.timeout == 300.0, "no step is known"
    for number, seconds, expected in ((1, 0.2, 60.0), (2, 4.0, 120.0), (3, 100.0, 300.0)):
        found.folder.history.take({**step(number), "step_time_s": seconds})
        assert Run._patience(found) == expected


def test_a_rank_alone_is_missed_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else shows a sign of life, but the queue answers."""
    now, ended = [1000.0], list[bool]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    run._end_attempt = lambda: ended.append(True)
    run.folder.history.take(place(0))
    Run._look(run, [])  # before any sign of life
    Run._look(run, [beat(0, trained_s=9.0)])
    for _ in range(6):
        Run._look(run, [])
        now[0] += 10.0
    assert not ended
    for _ in range(3):
        Run._look(run, [])
        now[0] += 10.0
    assert ended == [True], "its attempt is ended once"
    assert run._ended.ranks == (0,)


def look(run: Any, *ranks: int, trained: float = 9.0) -> bool:
    """Let ranks show two signs of life each, and return whether the workers were asked to stop."""
    for rank in (*ranks, *ranks):
        Run._look(run, [beat(rank, trained_s=trained)])
    return run._inbox.stops


def test_an_order_to_stop_holds_for_the_next_attempt(run: Any) -> None:
    """A node that goes away takes the driver's SIGTERM and a worker with it."""
    Run.ask_to_stop(run)
    Run.begin(run)
    assert run._inbox.stops


def test_an_order_to_grow_does_not(run: Any) -> None:
    run.grows = run._inbox.stops = True
    Run.begin(run)
    assert not run._inbox.stops


def test_an_attempt_begins_without_the_places_of_an_earlier_process(run: Any) -> None:
    run.folder.history.take(place(0))
    Run.begin(run)
    assert not run.folder.history.places


def test_workers_make_room_for_more_once_all_of_them_train(run: Any) -> None:
    assert not look(run, 0, 1), "their places are not known yet"
    run.folder.history.take(place(0))
    assert not look(run, 0, 1)
    run.folder.history.take(place(1))
    assert not look(run, 0, 1, trained=0.0)
    assert look(run, 0, 1)
    assert run.grows


def test_room_that_workers_do_not_fit_into_is_tried_seldom(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        run.folder.history.take(place(rank))
    assert look(run, 0, 1)
    for later, asked in ((0.0, False), (60.0, False), (700.0, True)):
        Run.begin(run)
        for rank in (0, 1):
            run.folder.history.take(place(rank))
        now = time.monotonic() + later
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda now=now: now))
        assert look(run, 0, 1) == asked
