"""Pictures of a study: how the best came to be, what the planner had said, which knobs mattered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

_BLUE, _ORANGE, _GREY, _RED, _INK = "#2364aa", "#d9630b", "#9ca3af", "#b91c1c", "#1f2937"


def draw_history(trials: Sequence[FrozenTrial], reference: float, path: Path) -> None:
    """Every trial's step, the best so far, and the recipe as it stands."""
    figure, axes = _figure("Steps that were measured; lower is better", (9, 4.2))
    done = [each for each in trials if each.user_attrs.get("seconds")]
    kept = [each for each in done if each.state == TrialState.COMPLETE]
    best: list[float] = []
    for each in kept:
        best.append(min([each.user_attrs["seconds"], *best[-1:]]))
    axes.plot(
        [each.number for each in kept], [each.user_attrs["seconds"] * 1e3 for each in kept], "o", color=_BLUE, label="measured"
    )
    stopped = [each for each in done if each.state == TrialState.PRUNED]
    if stopped:
        at = [each.user_attrs["seconds"] * 1e3 for each in stopped]
        axes.plot([each.number for each in stopped], at, "o", mfc="white", color=_GREY, label="stopped early")
    failed = [each.number for each in trials if each.state == TrialState.FAIL]
    for number in failed:
        axes.axvline(number, color=_RED, linewidth=0.8, linestyle=":", label="failed" if number == failed[0] else None)
    axes.step([each.number for each in kept], [each * 1e3 for each in best], where="post", color=_ORANGE, label="best so far")
    axes.axhline(reference * 1e3, color=_GREY, linewidth=1, linestyle="--", label="recipe as it stands")
    axes.set(xlabel="trial", ylabel="step (ms)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, path)


def draw_predicted(trials: Sequence[FrozenTrial], path: Path) -> None:
    """What was predicted beside what was measured."""
    figure, axes = _figure("Predicted and measured steps", (5.6, 5.2))
    told = [each for each in trials if each.user_attrs.get("seconds") and each.user_attrs.get("predicted_s")]
    measured = [each.user_attrs["seconds"] * 1e3 for each in told]
    predicted = [each.user_attrs["predicted_s"] * 1e3 for each in told]
    most = 1.08 * max([*measured, *predicted])
    axes.fill_between([0, most], [0, 0.85 * most], [0, 1.15 * most], color=_BLUE, alpha=0.08, label="15 % either way")
    axes.plot([0, most], [0, most], color=_BLUE, linewidth=1)
    axes.plot(measured, predicted, "o", color=_ORANGE)
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="measured (ms)", ylabel="predicted (ms)")
    _finish(figure, axes, path)


def draw_front(trials: Sequence[FrozenTrial], front: Sequence[FrozenTrial], path: Path) -> None:
    """Every setting's step and memory, and those that none beats at both."""
    figure, axes = _figure("Step and memory; lower and further left is better", (7, 4.6))
    best = {each.number for each in front}
    others = [each for each in trials if each.state == TrialState.COMPLETE and each.number not in best]
    for each, colour, label in ((others, _BLUE, "measured"), (list(front), _ORANGE, "none beats these at both")):
        steps, held = ([trial.user_attrs[key] for trial in each] for key in ("seconds", "peak_gib"))
        axes.plot([1e3 * seconds for seconds in steps], held, "o", color=colour, label=label)
    for trial in front:
        at = (1e3 * trial.user_attrs["seconds"], trial.user_attrs["peak_gib"])
        axes.annotate(trial.user_attrs["setting"], at, (6, 4), textcoords="offset points", fontsize=7, color=_INK)
    axes.set(xlabel="step (ms)", ylabel="memory (GiB)")
    axes.margins(x=0.15, y=0.12)
    _finish(figure, axes, path)


def draw_importance(importance: Mapping[str, float], path: Path) -> None:
    """Each knob's share of the differences between trials."""
    figure, axes = _figure("What mattered: share of the differences between trials", (7, 0.9 + 0.34 * len(importance)))
    names = sorted(importance, key=importance.__getitem__)
    axes.barh(names, [importance[name] for name in names], color=_BLUE)
    axes.set_xlim(0, max(1e-6, *importance.values()) * 1.15)
    for place, name in enumerate(names):
        axes.text(importance[name], place, f" {importance[name]:.0%}", va="center", fontsize=8, color=_INK)
    _finish(figure, axes, path, legend=False)


def _figure(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, dpi=144, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", color=_INK)
    return figure, figure.subplots()


def _finish(figure: Figure, axes: Axes, path: Path, legend: bool = True) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))
