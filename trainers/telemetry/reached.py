"""How long a run took to reach a loss: from which step on its losses stayed at or below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainers.telemetry.history import History

WINDOW = 20  # steps whose median counts as the training loss, because the loss of one step depends mostly on its batch


class Reached(NamedTuple):
    """The step from which on a loss stayed at or below a value, as far as the run has come, and what the run had spent by then.

    Args:
        step: the last step that this took.
        tokens: tokens of all sequences since the run began.
        seconds: of its steps alone. Steps that ran again after a failure count once.
        elapsed_s: on the clock since the run began, with evaluation, checkpoints and failures; None if records have no times.
    """

    step: int
    tokens: int
    seconds: float
    elapsed_s: float | None


def training_reached(history: History, loss: float, tokens: int) -> Reached | None:
    """Return when the median of the newest `WINDOW` training losses stayed at or below `loss`; None if it does not yet.

    Args:
        tokens: tokens of a step.
    """
    losses = history.steps.column("loss")
    if len(losses) < WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(np.where(np.isfinite(losses), losses, np.inf), WINDOW)
    first = _stayed(np.median(windows, axis=1), loss)
    return None if first is None else _reached(history, first + WINDOW, tokens)


def validation_reached(history: History, loss: float, tokens: int) -> Reached | None:
    """Return when the validation loss stayed at or below `loss`; None if it does not yet.

    Args:
        tokens: tokens of a step.
    """
    validations = [history.validations[step] for step in sorted(history.validations)]
    # A loss that is no number is null in a file.
    losses = [np.inf if validation["loss"] is None else validation["loss"] for validation in validations]
    first = _stayed(losses, loss)
    if first is None:
        return None
    count = int(np.searchsorted(history.steps.column("step"), validations[first]["step"], side="right"))
    return _reached(history, count, tokens) if count else None


def _stayed(losses: Sequence[float] | np.ndarray, most: float) -> int | None:
    """Return the place of the first loss from which on none is above `most`."""
    above = np.flatnonzero(~(np.asarray(losses) <= most))  # NaN is above
    first = int(above[-1]) + 1 if len(above) else 0
    return first if first < len(losses) else None


def _reached(history: History, count: int, tokens: int) -> Reached:
    """Return what the first `count` steps had spent."""
    steps, times, seconds = (history.steps.column(name) for name in ("step", "time", "step_time_s"))
    elapsed = float(times[count - 1] - times[0] + seconds[0])
    return Reached(int(steps[count - 1]), count * tokens, float(seconds[:count].sum()), elapsed if np.isfinite(elapsed) else None)
