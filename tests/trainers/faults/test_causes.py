"""What a failed training tells: the cause first, from whichever worker, and in one line."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from ray.train import TrainingFailedError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from foldray.errors import UserError
from tests.trainers.driver.faulty import Odd
from trainers.faults.causes import (
    AFTER,
    WorkerError,
    identity,
    reason,
    root_cause,
    sendable,
    steps_before,
    told_first,
    tracebacks,
)


def raised(error: Exception) -> Exception:
    """Return an exception as a worker sends it."""
    try:
        raise error
    except Exception as caught:
        return pickle.loads(pickle.dumps(sendable(caught)))


def group(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError("[Rank 0 Error Snippet]:\nTraceback …", dict(enumerate(errors)))


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [(ValueError("no\n luck"), ValueError, "ValueError: no luck"), (Odd(1, 2), WorkerError, "Odd: 1 is not 2")],
)
def test_an_exception_travels_with_its_place(error: Exception, kind: type, told: str) -> None:
    sent = raised(error)
    assert type(sent) is kind
    assert "in raised" in "\n".join(sent.__notes__)
    line = reason(group(sent))
    assert line.startswith(f"{told} ({__file__}:")
    assert line.endswith(", raised)")


def test_the_cause_is_told_before_what_followed_from_it() -> None:
    lost = RuntimeError("Connection closed by peer")
    assert str(root_cause(group(lost, raised(ValueError("mine"))))) == "mine"
    assert root_cause(group(lost)) is lost
    assert reason(ControllerError(raised(KeyError("x")))).startswith("KeyError: 'x' (")


def test_the_same_error_with_other_numbers_is_the_same() -> None:
    """CUDA's message has the free bytes of the GPU, and a library may fail in another of its functions."""

    def fails(text: str, error: type[Exception] = ValueError) -> Exception:
        try:
            json.loads(text) if error is ValueError else exec("raise error(text)", {"error": error, "text": text})
        except Exception as caught:
            caught.add_note(f"{AFTER}14")
            return pickle.loads(pickle.dumps(sendable(caught)))
        raise AssertionError(text)

    one, other = fails('{"a": 1'), fails("")
    assert reason(one) != reason(other)
    assert identity(group(RuntimeError("Connection closed by peer"), one)) == identity(group(other))
    assert identity(one) != identity(raised(json.JSONDecodeError("x", "", 0))), "another function"
    assert identity(one).startswith(f"JSONDecodeError in {__name__}, ")
    assert identity(fails("x", OSError)) == identity(one).replace("JSONDecodeError", "OSError")
    assert identity(raised(Odd(1, 2))) == identity(raised(Odd(3, 4))) == f"Odd in {__name__}, raised", "it cannot be pickled"
    assert [steps_before(group(error)) for error in (one, raised(ValueError(f"{AFTER}3")))] == [14, None]


def test_a_users_mistake_on_a_worker_is_a_users_mistake() -> None:
    mistake = UserError("data.cache", "/data", "holds no complete packed data; prepare it again")
    assert told_first(group(raised(ValueError("x")), raised(mistake))).args == mistake.args


@pytest.mark.parametrize("kind", [group, lambda error: ControllerError(error)])
def test_any_other_failure_stays_rays_error(kind: Any) -> None:
    error = kind(raised(ValueError("out of luck")))
    told = told_first(error)
    assert told is error
    assert isinstance(told, TrainingFailedError)
    first, second, *_ = str(told).splitlines()
    assert first.startswith("ValueError: out of luck (")
    assert second.startswith("Training failed due to")
    assert isinstance(pickle.loads(pickle.dumps(told)), type(error))
    assert "ValueError: out of luck" in tracebacks(told)
