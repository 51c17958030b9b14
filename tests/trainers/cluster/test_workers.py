"""What runs on workers leaves nothing behind, also if processes of Ray are lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import RunConfig
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from foldray.recipe import Recipe
from trainers.cluster import workers
from trainers.cluster.workers import release


def test_no_folder_of_a_task_stays_in_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []

    class Trainer:
        def __init__(self, loop: Any, run_config: RunConfig, **_: Any) -> None:
            self.folder = tmp_path / str(run_config.name)

        def fit(self) -> Any:
            self.folder.mkdir()
            made.append(self.folder)
            return SimpleNamespace(return_value={})

    monkeypatch.setattr(workers, "TorchTrainer", Trainer)
    monkeypatch.setattr(workers, "storage_folder", lambda recipe: tmp_path.as_uri())
    for name in ("connect", "check_room"):
        monkeypatch.setattr(workers, name, lambda *_, **__: None)
    workers.on_workers(Recipe.parse({"model": {"preset": "tiny"}}), lambda config: None, "verify")
    assert made
    assert not list(tmp_path.iterdir())


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
