"""Signals to a training: the first one asks, the second one ends it, and one signal that comes twice is one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ray.train import RunConfig

from tests.foldray.parity import make_recipe
from trainers import FoldTrainer
from trainers.faults import stopping
from trainers.faults.stopping import Stopping


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_one_ends(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_SAME_S", 0.05)
    asked: list[int] = []
    with Stopping(lambda: not asked.append(1)) as found:
        send(number)
        assert (asked, found.signal) == ([1], number)
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            send(number)
    assert asked == [1]


def test_a_signal_that_is_also_passed_on_by_the_parent_is_one() -> None:
    """`ray job stop` sends SIGTERM to the training and to its parent, which passes it on."""
    asked: list[int] = []
    with Stopping(lambda: not asked.append(1)) as found:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert (asked, found.signal) == ([1], signal.SIGTERM)


def test_a_signal_before_anybody_can_be_asked_ends() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(KeyboardInterrupt) as found, Stopping(lambda: False):
            send(number)
        assert found.value.args == (number,)
        with pytest.raises(KeyboardInterrupt) as found, Stopping(lambda: False):
            replaced(number)
        assert found.value.args == (number,)


def replaced(number: signal.Signals) -> None:
    """Get a signal, and raise a new exception, as Ray does while it waits."""
    with suppress(KeyboardInterrupt):
        send(number)
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_data_are_prepared_ends(
    ray_session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ray's own handler of SIGTERM would end the process with another exit code."""
    trainer = FoldTrainer(make_recipe(2), run_config=RunConfig(name="r", storage_path=str(tmp_path)))
    monkeypatch.setattr(FoldTrainer, "_prepare", lambda self: send(number))
    with pytest.raises(KeyboardInterrupt) as found:
        trainer.fit()
    assert found.value.args == (number,)
    assert trainer.stopped == number
    assert list(tmp_path.iterdir()) == []
