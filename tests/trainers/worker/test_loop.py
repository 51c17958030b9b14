"""How a worker begins: with the state of a checkpoint, and with its order of the sequences. No training is started."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from ray.train import Checkpoint

from foldray.comm import Activity
from tests.foldray.parity import make_recipe
from tests.trainers.checkpoints.damage import make_run, progress, shards_of, state
from trainers.data.order import NEWEST
from trainers.data.packed import Batches
from trainers.worker.loop import Worker


class Ordered:
    """Sequences that know their order alone."""

    def order(self, seed: int, version: int) -> Any:
        return seed, version


def restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, anew: bool = False, own: Path | None = None
) -> tuple[int, Any, dict[str, torch.Tensor]]:
    """Return the step at which a worker begins that starts from a checkpoint, the worker, and the state that it has loaded."""
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: own and Checkpoint.from_directory(str(own)))
    loaded, sent = state(0), list[Any]()
    worker: Any = SimpleNamespace(
        recipe=make_recipe(1), data=SimpleNamespace(train=Ordered()), start=Checkpoint.from_directory(str(folder)), rank=0,
        activity=Activity(), saver=SimpleNamespace(group=None, limit=timedelta(minutes=1)), guard=SimpleNamespace(skipped=0),
        engine=SimpleNamespace(shards=lambda: shards_of(loaded), load_shards=lambda: None),
        outbox=SimpleNamespace(send=sent.append), validation={}, anew=anew, _recall=lambda known: None,
    )  # fmt: skip
    worker.batches = Batches(worker.data.train, worker.recipe.training.seed)
    worker.sent = sent
    return Worker._restore(worker), worker, loaded


def test_a_training_keeps_the_order_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of earlier versions do not name their order."""
    folder = make_run(tmp_path / "run") / "step_00000003"
    for found, version in (({}, 1), ({"order": 1}, 1), ({"order": 2}, 2)):
        progress(**found)(folder)
        step, worker, _ = restored(folder, monkeypatch)
        assert (step, worker.batches.version, worker.batches._order) == (3, version, (0, version))


def test_with_other_data_a_training_takes_weights_and_moments_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps begin at 0 and its order is a new one, until it has a checkpoint of its own."""
    folder, own = make_run(tmp_path / "run") / "step_00000003", make_run(tmp_path / "own") / "step_00000002"
    step, worker, loaded = restored(folder, monkeypatch, anew=True)
    assert (step, worker.batches.version, worker.validation, worker.sent) == (0, NEWEST, {}, [])
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state(3).items())
    step, worker, loaded = restored(folder, monkeypatch, anew=True, own=own)
    assert (step, worker.sent) == (2, [{"kind": "resumed", "step": 2}])
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state(2).items())
