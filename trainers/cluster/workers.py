"""Something run once on a recipe's workers."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from foldray.comm import Groups
from foldray.recipe import Recipe
from trainers.cluster.joining import check_room, connect
from trainers.cluster.run_storage import storage_folder

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
"""Workers' environment: else glibc would hand every large block back to the kernel and fault its pages in again, every step."""


def scaling(recipe: Recipe) -> ScalingConfig:
    """The workers that a recipe asks Ray Train for."""
    spec = recipe.cluster
    resources = {"CPU": spec.cpus_per_worker, **({"GPU": 1} if spec.gpu else {})}
    return ScalingConfig(
        num_workers=spec.workers, use_gpu=spec.gpu, resources_per_worker=resources, placement_strategy=spec.placement
    )


def on_workers(recipe: Recipe, loop: Callable[[dict[str, Any]], Any], name: str, **config: Any) -> dict[str, Any]:
    """Run a loop once on a recipe's workers, as Ray Train does; what the first of them returned.

    Args:
        loop: gets `config` and the recipe, as `worker` reads it.
        name: of what is done, for the folder that Ray keeps meanwhile.

    Raises:
        UserError: the recipe cannot run here.
    """
    storage, folder = storage_folder(recipe), f"{name}-{secrets.token_hex(4)}"
    connect(recipe, crowded=True)
    check_room(recipe)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"recipe": recipe.model_dump(mode="json"), **config},
        scaling_config=scaling(recipe),
        run_config=RunConfig(
            name=folder,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
            worker_runtime_env={"env_vars": ALLOCATOR},
        ),
    )
    try:
        found = trainer.fit().return_value
    finally:
        shutil.rmtree(Path(storage) / folder, ignore_errors=True)
    assert isinstance(found, dict), "the first worker came back without a result"
    return found


def worker(config: dict[str, Any]) -> tuple[Recipe, Groups, torch.device]:
    """A worker of `on_workers`: its recipe, its place in the fold, its device."""
    recipe = Recipe.parse(config["recipe"])
    torch.set_num_threads(recipe.cluster.cpus_per_worker)
    device = ray.train.torch.get_device() if recipe.cluster.gpu else torch.device("cpu")
    return recipe, Groups.create(recipe.placed_fold, ray.train.get_context().get_world_rank()), device
