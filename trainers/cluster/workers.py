"""What a recipe's workers need of Ray: their environment, their resources and nodes, and how these are given back."""

from __future__ import annotations

import ray._private.state
from ray import PlacementGroupID
from ray.actor import ActorHandle
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.train import ScalingConfig
from ray.util.placement_group import PlacementGroup, remove_placement_group

from foldray.comm import nccl
from foldray.recipe import Recipe
from trainers.cluster.joining import resources

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
    labels = selectors(recipe)
    return ScalingConfig(
        num_workers=spec.workers if spec.min_workers is None else (spec.min_workers, spec.workers),
        use_gpu=spec.gpu,
        resources_per_worker=resources(recipe),
        placement_strategy=spec.placement,
        label_selector=labels if chooses or any(labels) else None,
    )


def selectors(recipe: Recipe) -> list[dict[str, str]]:
    """Return the labels of the nodes that each rank may run on."""
    return [dict([label.split("=", 1)]) if label else {} for label in recipe.labels]


def release(actor: ActorHandle) -> None:
    """Give what an actor has reserved back to the cluster. Ray does so only when the job ends, too."""
    accessor = ray._private.state.state._connect_and_get_accessor()
    for row in accessor.get_placement_group_table():
        group = PlacementGroupTableData.FromString(row)
        if group.creator_actor_id == actor._actor_id.binary():
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))
