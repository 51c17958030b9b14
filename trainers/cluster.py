"""Joining or starting Ray, and whether the workers fit."""

from __future__ import annotations

import os
from pathlib import Path

import ray

from foldray.errors import UserError
from foldray.recipe import Recipe

# What Ray's own processes read; set before it starts, never over a user's value.
_QUIET = {
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A worker group that cannot be placed, or a lost worker, is noticed in seconds.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
}
_OBJECT_STORE = 512 * 2**20  # bytes; training data does not travel through Ray


def in_job() -> bool:
    """Whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def connect(recipe: Recipe) -> None:
    """Join the cluster that the recipe or the environment names, or start Ray on this machine; a joined one stays as it is.

    Raises:
        UserError: no cluster answers at the address.
    """
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    if ray.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    address = recipe.cluster.address
    if address is None and not in_job() and "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            "cluster.address", address or os.environ.get("RAY_ADDRESS"), f"no Ray cluster answers there ({reason})"
        ) from None


def check_room(recipe: Recipe) -> None:
    """Refuse at once what could never be placed.

    Raises:
        UserError: more workers, CPUs or GPUs than the cluster's nodes have.
    """
    cluster = recipe.cluster
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = [_places(node, cluster.cpus_per_worker, cluster.gpu) for node in nodes]
    if cluster.placement == "STRICT_SPREAD":
        places = [min(place, 1) for place in places]
    room = max(places, default=0) if cluster.placement == "STRICT_PACK" else sum(places)
    if cluster.workers > room:
        each = f"{cluster.cpus_per_worker} CPU" + (" and 1 GPU" if cluster.gpu else "")
        rule = f"the cluster has room for {room} workers of {each} each on {len(nodes)} node(s), placed {cluster.placement}"
        raise UserError("cluster.workers", cluster.workers, rule, [f"1 to {room}"] if room else None)


def storage_folder(recipe: Recipe) -> str:
    """Where runs go: an absolute folder, or a URI that Ray's storage understands.

    Raises:
        UserError: a relative folder inside a Ray job, whose working folder is deleted; a folder that cannot be written.
    """
    given = recipe.cluster.storage
    if given is not None and "://" in given:
        return given
    if in_job() and given is not None and not Path(given).expanduser().is_absolute():
        raise UserError(
            "cluster.storage", given, "a Ray job's working folder is deleted with the job; give an absolute folder or a URI"
        )
    folder = Path(given).expanduser() if given else (Path.home() / "foldray" / "runs" if in_job() else Path("runs"))
    folder = folder.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError("cluster.storage", folder, f"{existing} is no folder that can be written to")
    return str(folder)


def _places(node: dict[str, float], cpus: int, gpu: bool) -> int:
    by_cpu = int(node.get("CPU", 0) // cpus)
    return min(by_cpu, int(node.get("GPU", 0))) if gpu else by_cpu
