"""`foldray status` and `foldray health`: how a run is doing, and how evenly it uses its experts, read from its folder."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
from trainers.faults.watch import Pace
from trainers.folders import Checked, DamagedFile, Folder, printable, read_json
from trainers.routes.files import ABOUT, FOLDER
from trainers.routes.recorded import Recorded
from trainers.routes.summary import RoutesSummary, summary
from trainers.sinks.run_folder import FAILURE, RANKS, read_history, read_run, recipe_of
from trainers.telemetry.expert_health import STARVED, Health
from trainers.telemetry.history import LOAD_WINDOW, History
from trainers.telemetry.reached import WINDOW, Reached, training_reached, validation_reached

_FIELD = "RUN"
_QUIET_S = 120.0  # a run without news for so long, and for many times its step, is not told to be training
_WIDTH = 120  # of the table of ranks
_LONGEST = 2000  # characters of what failed
_STATUS = {"running": "is training", "silent": "should be training, but is silent", "finished": "has finished"}
_RANKS_LEGEND = """\
works: share of a rank's time without waiting for others; over others, over before: this over theirs, and over its own past
!: the others wait for this rank"""
_EXPERTS_LEGEND = f"""\
fullest expert, rank: load over the mean load; 1 is even, and a step waits for the fullest (mean of the steps)
entropy: of the load, over ln(experts); 1 is even, 0 is one expert for all (mean of the steps)
dead: experts without a token in these steps; starved: those with less than {STARVED:.0%} of the even share, dead ones included"""


class _Rank(Checked):
    rank: int
    doing: str
    waits: list[str]
    still_s: float
    node_ip: str
    pid: int
    pace: Pace | None


class _Ranks(Checked):
    """What `ranks.json` holds."""

    time: float
    ranks: list[_Rank] = Field(default_factory=list)


@dataclass(frozen=True)
class RunStatus:
    """How run `name` is doing: the status that its `run.json` tells, and what its ranks did when they last showed a sign of life.

    `now` is the present time, in seconds since 1970. `losses` are those for which it is told when the run reached them.
    """

    name: str
    recipe: Recipe
    history: History
    status: str
    ranks: _Ranks | None
    now: float
    losses: Sequence[float] = ()

    @classmethod
    def at(cls, run: str, trust: bool = False, losses: Sequence[float] = ()) -> RunStatus:
        """Read the folder of a run. With `trust`, import the modules that its recipe names (`Recipe.stored`)."""
        if (wrong := next((loss for loss in losses if not math.isfinite(loss)), None)) is not None:
            raise UserError("loss", wrong, "must be a number, in nats per token")
        path = _with_file(run, "run.json")
        try:
            ranks = read_json(Folder(str(path)), RANKS, TypeAdapter(_Ranks)) if (path / RANKS).exists() else None
        except DamagedFile as error:
            raise UserError(_FIELD, run, f"its {error}") from None
        status = (read_run(path, _FIELD) or {}).get("status", "unknown")
        recipe = recipe_of(Folder(str(path)), _FIELD, run, trust)
        return cls(path.name, recipe, read_history(path, _FIELD), status, ranks, time.time(), losses)

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
            "status": "silent" if self.status == "running" and is_quiet else self.status,
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
            "failures": [{key: failure.get(key) for key in FAILURE} for failure in history.failures],
            "ranks": [rank.model_dump() for rank in self.ranks.ranks] if self.ranks else [],
            "slow": sorted(history.slow),
            "reached": [
                {"loss": loss, **{name: found and found._asdict() for name, found in self._reached(loss).items()}}
                for loss in self.losses
            ],
        }

    def _reached(self, loss: float) -> dict[str, Reached | None]:
        tokens = self.recipe.training.global_batch * self.recipe.data.seq_len
        given = self.history, loss, tokens
        return {"training": training_reached(*given), "validation": validation_reached(*given)}

    def text(self) -> str:
        """Return the status as lines and a table of ranks, for people."""
        status = self.document()
        lines = [f"{self.name}: {_STATUS.get(status['status'], printable(status['status']))}"]
        if status["status"] == "silent":
            lines[0] += f"; the last news is {_span(status['silent_s'])} old"
        speed = ""
        if status["step_time_s"] is not None:
            step_time, rate, left = f"{status['step_time_s']:.3g}", f"{status['tokens_per_s']:,.0f}", _span(status["left_s"])
            speed = f", {step_time} s a step, {rate} tokens/s, {left} left"
        loss = "" if status["loss"] is None else f", loss {status['loss']:.4f}"
        lines.append(f"step {status['step']} of {status['steps']}{loss}{speed}")
        if status["skipped_steps"]:
            lines.append(f"skipped steps, whose gradients were not finite: {status['skipped_steps']}")
        if status["val_bpb"] is not None:
            lines.append(f"validation: {status['val_bpb']:.3f} bits per byte")
        saved = status["checkpoint"]
        lines.append(f"last checkpoint: step {saved['step']}, {_span(saved['age_s'])} ago" if saved else "no checkpoint yet")
        lines += [f"loss {loss:g}: {_when(self._reached(loss))}" for loss in self.losses]
        for failure in status["failures"]:
            after = f"went on from step {failure['saved']}" if failure["goes_on"] else "gave up"
            lines.append(f"failed after step {failure['step']}: {printable(failure['what'], _LONGEST)}; foldray {after}")
        if status["ranks"] and status["status"] in ("running", "silent"):
            table = self._table(status["ranks"], status["slow"])
            lines += ["", *_lines(table, Console(width=max(Console().width, _WIDTH))), "", _RANKS_LEGEND]
        return "\n".join(lines)

    def _table(self, ranks: list[dict[str, Any]], slow: list[int]) -> Table:
        table = _empty_table("rank", "node", "works", "over others", "over before", "does", "waits for")
        for column in (table.columns[1], *table.columns[5:]):
            column.justify = "left"
        for rank in ranks:
            pace = rank["pace"] or {}
            works = f"{pace['busy']:.0%}" if pace else "–"
            ratios = (f"{pace[key]:.2f}" if pace.get(key) is not None else "–" for key in ("over_others", "over_before"))
            name = f"{rank['rank']}{' !' if rank['rank'] in slow else ''}"
            texts = (rank["node_ip"], works, *ratios, rank["doing"], ", ".join(rank["waits"]) or "nothing")
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


@dataclass(frozen=True)
class RunHealth:
    """The balance of a run's experts in its newest `steps`, at most `history.LOAD_WINDOW`. `name` is the run's id."""

    name: str
    history: History
    recipe: Recipe
    health: Health
    steps: range
    routes: RoutesSummary | None = None

    @classmethod
    def at(cls, run: str, trust: bool = False) -> RunHealth:
        """Read the folder of a run, which may still train. Loads of experts are in the records of all versions of foldray.

        With `trust`, import the modules that its recipe names (`Recipe.stored`).
        """
        path = _with_file(run, "metrics.jsonl")
        recipe, history = recipe_of(Folder(str(path)), _FIELD, run, trust), read_history(path, _FIELD)
        load, steps = history.load, history.newest
        if load is None or steps is None:
            raise UserError(_FIELD, run, "has no loads of experts: it has finished no step, or its model has no MoE layer")
        shape = (len(recipe.model.moe_layers), recipe.model.experts)
        if load.shape != shape:
            sizes = " and ".join(f"{layers} MoE layers of {experts} experts" for layers, experts in (load.shape, shape))
            raise UserError(_FIELD, run, f"has a metrics.jsonl and a recipe.yaml of different models: {sizes}")
        health = history.health(recipe.placed_fold.ep)
        assert health is not None, "the history has loads"
        routes = summary(Recorded(run, _FIELD), recipe.placed_fold) if (path / FOLDER / ABOUT).exists() else None
        return cls(path.name, history, recipe, health, steps, routes)

    def draw(self, path: Path) -> None:
        """Draw the page of pictures into a PNG."""
        from trainers.pictures.health import draw_health

        draw_health(self.history, path, self.name, self.recipe.model.moe_layers)

    def document(self) -> dict[str, Any]:
        """Return the table as a JSON document: measures as in the records of steps, by layer and in the worst layer."""
        measures, health = self.health.by_layer(), self.health
        return {
            "run": self.name,
            "steps": [self.steps[0], self.steps[-1]],
            "experts": self.recipe.model.experts,
            "ep": self.recipe.placed_fold.ep,
            "layers": [
                {"layer": layer, **{name: values[at] for name, values in measures.items()}}  # type: ignore[index]
                for at, layer in enumerate(self.recipe.model.moe_layers)
            ],
            "worst": {
                "max_over_mean": float(health.max_over_mean.max()),
                "rank_max_over_mean": float(health.rank_max_over_mean.max()),
                "entropy": float(health.entropy.min()),
                "dead": int(health.dead.max()),
                "starved": int(health.starved.max()),
            },
            "moved": [{"step": step, "experts": record["experts"]} for step, record in sorted(self.history.placed.items())],
            "routes": self.routes,
        }

    def text(self) -> str:
        """Return the table, with a row for each layer and one for the worst value of each column, and what they mean."""
        balance = self.document()
        first, last = balance["steps"]
        ep, experts = balance["ep"], balance["experts"]
        head = f"{self.name}, steps {first}–{last}: {experts} experts in each MoE layer, {experts // ep} on each of {ep} ranks"
        table = _empty_table("layer", "fullest expert", "fullest rank", "entropy", "dead", "starved")
        for row in [*balance["layers"], {"layer": "worst", **balance["worst"]}]:
            ratios = f"{row['max_over_mean']:.2f}", f"{row['rank_max_over_mean']:.2f}", f"{row['entropy']:.4f}"
            table.add_row(str(row["layer"]), *ratios, str(row["dead"]), str(row["starved"]))
        return "\n".join([head, "", *_lines(table, Console()), "", _EXPERTS_LEGEND, *self._further_text()])

    def _further_text(self) -> list[str]:
        lines = []
        if self.history.placed:
            lines.append(f"experts changed places after {len(self.history.placed)} steps")
        if self.routes is not None:
            median, most, highest = self.routes["overload"]
            over = f"fullest rank over the mean: median {median:.2f}, 95 % below {most:.2f}, at most {highest:.2f}"
            stays = f"{self.routes['stays']:.0%} of the rows stay on their rank"
            lines.append(f"recorded routes of {self.routes['steps']} steps: {over}; {stays}")
        return ["", *lines] if lines else []


def _with_file(run: str, file: str) -> Path:
    """Return the folder of a run on this machine, which has at least this file."""
    path = Path(run).expanduser().absolute()
    if not (path / file).exists():
        raise UserError(_FIELD, run, f"has no {file}, so it is not the folder of a run on this machine")
    return path


def _empty_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _lines(table: Table, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _when(reached: dict[str, Reached | None]) -> str:
    """Return a text on when training and validation reached a loss."""
    texts = []
    for name, words in (("training", f"training (median of {WINDOW} steps)"), ("validation", "validation")):
        found = reached[name]
        if found is None:
            texts.append(f"{words} not yet")
            continue
        elapsed = "" if found.elapsed_s is None else f", {_span(found.elapsed_s)} after the start"
        texts.append(f"{words} from step {found.step} on, {found.tokens:,} tokens, {_span(found.seconds)} of steps{elapsed}")
    return "; ".join(texts)


def _span(seconds: float) -> str:
    """Return a time span in its largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
