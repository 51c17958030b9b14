"""Fewer workers than a recipe asks for, while the cluster has no more."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.train import ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ScalingDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

from foldray.recipe import Recipe

_PATIENCE_S = 300.0  # for the fewest workers


class LegalWorlds(ElasticScalingPolicy):
    """Ray's elastic scaling, rounded to numbers of workers that have a legal fold.

    Ray would resize a group that runs without a checkpoint of its last step. So foldray's driver resizes it: it asks the
    workers to stop in order, and starts them again.

    Args:
        worlds: the legal numbers of workers.
    """

    def __init__(self, scaling_config: ScalingConfig, worlds: Sequence[int]):
        super().__init__(scaling_config)
        self._worlds = tuple(worlds)
        self._waits_since: float | None = None

    def _count_possible_workers(self, reserved_resources: dict) -> int:
        # Ray's coordinator still has the nodes of some seconds ago. A group with a place on a lost node would wait for a minute.
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        room = super()._count_possible_workers({node: has for node, has in reserved_resources.items() if node in alive})
        return max((world for world in self._worlds if world <= room), default=0)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        decision = super().make_decision_for_non_running_worker_group()
        if not isinstance(decision, NoopDecision):
            self._waits_since = None
            return decision
        self._waits_since = self._waits_since or time.monotonic()
        if time.monotonic() - self._waits_since > _PATIENCE_S:
            self._waits_since = None
            raise WorkerGroupStartupTimeoutError(min(self._worlds))
        return decision

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        return NoopDecision()


def larger_world(recipe: Recipe, worlds: Sequence[int], now: int) -> int | None:
    """Return the largest legal number of workers above `now` for which the cluster has room; None if there is none."""
    spec = recipe.cluster
    need = {"CPU": float(spec.cpus_per_worker), **({"GPU": 1.0} if spec.gpu else {})}
    free = ray._private.state.available_resources_per_node()
    more = sum(min(int(node.get(name, 0.0) // amount) for name, amount in need.items()) for node in free.values())
    return max((world for world in worlds if now < world <= now + more), default=None)
