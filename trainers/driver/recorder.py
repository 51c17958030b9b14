"""The run folder: `recipe.yaml`, `metrics.jsonl`, `run.json` and the pictures, all written by the driver."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict  # as pydantic asks for below Python 3.12

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.folders import DamagedFile, Folder, read_json
from trainers.pictures.training import draw_expert_load, draw_loss, draw_tried
from trainers.records import LOAD_WINDOW, History, Record, as_json

_PICTURE_PERIOD_S = 30.0  # drawing takes the driver half a second, and the workers may be on the same cores


@dataclass(frozen=True)
class Summary:
    """What came out of a run; the closing table shows it, `run.json` and `train --json` hold it.

    Rates are medians over all steps. What concerns experts is taken over the newest steps (`LOAD_WINDOW`): the busiest
    expert's load over the mean is averaged over them and is the worst layer's; a dead expert got no token in any of them.
    """

    run_id: str
    run_dir: str
    status: str
    steps: int
    final_loss: float | None
    val_bpb: float | None
    unigram_bpb: float | None
    bigram_bpb: float | None
    tokens_per_s: float | None
    mfu: float | None
    load_max_over_mean: float | None
    busiest_layer: int | None
    dead_experts: int | None
    drop_rate: float | None
    checkpoint: str | None
    pictures: tuple[str, ...]
    mlflow_uri: str | None
    mlflow_run_id: str | None
    mlflow_command: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RunFolder:
    """Writes a run's folder; the folder's name is the run's id.

    A folder that holds a run already is gone on with: `history` begins with what it recorded, and `previous` is its last
    `run.json`.

    Args:
        path: the folder, on the driver's disk or a shared one; made if needed.
        recipe: what is trained.
        baselines: bits per byte of simple predictors on the validation text ("unigram", "bigram").
        bytes_per_token: mean length of a token; 1 for the byte tokenizer.
        history: what the folder's run has done so far; read from there if not given.
        start: the checkpoint that the run begins at, if any; one that was noted before stays.

    Raises:
        UserError: what the folder holds of a run cannot be read.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        baselines: Mapping[str, float],
        bytes_per_token: float = 1.0,
        history: History | None = None,
        start: str | None = None,
    ):
        self.path = path.absolute()
        self.previous = read_run(path)
        self.history = read_history(path) if history is None else history
        self._start = start or (self.previous or {}).get("started_from")
        self._recipe, self._baselines, self._bytes_per_token = recipe, dict(baselines), bytes_per_token
        self._mlflow: tuple[str | None, str | None, str | None] = (None, None, None)
        self._drawn = time.monotonic()
        self.path.mkdir(parents=True, exist_ok=True)
        self._mend_last_line()
        (self.path / "recipe.yaml").write_text(as_yaml(recipe))
        self._write_run("running")

    def tracked_by(self, uri: str, run_id: str, command: str | None) -> None:
        """Note where MLflow has this run."""
        self._mlflow = (uri, run_id, command)
        self._write_run("running")

    def receive(self, record: Record) -> None:
        """Write a record down; redraw the pictures at a validation, twice a minute at most."""
        self.history.receive(record)
        with self._metrics.open("a") as lines:  # closed and so flushed: whoever follows the file sees whole lines
            lines.write(as_json(record) + "\n")
        if record["kind"] != "step":
            self._write_run("running")
        if record["kind"] == "validation" and time.monotonic() - self._drawn > _PICTURE_PERIOD_S:
            self.draw()

    def draw(self) -> None:
        """Draw the pictures that there is something to show on."""
        if self.history.steps:
            draw_loss(self.history, self._baselines, self._loss, self.path.name, self._bytes_per_token)
        if self.history.tried:
            draw_tried(self.history, self._online, self.path.name)
        if self.history.load is not None:
            draw_expert_load(self.history, self._expert_load, self.path.name, self._recipe.model.moe_layers)
        self._drawn = time.monotonic()

    def close(self, status: str) -> Summary:
        """Draw the pictures and write the last `run.json`; `status` is finished, failed or killed."""
        self.draw()
        return self._write_run(status)

    def summary(self, status: str) -> Summary:
        """What has come out of the run so far."""
        history, steps = self.history, list(self.history.steps.values())
        last = history.steps[history.last_step] if steps else None
        validation = history.validations[max(history.validations)] if history.validations else None
        checkpoint = history.checkpoints[max(history.checkpoints)]["path"] if history.checkpoints else None
        busiest, layer, dead = self._balance()
        return Summary(
            run_id=self.path.name,
            run_dir=str(self.path),
            status=status,
            steps=history.last_step,
            final_loss=last["loss"] if last else None,
            val_bpb=validation["bits_per_byte"] if validation else None,
            unigram_bpb=self._baselines.get("unigram"),
            bigram_bpb=self._baselines.get("bigram"),
            tokens_per_s=_median([step["tokens_per_s"] for step in steps]),
            mfu=_median([step["mfu"] for step in steps]),
            load_max_over_mean=busiest,
            busiest_layer=layer,
            dead_experts=dead,
            drop_rate=_mean([step["drop_rate"] for step in steps[-LOAD_WINDOW:]]),
            checkpoint=checkpoint,
            pictures=tuple(str(path) for path in (self._loss, self._expert_load, self._online) if path.exists()),
            mlflow_uri=self._mlflow[0],
            mlflow_run_id=self._mlflow[1],
            mlflow_command=self._mlflow[2],
        )

    @property
    def artifacts(self) -> list[Path]:
        """The files that a tracking server should keep a copy of."""
        online = [self._online] if self.history.tried else []
        return [self.path / "recipe.yaml", self.path / "run.json", self._loss, self._expert_load, *online]

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _loss(self) -> Path:
        return self.path / "loss.png"

    @property
    def _expert_load(self) -> Path:
        return self.path / "expert_load.png"

    @property
    def _online(self) -> Path:
        return self.path / "online_search.png"

    def _balance(self) -> tuple[float | None, int | None, int | None]:
        load = self.history.load
        if load is None:
            return None, None, None
        # Step by step, not of the sum: a step waits for its busiest expert, even if it is another one in every step.
        newest = list(self.history.imbalance.values())[-LOAD_WINDOW:]
        ratio = np.mean(newest, axis=0)
        worst = int(ratio.argmax())
        return float(ratio[worst]), self._recipe.model.moe_layers[worst], int((load == 0).sum())

    def _write_run(self, status: str) -> Summary:
        summary = self.summary(status)
        workers = [self.history.places[rank] for rank in sorted(self.history.places)]
        begun = {"started_from": self._start, "resumed_at": self.history.resumes}
        document = summary.as_dict() | begun | {"workers": workers}
        half = self.path / ".run.json"
        half.write_text(json.dumps(json.loads(as_json(document)), indent=2) + "\n")
        half.replace(self.path / "run.json")
        return summary

    def _mend_last_line(self) -> None:
        # A driver that was killed may have left half a line; the next record must not be glued to it.
        if self._metrics.exists() and (text := self._metrics.read_bytes()) and not text.endswith(b"\n"):
            self._metrics.write_bytes(text[: text.rfind(b"\n") + 1])


class _Run(TypedDict, total=False):
    """What a later part of a run needs of its `run.json`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way

    mlflow_run_id: str | None
    started_from: str | None


def read_run(path: Path) -> dict[str, Any] | None:
    """The `run.json` of a run folder, or None where there is none.

    Raises:
        UserError: it is no such file.
    """
    if not (path / "run.json").exists():
        return None
    try:
        return dict(read_json(Folder(str(path)), "run.json", TypeAdapter(_Run)))
    except DamagedFile as error:
        raise UserError("resume", path.name, f"its {error}; mend or delete that file") from None


def read_history(path: Path) -> History:
    """What a run folder's `metrics.jsonl` tells.

    Raises:
        UserError: it tells no history.
    """
    file = path / "metrics.jsonl"
    try:
        if file.exists():
            Folder(str(path)).size(file.name)  # a device could be read for ever
        return History.read(file)
    except (DamagedFile, ValueError) as error:
        what = error if isinstance(error, DamagedFile) else DamagedFile(file.name, f"cannot be read ({error})")
        raise UserError("resume", path.name, f"its {what}; mend or delete that file") from None


def as_yaml(recipe: Recipe) -> str:
    """A recipe with every key, as a file that `Recipe.load` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
