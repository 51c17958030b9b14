"""`foldray status`: how a run is doing, read from its folder."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.driver.stored_recipe import recipe_of
from trainers.folders import Checked, DamagedFile, Folder, printable, read_json
from trainers.sinks.run_folder import RANKS, read_history, read_run
from trainers.telemetry.history import LOAD_WINDOW, History

_FIELD = "RUN"
_QUIET_S = 120.0  # a run without news for so long, and for many times its step, is not told to be training


class _Pace(Checked):
    busy: float
    over_others: float | None
    over_before: float | None


class _Rank(Checked):
    rank: int
    doing: str
    waits: list[str]
    still_s: float
    node_ip: str
    pid: int
    pace: _Pace | None


class _Ranks(Checked):
    """What `ranks.json` holds."""

    time: float
    ranks: list[_Rank] = Field(default_factory=list)


@dataclass(frozen=True)
class RunStatus:
    """How a run is doing.

    Args:
        name: the run's id.
        recipe: its recipe.
        history: its records.
        told: the status in its `run.json`.
        ranks: what its ranks were doing when they last told; None without a sign of life.
        now: the present time, in seconds since 1970.
    """

    name: str
    recipe: Recipe
    history: History
    told: str
    ranks: _Ranks | None
    now: float

    @classmethod
    def at(cls, run: str, trust: bool = False) -> RunStatus:
        """Read the folder of a run.

        Args:
            trust: whether to import the modules that its recipe names (`Recipe.stored`).
        """
        path = Path(run).expanduser().absolute()
        if not (path / "run.json").exists():
            raise UserError(_FIELD, run, "has no run.json, so it is not the folder of a run on this machine")
        try:
            ranks = read_json(Folder(str(path)), RANKS, TypeAdapter(_Ranks)) if (path / RANKS).exists() else None
        except DamagedFile as error:
            raise UserError(_FIELD, run, f"its {error}") from None
        told = (read_run(path, _FIELD) or {}).get("status", "unknown")
        recipe = recipe_of(Folder(str(path)), _FIELD, run, trust)
        return cls(path.name, recipe, read_history(path, _FIELD), told, ranks, time.time())

    def document(self) -> dict[str, Any]:
        """Return the status as a JSON document. Times are in seconds."""
        history, steps = self.history, self.history.steps
        newest = {name: steps.column(name)[-LOAD_WINDOW:] for name in ("step_time_s", "tokens_per_s")}
        step_time, tokens_per_s = (float(np.median(values)) if steps else None for values in newest.values())
        loss = steps[steps.last]["loss"] if steps else None
        total = self.recipe.training.stop_after or self.recipe.training.steps
        quiet = None if self._newest is None else max(self.now - self._newest, 0.0)
        is_quiet = quiet is not None and quiet > max(_QUIET_S, 10 * (step_time or 0.0))
        validation = history.validations[max(history.validations)] if history.validations else None
        return {
            "run": self.name,
            "status": "silent" if self.told == "running" and is_quiet else self.told,
            "silent_s": quiet,
            "step": history.last_step,
            "steps": total,
            "skipped_steps": steps[steps.last].get("skipped_steps") if steps else None,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "val_bpb": validation and validation["bits_per_byte"],
            "step_time_s": step_time,
            "tokens_per_s": tokens_per_s,
            "left_s": None if step_time is None else step_time * max(total - history.last_step, 0),
            "checkpoint": self._checkpoint(),
            "failures": [{key: failure.get(key) for key in _FAILURE} for failure in history.failures],
            "ranks": [each.model_dump() for each in self.ranks.ranks] if self.ranks else [],
            "slow": sorted(history.slow),
        }

    def text(self) -> str:
        """Return the status as lines and a table of ranks, for people."""
        found, out = self.document(), Console(width=max(Console().width, _WIDTH))
        lines = [f"{self.name}: {_STATUS.get(found['status'], printable(found['status']))}"]
        if found["status"] == "silent":
            lines[0] += f"; the last news is {_span(found['silent_s'])} old"
        speed = ""
        if found["step_time_s"] is not None:
            speed = f", {found['step_time_s']:.3g} s a step, {found['tokens_per_s']:,.0f} tokens/s, {_span(found['left_s'])} left"
        loss = "" if found["loss"] is None else f", loss {found['loss']:.4f}"
        lines.append(f"step {found['step']} of {found['steps']}{loss}{speed}")
        if found["skipped_steps"]:
            lines.append(f"skipped steps, whose gradients were not finite: {found['skipped_steps']}")
        if found["val_bpb"] is not None:
            lines.append(f"validation: {found['val_bpb']:.3f} bits per byte")
        saved = found["checkpoint"]
        lines.append(f"last checkpoint: step {saved['step']}, {_span(saved['age_s'])} ago" if saved else "no checkpoint yet")
        for failure in found["failures"]:
            after = f"went on from step {failure['saved']}" if failure["goes_on"] else "gave up"
            lines.append(f"failed after step {failure['step']}: {printable(failure['what'], _LONGEST)}; foldray {after}")
        if found["ranks"] and found["status"] in ("running", "silent"):
            with out.capture() as captured:
                out.print(self._table(found))
            lines += ["", *(line.rstrip() for line in captured.get().splitlines()), "", _LEGEND]
        return "\n".join(lines)

    def _table(self, found: dict[str, Any]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("rank", "node", "works", "over others", "over before", "does", "waits for"):
            table.add_column(name, justify="left" if name in ("node", "does", "waits for") else "right", no_wrap=True)
        for each in found["ranks"]:
            pace = each["pace"] or {}
            works = f"{pace['busy']:.0%}" if pace else "–"
            ratios = (f"{pace[key]:.2f}" if pace.get(key) is not None else "–" for key in ("over_others", "over_before"))
            name = f"{each['rank']}{' !' if each['rank'] in found['slow'] else ''}"
            texts = (each["node_ip"], works, *ratios, each["doing"], ", ".join(each["waits"]) or "nothing")
            table.add_row(name, *(Text(printable(text)) for text in texts))
        return table

    def _checkpoint(self) -> dict[str, Any] | None:
        if not self.history.checkpoints:
            return None
        saved = self.history.checkpoints[max(self.history.checkpoints)]
        return {"step": saved["step"], "path": saved["path"], "age_s": max(self.now - saved.get("time", self.now), 0.0)}

    @property
    def _newest(self) -> float | None:
        """When the run was last heard of."""
        steps = self.history.steps
        times = [(steps[steps.last].get("time") or 0.0) if steps else None, self.ranks.time if self.ranks else None]
        return max((time for time in times if time is not None), default=None)


_WIDTH = 120  # of the table of ranks
_LONGEST = 2000  # characters of what failed
_FAILURE = ("time", "step", "failure", "what", "ranks", "goes_on", "saved", "reason")
_STATUS = {"running": "is training", "silent": "should be training, but is silent", "finished": "has finished"}
_LEGEND = """\
works: share of a rank's time without waiting for others; over others, over before: this over theirs, and over its own past
!: the others wait for this rank"""


def _span(seconds: float) -> str:
    """Return a time span in its largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
