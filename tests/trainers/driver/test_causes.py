"""What a failed training tells: the cause first, from whichever worker, and in one line."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from ray.train import TrainingFailedError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from foldray.errors import UserError
from tests.trainers.driver.faulty import Odd
from trainers.driver.causes import reason, root_cause, told_first, tracebacks
from trainers.worker.ending import WorkerError, sendable


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
