"""Persistent ranks: their process group, and failures of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe
from trainers.cluster import actors
from trainers.cluster.actors import RankFailure, Ranks


@pytest.fixture
def pair(ray_session) -> Iterator[Ranks]:
    ranks = Ranks(make_recipe(2, 2))
    yield ranks
    ranks.close()


def _world(state: dict[str, Any]) -> tuple[int, str, str, str]:
    return state["rank"], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]


def _fail_once(state: dict[str, Any], rank: int) -> int:
    if state["rank"] == rank:
        raise ValueError("not today")
    return state["rank"]


def test_every_rank_knows_its_place_and_that_it_sees_one_device(pair: Ranks) -> None:
    """Each actor sees only its own GPU, as number 0. DeepSpeed takes LOCAL_RANK as the number of the GPU."""
    assert pair.call(_world, timeout=240) == [(0, "0", "2", "0"), (1, "1", "2", "0")]


@pytest.mark.parametrize(
    "error", [RankFailure("took more than 60 s"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_ranks_that_do_not_start_leave_their_room(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    made, removed, room = [], [], SimpleNamespace(wait=lambda seconds: True)

    def start(ranks: Ranks, recipe: Recipe, needs: dict[str, float]) -> None:
        ranks._actors.append("actor")
        raise error

    monkeypatch.setattr(actors, "placement_group", lambda bundles, **options: made.append(room) or room)
    monkeypatch.setattr(actors, "remove_placement_group", removed.append)
    monkeypatch.setattr(actors.ray, "kill", removed.append)
    monkeypatch.setattr(actors, "chosen_nodes", lambda traffic, needs: None)
    monkeypatch.setattr(Ranks, "_start", start)
    with pytest.raises(type(error)):
        Ranks(make_recipe(2, 2))
    assert (made, removed) == ([room], ["actor", room])


def test_a_rank_that_fails_is_told_in_one_line(pair: Ranks) -> None:
    with pytest.raises(RankFailure, match="failed: ValueError: not today"):
        pair.call(_fail_once, 1, timeout=240)
