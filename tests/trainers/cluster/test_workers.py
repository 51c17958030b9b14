"""What workers had is given back, also if processes of Ray are lost."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from trainers.cluster.workers import release


@ray.remote(num_cpus=0)
class Reserves:
    def reserve(self) -> PlacementGroup:
        group = placement_group([{"CPU": 0.01}])
        ray.get(group.ready())
        return group


def test_what_a_lost_actor_has_reserved_is_given_back(ray_session: None) -> None:
    """Ray keeps it as long as the job runs, so the next workers would find no room."""
    lost, other = Reserves.remote(), Reserves.remote()
    groups = ray.get([each.reserve.remote() for each in (lost, lost, other)])
    ray.kill(lost)
    assert [_state(group) for group in groups] == ["CREATED"] * 3
    release(lost)
    assert [_state(group) for group in groups] == ["REMOVED", "REMOVED", "CREATED"]
    ray.kill(other)
    release(other)


def _state(group: PlacementGroup) -> str:
    return placement_group_table(group)["state"]
