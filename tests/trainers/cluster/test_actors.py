"""Persistent ranks: their process group, and failures of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from foldray.comm import Groups
from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe
from trainers.cluster import actors
from trainers.cluster.actors import RankFailure, Ranks, on_workers


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


def test_ranks_run_where_their_labels_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(bundles: Any, **options: Any) -> Any:
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(actors, "placement_group", refuse)
    monkeypatch.setattr(actors, "chosen_nodes", lambda traffic, needs: ["node"] * 2)
    placement = {"attention": 1, "experts": 1, "attention_nodes": "gpu=h100"}
    for recipe in (make_recipe(2, 2), make_recipe(2, 1, placement=placement)):
        with pytest.raises(KeyboardInterrupt):
            Ranks(recipe)
    anywhere, labelled = (options["bundle_label_selector"] for options in asked)
    assert anywhere == [{"ray.io/node-id": "node"}] * 2
    assert labelled == [{"gpu": "h100"}, {}], "Ray chooses among the nodes with the label"


def _once(recipe: Recipe, groups: Groups, device: Any, fails: str) -> dict[str, Any] | None:
    if fails == "user" and groups.rank == 1:
        raise UserError("data.path", "x", "is gone")
    if fails == "code" and groups.rank == 1:
        raise ValueError("not today")
    return {"ranks": list(groups.control.ranks)} if groups.rank == 0 else None


def test_something_is_run_once(ray_session: None) -> None:
    recipe = make_recipe(2, 2)
    assert on_workers(recipe, _once, fails="") == {"ranks": [0, 1]}
    with pytest.raises(UserError, match=r"^data\.path=x: is gone$"):
        on_workers(recipe, _once, fails="user")
    with pytest.raises(RankFailure, match="failed: ValueError: not today"):
        on_workers(recipe, _once, fails="code")
    assert on_workers(recipe, _once, fails="", by_node=True) == {"ranks": [0, 1]}, "no room is lost"
