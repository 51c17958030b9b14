"""Whole trainings on Ray: what they leave behind, and that stopping, killing and repeating changes nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.train import RunConfig, ScalingConfig

from foldray.fold import Fold
from foldray.recipe import Recipe
from trainers import FoldTrainer

pytestmark = pytest.mark.usefixtures("ray_session")

_MODEL = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 64, "experts": 4, "topk": 2,
    "expert_hidden": 48, "vocab": 264, "moe_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text("".join(f"{i} times {j} is {i * j}. " for j in range(2000)))
    return folder


def recipe(storage: Path, **sections: Any) -> Recipe:
    base: dict[str, Any] = {
        "name": "test",
        "model": _MODEL,
        "data": {"source": "text", "path": str(storage / "texts" / "*.txt"), "seq_len": 32, "validation": {"fraction": 0.3}},
        "fold": {"ep": 2},
        "optimizer": {"lr": 3e-3},
        "training": {"steps": 12, "global_batch": 8, "micro_batch": 2, "eval_sequences": 24},
        "checkpoint": {"every": 4},
        "cluster": {"workers": 2, "storage": str(storage)},
    }
    return Recipe.parse(
        {key: {**base.get(key, {}), **sections.get(key, {})} if key != "name" else "test" for key in base | sections}
    )


def fit(recipe: Recipe, **options: Any) -> FoldTrainer:
    trainer = FoldTrainer(recipe, **options)
    trainer.fit()
    return trainer


def losses(trainer: FoldTrainer) -> list[float]:
    assert trainer.run is not None
    steps = trainer.run.folder.history.steps
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [steps[step]["loss"] for step in sorted(steps)]


@pytest.fixture(scope="module", params=["deepspeed", "torch"])
def whole(request: pytest.FixtureRequest, storage: Path, ray_session: None) -> tuple[dict, FoldTrainer]:
    """An engine, and an uninterrupted run of it."""
    sections = {"engine": {"kind": request.param}}
    return sections, fit(recipe(storage, **sections))


def test_a_run_leaves_what_people_look_at(whole: tuple[dict, FoldTrainer]) -> None:
    _, trainer = whole
    run = trainer.run
    assert run is not None
    assert run.summary is not None
    assert run.summary.steps == 12
    assert run.summary.val_bpb is not None
    assert losses(trainer)[-1] < losses(trainer)[0]
    folder = Path(run.summary.run_dir)
    assert {"recipe.yaml", "run.json", "metrics.jsonl", "loss.png", "expert_load.png"} <= {path.name for path in folder.iterdir()}
    assert Recipe.load(folder / "recipe.yaml") == trainer.recipe
    logged = run.tracker._client.get_metric_history(run.tracker.run_id, "loss")
    assert [metric.value for metric in sorted(logged, key=lambda metric: metric.step)] == losses(trainer)
    assert len(sorted(folder.glob("step_*"))) == trainer.recipe.checkpoint.keep


def test_the_run_record_agrees_with_the_fold_that_explain_shows(whole: tuple[dict, FoldTrainer]) -> None:
    _, trainer = whole
    assert trainer.run is not None
    workers = json.loads((trainer.run.folder.path / "run.json").read_text())["workers"]
    groups = Fold(2, ep=2).as_dict()
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert len({worker["actor"] for worker in workers}) == 2
    for view, families in (("attention", ("tp", "cp", "dp", "pp")), ("moe", ("etp", "ep", "edp", "pp"))):
        for family in families:
            for group in groups[view]["groups"][family]:
                assert [workers[rank][view][family] for rank in group] == list(range(len(group)))
    assert all(worker["node"] and worker["pid"] for worker in workers)


def test_the_same_seed_gives_identical_losses(whole: tuple[dict, FoldTrainer], storage: Path) -> None:
    sections, trainer = whole
    assert losses(fit(recipe(storage, **sections))) == losses(trainer)


def test_stopping_and_resuming_changes_no_bit(whole: tuple[dict, FoldTrainer], storage: Path) -> None:
    sections, trainer = whole
    first = fit(recipe(storage, **sections, training={"stop_after": 7}))
    assert len(losses(first)) == 7
    assert first.run is not None
    second = fit(recipe(storage, **sections), resume=first.run.folder.path.name)
    assert losses(second) == losses(trainer)
    assert second.run is not None
    assert trainer.run is not None
    assert second.run.summary.val_bpb == trainer.run.summary.val_bpb


def test_a_killed_worker_costs_nothing_before_the_last_checkpoint(whole: tuple[dict, FoldTrainer], storage: Path) -> None:
    sections, _ = whole
    longer = recipe(storage, **sections, training={"steps": 120}, checkpoint={"every": 10})
    undisturbed, trainer = fit(longer), FoldTrainer(longer)
    killer = threading.Thread(target=_kill_rank_1_after, args=(trainer, 40), daemon=True)
    killer.start()
    trainer.fit()
    killer.join(10)
    assert trainer.run is not None
    assert len(trainer.run.folder.history.resumes) == 1
    assert trainer.run.folder.history.resumes[0] >= 10
    assert losses(trainer) == losses(undisturbed)


def _kill_rank_1_after(trainer: FoldTrainer, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        history = trainer.run.folder.history if trainer.run is not None else None
        if history is not None and history.last_step >= step:
            os.kill(history.places[1]["pid"], signal.SIGKILL)
            return
        time.sleep(0.01)


def test_a_checkpoint_loads_under_another_fold_and_engine(storage: Path) -> None:
    first = fit(recipe(storage, engine={"kind": "deepspeed"}, training={"stop_after": 7}))
    assert first.run is not None
    name = first.run.folder.path.name
    changed = recipe(storage, engine={"kind": "torch"}, fold={"ep": 1}, cluster={"workers": 1})
    second, reference = fit(changed, resume=name), fit(recipe(storage, engine={"kind": "torch"}))
    assert losses(second) == pytest.approx(losses(reference), rel=1e-4)


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


def test_a_damaged_checkpoint_is_named(storage: Path) -> None:
    first = fit(recipe(storage, training={"stop_after": 4}))
    assert first.run is not None
    folder = first.run.folder.path
    victim = next((folder / "step_00000004").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(Exception, match=rf"step_00000004: {victim.name} has \d+ bytes instead of \d+"):
        fit(recipe(storage, cluster={"max_failures": 0}), resume=folder.name)
