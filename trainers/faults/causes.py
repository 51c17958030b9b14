"""What a failed training tells: the error of a worker inside Ray's errors, first and in one line."""

from __future__ import annotations

import re
import textwrap
import traceback

from ray.exceptions import RayActorError
from ray.train import TrainingFailedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from foldray.errors import UserError
from foldray.urls import told_without
from trainers.faults.ending import AFTER, CAME, Preempted, WorkerError, origin

LOST = (RayActorError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
"""What Ray tells of a worker whose process has ended, or does not answer."""
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo/|ncclRemoteError|ncclSystemError|no route to host|timed? ?out",
    re.IGNORECASE,
)
_RAISED = re.compile(r"^raised in (.+)$", re.MULTILINE)
_CAME = re.compile(rf"^{CAME}(.*)$", re.MULTILINE)
_AFTER = re.compile(rf"^{AFTER}(\d+)$", re.MULTILINE)


def root_cause(error: BaseException) -> BaseException:
    """Return the exception of a worker inside Ray's exceptions.

    If several workers failed, a UserError wins, then an exception from a user's code, then one that does not only follow from
    the end of another worker.
    """
    if isinstance(error, UserError):
        return error
    if failures := getattr(error, "worker_failures", None):
        return root_cause(min(failures.values(), key=_rank))
    inner = getattr(error, "controller_failure", None) or getattr(error, "cause", None) or error.__cause__
    return root_cause(inner) if isinstance(inner, BaseException) else error


def follows(error: BaseException) -> bool:
    """Whether the error of a worker may follow from the end of another one, or from a broken connection.

    torch's process groups raise RuntimeError. An error of a storage, which is an OSError, follows from no other worker.
    """
    return isinstance(error, LOST) or (isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error))))


def _rank(error: BaseException) -> tuple[bool, bool, bool]:
    return not isinstance(error, UserError | Preempted), follows(error), not _places(error)


def reason(error: BaseException) -> str:
    """Return what went wrong in one line: the type and the message of the cause, and the user's line of code."""
    cause = root_cause(error)
    places = _places(cause)
    where = f" ({places[-1]})" if places else ""
    text = textwrap.shorten(told_without(_told(cause)), 600, placeholder=" …")
    return f"{text}{where}"


def identity(error: BaseException) -> str:
    """Return what one cause has in common each time: the type of the exception, and the function that it came from.

    The message may have numbers that differ each time, such as the free bytes of a GPU.
    """
    cause = root_cause(error)
    places = _noted(_CAME, cause)
    return f"{_told(cause).partition(':')[0]} in {places[-1] if places else origin(cause)}"


def steps_before(error: BaseException) -> int | None:
    """Return how many steps had finished on the rank that raised the cause; None if it does not tell."""
    steps = _noted(_AFTER, root_cause(error))
    return int(steps[-1]) if steps else None


def _told(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, WorkerError) else f"{type(cause).__name__}: {cause}"


def _places(error: BaseException) -> list[str]:
    return _noted(_RAISED, error)


def _noted(what: re.Pattern[str], error: BaseException) -> list[str]:
    return what.findall("\n".join(getattr(error, "__notes__", ())))


def told_first(error: TrainingFailedError) -> Exception:
    """Return the error to raise for a training that failed.

    A user's mistake, which a worker found, is a UserError. Any other is Ray's error, whose first line is the reason.
    """
    cause = root_cause(error)
    if isinstance(cause, UserError):
        return cause
    error.args = (f"{reason(error)}\n{error}", *error.args[1:])
    return error


def tracebacks(failure: BaseException) -> str:
    """Return the tracebacks of the driver and of every failed worker."""
    workers = {f"rank {rank}": error for rank, error in getattr(failure, "worker_failures", {}).items()}
    texts = [f"{where}\n{''.join(traceback.format_exception(error))}" for where, error in {**workers, "driver": failure}.items()]
    return told_without("\n".join(texts))
