"""What a failed training tells: the error of a worker inside Ray's errors, first and in one line."""

from __future__ import annotations

import os
import pickle
import re
import textwrap
import traceback

from ray.exceptions import RayActorError
from ray.train import TrainingFailedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from foldray.errors import UserError
from foldray.urls import told_without
from trainers.worker.loop import Preempted

LOST = (RayActorError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
"""What Ray tells of a worker whose process has ended, or does not answer."""
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo/|ncclRemoteError|ncclSystemError|no route to host|timed? ?out",
    re.IGNORECASE,
)
_OURS = ("foldray", "trainers", "tuners")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}/")
_RAISED = re.compile(r"^raised in (.+)$", re.MULTILINE)


class WorkerError(RuntimeError):
    """An exception of a worker that cannot travel. The message begins with its type."""


def sendable(error: Exception) -> Exception:
    """Return an exception that Ray can pass on, with its traceback as a note, because Ray passes on only the exception.

    If an exception's constructor takes other arguments than it hands to `Exception`, no other process can make it again.
    """
    note, sent = "".join(traceback.format_exception(error)) + _place(error), error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        sent = WorkerError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent


def _place(error: Exception) -> str:
    """Return the user's line of code that raised an exception, or an empty text if foldray or a library raised it alone."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path, ours = frame.f_code.co_filename, frame.f_globals.get("__name__", "").split(".")[0] in _OURS
        if not ours and os.path.isfile(path) and not any(part in path for part in _LIBRARIES):
            return f"raised in {path}:{line}, {frame.f_code.co_name}\n"
    return ""


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
    told = str(cause) if isinstance(cause, WorkerError) else f"{type(cause).__name__}: {cause}"
    text = textwrap.shorten(told_without(told), 600, placeholder=" …")
    return f"{text}{where}"


def _places(error: BaseException) -> list[str]:
    return _RAISED.findall("\n".join(getattr(error, "__notes__", ())))


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
