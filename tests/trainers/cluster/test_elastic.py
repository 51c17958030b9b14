"""Ray's elastic scaling takes legal numbers of workers, and waits for them within a time limit."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.train import ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision

from trainers.cluster import elastic
from trainers.cluster.elastic import LegalWorlds, larger_world


class Policy(LegalWorlds):
    """With this many CPUs in place of a cluster."""

    cpus = 0.0

    def _maybe_send_resource_request(self) -> None:
        pass

    def _get_reserved_resources(self) -> dict[str, dict[str, float]]:
        return {"a": {"CPU": self.cpus}, "b": {"CPU": 1.0}}


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in "ab"])
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", dict)
    return Policy(ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 1}), (2, 4, 8))


@pytest.mark.parametrize(("cpus", "workers"), [(1, 2), (2, 2), (3, 4), (6, 4), (7, 8), (99, 8)])
def test_the_largest_legal_number_that_fits_starts(policy: Policy, cpus: float, workers: int) -> None:
    policy.cpus = cpus
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision)
    assert decision.num_workers == workers


def test_a_node_that_is_lost_has_no_room(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.cpus = 3
    for alive, workers in ((True, 4), (False, 2)):
        nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": alive}]
        monkeypatch.setattr(ray, "nodes", lambda nodes=nodes: nodes)
        decision = policy.make_decision_for_non_running_worker_group()
        assert isinstance(decision, ResizeDecision)
        assert decision.num_workers == workers


def test_it_waits_until_ray_knows_a_node_that_has_come(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.cpus, clock = 3, [100.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: {"a": {"CPU": 3.0}, "b": {"CPU": 5.0}})
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    policy.cpus = 7
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision)
    assert decision.num_workers == 8
    policy.cpus = 3  # another job holds the rest
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    clock[0] += 21.0
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision)
    assert decision.num_workers == 4


def test_it_waits_for_the_fewest_workers_for_some_time(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: clock[0] + 1)
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    clock[0] = 299.0
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    clock[0] = 301.0
    with pytest.raises(WorkerGroupStartupTimeoutError, match="waiting for 2 workers"):
        policy.make_decision_for_non_running_worker_group()


def test_ray_does_not_resize_a_group_that_runs(policy: Policy) -> None:
    policy.cpus = 99
    state: Any = None
    assert isinstance(policy.make_decision_for_running_worker_group(state, state), NoopDecision)


@pytest.mark.parametrize(
    ("free", "now", "expected"),
    [
        ({}, 2, None), ({"a": 1}, 2, None), ({"a": 2}, 2, 4), ({"a": 1, "b": 1}, 2, 4), ({"a": 5}, 2, 4), ({"a": 6}, 2, 8),
        ({"a": 9}, 8, None),
    ],
)  # fmt: skip
def test_room_for_more(monkeypatch: pytest.MonkeyPatch, free: dict[str, float], now: int, expected: int | None) -> None:
    found = {node: {"CPU": float(count)} for node, count in free.items()}
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: found)
    assert larger_world({"CPU": 1.0}, (2, 4, 8), now) == expected


def test_room_has_all_that_a_worker_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"a": {"CPU": 8.0, "big": 1.0}, "b": {"CPU": 8.0}}
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: found)
    assert larger_world({"CPU": 1.0, "big": 1.0}, (2, 3, 8), 2) == 3
    assert larger_world({"CPU": 1.0, "huge": 1.0}, (2, 3, 8), 2) is None
