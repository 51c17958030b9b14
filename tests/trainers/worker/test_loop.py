"""How a worker begins: with the state of a checkpoint, and with its order of the sequences. No training is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray.train import Checkpoint

from foldray.comm import Activity
from tests.foldray.parity import make_recipe
from tests.trainers.checkpoints.damage import make_run, progress, shards_of, state
from trainers.data.packed import Batches
from trainers.worker.loop import Worker


class Ordered:
    """Sequences that know their order alone."""

    def order(self, seed: int, version: int) -> Any:
        return seed, version


def restored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    """Return the step at which a worker begins that starts from a checkpoint, and the worker."""
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    worker: Any = SimpleNamespace(
        recipe=make_recipe(1), data=SimpleNamespace(train=Ordered()), start=Checkpoint.from_directory(str(folder)), rank=1,
        activity=Activity(), saver=SimpleNamespace(group=None), validation={}, _recall=lambda known: None,
        engine=SimpleNamespace(shards=lambda: shards_of(state(0)), load_shards=lambda shards: None),
    )  # fmt: skip
    worker.batches = Batches(worker.data.train, worker.recipe.training.seed)
    return Worker._restore(worker), worker


def test_a_training_keeps_the_order_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of earlier versions do not name their order."""
    folder = make_run(tmp_path / "run") / "step_00000003"
    for found, version in (({}, 1), ({"order": 1}, 1), ({"order": 2}, 2)):
        progress(**found)(folder)
        step, worker = restored(folder, monkeypatch)
        assert (step, worker.batches.version, worker.batches._order) == (3, version, (0, version))
