"""What a failed training tells: the error of a worker inside Ray's errors, first and in one line."""

from __future__ import annotations

import re
import textwrap
import traceback

from ray.train import TrainingFailedError

from foldray.errors import UserError
from foldray.urls import told_without

_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ")


def root_cause(error: BaseException) -> BaseException:
    """Return the exception of a worker inside Ray's exceptions. A UserError wins over the other workers' exceptions."""
    if isinstance(error, UserError):
        return error
    failures = list((getattr(error, "worker_failures", None) or {}).values())
    if failures:
        return root_cause(next((failure for failure in failures if isinstance(failure, UserError)), failures[0]))
    inner = getattr(error, "controller_failure", None) or getattr(error, "cause", None) or error.__cause__
    return root_cause(inner) if isinstance(inner, BaseException) else error


def reason(error: BaseException) -> str:
    """Return what went wrong in one line: the type and the message of the cause, and the line of code that raised it."""
    cause = root_cause(error)
    notes = "\n".join(getattr(cause, "__notes__", ()))
    frames = [frame for frame in _FRAME.findall(notes) if not any(part in frame[0] for part in _LIBRARIES)]
    where = " ({}:{} in {})".format(*frames[-1]) if frames else ""
    text = textwrap.shorten(told_without(f"{type(cause).__name__}: {cause}"), 600, placeholder=" …")
    return f"{text}{where}"


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
