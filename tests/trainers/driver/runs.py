"""Trainings on Ray that several files of tests look at."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from foldray.recipe import Recipe
from tests.trainers.checkpoints.damage import shards_of
from trainers import FoldTrainer
from trainers.checkpoints import tensors
from trainers.checkpoints.stored import look
from trainers.folders import Folder

STEPS = 60
MODEL = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 64, "experts": 4, "topk": 2,
    "expert_hidden": 48, "vocab": 264, "moe_every": 1,
}  # fmt: skip


def recipe(storage: Path, **sections: Any) -> Recipe:
    base: dict[str, Any] = {
        "name": "test",
        "model": MODEL,
        "data": {"source": "text", "path": str(storage / "texts" / "*.txt"), "seq_len": 32, "validation": {"fraction": 0.3}},
        "fold": {"ep": 2},
        "optimizer": {"lr": 3e-3},
        "training": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "eval_sequences": 24},
        "checkpoint": {"every": 10},
        "cluster": {"workers": 2, "storage": str(storage)},
    }
    return Recipe.parse(
        {key: {**base.get(key, {}), **sections.get(key, {})} if key != "name" else "test" for key in base | sections}
    )


def write_texts(folder: Path, many: int = 2000, files: int = 4) -> None:
    """Make a folder with files of text that a small model can learn."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        (folder / f"{i}.txt").write_text("".join(f"{i} times {j} is {i * j}. " for j in range(many)))


def fit(recipe: Recipe, **options: Any) -> FoldTrainer:
    trainer = FoldTrainer(recipe, **options)
    trainer.fit()
    return trainer


def signal_after(trainer: FoldTrainer, rank: int, step: int, sign: signal.Signals) -> None:
    """Send a signal to the worker of a rank, once its training has told of a step."""
    deadline = time.monotonic() + 300  # a loaded machine starts slowly
    while time.monotonic() < deadline:
        history = trainer.run.folder.history if trainer.run is not None else None
        if history is not None and history.last_step >= step:
            os.kill(history.places[rank]["pid"], sign)
            return
        time.sleep(0.01)


def losses(trainer: FoldTrainer) -> list[float]:
    assert trainer.run is not None
    steps = trainer.run.folder.history.steps
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [steps[step]["loss"] for step in sorted(steps)]


def weights(trainer: FoldTrainer, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer state of a run after a step."""
    assert trainer.run is not None
    stored = look(Folder(str(trainer.run.folder.path / f"step_{step:08d}")))
    state = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in stored.contents.tensors.items()}
    tensors.load(stored, shards_of(state), None)
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
