"""Whole trainings on Ray: their files, and equal results after a stop, a killed worker or a repetition."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from ray.train import RunConfig, ScalingConfig

from foldray.cli import main
from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.checkpoints.damage import flipped
from tests.trainers.driver.runs import STEPS, fit, losses, recipe, same, signal_after, weights
from trainers import FoldTrainer, Model
from trainers.checkpoints.reported import LIST
from trainers.checkpoints.stored import look
from trainers.data.packed import PackedData
from trainers.driver import resuming, run
from trainers.faults import watch
from trainers.folders import Folder
from trainers.sinks.run_folder import RunFolder, read_run
from trainers.telemetry.expert_health import Health

pytestmark = pytest.mark.usefixtures("ray_session")

BEFORE, STOP = 20, 25


@pytest.fixture(scope="module")
def stopped(engine: dict[str, Any], storage: Path, ray_session: None) -> FoldTrainer:
    """The same run, stopped early."""
    return fit(recipe(storage, **engine, training={"stop_after": STOP}))


def other(engine: dict[str, Any]) -> dict[str, Any]:
    return {"engine": {"kind": {"deepspeed": "torch", "torch": "deepspeed"}[engine["engine"]["kind"]]}}


def copied(trainer: FoldTrainer, name: str) -> Path:
    """Copy a run's folder to another name, which the test then resumes."""
    assert trainer.run is not None
    return Path(shutil.copytree(trainer.run.folder.path, trainer.run.folder.path.with_name(name), dirs_exist_ok=True))


def test_a_run_leaves_what_people_look_at(whole: FoldTrainer) -> None:
    run = whole.run
    assert run is not None
    assert run.summary is not None
    assert run.summary.steps == STEPS
    assert run.summary.val_bpb is not None
    assert losses(whole)[-1] < losses(whole)[0]
    folder = Path(run.summary.run_dir)
    assert {"recipe.yaml", "run.json", "metrics.jsonl", "loss.png", "speed.png", "expert_load.png", "expert_health.png"} <= {
        path.name for path in folder.iterdir()
    }
    assert Recipe.load(folder / "recipe.yaml") == whole.recipe
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in [record for record in records if record["kind"] == "step"]:
        health = Health.of([np.array(record["load"])], ep=2)
        assert record["by_layer"] == health.by_layer()
        assert record["mfu"] is None  # no data sheet has this processor
        assert 0 < record["product_share"] < 1
        assert record["load_entropy"] == pytest.approx(float(health.entropy.min()))
        assert record["rank_max_over_mean"] == pytest.approx(float(health.rank_max_over_mean.max()))
    logged = MlflowClient(run.tracker.uri).get_metric_history(run.tracker.run_id, "loss")
    assert [metric.value for metric in sorted(logged, key=lambda metric: metric.step)] == losses(whole)
    assert len(sorted(folder.glob("step_*"))) == whole.recipe.checkpoint.keep


def test_a_trained_model_has_the_loss_of_the_last_validation(whole: FoldTrainer, storage: Path) -> None:
    assert whole.run is not None
    model, count = Model.load(whole.run.folder.path, device="cpu"), whole.recipe.training.eval_sequences
    stored = look(Folder(str(whole.run.folder.path / f"step_{STEPS:08d}")))
    assert model.step == stored.progress.step
    token_BL = PackedData.open(storage / "data" / stored.progress.data).validation.tokens(range(count))
    loss = torch.nn.functional.cross_entropy(model.logits(token_BL[:, :-1]).flatten(0, 1), token_BL[:, 1:].flatten())
    assert float(loss) == pytest.approx(whole.run.folder.history.validations[STEPS]["loss"], rel=1e-5)
    assert Model.load(stored.folder.checkpoint, device="cpu").generate("1 times 2 is ", 9, seed=1).tokens


def test_the_run_record_agrees_with_the_fold_that_explain_shows(whole: FoldTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert whole.run is not None
    workers = json.loads((whole.run.folder.path / "run.json").read_text())["workers"]
    assert main(["explain", "--world-size", "2", "--ep", "2", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert len({worker["actor"] for worker in workers}) == 2
    for view, families in (("attention", ("tp", "cp", "dp", "pp")), ("moe", ("etp", "ep", "edp", "pp"))):
        for family in families:
            for group in explained[view]["groups"][family]:
                assert [workers[rank][view][family] for rank in group] == list(range(len(group)))
    assert all(worker["node"] and worker["pid"] for worker in workers)


@pytest.mark.gate(1 / 3)
def test_a_run_begins_with_weights_of_transformers(engine: dict, whole: FoldTrainer, storage: Path, tmp_path: Path) -> None:
    """The weights of a run leave for transformers, and another fold and engine begin with them."""
    pytest.importorskip("transformers")
    assert whole.run is not None
    assert main(["export-hf", str(whole.run.folder.path), str(tmp_path / "hub")]) == 0
    changed = {"training": {"steps": 1, "weights": str(tmp_path / "hub")}, "data": {"tokenizer": "byte"}}
    begun = fit(recipe(storage, **other(engine), **changed, optimizer={"lr": 1e-6}, fold={"ep": 1, "tp": 2}))
    assert begun.run is not None
    assert begun.run.summary.val_bpb == pytest.approx(whole.run.summary.val_bpb, rel=1e-3)
    with pytest.raises(UserError, match=r"means model\.layers=2, and the recipe's model has 3"):
        fit(recipe(storage, **engine, **changed, model={"layers": 3}))


@pytest.mark.nightly("another training")
def test_the_same_seed_gives_identical_losses(whole: FoldTrainer, stopped: FoldTrainer) -> None:
    assert losses(stopped) == losses(whole)[:STOP]


@pytest.mark.nightly("another training; a killed worker needs the same from a checkpoint")
def test_stopping_and_resuming_changes_no_bit(engine: dict, whole: FoldTrainer, stopped: FoldTrainer, storage: Path) -> None:
    second = fit(recipe(storage, **engine), resume=copied(stopped, f"again-{engine['engine']['kind']}").name)
    assert second.run is not None
    assert second.run.folder.history.resumes == [STOP]
    assert losses(second) == losses(whole)
    assert same(weights(second), weights(whole))
    assert second.run.summary is not None
    assert whole.run is not None
    assert second.run.summary.val_bpb == whole.run.summary.val_bpb  # type: ignore[union-attr]


@pytest.mark.gate(2 / 5)
def test_a_killed_worker_costs_nothing_before_the_last_checkpoint(engine: dict, whole: FoldTrainer, storage: Path) -> None:
    trainer = FoldTrainer(recipe(storage, **engine))
    killer = threading.Thread(target=signal_after, args=(trainer, 1, 30, signal.SIGKILL), daemon=True)
    killer.start()
    trainer.fit()
    killer.join()
    assert trainer.run is not None
    assert len(trainer.run.folder.history.resumes) == 1, "the worker must have been killed in mid-run"
    assert trainer.run.folder.history.resumes[0] >= 10
    assert losses(trainer) == losses(whole)
    (attempt,) = trainer.attempts
    assert attempt.failure.kind == "lost"
    assert attempt.failure.ranks == (1,)
    assert "the process of rank 1 on " in attempt.failure.what


@pytest.mark.nightly("another training; test_watch.py and test_run.py have the rule")
def test_a_stopped_worker_is_replaced_before_the_others_wait_too_long(
    engine: dict, whole: FoldTrainer, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in ((run, "_LOOK_S", 0.5), (run, "_SILENT_S", 6.0), (watch, "_QUIET_S", 3.0)):
        monkeypatch.setattr(module, name, seconds)
    trainer = FoldTrainer(recipe(storage, **engine))
    stopper = threading.Thread(target=signal_after, args=(trainer, 1, 30, signal.SIGSTOP), daemon=True)
    stopper.start()
    trainer.fit()
    stopper.join()
    assert losses(trainer) == losses(whole)
    (attempt,) = trainer.attempts
    assert (attempt.failure.kind, attempt.failure.ranks) == ("stalled", (1,))
    assert attempt.failure.what.startswith("rank 1 showed no sign of life for ")


@pytest.mark.nightly("two trainings more; test_reshard.py has the same without Ray")
def test_a_checkpoint_loads_under_another_fold_and_engine(
    engine: dict, whole: FoldTrainer, stopped: FoldTrainer, storage: Path
) -> None:
    """Two ranks with half of the experts each save the checkpoint. One rank with the other engine loads it."""
    changed = recipe(storage, **other(engine), fold={"ep": 1}, cluster={"workers": 1}, training={"stop_after": STOP + 15})
    second = fit(changed, resume=copied(stopped, f"other-{engine['engine']['kind']}").name)
    assert losses(second) == pytest.approx(losses(whole)[: STOP + 15], rel=1e-4)


@pytest.mark.nightly("another training; test_resuming.py has all but the training")
def test_a_run_goes_on_from_its_newest_undamaged_checkpoint(
    engine: dict, whole: FoldTrainer, storage: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest checkpoint is damaged, and Ray's list of checkpoints, too. The run ends like the uninterrupted run."""
    folder = copied(whole, f"damaged-{engine['engine']['kind']}")
    victim = next((folder / f"step_{STEPS:08d}").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-100])
    (folder / LIST).write_text("{")
    second = fit(recipe(storage, **engine), resume=folder.name)
    assert rf"its checkpoint step_{STEPS:08d} is damaged: {victim.name} has " in caplog.text
    assert second.run is not None
    assert second.run.folder.history.resumes == [STEPS - 10]
    assert losses(second) == losses(whole)
    assert same(weights(second), weights(whole))
    assert not second.attempts


@pytest.mark.nightly("two trainings more; test_continuing.py and test_loop.py have all but the trainings")
def test_a_copy_of_the_data_goes_on_and_other_data_are_a_second_stage(
    engine: dict, whole: FoldTrainer, storage: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts, last = tmp_path / "texts", copied(whole, f"stage-{engine['engine']['kind']}") / f"step_{STEPS:08d}"
    shutil.copytree(storage / "texts", texts, copy_function=shutil.copyfile)
    data, training = {"path": f"{texts}/*.txt"}, {"steps": STEPS + 2}
    more = fit(recipe(storage, **engine, data=data, training=training), resume=last.parent.name)
    assert more.run is not None
    assert (more.run.folder.history.resumes, len(losses(more))) == ([STEPS], STEPS + 2)
    (texts / "0.txt").write_text("".join(f"{j} and 3 is {j + 3}. " for j in range(2000)))
    caplog.clear()
    stage = fit(recipe(storage, **engine, data=data, training={"steps": 4}), start=last)
    assert stage.run is not None
    assert "this run has other data, so it takes the weights and the optimizer's state of step 60" in caplog.text
    steps = stage.run.folder.history.steps
    assert (stage.run.folder.history.resumes, list(steps)) == ([], [1, 2, 3, 4])
    assert steps[1]["loss"] < losses(whole)[0] - 1.0
    state = weights(stage, 4)
    assert {float(value) for name, value in state.items() if name.endswith("/step")} == {STEPS + 4.0}


@pytest.mark.nightly("two trainings more")
def test_a_new_run_begins_where_a_damaged_one_was_whole(
    engine: dict, whole: FoldTrainer, stopped: FoldTrainer, storage: Path
) -> None:
    """The message names the checkpoint before the damaged one. A new run from there ends like the uninterrupted run."""
    folder = copied(stopped, f"offered-{engine['engine']['kind']}")
    victim = next((folder / f"step_{STOP:08d}").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"is damaged: {victim.name} has \d+ bytes instead of \d+") as told:
        fit(recipe(storage, **engine), start=folder / f"step_{STOP:08d}")
    offered = Path(str(told.value).rpartition(" --from ")[2])
    assert offered == folder / f"step_{BEFORE:08d}"
    second = fit(recipe(storage, **engine), start=offered)
    assert second.run is not None
    assert second.run.folder.path != folder
    assert second.run.folder.history.resumes == [BEFORE]
    assert [step["loss"] for step in second.run.folder.history.steps.values()] == losses(whole)[BEFORE:]
    assert same(weights(second), weights(whole))
    assert (read_run(second.run.folder.path) or {})["started_from"] == str(offered)


@pytest.mark.nightly("two trainings more")
def test_damage_that_only_workers_find_costs_an_attempt(
    engine: dict, storage: Path, whole: FoldTrainer, stopped: FoldTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver hashes no large files. The workers do, and the next attempt begins with the checkpoint before."""
    monkeypatch.setattr(resuming, "_MOST_HASHED", 0)
    run = copied(stopped, f"middle-{engine['engine']['kind']}")
    flipped("__1_0.distcp")(run / f"step_{STOP:08d}")
    second = fit(recipe(storage, **engine), resume=run.name)
    assert [(attempt.failure.kind, attempt.saved) for attempt in second.attempts] == [("damaged", BEFORE)]
    assert f"step_{STOP:08d} is damaged: __1_0.distcp has other bytes" in second.attempts[0].failure.what
    assert losses(second) == losses(whole)
    found = json.loads((run / "run.json").read_text())["failures"]
    assert [(failure["failure"], failure["goes_on"], failure["saved"]) for failure in found] == [("damaged", True, BEFORE)]


def test_a_run_stopped_before_its_first_checkpoint_begins_again_where_it_began(storage: Path, tmp_path: Path) -> None:
    origin = str(tmp_path / "run" / "step_00000003")
    folder = storage / "begun"
    RunFolder(folder, recipe(storage), {}, start=origin).close("killed")
    RunFolder(folder, recipe(storage), {}).close("killed")  # a resumed run that also ended before its first checkpoint
    trainer = FoldTrainer(recipe(storage), resume="begun")
    with pytest.raises(UserError, match="is not a checkpoint's folder, or does not exist") as told:
        trainer.fit()
    assert (told.value.field, told.value.value) == ("from", origin)


@pytest.mark.nightly("another training; test_python.py passes Ray's configurations as well")
def test_rays_own_configurations_are_taken(storage: Path) -> None:
    trainer = FoldTrainer(
        recipe(storage, training={"steps": 2}, fold={"ep": 1}),
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="mine", storage_path=str(storage / "other")),
    )
    result = trainer.fit()
    assert result.return_value["steps"] == 2
    assert Path(result.path) == storage / "other" / "mine"
    assert (storage / "other" / "mine" / "loss.png").exists()
