"""Ray actors that form one world of ranks and run functions: many, one after another, or one (`on_workers`).

A `TorchTrainer` takes ten seconds to start for every function. Such a group of actors starts once, in two seconds, and then
a call takes milliseconds. The group has no checkpoints and does not restart ranks. After the loss of a rank, the caller has
to start a new group.
"""

from __future__ import annotations

import os
import sys
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

from foldray.comm import Groups, nccl
from foldray.errors import UserError
from foldray.nodes import Edges
from foldray.recipe import Recipe
from trainers.cluster import joining
from trainers.cluster.joining import resources
from trainers.cluster.seating import NODE_ID, chosen_nodes, seated, traffic_of
from trainers.cluster.workers import environment, selectors

MEMORY = "memory"
_PLACED_S, _JOINED_S = 180.0, 300.0  # seconds for actors to be placed, and to find each other


class RankFailure(Exception):
    """A call failed on some rank. The other ranks may wait for it forever, so the group cannot be used any more.

    The reason is one line. It begins with `MEMORY` if a rank ran out of memory.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Ranks:
    """A world of ranks. If they do not start, or do not find each other, nothing of them is left.

    Args:
        recipe: its section `cluster` says how many ranks to start, and with which resources.
        nodes: ids of the nodes to use; None lets Ray place the ranks as the recipe says.
        traffic: what ranks send to each other, by which they get their nodes; None is the traffic of the recipe.

    Attributes:
        hosts: addresses of the nodes that the ranks run on, in the order of ranks.
    """

    def __init__(self, recipe: Recipe, nodes: Sequence[str] | None = None, traffic: Edges | None = None):
        spec, self._traffic = recipe.cluster, traffic_of(recipe) if traffic is None else traffic
        needs, where = resources(recipe), selectors(recipe)
        self._wanted = [str(sorted(labels.items())) for labels in where]
        if nodes is not None:
            share = -(-spec.workers // len(nodes))
            chosen: list[str] | None = [nodes[rank // share] for rank in range(spec.workers)]
        else:
            chosen = chosen_nodes(self._traffic, needs) if spec.placement == "PACK" and not any(where) else None
        if chosen is not None:
            where = [{**labels, NODE_ID: node} for labels, node in zip(where, chosen, strict=True)]
        options: dict[str, Any] = {"bundle_label_selector": where} if any(where) else {}
        self._actors: list[Any] = []
        self._placement: PlacementGroup = placement_group([needs] * spec.workers, strategy=spec.placement, **options)
        try:
            if not self._placement.wait(_PLACED_S):
                raise UserError("cluster.workers", spec.workers, f"found no room on the cluster within {_PLACED_S:.0f} s")
            self._start(recipe, needs)
        except BaseException:  # otherwise the next ranks would wait for this room
            self.close()
            raise

    def _start(self, recipe: Recipe, needs: dict[str, float]) -> None:
        make = ray.remote(_Rank).options
        for bundle in range(recipe.cluster.workers):
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
            options: dict[str, Any] = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_restarts": 0}
            options["scheduling_strategy"], options["runtime_env"] = strategy, {"env_vars": environment(recipe)}
            self._actors.append(make(**options).remote(recipe.cluster.cpus_per_worker))
        places = self._wait([actor.where.remote() for actor in self._actors], _JOINED_S)
        order = seated(self._traffic, [node for node, _ in places], self._wanted, self._wanted)
        self._actors = actors = [self._actors[number] for number in order]
        host = places[order[0]][1]
        (port,) = self._wait([actors[0].open.remote(host)], _JOINED_S)
        self.hosts = list(dict.fromkeys(places[number][1] for number in order))
        backend = "nccl" if recipe.cluster.gpu else "gloo"
        joins = [actor.join.remote(host, port, rank, len(actors), backend) for rank, actor in enumerate(actors)]
        self._wait(joins, _JOINED_S)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float | None) -> list[Any]:
        """Call `function(state, *arguments)` on all ranks at once, and return the results by rank.

        `state` is a dictionary that a rank keeps from call to call. If a rank fails, or if the call takes longer than `timeout`
        seconds, it raises RankFailure. None is any time.
        """
        return self._wait([actor.call.remote(function, arguments) for actor in self._actors], timeout)

    def close(self) -> None:
        """Stop all ranks, even if a call is running."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._placement)

    @staticmethod
    def _wait(calls: list[Any], timeout: float | None) -> list[Any]:
        """Return all results. The first failure raises, even if other ranks are still running."""
        end, running = None if timeout is None else time.monotonic() + timeout, list(calls)
        try:
            while running:
                done, running = ray.wait(running, num_returns=1, timeout=end and max(0.0, end - time.monotonic()))
                if not done:
                    raise RankFailure(f"took more than {timeout:.0f} s")
                ray.get(done)
            return ray.get(calls)
        except (RayError, GetTimeoutError) as error:
            raise RankFailure(_reason(error)) from error


def on_workers(
    recipe: Recipe, function: Callable[..., Any], told: str = "", by_node: bool = False, **options: Any
) -> dict[str, Any]:
    """Run `function(recipe, groups, device, **options)` once on a recipe's workers, and return the result of the first rank.

    Args:
        told: what to say on standard error when the workers start.
        by_node: whether ranks are numbered node by node, instead of by the traffic of the recipe.

    Raises:
        UserError: a worker has found a user's mistake.
        RankFailure: a worker failed otherwise.
    """
    joining.connect(recipe, crowded=True)
    joining.check_room(recipe)
    if told:
        print(told, file=sys.stderr)
    ranks = Ranks(recipe, traffic=Edges(recipe.placed_fold, ()) if by_node else None)
    try:
        result = ranks.call(_once, recipe.model_dump(mode="json"), function, options, timeout=None)[0]
    except RankFailure as failure:
        cause = getattr(failure.__cause__, "cause", None)
        raise cause if isinstance(cause, UserError) else failure from failure.__cause__
    finally:
        ranks.close()
    assert isinstance(result, dict), f"the first worker returned {result!r} instead of a dict"
    return result


def _once(state: dict[str, Any], given: dict[str, Any], function: Callable[..., Any], options: dict[str, Any]) -> Any:
    recipe = Recipe.parse(given)
    nccl.take_adapters(recipe.adapters[state["rank"]])
    groups = Groups.create(recipe.placed_fold, state["rank"])
    result = function(recipe, groups, state["device"], **options)
    groups.close()
    return result


class _Rank:
    def __init__(self, threads: int):
        torch.set_num_threads(threads)
        self._state: dict[str, Any] = {}
        self._store: dist.TCPStore | None = None

    def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def open(self, host: str) -> int:
        """Open the store in which ranks find each other, at a free port, and return the port."""
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_JOINED_S))
        return self._store.port

    def join(self, host: str, port: int, rank: int, world: int, backend: str) -> None:
        timeout = timedelta(seconds=_JOINED_S)
        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
        # Each actor sees only its own GPU. DeepSpeed takes the local rank as the number of a visible GPU, so it must be 0.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(port))
        if backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        self._state |= {"rank": rank, "device": torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")}

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(self._state, *arguments)


def _reason(error: Exception) -> str:
    cause: BaseException = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    line = " ".join(str(cause).split())[:200]
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError, OutOfMemoryError)):
        return f"{MEMORY}: {line or 'a rank needed more than its node has'}"
    if isinstance(cause, (RayActorError, WorkerCrashedError)):
        return f"lost a worker: {line}"
    if isinstance(cause, UserError):
        return f"refused: {cause}"
    return f"failed: {type(cause).__name__}: {line}"
