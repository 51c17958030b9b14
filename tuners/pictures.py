"""Draws a study: the steps of its trials, predicted and measured steps, time and memory, and the importance of knobs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import TrialState

from trainers.pictures.canvas import BLUE, INK, ORANGE, PALE_GREY, RED, one_panel, write
from tuners.record import StoredTrial


def draw_history(trials: Sequence[StoredTrial], reference_s: float, path: Path) -> None:
    """Draw the step time of every trial, of the best feasible trial so far, and of the unchanged recipe."""
    figure, axes = _figure("Steps that were measured; lower is better", (9, 4.2))
    steps_ms = {trial.number: trial.record.seconds * 1e3 for trial in trials if trial.record.seconds is not None}
    kept, stopped = (
        [trial.number for trial in trials if trial.state == state and trial.number in steps_ms]
        for state in (TrialState.COMPLETE, TrialState.PRUNED)
    )
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    axes.plot(kept, [steps_ms[number] for number in kept], "o", color=BLUE, label="measured")
    if stopped:
        heights = [steps_ms[number] for number in stopped]
        axes.plot(stopped, heights, "o", mfc="white", color=PALE_GREY, label="stopped early")
    for number in failed:
        axes.axvline(number, color=RED, linewidth=0.8, linestyle=":", label="failed" if number == failed[0] else None)
    feasible = [trial.number for trial in trials if trial.number in kept and trial.record.feasible]
    best = list(itertools.accumulate((steps_ms[number] for number in feasible), min))
    axes.step(feasible, best, where="post", color=ORANGE, label="best so far")
    axes.axhline(reference_s * 1e3, color=PALE_GREY, linewidth=1, linestyle="--", label="recipe as it stands")
    axes.set(xlabel="trial", ylabel="step (ms)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(figure, axes, path)


def draw_predicted(pairs: Sequence[tuple[float, float]], path: Path) -> None:
    """Draw predicted over measured step times, from pairs of both in seconds."""
    figure, axes = _figure("Predicted and measured steps", (5.6, 5.2))
    predicted, measured = ([seconds * 1e3 for seconds in column] for column in zip(*pairs, strict=True))
    limit = 1.08 * max([*measured, *predicted])
    axes.fill_between([0, limit], [0, 0.85 * limit], [0, 1.15 * limit], color=BLUE, alpha=0.08, label="15 % either way")
    axes.plot([0, limit], [0, limit], color=BLUE, linewidth=1)
    axes.plot(measured, predicted, "o", color=ORANGE)
    axes.set(xlim=(0, limit), ylim=(0, limit), xlabel="measured (ms)", ylabel="predicted (ms)")
    _save(figure, axes, path)


def draw_front(trials: Sequence[StoredTrial], front: Sequence[StoredTrial], path: Path) -> None:
    """Draw the step time and memory of every trial, and mark the trials that no other trial beats at both."""
    figure, axes = _figure("Step and memory; lower and further left is better", (7, 4.6))
    best = {trial.number for trial in front}
    beaten = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.number not in best]
    for shown, colour, label in ((beaten, BLUE, "measured"), (front, ORANGE, "none beats these at both")):
        points = [_step_and_memory(trial) for trial in shown]
        axes.plot([step for step, _ in points], [memory for _, memory in points], "o", color=colour, label=label)
    for trial in front:
        place = _step_and_memory(trial)
        axes.annotate(str(trial.record.setting), place, (6, 4), textcoords="offset points", fontsize=7, color=INK)
    axes.set(xlabel="step (ms)", ylabel="memory (GiB)")
    axes.margins(x=0.15, y=0.12)
    _save(figure, axes, path)


def _step_and_memory(trial: StoredTrial) -> tuple[float, float]:
    """Return a trial's step (ms) and memory (GiB). An unknown number is NaN, which matplotlib does not draw."""
    seconds, peak_gib = trial.record.seconds, trial.record.peak_gib
    return (float("nan") if seconds is None else 1e3 * seconds), (float("nan") if peak_gib is None else peak_gib)


def draw_importance(importance: Mapping[str, float], path: Path) -> None:
    figure, axes = _figure("What mattered: share of the differences between trials", (7, 0.9 + 0.34 * len(importance)))
    names = sorted(importance, key=importance.__getitem__)
    axes.barh(names, [importance[name] for name in names], color=BLUE)
    axes.set_xlim(0, max(1e-6, *importance.values()) * 1.15)
    for place, name in enumerate(names):
        axes.text(importance[name], place, f" {importance[name]:.0%}", va="center", fontsize=8, color=INK)
    _save(figure, axes, path, legend=False)


def _figure(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure, axes = one_panel(*size)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", color=INK)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path, legend: bool = True) -> None:
    if legend:
        axes.legend(frameon=False, fontsize=8)
    write(figure, path)
