"""The run folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foldray import Recipe
from tests.trainers.telemetry.records import place, resumed, run, saved, step, validation
from trainers.sinks.run_folder import RunFolder, as_yaml, read_run
from trainers.telemetry.records import Record, as_json

BASELINES = {"unigram": 4.87, "bigram": 3.62}
ROUTED = {"score": "sigmoid", "normalize": True, "bias_rate": 0.001}


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.parse({"name": "r", "model": {"preset": "tiny"}})


def record_all(folder: RunFolder, *records: Record) -> RunFolder:
    for record in records:
        folder.take(record)
    return folder


def document(folder: RunFolder) -> dict[str, Any]:
    return read_run(folder.path) or {}


def test_a_run_leaves_everything(recipe, tmp_path):
    folder = RunFolder(tmp_path / "r-1", recipe, BASELINES)
    folder.tracked_by("sqlite:////x", "ab", "mlflow server")
    layers, experts = len(recipe.model.moe_layers), recipe.model.experts
    summary = record_all(folder, *run(30, layers, experts)).close("finished")
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"recipe.yaml", "metrics.jsonl", "run.json", "loss.png", "speed.png", "expert_load.png", "expert_health.png"}
    assert (summary.run_id, summary.steps, summary.dead_experts) == ("r-1", 30, 0)
    assert (summary.metrics["mfu"], summary.metrics["product_share"]) == (0.4, 0.5)
    assert summary.checkpoint == "/storage/run/checkpoint_30"
    assert summary.load_max_over_mean is not None
    assert 1.2 < summary.load_max_over_mean < 1.5
    assert summary.metrics["drop_rate"] == pytest.approx(0.01)
    assert {"run_id", "run_dir", "steps", "final_loss", "val_bpb", "bigram_bpb", "mlflow_uri"} <= set(document(folder))
    assert [worker["rank"] for worker in document(folder)["workers"]] == [0, 1]
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 2 + 30 + 3 + 3
    assert all(path.exists() for path in folder.artifacts)


def test_run_json_says_how_it_stands(recipe, tmp_path):
    folder = RunFolder(tmp_path / "r-1", recipe, BASELINES)
    assert document(folder)["status"] == "running"
    record_all(folder, place(0), step(1), step(2), validation(2), saved(2), step(3, loss=math.nan))
    assert (document(folder)["steps"], document(folder)["val_bpb"]) == (2, 3.0)
    summary = folder.close("failed")
    assert summary.busiest_layer is None
    assert document(folder)["final_loss"] is None


def test_conversations_have_a_loss_alone(recipe, tmp_path):
    folder = record_all(RunFolder(tmp_path / "r-1", recipe, {}, None), step(1), {**validation(1), "bits_per_byte": None})
    assert (document(folder)["val_loss"], document(folder)["val_bpb"]) == (3.0 * math.log(2), None)
    again = RunFolder(tmp_path / "r-1", recipe, {}, None)
    assert again.history.validations[1]["bits_per_byte"] is None
    assert again.close("finished").bigram_bpb is None


def test_a_resumed_run_goes_on_in_its_folder(recipe, tmp_path):
    first = record_all(RunFolder(tmp_path / "r-1", recipe, BASELINES), step(1, 3.0), step(2, 3.0), saved(1))
    first.tracked_by("sqlite:////x", "ab", None)
    with (first.path / "metrics.jsonl").open("a") as lines:
        lines.write('{"kind": "step", "st')  # the driver was killed here
    second = RunFolder(tmp_path / "r-1", recipe, BASELINES)
    assert second.previous is not None
    assert second.previous["mlflow_run_id"] == "ab"
    assert second.history.last_step == 2
    summary = record_all(second, resumed(1), step(2, 1.0), step(3, 1.0)).close("finished")
    assert summary.steps == 3
    assert second.history.steps[2]["loss"] == 1.0
    written = (first.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in written] == ["step", "step", "checkpoint", "resumed", "step", "step"]
    assert document(second)["resumed_at"] == [1]


def test_a_full_disk_costs_no_recipe(recipe, tmp_path, monkeypatch):
    """Without it, the run could not go on once the disk has room."""
    RunFolder(tmp_path / "r-1", recipe, {})

    def full(path, text, **_):
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder(tmp_path / "r-1", recipe, {})
    assert Recipe.load(tmp_path / "r-1" / "recipe.yaml") == recipe


def test_a_run_that_never_began_can_be_closed(recipe, tmp_path):
    summary = RunFolder(tmp_path / "r-1", recipe, {}).close("failed")
    assert (summary.steps, summary.final_loss, summary.pictures, summary.bigram_bpb) == (0, None, (), None)


@pytest.mark.parametrize("router", [{}, ROUTED])
def test_the_recipe_can_be_loaded_again(router, tmp_path):
    recipe = Recipe.parse({"name": "r", "model": {"preset": "tiny", "router": router}})
    (tmp_path / "recipe.yaml").write_text(as_yaml(recipe))
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_what_a_killed_driver_has_half_written_is_removed(recipe, tmp_path, monkeypatch, lines):
    monkeypatch.setattr("trainers.sinks.run_folder._BLOCK", 64)
    whole = "".join(as_json(step(number)) + "\n" for number in range(1, lines + 1))
    (tmp_path / "metrics.jsonl").write_text(whole + as_json(step(lines + 1))[:-5])
    folder = RunFolder(tmp_path, recipe, BASELINES)
    assert (tmp_path / "metrics.jsonl").read_text() == whole
    assert folder.history.last_step == lines


def test_a_large_models_loads_are_written_now_and_then(recipe, tmp_path):
    loads = [[7] * 300] * 4  # of 1200 experts, so every third step has them
    folder = record_all(RunFolder(tmp_path, recipe, BASELINES), *(step(number, load=loads) for number in range(1, 8)))
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(each["load"] is not None, each["by_layer"] is not None) for each in written] == [
        (each["step"] % 3 == 0,) * 2 for each in written
    ]
    assert all(each["rank_max_over_mean"] == 1.0 for each in written)
    assert folder.history.course.ends().tolist() == [*range(1, 8)]
    assert RunFolder(tmp_path, recipe, BASELINES).history.course.ends().tolist() == [3, 6]
