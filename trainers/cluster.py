"""Joining or starting Ray, and whether the workers fit."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pyarrow
import pyarrow.fs
import ray
import ray.train
import torch
from ray._private.grpc_utils import init_grpc_channel
from ray.exceptions import AuthenticationError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from foldray.comm import Groups
from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.jobs import WANTS_TOKEN

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
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
"""Workers' environment: else glibc would hand every large block back to the kernel and fault its pages in again, every step."""
_ANSWER_S = 10.0  # seconds for a cluster to answer at its address
_OBJECT_STORE = 512 * 2**20  # bytes; training data does not travel through Ray


def in_job() -> bool:
    """Whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def connect(recipe: Recipe, crowded: bool = False) -> None:
    """Join the cluster that the recipe or the environment names, or start Ray on this machine; a joined one stays as it is.

    Args:
        crowded: a Ray started here takes as many workers as the recipe has, whatever the number of cores.

    Raises:
        UserError: no cluster answers at the address, or it refuses the token.
    """
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    if ray.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    address = recipe.cluster.address
    if address is None and not in_job() and "RAY_ADDRESS" not in os.environ:
        cpus = max(os.cpu_count() or 1, recipe.cluster.workers * recipe.cluster.cpus_per_worker) if crowded else None
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=_OBJECT_STORE, **quiet)
        return
    named = address or os.environ.get("RAY_ADDRESS", "auto")
    try:
        _knock(named)
        ray.init(address=address, **quiet)
    except AuthenticationError:
        raise UserError("cluster.address", named, WANTS_TOKEN) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError("cluster.address", named, f"no Ray cluster answers there, or not to this token ({reason})") from None


def _knock(address: str) -> None:
    """Fail in seconds where nobody listens, or somebody who is not Ray (its dashboard, say): Ray tries for a quarter of an hour.

    Raises:
        ConnectionError: nothing at the address speaks Ray's protocol.
    """
    if ":" not in address:
        return  # a word, which Ray knows or refuses at once
    channel = init_grpc_channel(address.removeprefix("ray://"))
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
    except grpc.FutureTimeoutError:
        raise ConnectionError(f"none in {_ANSWER_S:.0f} s; it should be the head node's HOST:PORT, port 6379 as a rule") from None
    finally:
        channel.close()


def check_room(recipe: Recipe) -> None:
    """Refuse at once what could never be placed.

    Raises:
        UserError: more workers, CPUs or GPUs than the cluster's nodes have.
    """
    cluster = recipe.cluster
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if cluster.gpu and not any(node.get("GPU") for node in nodes):
        raise UserError("cluster.gpu", "true", f"none of the cluster's {len(nodes)} node(s) has a GPU", ["false"])
    places = [_places(node, cluster.cpus_per_worker, cluster.gpu) for node in nodes]
    if cluster.placement == "STRICT_SPREAD":
        places = [min(place, 1) for place in places]
    room = max(places, default=0) if cluster.placement == "STRICT_PACK" else sum(places)
    if cluster.workers > room:
        each = f"{cluster.cpus_per_worker} CPU" + (" and 1 GPU" if cluster.gpu else "")
        rule = f"the cluster has room for {room} workers of {each} each on {len(nodes)} node(s), placed {cluster.placement}"
        raise UserError("cluster.workers", cluster.workers, rule, [f"1 to {room}"] if room else None)


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
    connect(recipe, crowded=True)
    check_room(recipe)
    storage, folder = storage_folder(recipe), f"{name}-{secrets.token_hex(4)}"
    trainer = TorchTrainer(
        loop,
        train_loop_config={"recipe": recipe.model_dump(), **config},
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


def storage_folder(recipe: Recipe) -> str:
    """Where runs go: an absolute folder, or a URI that Ray's storage understands.

    Raises:
        UserError: a relative folder inside a Ray job, whose working folder is deleted; a folder that cannot be written; a URI
            that cannot be opened.
    """
    given = recipe.cluster.storage
    if given is not None and "://" in given:
        return _reachable(given)
    try:
        folder = Path(given).expanduser() if given else (Path.home() / "foldray" / "runs" if in_job() else Path("runs"))
    except RuntimeError:
        raise UserError("cluster.storage", given, "names the home of a user who is not known here") from None
    if in_job() and given is not None and not folder.is_absolute():
        raise UserError(
            "cluster.storage", given, "a Ray job's working folder is deleted with the job; give an absolute folder or a URI"
        )
    folder = folder.absolute()
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):  # tried, because permissions do not tell of root, /proc and full disks
            return str(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError("cluster.storage", folder, f"is no folder that can be written to ({reason})") from None


def _reachable(uri: str) -> str:
    try:
        pyarrow.fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError("cluster.storage", uri, f"is no storage that can be reached ({error})") from None
    return uri


def _places(node: dict[str, float], cpus: int, gpu: bool) -> int:
    by_cpu = int(node.get("CPU", 0) // cpus)
    return min(by_cpu, int(node.get("GPU", 0))) if gpu else by_cpu
