"""Runs a function once on the workers of a recipe."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow
import ray._private.state
import ray.train
import torch
from ray import PlacementGroupID
from ray.actor import ActorHandle
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group

from foldray.comm import Groups, nccl
from foldray.fold import Edges
from foldray.recipe import Recipe
from trainers.cluster.joining import check_room, connect, resources
from trainers.cluster.run_storage import storage_folder
from trainers.cluster.seating import Seating, traffic_of
from trainers.folders import Folder

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
"""Environment of workers on CPUs. By default, glibc returns large blocks to the kernel, and steps get new pages for them."""


def environment(recipe: Recipe) -> dict[str, str]:
    # With GPUs, large blocks of the host are copies for checkpoints, which should go back to the kernel.
    return dict(nccl.ENVIRONMENT if recipe.cluster.gpu else _ALLOCATOR)


def scaling(recipe: Recipe) -> ScalingConfig:
    """Return the workers that a recipe needs, for Ray Train.

    `Seating` numbers them. Where it may also choose their nodes, they have a selector each, without labels.
    """
    spec = recipe.cluster
    chooses = spec.placement == "PACK" and spec.min_workers is None
    return ScalingConfig(
        num_workers=spec.workers if spec.min_workers is None else (spec.min_workers, spec.workers),
        use_gpu=spec.gpu,
        resources_per_worker=resources(recipe),
        placement_strategy=spec.placement,
        label_selector=[_selector(label) for label in recipe.labels] if chooses or any(recipe.labels) else None,
    )


def _selector(label: str | None) -> dict[str, str]:
    return dict([label.split("=", 1)]) if label else {}


def release(actor: ActorHandle) -> None:
    """Give what an actor has reserved back to the cluster. Ray does so only when the job ends, too."""
    accessor = ray._private.state.state._connect_and_get_accessor()
    for row in accessor.get_placement_group_table():
        group = PlacementGroupTableData.FromString(row)
        if group.creator_actor_id == actor._actor_id.binary():
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))


def on_workers(
    recipe: Recipe, loop: Callable[[dict[str, Any]], Any], name: str, told: str = "", by_node: bool = False, **config: Any
) -> dict[str, Any]:
    """Run a function once on a recipe's workers with Ray Train, and return the result of the first worker.

    Args:
        loop: the function. It gets a dict with `config` and the recipe, which `worker` reads.
        name: the name of the folder that Ray uses meanwhile.
        told: what to say on standard error when the workers start.
        by_node: whether ranks are numbered node by node, instead of by the traffic of the recipe.
    """
    storage, folder = storage_folder(recipe), f"{name}-{secrets.token_hex(4)}"
    connect(recipe, crowded=True)
    check_room(recipe)
    if told:
        print(told, file=sys.stderr)
    traffic = Edges(recipe.placed_fold, ()) if by_node else traffic_of(recipe)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"recipe": recipe.model_dump(mode="json"), **config},
        scaling_config=scaling(recipe),
        run_config=RunConfig(
            name=folder,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
            worker_runtime_env={"env_vars": environment(recipe)},
            callbacks=[Seating({recipe.cluster.workers: traffic})],
        ),
    )
    try:
        result = trainer.fit().return_value
    finally:
        with suppress(OSError, ValueError, pyarrow.ArrowException):
            (Folder(storage) / folder).delete()
    assert isinstance(result, dict), f"the first worker returned {result!r} instead of a dict"
    return result


def worker(config: dict[str, Any]) -> tuple[Recipe, Groups, torch.device]:
    """Return the recipe, the process groups and the device of a worker of `on_workers`."""
    recipe = Recipe.parse(config["recipe"])
    torch.set_num_threads(recipe.cluster.cpus_per_worker)
    device = ray.train.torch.get_device() if recipe.cluster.gpu else torch.device("cpu")
    return recipe, Groups.create(recipe.placed_fold, ray.train.get_context().get_world_rank()), device
