"""What a study found, for people: a page with pictures, the best recipe as a file, a table in the terminal."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from tuners.pictures import draw_front, draw_history, draw_importance, draw_predicted
from tuners.sampler import LOST, REASON
from tuners.space import Setting
from tuners.study import Outcome

_STATES = {TrialState.COMPLETE: "", TrialState.PRUNED: "stopped early", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}


def write(outcome: Outcome, study: optuna.Study, reference: float, folder: Path) -> dict[str, Path]:
    """Best recipe, report and pictures; which file is what."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"best": folder / "best.yaml", "report": folder / "report.md", "history": folder / "history.png"}
    text = yaml.safe_dump(_told(outcome), sort_keys=False, allow_unicode=True)
    files["best"].write_text(f"# {outcome.best}: found by `foldray tune`\n{text}")
    trials = [each for each in outcome.trials if not each.user_attrs.get(LOST)]
    draw_history(trials, reference, files["history"])
    if any(each.user_attrs.get("predicted_s") and each.user_attrs.get("seconds") for each in trials):
        files["predicted"] = folder / "predicted.png"
        draw_predicted(trials, files["predicted"])
    if outcome.front:
        files["front"] = folder / "front.png"
        draw_front(trials, outcome.front, files["front"])
    weights = importance(study)
    if weights:
        files["importance"] = folder / "importance.png"
        draw_importance(weights, files["importance"])
    files["report"].write_text(_page(outcome, trials, weights, reference, {name: path.name for name, path in files.items()}))
    return files


def importance(study: optuna.Study) -> dict[str, float]:
    """Each parameter's share of the variance between trials; empty where too few were measured to tell."""
    done = [each for each in study.get_trials(deepcopy=False) if each.state == TrialState.COMPLETE]
    if len(done) < 4:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(optuna.importance.get_param_importances(study, target=lambda each: each.values[0]))
        except (RuntimeError, ValueError):  # all trials equal
            return {}


def summary(outcome: Outcome, reference: float) -> dict[str, Any]:
    """The document of `foldray tune --json`, its files left out."""
    gain = outcome.gain
    return {
        "best": outcome.best._asdict(), "step_time_s": outcome.seconds, "reference_step_time_s": reference,
        "gain": None if gain is None else {"times": gain.times, "low": gain.low, "high": gain.high, "pairs": gain.pairs},
        "trials": [trial_document(each) for each in outcome.trials if not each.user_attrs.get(LOST)],
        **({"front": [each.number for each in outcome.front]} if outcome.front else {}),
    }  # fmt: skip


def trial_document(trial: FrozenTrial) -> dict[str, Any]:
    """One trial, for programs."""
    keys = ("setting", "seconds", "ratio", "predicted_s", "peak_gib", "feasible", "hosts", REASON)
    return {"number": trial.number, "state": trial.state.name.lower(), **{key: trial.user_attrs.get(key) for key in keys}}


def gain_line(outcome: Outcome) -> str:
    """In one sentence."""
    gain = outcome.gain
    if gain is None:
        return "The recipe as it stands is the best that was tried."
    interval = f"95 %: {gain.low:.2f} to {gain.high:.2f}, {gain.pairs} pairs"
    surely = "" if gain.low > 1 else ", not surely faster"
    return f"{gain.times:.2f} times as fast as the recipe as it stands ({interval}{surely})."


def table(outcome: Outcome) -> str:
    """All trials, fastest first, for the terminal."""
    trials = [each for each in outcome.trials if not each.user_attrs.get(LOST)]
    order = sorted(trials, key=lambda each: each.user_attrs.get("seconds") or 1e30)
    lines = [f"{'trial':>5}{'ms':>10}{'±':>7}{'predicted':>11}  setting"]
    for each in order:
        cells = _cells(each)
        note = f"  {cells['note']}" if cells["note"] else ""
        lines.append(f"{each.number:>5}{cells['ms']:>10}{cells['noise']:>7}{cells['predicted']:>11}  {cells['setting']}{note}")
    if outcome.front:
        lines += ["", "best at both time and memory:"]
        lines += [
            f"{each.number:>5}{each.user_attrs['seconds'] * 1e3:>10.0f} ms{each.user_attrs['peak_gib']:>8.2f} GiB  "
            f"{each.user_attrs['setting']}"
            for each in outcome.front
        ]
    return "\n".join(lines)


def _cells(trial: FrozenTrial) -> dict[str, str]:
    seconds, half = trial.user_attrs.get("seconds"), trial.user_attrs.get("ratio_half_interval")
    predicted = trial.user_attrs.get("predicted_s")
    reason = trial.user_attrs.get(REASON) or _STATES.get(trial.state, trial.state.name.lower())
    return {
        "ms": f"{seconds * 1e3:.0f}" if seconds else "–",
        "noise": f"{half / trial.user_attrs['ratio']:.1%}" if half else "",
        "predicted": f"{predicted * 1e3:.0f}" if predicted else "",
        "setting": str(trial.user_attrs.get("setting", "")),
        "note": str(reason),
    }


def _told(outcome: Outcome) -> dict[str, Any]:
    """The recipe as a mapping without what is as it is by default."""
    given = outcome.recipe.model_dump(mode="json", exclude_defaults=True)
    given.pop("tune", None)
    return given


def _page(
    outcome: Outcome, trials: list[FrozenTrial], weights: Mapping[str, float], reference: float, files: Mapping[str, str]
) -> str:
    pruned = sum(each.state == TrialState.PRUNED for each in trials)
    failed = sum(each.state == TrialState.FAIL for each in trials)
    lines = [
        f"# How to train {outcome.recipe.name}", "",
        f"**{outcome.best}**: {gain_line(outcome)}", "",
        f"{len(trials)} of {len(outcome.table.rows)} legal settings were tried ({pruned} stopped early, {failed} failed). A step "
        f"takes {outcome.seconds * 1e3:.0f} ms; of the recipe as it stands, {reference * 1e3:.0f} ms. "
        f"The best recipe is in `{files['best']}`; `foldray train {files['best']}` runs it.", "",
        f"![Steps that were measured]({files['history']})", "",
    ]  # fmt: skip
    if "predicted" in files:
        lines += [f"![Predicted and measured steps]({files['predicted']})", ""]
    if "front" in files:
        lines += [
            f"None of the others beats these {len(outcome.front)} at both time and memory; the best recipe is the fastest:", "",
            f"![Step and memory]({files['front']})", "",
        ]  # fmt: skip
    if "importance" in files:
        first = max(weights, key=weights.__getitem__)
        lines += [f"What mattered most was `{first}`:", "", f"![Importance of each knob]({files['importance']})", ""]
    lines += ["| trial | setting | step, ms | ± | predicted, ms | GiB | |", "|---:|---|---:|---:|---:|---:|---|"]
    for each in sorted(trials, key=lambda each: each.user_attrs.get("seconds") or 1e30):
        cells, peak = _cells(each), each.user_attrs.get("peak_gib")
        held = f"{peak:.2f}" if peak is not None else ""
        lines.append(
            f"| {each.number} | {cells['setting']} | {cells['ms']} | {cells['noise']} | {cells['predicted']} | {held} "
            f"| {cells['note']} |"
        )
    return "\n".join([*lines, ""])


def note(setting: Setting, seconds: float, ratio: float, predicted: float | None, reason: str | None) -> str:
    """A trial in plain words, as the dashboard shows it."""
    if reason:
        return f"**{setting}** could not be measured: {reason}."
    beside = (
        f"{1 / ratio:.2f} times as fast as the recipe as it stands"
        if ratio < 1
        else f"{ratio:.2f} times as slow as the recipe as it stands"
    )
    said = "" if predicted is None else f" The planner had said {predicted * 1e3:.0f} ms ({predicted / seconds - 1:+.0%})."
    return f"**{setting}** takes {seconds * 1e3:.0f} ms a step: {beside}.{said}"
