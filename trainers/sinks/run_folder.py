"""The run folder: `recipe.yaml`, `metrics.jsonl`, `run.json`, found lists and the pictures. Only the driver writes them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict  # pydantic requires this one below Python 3.12

from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.urls import without_secrets
from trainers.faults.watch import Pace
from trainers.folders import DamagedFile, Folder, read_json, with_path
from trainers.telemetry.history import LOAD_WINDOW, History, Steps
from trainers.telemetry.metrics import METRICS, Metric, metrics_of
from trainers.telemetry.records import Beat, Record, Step, as_json

RANKS, RECIPE, MOST_RECIPE = "ranks.json", "recipe.yaml", 1 << 20
_PICTURES = _LOSS, _SPEED, _LOAD, _HEALTH = "loss.png", "speed.png", "expert_load.png", "expert_health.png"
_SEARCH = "online_search.png"  # of a run that tries settings
FAILURE = ("time", "step", "failure", "what", "ranks", "goes_on", "saved", "reason")
"""What `run.json` tells of a failure."""
_LOADS = 512  # of experts in a line of `metrics.jsonl`, on average
_BLOCK = 1 << 20  # bytes of `metrics.jsonl` that are searched at once for the end of its last line
_WRITE_PERIOD_S = 5.0
_PICTURE_PERIOD_S = 30.0  # drawing takes half a second, perhaps on the workers' cores
_PAGE_PERIOD_S = 300.0  # the page of the experts' health takes one second or two


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a run, for the closing table, `run.json` and `train --json`.

    `metrics` has the metrics of steps, as `Metric.over` puts them together. Figures of experts cover the newest steps
    (`LOAD_WINDOW`; `health.Health`). `val_loss` is in nats per token that counts, `val_bpb` in bits per byte (None for
    conversations). `val_sources` has loss and bits_per_byte of each source of a mixture (None without one).
    `load_max_over_mean` is the load of the busiest expert over the mean load, averaged over these steps, in the worst layer;
    `rank_max_over_mean` is that of the busiest rank, and `load_entropy` the lowest entropy of a layer. A dead expert got no
    token in any of these steps, and a starved one less than a tenth of the even share.
    """

    run_id: str
    run_dir: str
    status: str
    steps: int
    metrics: dict[str, float | None]
    final_loss: float | None
    val_loss: float | None
    val_bpb: float | None
    val_sources: dict[str, Any] | None
    unigram_bpb: float | None
    bigram_bpb: float | None
    load_max_over_mean: float | None = None
    busiest_layer: int | None = None
    rank_max_over_mean: float | None = None
    load_entropy: float | None = None
    dead_experts: int | None = None
    starved_experts: int | None = None
    checkpoint: str | None
    pictures: tuple[str, ...]
    mlflow_uri: str | None = None
    mlflow_run_id: str | None = None
    mlflow_command: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return one mapping of all results, the metrics among them."""
        fields = asdict(self)
        return fields.pop("metrics") | fields  # no metric replaces a result


class RunFolder:
    """Writes a run's folder. The name of the folder is the run's id.

    If the folder already holds a run, this continues it: `history` starts with the run's records, and `previous` is its last
    `run.json`.

    Args:
        path: the folder, on the driver's disk or a shared one. It is created if needed.
        baselines: bits per byte of simple models on the validation text ("unigram", "bigram").
        bytes_per_token: mean length of a token; 1 for the byte tokenizer. None for conversations, whose losses are per token.
        history: records of the run so far; None reads them from the folder.
        start: the checkpoint that the run starts from; None keeps the one in `run.json`.
        data: what is told about the data of each source, by its name (`mixture.counts_by_source`).
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        baselines: Mapping[str, float],
        bytes_per_token: float | None = 1.0,
        history: History | None = None,
        start: str | None = None,
        data: Mapping[str, Any] | None = None,
    ):
        self._data = data
        self.path = path.absolute()
        self.previous = read_run(path)
        self._of_steps = metrics_of(recipe)
        self.history = read_history(path, metrics=self._of_steps) if history is None else history
        self._start = start or (self.previous or {}).get("started_from")
        self._recipe, self._baselines, self._bytes_per_token = recipe, dict(baselines), bytes_per_token
        self._mlflow: dict[str, Any] = {}
        self._drawn = self._page_drawn = time.monotonic()
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics = self.path / "metrics.jsonl"
        self._mend_last_line()
        _replace(self.path / RECIPE, as_yaml(recipe))
        self._write_run("running")

    def tracked_by(self, uri: str, run_id: str, command: str | None) -> None:
        """Write MLflow's address and id of this run into `run.json`."""
        self._mlflow = {"mlflow_uri": uri, "mlflow_run_id": run_id, "mlflow_command": command}
        self._write_run("running")

    def take(self, record: Record) -> None:
        """Write a record. At a validation, draw the pictures again, but at most twice a minute, and the page less often."""
        if record["kind"] == "listed":
            _replace(self.path / f"list-{record['degree']}.json", as_json(record) + "\n")
            record = {**record, "lists": []}
        self.history.take(record)
        with self._metrics.open("a") as lines:  # closing flushes the file, so its readers see complete lines
            lines.write(as_json(_without_loads(record) if record["kind"] == "step" else record) + "\n")
        self._is_stale |= record["kind"] != "step"
        # Every rank sends its place. With thousands of them, the file would be written all the time.
        if self._is_stale and (record["kind"] != "place" or time.monotonic() - self._wrote > _WRITE_PERIOD_S):
            self._write_run("running")
        if record["kind"] == "validation" and time.monotonic() - self._drawn > _PICTURE_PERIOD_S:
            self.draw(page=time.monotonic() - self._page_drawn > _PAGE_PERIOD_S)

    def write_ranks(self, beats: Mapping[int, Beat], paces: Mapping[int, Pace]) -> None:
        """Write what every rank does into `ranks.json`, which `foldray status` reads."""
        ranks = [
            {
                **beats[rank],
                "pace": asdict(paces[rank]) if rank in paces else None,
                "node_ip": place["node_ip"],
                "pid": place["pid"],
            }
            for rank, place in sorted(self.history.places.items())
            if rank in beats
        ]
        _replace(self.path / RANKS, as_json({"time": time.time(), "ranks": ranks}) + "\n")

    def draw(self, page: bool = True) -> None:
        """Draw the pictures for which the run has data, and with `page` also the page of the experts' health."""
        # matplotlib takes a while to import. The first picture comes after the first step.
        from trainers.pictures.health import draw_health
        from trainers.pictures.speed import draw_speed
        from trainers.pictures.training import draw_expert_load, draw_loss, draw_tried

        if self.history.steps:
            draw_loss(self.history, self._baselines, self.path / _LOSS, self.path.name, self._bytes_per_token)
        if self.history.speed.times:
            draw_speed(self.history.speed, self.path / _SPEED, self.path.name)
        if self.history.tried:
            draw_tried(self.history, self.path / _SEARCH, self.path.name)
        if self.history.load is not None:
            layers = self._recipe.model.moe_layers
            draw_expert_load(self.history, self.path / _LOAD, self.path.name, layers)
            if page:
                draw_health(self.history, self.path / _HEALTH, self.path.name, layers)
                self._page_drawn = time.monotonic()
        self._drawn = time.monotonic()

    def close(self, status: str) -> Summary:
        """Draw the pictures and write the last `run.json`; `status` is finished, stopped, failed or killed."""
        self.draw()
        return self._write_run(status)

    def summary(self, status: str) -> Summary:
        """Return the results of the run so far."""
        history, steps = self.history, self.history.steps
        validation = history.validations[max(history.validations)] if history.validations else None
        return Summary(
            run_id=self.path.name,
            run_dir=str(self.path),
            status=status,
            steps=history.last_step,
            metrics={metric.name: _over(metric, steps) for metric in self._of_steps if metric.over},
            final_loss=steps[steps.last]["loss"] if steps else None,
            val_loss=validation["loss"] if validation else None,
            val_bpb=validation["bits_per_byte"] if validation else None,
            val_sources=dict(validation["sources"]) if validation and "sources" in validation else None,
            unigram_bpb=self._baselines.get("unigram"),
            bigram_bpb=self._baselines.get("bigram"),
            **self._balance(),
            checkpoint=self._checkpoint(),
            pictures=tuple(str(self.path / name) for name in (*_PICTURES, _SEARCH) if (self.path / name).exists()),
            **self._mlflow,
        )

    def _checkpoint(self) -> str | None:
        """Return the newest checkpoint as `--from` takes it. Ray knows only the path in a storage elsewhere."""
        if not (checkpoints := self.history.checkpoints):
            return None
        path, storage = checkpoints[max(checkpoints)]["path"], self._recipe.cluster.storage or ""
        if "://" not in storage:
            return path
        inside = f"{self.path.name}/{os.path.basename(path)}"
        return without_secrets(with_path(storage, lambda folder: f"{folder}/{inside}"))

    @property
    def artifacts(self) -> list[Path]:
        """The files to copy to the tracking server."""
        search = [_SEARCH] if self.history.tried else []
        return [self.path / name for name in (RECIPE, "run.json", *_PICTURES, *search)]

    def _balance(self) -> dict[str, Any]:
        """Return the figures of experts in the summary."""
        health = self.history.health(self._recipe.placed_fold.ep)
        if health is None:
            return {}
        worst = int(health.max_over_mean.argmax())
        return {
            "load_max_over_mean": float(health.max_over_mean[worst]),
            "busiest_layer": self._recipe.model.moe_layers[worst],
            "rank_max_over_mean": float(health.rank_max_over_mean.max()),
            "load_entropy": float(health.entropy.min()),
            "dead_experts": int(health.dead.sum()),
            "starved_experts": int(health.starved.sum()),
        }

    def _write_run(self, status: str) -> Summary:
        summary = self.summary(status)
        workers = [self.history.places[rank] for rank in sorted(self.history.places)]
        failures = [{key: failure.get(key) for key in FAILURE} for failure in self.history.failures]
        origin = {"started_from": self._start, "resumed_at": self.history.resumes, "failures": failures}
        document = summary.as_dict() | origin | {"data": self._data, "workers": workers}
        _replace(self.path / "run.json", as_json(document, indent=2) + "\n")
        self._wrote, self._is_stale = time.monotonic(), False
        return summary

    def _mend_last_line(self) -> None:
        # A killed driver may leave an incomplete line. It is removed, so that the next record starts a new line.
        if not self._metrics.exists():
            return
        with self._metrics.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(end - _BLOCK, 0)
                file.seek(start)
                if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                    end = start + newline + 1
                    break
                end = start
            file.truncate(end)


class _Run(TypedDict, total=False):
    """The keys of `run.json` that are read."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic documents this attribute

    status: str
    mlflow_run_id: str | None
    started_from: str | None


def read_run(path: Path, field: str = "resume") -> dict[str, Any] | None:
    """Return the `run.json` of a run folder, which the user calls `field`; None if the file does not exist."""
    if not (path / "run.json").exists():
        return None
    try:
        return dict(read_json(Folder(str(path)), "run.json", TypeAdapter(_Run)))
    except DamagedFile as error:
        raise UserError(field, path.name, f"its {error}; repair or delete that file") from None


def read_history(path: Path, field: str = "resume", metrics: Sequence[Metric] = METRICS) -> History:
    """Return the history in the `metrics.jsonl` of a run folder, which the user calls `field`, with these metrics of steps."""
    file = path / "metrics.jsonl"
    try:
        if file.exists():
            Folder(str(path)).size(file.name)  # refuses a device, whose read might never end
        return History.read(file, metrics)
    except (DamagedFile, ValueError) as error:
        what = error if isinstance(error, DamagedFile) else DamagedFile(file.name, f"cannot be read ({error})")
        raise UserError(field, path.name, f"its {what}; repair or delete that file") from None


def recipe_of(run: Folder, field: str, value: str, trust: bool = False) -> Recipe:
    """Return the recipe in the folder of a run, whose `value` in `field` is what the user calls it.

    With `trust`, import the modules that the recipe names (`Recipe.stored`).
    """
    try:
        text = run.read(RECIPE, MOST_RECIPE).decode()
    except DamagedFile as error:
        raise UserError(field, value, f"its {error}; it says how the model is made") from None
    except UnicodeDecodeError:
        raise UserError(field, value, f"its {RECIPE} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(field, value, f"its {RECIPE} cannot be read ({error.strerror or error})") from None
    try:
        return Recipe.stored(f"{run.name}/{RECIPE}", text, trust)
    except UserError as error:
        raise UserError(field, value, f"its {RECIPE} is refused ({error})") from None


def as_yaml(recipe: Recipe) -> str:
    """Return a recipe with all its keys, as YAML that `Recipe.load` reads."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _without_loads(record: Step) -> Step:
    """Return a step as it is written. Of a large model, only every n-th step has the loads of its experts.

    Otherwise, the loads of a model with 94 layers of 128 experts would take 70 KB a step, and minutes to read after a day.
    """
    every = math.ceil(len(record["load"]) * len(record["load"][0]) / _LOADS) if record["load"] else 1
    return record if record["step"] % every == 0 else {**record, "load": None, "by_layer": None}


def _replace(path: Path, text: str) -> None:
    """Write a text file at once, so that its readers find the old text or the new one."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


def _over(metric: Metric, steps: Steps) -> float | None:
    """Return a metric over the steps of a run; None if no step has it."""
    values = steps.column(metric.name)
    if metric.over == "last":
        values = values[-1:]
    elif metric.over == "newest":
        values = values[-LOAD_WINDOW:]
    finite = values[~np.isnan(values)]
    if not finite.size:
        return None
    value = float(np.median(finite) if metric.over == "median" else np.mean(finite))
    return int(value) if metric.whole else value
