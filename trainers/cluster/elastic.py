"""Fewer workers than a recipe asks for, while the cluster has no more."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import ray
from ray.train import ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision, ScalingDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState

from trainers.cluster.joining import seats

_PATIENCE_S = 300.0  # for the fewest workers
_STALE_S = 20.0  # until Ray's coordinator knows a node that has come


class LegalWorlds(ElasticScalingPolicy):
    """Ray's elastic scaling, rounded to numbers of workers that have a legal fold.

    Ray would resize a group that runs without a checkpoint of its last step. So foldray's driver resizes it: it asks the
    workers to stop in order, and starts them again. `worlds` are the legal numbers of workers.
    """

    def __init__(self, scaling_config: ScalingConfig, worlds: Sequence[int]):
        super().__init__(scaling_config)
        self._worlds = tuple(worlds)
        self._waits_since: float | None = None
        self._fewer_since: float | None = None

    def _count_possible_workers(self, reserved_resources: dict) -> int:
        # Ray's coordinator still has the nodes of some seconds ago. A group with a place on a lost node would wait for a minute.
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return self._legal(
            super()._count_possible_workers({node: has for node, has in reserved_resources.items() if node in alive})
        )

    def _legal(self, room: int) -> int:
        """Return the largest legal number of workers up to this one."""
        return max((world for world in self._worlds if world <= room), default=0)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, ResizeDecision):
            self._waits_since = None
            return self._unless_stale(decision)
        self._waits_since = self._waits_since or time.monotonic()
        if time.monotonic() - self._waits_since > _PATIENCE_S:
            self._waits_since = None
            raise WorkerGroupStartupTimeoutError(min(self._worlds))
        return decision

    def _unless_stale(self, decision: ResizeDecision) -> ScalingDecision:
        """Wait for some time if the nodes have room for more workers than Ray's coordinator knows."""
        if decision.num_workers < self._legal(_room(self.scaling_config._resources_per_worker_not_none)):
            self._fewer_since = self._fewer_since or time.monotonic()
            if time.monotonic() - self._fewer_since < _STALE_S:
                return NoopDecision()
        self._fewer_since = None
        return decision

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        return NoopDecision()


def larger_world(need: Mapping[str, float], worlds: Sequence[int], now: int) -> int | None:
    """Return the largest legal number of workers, each with these needs, above `now` that the cluster has room for, if any."""
    room = now + _room(need)
    return max((world for world in worlds if now < world <= room), default=None)


def _room(need: Mapping[str, float]) -> int:
    """Return the number of workers with these needs that nodes have room for now."""
    return sum(seats(free, need) for free in ray._private.state.available_resources_per_node().values())
