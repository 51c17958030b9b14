"""Trains, or starts actors, on a Ray cluster of several nodes on this machine, in a process of its own.

    python -m tests.trainers.cluster.several_nodes NODES RECIPE.json train|start

`NODES` are numbers of CPUs, such as 1,2,1. The last line of the output is a JSON document: what happens with ranks in Ray's
order, and with foldray's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from foldray.nodes import Edges
from foldray.recipe import Recipe
from tests.patches import patched
from trainers import FoldTrainer
from trainers.cluster import actors
from trainers.cluster.actors import Ranks
from trainers.driver import ray_configs


def main(nodes: str, path: str, what: str) -> None:
    os.environ |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    recipe = Recipe.parse(json.loads(Path(path).read_text()))
    do: Callable[[Recipe], dict[str, Any]] = {"train": train, "start": start}[what]
    # The head has no CPUs, so that no worker is there.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for count in nodes.split(","):
            cluster.add_node(num_cpus=int(count), object_store_memory=100 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        module = ray_configs if what == "train" else actors
        with patched(module, "traffic_of", lambda each: Edges(each.placed_fold, ())):  # all orders are equally good
            in_rays_order = do(recipe)
        print(json.dumps({"ray": in_rays_order, "foldray": do(recipe)}))
    finally:
        ray.shutdown()
        cluster.shutdown()


def train(recipe: Recipe) -> dict[str, Any]:
    trainer = FoldTrainer(recipe)
    trainer.fit()
    assert trainer.run
    history = trainer.run.folder.history
    records = map(json.loads, (trainer.run.folder.path / "metrics.jsonl").read_text().splitlines())
    return {
        "nodes": [history.places[rank]["node"] for rank in sorted(history.places)],
        "losses": [step["loss"] for step in history.steps.values()],
        "traffic": [record["traffic"] for record in records if record["kind"] == "step"][-1],
        "validation": [each["loss"] for each in history.validations.values()],
    }


def start(recipe: Recipe) -> dict[str, Any]:
    group = Ranks(recipe)
    found = group.call(_node, timeout=600)
    group.close()
    return {"ranks": [rank for rank, _ in found], "nodes": [node for _, node in found]}


def _node(state: dict[str, Any]) -> tuple[int, str]:
    return state["rank"], ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    main(*sys.argv[1:])
