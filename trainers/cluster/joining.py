"""Joins or starts Ray, and checks that the workers fit."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
import torch
from ray._common.utils import get_system_memory
from ray.exceptions import AuthenticationError

from foldray.amounts import in_bytes
from foldray.blueprint import count_by_cut
from foldray.costs.memory import parameters
from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.urls import told_without
from trainers.cluster.jobs import WANTS_TOKEN, has_token, in_job, token_file

# Environment variables for Ray's processes. They are set before Ray starts, and never replace a user's value.
_FOR_RAY = {
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # With this, Ray Train notices within a minute that it cannot place a worker group.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
}
_PROMPT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Ray Train asks all workers every two seconds how they are. Until it has asked, an end or a loss costs time."""
_PROMPT_WORKERS = 64  # as many may be asked that often
_SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
_ANSWER_S = 10.0  # seconds for a cluster to answer at its address
_PROCESS_BYTES, _GPU_BYTES = 128 * 2**20, 512 * 2**30  # less than any worker's process needs, more than any GPU has
_STATES = {"adamw": 1.0, "muon": 0.5}
"""The least share of the memory of Adam's moments that the state of an optimizer needs."""
_OBJECT_STORE = 512 * 2**20  # bytes; training data does not travel through Ray


def connect(recipe: Recipe, crowded: bool = False) -> None:
    """Join the cluster that the recipe or the environment names, or start Ray on this machine.

    If this process has already joined a cluster, nothing happens. With `crowded`, a Ray on this machine takes all workers of the
    recipe, even if it has fewer cores.
    """
    prompt = _PROMPT if recipe.cluster.workers <= _PROMPT_WORKERS else {}
    for key, value in (_FOR_RAY | prompt).items():
        os.environ.setdefault(key, value)
    if ray.is_initialized():
        return
    address = recipe.cluster.address
    if address is None and not in_job() and "RAY_ADDRESS" not in os.environ:
        _check_memory(recipe, get_system_memory(), "this machine")
        cpus = max(os.cpu_count() or 1, recipe.cluster.workers * recipe.cluster.cpus_per_worker) if crowded else None
        _make_token()
        try:
            start_ray(num_cpus=cpus, object_store_memory=_OBJECT_STORE, **_SILENT)
        except Exception as error:  # Ray raises plain exceptions if its processes do not start in time
            reason = " ".join(str(error).split())[:160]
            raise UserError("cluster.address", None, f"Ray does not start on this machine ({reason})") from None
        return
    join(address)


def start_ray(**options: Any) -> None:
    """Start Ray on this machine. If its processes do not start within the half minute that Ray gives them, try once more: the
    machine may be busy."""
    for is_last in (False, True):
        try:
            ray.init(address="local", include_dashboard=False, **options)
            return
        except Exception:
            ray.shutdown()
            if is_last:
                raise


def join(address: str | None, field: str = "cluster.address") -> None:
    """Join the cluster at an address; None is the one that the environment names.

    If this process has already joined a cluster, nothing happens.
    """
    if ray.is_initialized():
        return
    named = address or os.environ.get("RAY_ADDRESS", "auto")
    try:
        _knock(named)
        ray.init(address=address, **_SILENT)
    except AuthenticationError:
        raise UserError(field, named, WANTS_TOKEN) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = told_without(" ".join(str(error).split()), named)[:160]
        raise UserError(field, named, f"no Ray cluster answers there, or it refuses the token ({reason})") from None


def _make_token() -> None:
    """Make the token of Ray clusters on this machine, if the user has none. Only the user may read it.

    Ray would make it itself, but let everybody on the machine read it, who could then run code in the cluster.
    """
    if has_token() or "RAY_AUTH_MODE" in os.environ:
        return
    path = token_file()
    with suppress(OSError):  # Ray then tries itself
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as draft:
            draft.write(secrets.token_hex(32))
            draft.flush()
            os.link(draft.name, path)  # at once, and never over the token of another process


def _knock(address: str) -> None:
    """Raise ConnectionError in seconds if no Ray cluster listens at an address. Ray itself would try for a quarter of an hour.

    A cluster speaks Ray's protocol. Its dashboard does not.
    """
    if ":" not in address:
        return  # Ray knows words such as "auto", and refuses other words at once
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    channel = init_grpc_channel(address.removeprefix("ray://"))
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
    except grpc.FutureTimeoutError:
        raise ConnectionError(f"no answer in {_ANSWER_S:.0f} s; give the head node's HOST:PORT, usually port 6379") from None
    finally:
        channel.close()


def check_room(recipe: Recipe) -> None:
    """Refuse a recipe whose workers can never be placed."""
    cluster = recipe.cluster
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node["Resources"] for node in alive]
    if cluster.gpu and not any(node.get("GPU") for node in nodes):
        raise UserError("cluster.gpu", "true", f"none of the cluster's {len(nodes)} node(s) has a GPU", ["false"])
    places = [seats(node, resources(recipe)) for node in nodes]
    if cluster.placement == "STRICT_SPREAD":
        places = [min(place, 1) for place in places]
    room = max(places, default=0) if cluster.placement == "STRICT_PACK" else sum(places)
    if cluster.workers > room:
        needs = f"{cluster.cpus_per_worker} CPU" + (" and 1 GPU" if cluster.gpu else "")
        rule = f"the cluster has room for {room} workers of {needs} each on {len(nodes)} node(s), placed {cluster.placement}"
        raise UserError("cluster.workers", cluster.workers, rule, [f"1 to {room}"] if room else None)
    for label in dict.fromkeys(filter(None, recipe.labels)):
        key, value = label.split("=", 1)
        room = sum(place for node, place in zip(alive, places, strict=True) if node.get("Labels", {}).get(key) == value)
        if (wanted := recipe.labels.count(label)) > room:
            assert recipe.placement
            field = "attention_nodes" if label == recipe.placement.attention_nodes else "expert_nodes"
            rule = f"needs room for {wanted} on nodes with this label, but they have room for {room}"
            raise UserError(f"placement.{field}", label, rule)
    # Ray reports the memory that was free at its start, and no GPU memory. So these limits are above any real memory.
    free = sum(node.get("memory", 0.0) + node.get("object_store_memory", 0.0) for node in nodes)
    _check_memory(recipe, cluster.workers * _GPU_BYTES if cluster.gpu else 2 * free, "the cluster")


def _check_memory(recipe: Recipe, available: float, where: str) -> None:
    """Refuse a recipe that certainly does not fit into the available bytes.

    Every worker needs memory for its process, for its share of weights and gradients, and for the optimizer's state.
    """
    fold, workers, (outside, inside) = recipe.placed_fold, recipe.cluster.workers, count_by_cut(recipe.model)
    trained = count_by_cut(recipe.model, trained=True)
    count = {"dp_cp": trained[0] / (fold.tp * fold.pp), "edp": trained[1] / (fold.ep * fold.etp * fold.moe_pp)}
    frozen = sum(count_by_cut(recipe.model)) - sum(trained)
    needed = frozen * getattr(torch, recipe.precision).itemsize + workers * (0.0 if recipe.cluster.gpu else _PROCESS_BYTES)
    for family, held in count.items():
        only = dict.fromkeys(count, 0.0) | {family: held}
        share = parameters(fold, recipe.engine.zero, getattr(torch, recipe.precision).itemsize, only)
        held_bytes = share.weights + share.gradients + share.optimizer * _STATES.get(recipe.optimizer.kind, 0.0)
        needed += held_bytes * (fold.attention_ranks if family == "dp_cp" else fold.moe_ranks)
    if needed > available:
        least = f"{workers} workers need at least {in_bytes(needed)} for weights, gradients and optimizer"
        rule = f"{least}, but {where} has {in_bytes(available)}"
        raise UserError("model", f"{outside + inside:.3g} parameters", rule)


def resources(recipe: Recipe) -> dict[str, float]:
    """Return what Ray reserves for a worker of a recipe."""
    return {"CPU": float(recipe.cluster.cpus_per_worker), **({"GPU": 1.0} if recipe.cluster.gpu else {})}


def seats(room: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers with these needs find room among a node's resources; 0 if they need nothing."""
    return min((int(room.get(name, 0.0) // amount) for name, amount in needs.items() if amount > 0), default=0)
