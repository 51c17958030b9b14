"""Reports the result of a study: a page with pictures, the best recipe as a file, and a table for the terminal."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import yaml
from optuna.trial import TrialState

from tuners.measure import Gain
from tuners.outcome import Outcome
from tuners.pictures import draw_front, draw_history, draw_importance, draw_predicted
from tuners.record import StoredTrial, TrialRecord

_STATES = {TrialState.COMPLETE: "", TrialState.PRUNED: "stopped early", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}
_LEAST_TRIALS = 4  # fewer trials say nothing about the importance of knobs


def write_report(outcome: Outcome, study: optuna.Study, folder: Path) -> dict[str, Path]:
    """Write the best recipe, the report and its pictures into a folder. Return the paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"best": folder / "best.yaml", "report": folder / "report.md", "history": folder / "history.png"}
    values = outcome.recipe.model_dump(mode="json", exclude_defaults=True, exclude={"tune"})
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    files["best"].write_text(f"# {outcome.best}: found by `foldray tune`\n{text}")
    draw_history(outcome.counted, outcome.reference_s, files["history"])
    records = [trial.record for trial in outcome.counted]
    pairs = [(record.predicted_s, record.seconds) for record in records if record.predicted_s and record.seconds]
    if pairs:
        files["predicted"] = folder / "predicted.png"
        draw_predicted(pairs, files["predicted"])
    if outcome.front:
        files["front"] = folder / "front.png"
        draw_front(outcome.counted, outcome.front, files["front"])
    importance = knob_importance(study)
    if importance:
        files["importance"] = folder / "importance.png"
        draw_importance(importance, files["importance"])
    files["report"].write_text(_page(outcome, importance, {name: path.name for name, path in files.items()}))
    return files


def knob_importance(study: optuna.Study) -> dict[str, float]:
    """Return each parameter's share of the variance between trials; empty if too few were measured."""
    if len(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])) < _LEAST_TRIALS:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(optuna.importance.get_param_importances(study, target=lambda trial: trial.values[0]))
        except (RuntimeError, ValueError):  # all trials are equal
            return {}


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return the document of `foldray tune --json`, without the keys `files`, `storage` and `mlflow_uri`."""
    gain = outcome.gain
    return {
        "best": outcome.best._asdict(), "step_time_s": outcome.seconds, "reference_step_time_s": outcome.reference_s,
        "best_trial": outcome.winner and outcome.winner.number, "gain": gain and asdict(gain),
        "run_off": [
            {"number": trial.number, **(asdict(result) if isinstance(result, Gain) else {"failure": result})}
            for trial, result in outcome.run_off
        ],
        "trials": [
            {"number": trial.number, "state": trial.state.name.lower(), **trial.record.summary()} for trial in outcome.counted
        ],
        **({"front": [trial.number for trial in outcome.front]} if outcome.front else {}),
    }  # fmt: skip


def gain_line(outcome: Outcome) -> str:
    """Say how much faster the best setting is, and which trial it was. Every report of a study has this line."""
    compared = [(trial, result) for trial, result in outcome.run_off if isinstance(result, Gain)]
    if outcome.gain is not None:
        line = f"{told_gain(outcome.gain)}."
        line += f" It was trial {outcome.winner.number}." if outcome.winner else ""
    elif compared:
        trial, gain = compared[0]
        line = (
            f"No setting is surely faster than the recipe as it stands. The nearest, trial {trial.number}, is {told_gain(gain)}."
        )
    else:
        line = "The recipe as it stands is the best that was tried."
    kept = [trial for trial in outcome.counted if trial.state == TrialState.COMPLETE and trial.record.ratio]
    first = min(kept, key=lambda trial: trial.record.ratio or 0.0, default=None)
    if first is not None and first.row != outcome.table.number[outcome.best]:
        line += f" Trial {first.number} had the shortest step of all trials, but did not win."
    return line


def told_gain(gain: Gain) -> str:
    interval = f"95 %: {gain.low:.2f} to {gain.high:.2f}, {gain.pairs} pairs"
    return f"{gain.times:.2f} times as fast as the recipe as it stands ({interval})"


def trials_table(outcome: Outcome) -> str:
    lines = [f"{'trial':>5}{'ms':>10}{'±':>7}{'predicted':>11}{'× bound':>9}  setting"]
    for trial in _fastest_first(outcome):
        cells = _Cells.of(trial)
        note = f"  {cells.note}" if cells.note else ""
        numbers = f"{trial.number:>5}{cells.step_ms:>10}{cells.noise:>7}{cells.predicted_ms:>11}{cells.over_bound:>9}"
        lines.append(f"{numbers}  {cells.setting}{note}")
    if outcome.front:
        lines += ["", "best at both time and memory:"]
    for trial in outcome.front:
        cells = _Cells.of(trial)
        lines.append(f"{trial.number:>5}{cells.step_ms:>10} ms{cells.memory_gib:>8} GiB  {cells.setting}")
    return "\n".join(lines)


def trial_note(record: TrialRecord, result: Gain | str | None = None) -> str:
    """Describe a trial in Markdown, for Optuna's dashboard. `result` is what the run-off says, once it has said it."""
    if record.seconds is None or record.ratio is None or record.reason:
        return f"**{record.setting}** could not be measured: {record.reason or 'failed'}."
    times = f"{1 / record.ratio:.2f} times as fast" if record.ratio < 1 else f"{record.ratio:.2f} times as slow"
    text = f"**{record.setting}** takes {record.seconds * 1e3:.0f} ms a step: {times} as the recipe as it stands."
    if record.predicted_s is not None:
        off = record.predicted_s / record.seconds - 1
        text += f" The planner had said {record.predicted_s * 1e3:.0f} ms ({off:+.0%})."
    if result is not None:
        text += f" In the run-off: {told_gain(result) if isinstance(result, Gain) else result}."
    return text


class _Cells(NamedTuple):
    """The cells of a trial in the tables. An unknown step is a dash, and other unknown cells are empty."""

    setting: str
    step_ms: str
    noise: str
    predicted_ms: str
    memory_gib: str
    over_bound: str
    note: str

    @classmethod
    def of(cls, trial: StoredTrial) -> _Cells:
        record = trial.record
        noise = record.ratio_half_interval / record.ratio if record.ratio_half_interval and record.ratio else None
        return cls(
            setting=record.setting or "",
            step_ms="–" if record.seconds is None else f"{record.seconds * 1e3:.0f}",
            noise="" if noise is None else f"{noise:.1%}" if noise < 1 else "> 99%",
            predicted_ms="" if record.predicted_s is None else f"{record.predicted_s * 1e3:.0f}",
            memory_gib="" if record.peak_gib is None else f"{record.peak_gib:.2f}",
            over_bound="" if record.over_bound is None else f"{record.over_bound:.2f}",
            note=record.reason or _STATES.get(trial.state, trial.state.name.lower()),
        )


def _fastest_first(outcome: Outcome) -> list[StoredTrial]:
    return sorted(outcome.counted, key=lambda trial: trial.record.seconds or float("inf"))


def _page(outcome: Outcome, importance: Mapping[str, float], files: Mapping[str, str]) -> str:
    trials = outcome.counted
    pruned = sum(trial.state == TrialState.PRUNED for trial in trials)
    failed = sum(trial.state == TrialState.FAIL for trial in trials)
    lines = [
        f"# How to train {outcome.recipe.name}", "",
        f"**{outcome.best}**: {gain_line(outcome)}", "",
        f"{len(trials)} of {len(outcome.table.rows)} legal settings were tried ({pruned} stopped early, {failed} failed). A step "
        f"takes {outcome.seconds * 1e3:.0f} ms; of the recipe as it stands, {outcome.reference_s * 1e3:.0f} ms. "
        f"The best recipe is in `{files['best']}`; `foldray train {files['best']}` runs it.", "",
        f"![Steps that were measured]({files['history']})", "",
    ]  # fmt: skip
    if outcome.run_off:
        lines += ["What could be the best, beside the recipe as it stands once more:", "", "| trial | setting | times as fast |"]
        lines += ["|---:|---|---|"]
        for trial, result in outcome.run_off:
            told = (
                f"{result.times:.2f} ({result.low:.2f} to {result.high:.2f}, {result.pairs} pairs)"
                if isinstance(result, Gain)
                else result
            )
            lines.append(f"| {trial.number} | {trial.record.setting} | {told} |")
        lines.append("")
    if "predicted" in files:
        lines += [f"![Predicted and measured steps]({files['predicted']})", ""]
    if "front" in files:
        lines += [
            f"None of the others beats these {len(outcome.front)} at both time and memory; the best recipe is the fastest:", "",
            f"![Step and memory]({files['front']})", "",
        ]  # fmt: skip
    if "importance" in files:
        first = max(importance, key=importance.__getitem__)
        lines += [f"What mattered most was `{first}`:", "", f"![Importance of each knob]({files['importance']})", ""]
    lines += ["| trial | setting | step, ms | ± | predicted, ms | GiB | × bound | |", "|---:|---|---:|---:|---:|---:|---:|---|"]
    lines += [f"| {trial.number} | {' | '.join(_Cells.of(trial))} |" for trial in _fastest_first(outcome)]
    return "\n".join([*lines, ""])
