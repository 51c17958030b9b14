"""The error that ends a worker's training: how it travels to the driver, and how the driver finds it in Ray's errors."""

from __future__ import annotations

import os
import pickle
import re
import textwrap
import traceback
from contextlib import suppress
from types import FrameType

from ray.exceptions import RayActorError
from ray.train import TrainingFailedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from foldray.errors import UserError
from foldray.urls import told_without

LOST = (RayActorError, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError)
"""What Ray tells of a worker whose process has ended, or does not answer."""
# torch's process groups tell what happened to a connection only in words.
BROKE = re.compile("connection (closed|reset|refused)( by peer)?|broken pipe|no route to host", re.IGNORECASE)
TIMEOUT = re.compile("timed? ?out", re.IGNORECASE)
_LIBRARY = re.compile("gloo/|ncclRemoteError|ncclSystemError", re.IGNORECASE)
# What the notes of an exception that has travelled tell, one each: the user's line of code, the origin, finished steps.
_RAISED, _CAME, AFTER = "raised in ", "came from ", "after step "
_OURS = ("foldray", "trainers", "tuners")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}/")


class Preempted(Exception):
    """The cluster takes nodes back. A checkpoint of the last step is saved."""


class WorkerError(RuntimeError):
    """An exception of a worker that cannot travel. The message begins with its type."""


def sendable(error: Exception) -> Exception:
    """Return an exception that Ray can pass on, with its traceback as a note, because Ray passes on only the exception.

    If an exception's constructor takes other arguments than it hands to `Exception`, no other process can make it again. If it
    says itself how it is pickled, it loses its notes.
    """
    for note in ("".join(traceback.format_exception(error)), *_place(error), f"{_CAME}{_origin(error)}"):
        error.add_note(note)
    with suppress(Exception):
        if hasattr(pickle.loads(pickle.dumps(error)), "__notes__") or isinstance(error, UserError):
            return error
    sent = WorkerError(f"{type(error).__name__}: {error}")
    sent.__notes__ = error.__notes__
    return sent


def _origin(error: BaseException) -> str:
    """Return the module and the function, outside of libraries, that an exception came from; empty if it was never raised.

    Libraries may fail at another place for the same reason, such as a full GPU.
    """
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    frame = next((frame for frame, _ in frames if _is_ours(frame) or _is_users(frame)), frames[0][0] if frames else None)
    return "" if frame is None else f"{frame.f_globals.get('__name__')}, {frame.f_code.co_qualname}"


def _place(error: Exception) -> list[str]:
    """Return a note of the user's line of code that raised an exception; none if foldray or a library raised it alone."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    return [f"{_RAISED}{code.co_filename}:{line}, {code.co_name}" for code, line in frames[-1:]]


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] in _OURS


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not _is_ours(frame) and os.path.isfile(path) and not any(part in path for part in _LIBRARIES)


def root_cause(error: BaseException) -> BaseException:
    """Return the exception of a worker inside Ray's exceptions.

    If several workers failed, a UserError wins, then an exception from a user's code, then one that does not only follow from
    the end of another worker.
    """
    if isinstance(error, UserError):
        return error
    if failures := getattr(error, "worker_failures", None):
        return root_cause(min(failures.values(), key=_precedence))
    inner = getattr(error, "controller_failure", None) or getattr(error, "cause", None) or error.__cause__
    return root_cause(inner) if isinstance(inner, BaseException) else error


def follows(error: BaseException) -> bool:
    """Whether the error of a worker may follow from the end of another one, or from a broken connection.

    torch's process groups raise RuntimeError. An error of a storage, which is an OSError, follows from no other worker.
    """
    words = BROKE, TIMEOUT, _LIBRARY
    return isinstance(error, LOST) or (isinstance(error, RuntimeError) and any(word.search(str(error)) for word in words))


def _precedence(error: BaseException) -> tuple[bool, bool, bool]:
    return not isinstance(error, UserError | Preempted), follows(error), not _noted(_RAISED, error)


def reason(error: BaseException) -> str:
    """Return what went wrong in one line: the type and the message of the cause, and the user's line of code."""
    cause = root_cause(error)
    places = _noted(_RAISED, cause)
    where = f" ({places[-1]})" if places else ""
    text = textwrap.shorten(told_without(_told(cause)), 600, placeholder=" …")
    return f"{text}{where}"


def identity(error: BaseException) -> str:
    """Return what one cause has in common each time: the type of the exception, and the function that it came from.

    The message may have numbers that differ each time, such as the free bytes of a GPU.
    """
    cause = root_cause(error)
    origins = _noted(_CAME, cause)
    return f"{_told(cause).partition(':')[0]} in {origins[-1] if origins else _origin(cause)}"


def steps_before(error: BaseException) -> int | None:
    """Return how many steps had finished on the rank that raised the cause; None if it does not tell."""
    steps = [int(step) for step in _noted(AFTER, root_cause(error)) if step.isdecimal()]
    return steps[-1] if steps else None


def _told(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, WorkerError) else f"{type(cause).__name__}: {cause}"


def _noted(label: str, error: BaseException) -> list[str]:
    """Return what the notes of an exception have behind a label."""
    return [note.removeprefix(label) for note in getattr(error, "__notes__", ()) if note.startswith(label)]


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
