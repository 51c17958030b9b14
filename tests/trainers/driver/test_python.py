"""Trainings from Python, as Ray's users write them: datasets, callbacks, storages, results, and a run that fails and goes on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint, CheckpointConfig, Result, RunConfig, TrainingFailedError, UserCallback

from foldray.recipe import Recipe
from tests.pool import repository
from tests.trainers.powercap import make
from trainers import FoldTrainer, Model
from trainers.data.packed import PackedData
from trainers.sinks.run_folder import read_history
from trainers.telemetry.metrics import reported_names

pytestmark = [pytest.mark.usefixtures("ray_session")]

TEXTS = [f"{i} times {j} is {i * j}. " * 3 for i in range(20) for j in range(20)]
RECIPE: dict[str, Any] = {
    "name": "python",
    "model": {
        "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 64, "experts": 4, "topk": 2,
        "expert_hidden": 48, "vocab": 264, "moe_every": 1, "ffn": "tests.trainers.driver.faulty:FAULTY",
    },
    "data": {"text_field": "body", "seq_len": 32},
    "fold": {"ep": 2},
    "engine": {"kind": "torch"},
    "training": {"steps": 6, "global_batch": 8, "micro_batch": 4, "eval_sequences": 8, "eval_every": 2},
    "checkpoint": {"every": 2, "asynchronous": False},
    "cluster": {"workers": 2, "failures": ["tests.trainers.faults.busy:HOPELESS"]},
}  # fmt: skip
CHECKPOINTS = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="validation/loss", checkpoint_score_order="max")


class Told(UserCallback):
    """Writes what it is told into files, because it runs in Ray's controller."""

    def __init__(self, folder: Path):
        self.folder = folder

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        told = {"run": run_context.run_config.name, "metrics": metrics, "checkpoint": checkpoint and checkpoint.path}
        with (self.folder / "reports.jsonl").open("a") as lines:
            lines.write(json.dumps(told) + "\n")

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        with (self.folder / "exceptions.txt").open("a") as lines:
            lines.writelines(f"{type(error).__name__}: {error}\n" for error in worker_exceptions.values())


def dataset(texts: list[str]) -> ray.data.Dataset:
    """A dataset of several blocks with another column."""
    rows = [{"number": number, "body": text} for number, text in enumerate(texts)]
    return ray.data.from_items(rows, override_num_blocks=4).map(lambda row: row)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("python")


def environment(place: Path) -> dict[str, Any]:
    return {"env_vars": {"FAULTY": str(place / "flag"), "POWERCAP": str(place / "powercap")}}


@pytest.fixture(scope="module")
def failed(place: Path, ray_session: None) -> Exception:
    """The error of a run whose activation fails in step 4, on a storage with a relative path."""
    make(place / "powercap", 2)
    flag = place / "flag"
    flag.write_text("odd 7")  # two blocks, so the fourth step
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        trainer = FoldTrainer(
            Recipe.parse(RECIPE),
            datasets={"train": dataset(TEXTS[40:]), "validation": lambda: dataset(TEXTS[:40])},
            run_config=RunConfig(
                name="mine", storage_path="runs", callbacks=[Told(place)], worker_runtime_env=environment(place)
            ),
        )
        with pytest.raises(TrainingFailedError) as told:
            trainer.fit()
    flag.unlink()
    return told.value


@pytest.fixture(scope="module")
def result(place: Path, failed: Exception) -> Result:
    """The result of the same run, restored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        config = RunConfig(callbacks=[Told(place)], checkpoint_config=CHECKPOINTS, worker_runtime_env=environment(place))
        return FoldTrainer.restore("runs/mine", run_config=config, trust=True).fit()


def test_the_error_of_a_users_function_comes_first(failed: Exception, place: Path) -> None:
    first = str(failed).splitlines()[0]
    assert first.startswith("Odd: 1 is not 2 (")
    assert "tests/trainers/driver/faulty.py:" in first
    assert first.endswith(", fail_at)")
    assert "Odd: 1 is not 2" in (place / "exceptions.txt").read_text()
    told = json.loads((place / "runs" / "mine" / "run.json").read_text())
    assert told["status"] == "failed"
    assert [failure["failure"] for failure in told["failures"]] == ["hopeless"], "the user's own kind; no attempt follows"


def test_a_result_is_filled_as_ray_documents_it(result: Result, place: Path) -> None:
    assert Path(result.path) == place / "runs" / "mine"
    assert result.error is None
    assert result.return_value["steps"] == 6
    assert tuple(result.metrics) == reported_names(Recipe.parse({"model": {"preset": "tiny"}}))
    history = read_history(place / "runs" / "mine")
    assert history.resumes == [2]
    last, validation = history.steps[6], history.validations[6]
    assert result.metrics["step"] == 6
    assert result.metrics["loss"] == last["loss"] == result.return_value["final_loss"]
    assert result.metrics["tokens_per_s"] == last["tokens_per_s"]
    assert result.metrics["validation/loss"] == validation["loss"]
    assert result.metrics["validation/bits_per_byte"] == validation["bits_per_byte"]
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path) == place / "runs" / "mine" / "step_00000006"


def test_steps_have_the_joules_of_all_processors(result: Result, place: Path) -> None:
    """A step calls the activation of two blocks in both directions. Validations, which call it as well, are left out."""
    run = place / "runs" / "mine"
    joules = read_history(run).steps.column("step_energy_j")
    assert [math.isnan(value) for value in joules] == [True, False, True, False, False, False], "both attempts begin without"
    assert joules[~np.isnan(joules)] == pytest.approx(2 * 2 * (1 + 2))
    assert json.loads((run / "run.json").read_text())["token_energy_j"] == pytest.approx(12 / (8 * 32))


def test_checkpoints_are_kept_by_their_score(result: Result, place: Path) -> None:
    """The highest validation loss is that of the first checkpoint. The last one stays, because a run continues from it."""
    kept = {Path(checkpoint.path).name: metrics for checkpoint, metrics in result.best_checkpoints}
    assert list(kept) == ["step_00000002"]
    assert kept["step_00000002"]["validation/loss"] > result.metrics["validation/loss"]
    assert sorted(path.name for path in (place / "runs" / "mine").glob("step_*")) == ["step_00000002", "step_00000006"]
    best = result.get_best_checkpoint("loss", "max")
    assert best is not None
    assert best.path.endswith("step_00000002")
    assert list(result.metrics_dataframe["step"]) == [2]
    assert Result.from_path(result.path).metrics == result.metrics


def test_callbacks_hear_of_every_report(result: Result, place: Path) -> None:
    reports = [json.loads(line) for line in (place / "reports.jsonl").read_text().splitlines()]
    assert [Path(report["checkpoint"]).name for report in reports] == ["step_00000002", "step_00000004", "step_00000006"]
    assert {report["run"] for report in reports} == {"mine"}
    for report in reports:
        assert [set(each) for each in report["metrics"]] == [set(reported_names(Recipe.parse({"model": {"preset": "tiny"}})))] * 2
        assert len({each["loss"] for each in report["metrics"]}) == 1
    assert reports[-1]["metrics"][0] == result.metrics


def test_a_dataset_trains_as_its_documents_in_files_would(result: Result, place: Path) -> None:
    """The recipe of the run names the stored documents, so the command line goes on with them, too."""
    recipe = Recipe.load(place / "runs" / "mine" / "recipe.yaml")
    assert recipe.data.source == "parquet"
    (folder,) = [path for path in (place / "runs" / "data").iterdir() if (path / "meta.json").exists()]
    data = PackedData.open(folder)
    separator = data.meta["separator"]
    stream = [token for text in TEXTS[40:] for token in (separator, *text.encode())]
    whole = data.train.tokens(range(len(data.train)))
    assert whole[:, :-1].flatten().tolist() == stream[: whole[:, :-1].numel()]


@pytest.mark.gate(1 / 4)
def test_a_model_is_loaded_in_another_process(result: Result, place: Path) -> None:
    script = (
        "from trainers import Model\n"
        "for each in ('runs/mine', 'runs/mine/step_00000006'):\n"
        "    print(repr(Model.load(each, device='cpu', trust=True).generate('2 times', 5, seed=1).text))\n"
    )
    path = {**os.environ, "PYTHONPATH": str(repository())}
    done = subprocess.run([sys.executable, "-c", script], cwd=place, env=path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    own = repr(Model.load(result.checkpoint, device="cpu", trust=True).generate("2 times", 5, seed=1).text)
    assert done.stdout.splitlines() == [own] * 2


@pytest.mark.nightly("another training")
def test_another_filesystem_takes_a_run_that_starts_from_a_checkpoint(
    result: Result, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in memory are the same data as the dataset, although they are stored elsewhere."""
    monkeypatch.chdir(tmp_path)
    files = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    training = {**RECIPE["training"], "steps": 8, "stop_after": 7}
    trainer = FoldTrainer(
        Recipe.parse({**RECIPE, "training": training}),
        datasets={"train": [{"body": text} for text in TEXTS[40:]], "validation": TEXTS[:40]},
        run_config=RunConfig(name="far", storage_path="bucket/runs", storage_filesystem=files),
        start=result.checkpoint,
    )
    found = trainer.fit()
    assert found.metrics["step"] == 7
    assert found.path == "bucket/runs/far"
    assert trainer.run is not None
    assert trainer.run.folder.history.resumes == [6]
    assert trainer.run.folder.path == tmp_path / "runs" / "far"
    assert (tmp_path / "bucket" / "runs" / "far" / "step_00000007").is_dir()
    assert Model.load(found.checkpoint, device="cpu", trust=True).step == 7
    assert FoldTrainer.can_restore("bucket/runs/far", files, trust=True)
    assert not FoldTrainer.can_restore("bucket/runs/far", files), "its recipe names code"
