"""Where a rank is: its node, and its place in both grids of the fold."""

from __future__ import annotations

import os

import ray
import torch

from foldray.comm import Groups
from trainers.telemetry.records import Place


def nodes() -> list[int]:
    """Return the node of every rank. Nodes have numbers in the order of their first ranks."""
    node = ray.get_runtime_context().get_node_id()
    nodes = [node]
    if torch.distributed.is_initialized():
        nodes = [node] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(nodes, node)
    return [list(dict.fromkeys(nodes)).index(name) for name in nodes]


def check_node(label: str | None) -> None:
    """Check that this rank runs on a node with the label of its half.

    Ray places workers by their labels, but numbers them node by node. If some nodes may have both halves, and others only
    one, a rank may be on a node that is not meant for its half.
    """
    key, _, value = (label or "").partition("=")
    if label and (actual := ray.get_runtime_context().get_node_labels().get(key)) != value:
        raise RuntimeError(f"a rank that needs a node with {label} runs on one with {key}={actual}; give every node one role")


def place_of(groups: Groups) -> Place:
    context, coordinate = ray.get_runtime_context(), groups.coordinate
    return {
        "kind": "place", "rank": groups.rank, "actor": context.get_actor_id(), "node": context.get_node_id(),
        "node_ip": ray.util.get_node_ip_address(), "pid": os.getpid(),
        "attention": coordinate.get("attention"), "moe": coordinate.get("moe"),
    }  # fmt: skip
