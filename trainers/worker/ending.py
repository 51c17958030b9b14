"""How the training of a worker ends, if not with a result: exceptions that the driver knows, and those that can travel to it."""

from __future__ import annotations

import os
import pickle
import traceback

_OURS = ("foldray", "trainers", "tuners")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}/")


class Preempted(Exception):
    """The cluster takes nodes back. A checkpoint of the last step is saved."""


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
