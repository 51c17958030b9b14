"""A metric has one row, and a recipe adds rows of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.telemetry.records import step
from trainers.sinks.mlflow_run import Tracker
from trainers.sinks.run_folder import RunFolder, read_history
from trainers.sinks.terminal import Console, closing_table
from trainers.telemetry.metrics import METRICS, Finished, Metric, Totals, metrics_of, reported, reported_names

WATTS = Metric(
    "watts", lambda step: 700.0 / step.seconds, "Power of a GPU, W", "gpu/watts", "watts", "median", ("power", "{:.0f} W"), True
)
LOSS = Metric("loss", lambda step: 0.0, "Another loss")
MODEL = {"model": {"preset": "tiny"}}
OWN = {**MODEL, "tracking": {"metrics": [f"{__name__}:WATTS"]}}


def test_every_metric_is_measured() -> None:
    totals = Totals(8, 2.0, 1.0, 0.1, None, 0.0, 0.0, torch.zeros(0, 4, dtype=torch.int64), {}, 6.0, False, False)
    finished = Finished(Recipe.parse(OWN), totals, 1e-3, 0.5, 2.0, True, 0, 6e9, 1e12, 2e12, None)
    found = {metric.name: metric.measure(finished) for metric in metrics_of(finished.recipe)}
    assert found["mfu"] == 6e9 / 2.0 / 1e12
    assert found["product_share"] == 6e9 / 2.0 / 2e12
    assert (found["loss"], found["lr"], found["trained_tokens"], found["watts"]) == (2.0, 1e-3, 8, 350.0)
    tokens = finished.recipe.training.global_batch * finished.recipe.data.seq_len
    assert (found["step_energy_j"], found["token_energy_j"]) == (6.0, 6.0 / tokens)
    unread = finished._replace(totals=totals._replace(joules=math.nan))
    assert {metric.measure(unread) for metric in METRICS if "energy" in metric.name} == {None}
    assert (found["balance_loss"], found["drop_rate"], found["dead_experts"]) == (None, None, None), "there is no MoE layer"


def test_a_metric_of_a_recipe_reaches_everything(tmp_path: Path) -> None:
    recipe = Recipe.parse({**MODEL, "tracking": {**OWN["tracking"], "uri": f"sqlite:///{tmp_path}/mlflow.db"}})
    folder, tracker = RunFolder(tmp_path / "r-1", recipe, {}), Tracker(recipe, "r-1", tmp_path)
    records: list[Any] = [step(1), {**step(2), "watts": 300.0}, {**step(3), "watts": 500.0}]
    for record in records:
        folder.take(record)
        tracker.take(record)
    summary = folder.close("finished")
    tracker.close("FINISHED")
    assert summary.metrics["watts"] == 400.0
    assert json.loads((tmp_path / "r-1" / "run.json").read_text())["watts"] == 400.0
    assert tracker._client.get_run(tracker.run_id).data.metrics["gpu/watts"] == 500.0
    assert read_history(tmp_path / "r-1", metrics=metrics_of(recipe)).steps.column("watts")[1:].tolist() == [300.0, 500.0]
    console = Console()
    with console.out.capture() as shown:
        console.out.print(closing_table(summary, metrics_of(recipe)))
    assert "400 W" in shown.get()
    assert reported(records[2], metrics_of(recipe))["gpu/watts"] == 500.0
    assert "gpu/watts" in reported_names(recipe)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("nowhere:WATTS", "cannot be imported"),
        (f"{__name__}:OWN", "is a dict, not a trainers.Metric"),
        (f"{__name__}:LOSS", "has the name 'loss', which another metric has"),
    ],
)
def test_what_is_no_metric_is_one_line(name: str, rule: str) -> None:
    recipe = Recipe.parse({**MODEL, "tracking": {"metrics": [name]}})
    with pytest.raises(UserError, match=rule):
        metrics_of(recipe)


def test_names_differ_everywhere() -> None:
    for names in (
        [metric.name for metric in METRICS],
        [metric.outside for metric in METRICS],
        [metric.gauge for metric in METRICS if metric.gauge],
    ):
        assert len(set(names)) == len(names)


def test_a_stored_recipe_runs_no_metric_without_trust() -> None:
    plain = "model: {preset: tiny}\ntracking: {experiment: 'team:run'"
    text = f"{plain}, metrics: ['{__name__}:WATTS']}}"
    with pytest.raises(UserError, match=r"tracking\.metrics\.0=.*names code"):
        Recipe.stored("recipe.yaml", text)
    assert Recipe.stored("recipe.yaml", plain + "}").tracking.experiment == "team:run"
    assert Recipe.stored("recipe.yaml", text, trust=True).tracking.metrics == (f"{__name__}:WATTS",)
