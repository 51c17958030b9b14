"""How the training of a worker ends, if not with a result: exceptions that the driver knows, and those that can travel to it."""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import suppress
from types import FrameType

from foldray.errors import UserError

_OURS = ("foldray", "trainers", "tuners")
CAME, AFTER = "came from ", "after step "
"""How the notes of an exception that has travelled tell its origin, and the steps that had finished, on a line each."""
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
    note = "".join(traceback.format_exception(error)) + _place(error) + f"{CAME}{origin(error)}\n"
    error.add_note(note)
    with suppress(Exception):
        if hasattr(pickle.loads(pickle.dumps(error)), "__notes__") or isinstance(error, UserError):
            return error
    sent = WorkerError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent


def origin(error: BaseException) -> str:
    """Return the module and the function, outside of libraries, that an exception came from; empty if it was never raised.

    Libraries may fail at another place for the same reason, such as a full GPU.
    """
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    frame = next((frame for frame, _ in frames if _is_ours(frame) or _is_users(frame)), frames[0][0] if frames else None)
    return "" if frame is None else f"{frame.f_globals.get('__name__')}, {frame.f_code.co_qualname}"


def _place(error: Exception) -> str:
    """Return the user's line of code that raised an exception, or an empty text if foldray or a library raised it alone."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_users(frame):
            return f"raised in {frame.f_code.co_filename}:{line}, {frame.f_code.co_name}\n"
    return ""


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] in _OURS


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not _is_ours(frame) and os.path.isfile(path) and not any(part in path for part in _LIBRARIES)
