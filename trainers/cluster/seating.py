"""Which worker is which rank, and on which node: so that the least traffic crosses nodes.

Ray decides where workers run, and Ray Train numbers them node by node. Both know nothing of a fold. So foldray names the
nodes of workers beforehand where Ray would leave it a choice, and renumbers the workers once they run. All of Ray Train then has
foldray's ranks.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroupContext

from foldray.costs import traffic
from foldray.nodes import Edges, Room, arrange
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from trainers.cluster.joining import join, resources, seats

NODE_ID = "ray.io/node-id"
"""The label that Ray gives to every node."""
_RELEASED_S = 10.0  # seconds for the cluster to have room; after that, Ray waits for it


class Host(NamedTuple):
    """A node of the cluster: its id in hexadecimal digits, its IP address, and how many workers it has room for."""

    id: str
    address: str
    seats: int


def joined_hosts(address: str, recipe: Recipe | None) -> list[Host]:
    """Join a cluster and return its nodes, also with resources that somebody has reserved.

    Args:
        address: its address, or "auto" for one that runs on this machine.
        recipe: says what a worker needs; None is a GPU if any node has one, or else a CPU.
    """
    join(address, "cluster")
    if recipe is not None:
        needs = resources(recipe)
    else:
        needs = {"GPU" if any(node["Resources"].get("GPU") for node in ray.nodes()) else "CPU": 1.0}
    return [host for host in hosts(needs) if host.seats]


def hosts(needs: Mapping[str, float], free: bool = False) -> list[Host]:
    """Return the nodes of the cluster, for workers with these needs. With `free`, reserved resources do not count."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    room = {node["NodeID"]: node["Resources"] for node in nodes}
    if free:
        room = ray._private.state.available_resources_per_node()
    return [Host(node["NodeID"], node["NodeManagerAddress"], seats(room.get(node["NodeID"], {}), needs)) for node in nodes]


def traffic_of(recipe: Recipe) -> Edges:
    """Return the bytes that the ranks of a recipe send to each other in a step."""
    return traffic.edges(as_candidate(recipe))


def chosen_nodes(edges: Edges, needs: Mapping[str, float]) -> list[str] | None:
    """Return the id of a node for every rank, among nodes with free room.

    Ray may choose (None) if a node has room for all ranks, or if the cluster has no room beyond them.
    """
    world, end = edges.fold.world_size, time.monotonic() + _RELEASED_S
    nodes = hosts(needs, free=True)
    # Ray would wait as well. Workers that have just ended give their room back a moment later.
    while sum(host.seats for host in nodes) < world and time.monotonic() < end:
        time.sleep(_RELEASED_S / 50)
        nodes = hosts(needs, free=True)
    if max(host.seats for host in nodes) >= world or sum(host.seats for host in nodes) <= world:
        return None
    where = arrange(edges, [Room(number, host.seats) for number, host in enumerate(nodes)])
    return [nodes[number].id for number in where]


def seated(edges: Edges, nodes: Sequence[str], kinds: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return for every rank the number of the worker that becomes it.

    Workers of a node get their ranks in the order of their numbers, which is that of their GPUs.

    Args:
        nodes: the node of every worker.
        kinds: the kind of place that every worker has been given.
        wanted: the kind of place that every rank needs.
    """
    names = list(dict.fromkeys(nodes))
    places = [(names.index(node), kind) for node, kind in zip(nodes, kinds, strict=True)]
    rooms = [Room(node, seats, kind) for (node, kind), seats in Counter(places).items()]
    waiting: dict[tuple[int, str], deque[int]] = defaultdict(deque)
    for worker, place in enumerate(places):
        waiting[place].append(worker)
    where = arrange(edges, rooms, wanted)
    return [waiting[place].popleft() for place in zip(where, wanted, strict=True)]


class Seating(WorkerGroupCallback):
    """Seats the workers of Ray Train, by the traffic between ranks for every number of workers.

    It runs in Ray's controller, whenever workers start.
    """

    def __init__(self, traffic: Mapping[int, Edges]):
        self._traffic = traffic
        self._selectors: list[dict[str, str]] = []

    def before_worker_group_start(self, worker_group_context: WorkerGroupContext) -> None:
        """Choose nodes, if the workers may be anywhere."""
        context = worker_group_context
        selectors = context.label_selector or []
        self._selectors = [dict(selector) for selector in selectors]
        if not selectors or any(selectors) or context.placement_strategy != "PACK":
            return
        edges = self._traffic[context.num_workers]
        for selector, node in zip(selectors, chosen_nodes(edges, context.resources_per_worker) or [], strict=False):
            selector[NODE_ID] = node  # Ray makes the placement group of these

    def before_init_train_context(self, workers: list[Worker]) -> dict[str, list[Any]]:
        """Renumber the workers. Ray gives each the number of its place in this list."""
        wanted = [str(sorted(selector.items())) for selector in self._selectors] or [""] * len(workers)
        kinds = [wanted[worker.placement_group_bundle_index] for worker in workers]
        nodes = [worker.metadata.node_id for worker in workers]
        order = seated(self._traffic[len(workers)], nodes, kinds, wanted)
        workers[:] = [workers[number] for number in order]
        for rank, worker in enumerate(workers):
            worker.distributed_context = dataclasses.replace(worker.distributed_context, world_rank=rank)
        return {}
