"""Joining or starting Ray, and whether the workers fit."""

from __future__ import annotations

import os

import grpc
import ray
import torch
from ray._common.utils import get_system_memory
from ray._private.grpc_utils import init_grpc_channel
from ray.exceptions import AuthenticationError

from foldray.blueprint import count_by_cut
from foldray.errors import UserError
from foldray.planner.memory import GIB, parameters
from foldray.recipe import Recipe
from foldray.urls import told_without
from trainers.cluster.jobs import WANTS_TOKEN, in_job

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
_ANSWER_S = 10.0  # seconds for a cluster to answer at its address
_PROCESS_BYTES, _GPU_BYTES = 128 * 2**20, 512 * 2**30  # less than any worker's process takes, more than any GPU has
_OBJECT_STORE = 512 * 2**20  # bytes; training data does not travel through Ray


def connect(recipe: Recipe, crowded: bool = False) -> None:
    """Join the cluster that the recipe or the environment names, or start Ray on this machine; a joined one stays as it is.

    Args:
        crowded: a Ray started here takes as many workers as the recipe has, whatever the number of cores.

    Raises:
        UserError: no cluster answers at the address, or it refuses the token; the model is too large for this machine.
    """
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    if ray.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    address = recipe.cluster.address
    if address is None and not in_job() and "RAY_ADDRESS" not in os.environ:
        _check_memory(recipe, get_system_memory(), "this machine")
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
        reason = told_without(" ".join(str(error).split()), named)[:160]
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
        UserError: more workers, CPUs or GPUs than the cluster's nodes have, or a model that their memory cannot hold.
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
    # Ray tells what was free as it started, of GPUs nothing: what is surely too much is more than anyone may have.
    free = sum(node.get("memory", 0.0) + node.get("object_store_memory", 0.0) for node in nodes)
    _check_memory(recipe, cluster.workers * _GPU_BYTES if cluster.gpu else 2 * free, "the cluster")


def _check_memory(recipe: Recipe, there: float, where: str) -> None:
    """Refuse what surely does not fit: every worker's process, its even share of weights and gradients, and Adam's moments."""
    fold, workers, (outside, inside) = recipe.fold, recipe.cluster.workers, count_by_cut(recipe.model)
    count = {"dp_cp": outside / (fold.tp * fold.pp), "edp": inside / (fold.ep * fold.etp * fold.pp)}
    held = parameters(recipe.placed_fold, recipe.engine.zero, getattr(torch, recipe.precision).itemsize, count)
    each = held.weights + held.gradients + (held.optimizer if recipe.optimizer.kind == "adamw" else 0.0)
    needed = workers * (each + (0 if recipe.cluster.gpu else _PROCESS_BYTES))
    if needed > there:
        rule = f"{workers} workers need {needed / GIB:.3g} GiB for weights, gradients and optimizer at least, {where} has "
        raise UserError("model", f"{outside + inside:.3g} parameters", f"{rule}{there / GIB:.3g} GiB")


def _places(node: dict[str, float], cpus: int, gpu: bool) -> int:
    by_cpu = int(node.get("CPU", 0) // cpus)
    return min(by_cpu, int(node.get("GPU", 0))) if gpu else by_cpu
