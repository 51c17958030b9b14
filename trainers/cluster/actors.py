"""Ranks that stay: Ray actors that make one world, and run one thing after another without being started anew.

A `TorchTrainer` takes ten seconds to start, such a group two, and once it is there a call takes milliseconds. It has no
checkpoints and no second chance: whoever uses it starts a new one when a rank is lost.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.cluster.workers import ALLOCATOR

MEMORY = "memory"
_PLACED_S, _JOINED_S = 60.0, 60.0  # seconds for actors to get their place, and to find each other


class RankFailure(Exception):
    """A call that failed on some rank, so that the others may wait for ever: the group is of no more use.

    Args:
        reason: one line; begins with `MEMORY` where there was too little.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Ranks:
    """A world of ranks.

    Args:
        nodes: ids of the nodes to be on; None is any, placed as the recipe says.

    Attributes:
        hosts: addresses of the nodes that it is on, in the order of ranks.

    Raises:
        UserError: there is no room.
    """

    def __init__(self, recipe: Recipe, nodes: Sequence[str] | None = None):
        spec = recipe.cluster
        each = {"CPU": float(spec.cpus_per_worker), **({"GPU": 1.0} if spec.gpu else {})}
        bundles, more = [each] * spec.workers, {}
        if nodes is not None:
            share = -(-spec.workers // len(nodes))
            more["bundle_label_selector"] = [{"ray.io/node-id": nodes[rank // share]} for rank in range(spec.workers)]
        self._placement: PlacementGroup = placement_group(bundles, strategy=spec.placement, **more)
        if not self._placement.wait(_PLACED_S):
            self.close()
            raise UserError("cluster.workers", spec.workers, f"found no room on the cluster within {_PLACED_S:.0f} s")
        self._actors = self._start(recipe, each)

    def _start(self, recipe: Recipe, each: dict[str, float]) -> list[Any]:
        make = ray.remote(_Rank).options
        started = []
        for bundle in range(recipe.cluster.workers):
            where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
            options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "max_restarts": 0, "scheduling_strategy": where}
            options["runtime_env"] = {"env_vars": ALLOCATOR}
            started.append(make(**options).remote(recipe.cluster.cpus_per_worker))
        self._actors = started
        places = self._wait([actor.where.remote() for actor in started], _JOINED_S)
        # Ranks of a node lie next to each other, as Ray Train has them.
        first = {node: number for number, (node, _) in reversed(list(enumerate(places)))}
        order = sorted(range(len(started)), key=lambda number: (first[places[number][0]], number))
        actors = [started[number] for number in order]
        host = places[order[0]][1]
        address = f"tcp://{host}:{self._wait([actors[0].free_port.remote()], _JOINED_S)[0]}"
        self.hosts = list(dict.fromkeys(places[number][1] for number in order))
        backend = "nccl" if recipe.cluster.gpu else "gloo"
        joins = [actor.join.remote(address, rank, len(actors), backend) for rank, actor in enumerate(actors)]
        self._wait(joins, _JOINED_S)
        return actors

    def call(self, function: Callable[..., Any], *given: Any, timeout: float) -> list[Any]:
        """`function(state, *given)` on every rank at once; `state` is a dictionary that each keeps. What they returned, by rank.

        Raises:
            RankFailure: of the first rank that failed, or after so many seconds.
        """
        return self._wait([actor.call.remote(function, given) for actor in self._actors], timeout)

    def close(self) -> None:
        """Stop all ranks, whatever they do."""
        for actor in getattr(self, "_actors", []):
            ray.kill(actor)
        remove_placement_group(self._placement)

    @staticmethod
    def _wait(calls: list[Any], timeout: float) -> list[Any]:
        """All results; the first failure ends it, whoever else still waits."""
        end, left = time.monotonic() + timeout, list(calls)
        try:
            while left:
                done, left = ray.wait(left, num_returns=1, timeout=max(0.0, end - time.monotonic()))
                if not done:
                    raise RankFailure(f"took more than {timeout:.0f} s")
                ray.get(done)
            return ray.get(calls)
        except (RayError, GetTimeoutError) as error:
            raise RankFailure(_reason(error)) from error


class _Rank:
    """One of them."""

    def __init__(self, threads: int):
        torch.set_num_threads(threads)
        self._state: dict[str, Any] = {}

    def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def join(self, address: str, rank: int, world: int, backend: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        # Ray shows each actor its own GPU alone. DeepSpeed takes the local rank for the number of a GPU that it sees.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=port)
        if backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=_JOINED_S))
        self._state |= {"rank": rank, "device": torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")}

    def call(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        return function(self._state, *given)


def _reason(error: Exception) -> str:
    """One line."""
    cause: BaseException = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    line = " ".join(str(cause).split())[:200]
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError, OutOfMemoryError)):
        return f"{MEMORY}: {line or 'more was needed than there is'}"
    if isinstance(cause, (RayActorError, WorkerCrashedError)):
        return f"lost a worker: {line}"
    if isinstance(cause, UserError):
        return f"cannot be: {cause}"
    return f"failed: {type(cause).__name__}: {line}"
