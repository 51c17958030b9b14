"""Whole trainings on Ray whose experts have workers of their own: results, checkpoints, lost workers, and mistakes."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.driver.runs import STEPS, fit, losses, recipe, signal_after
from trainers import DisagTrainer, FoldTrainer

pytestmark = pytest.mark.usefixtures("ray_session")


def apart(storage: Path, **sections: Any) -> Recipe:
    values = recipe(storage, **sections, fold={"ep": 1}).model_dump()
    values["schedule"]["kind"] = "af_pipe"
    return Recipe.parse({**values, "placement": {"attention": 1, "experts": 1}})


@pytest.fixture(scope="module")
def own(engine: dict[str, Any], storage: Path) -> FoldTrainer:
    """The run `whole` with workers of their own for the experts."""
    return fit(apart(storage, **engine))


@pytest.mark.gate(2 / 5)
def test_a_run_is_that_of_shared_workers_and_its_record_says_which_half_a_worker_has(
    whole: FoldTrainer, own: FoldTrainer
) -> None:
    assert own.run is not None
    assert whole.run is not None
    assert len(losses(own)) == STEPS
    assert losses(own) == pytest.approx(losses(whole), rel=1e-4)
    assert own.run.summary is not None
    assert own.run.summary.val_bpb == pytest.approx(whole.run.summary.val_bpb, rel=1e-4)  # type: ignore[union-attr]
    places = own.run.folder.history.places
    assert [bool(places[rank]["attention"]) for rank in range(2)] == [True, False]
    assert [bool(places[rank]["moe"]) for rank in range(2)] == [False, True]
    lines = (own.run.folder.path / "metrics.jsonl").read_text().splitlines()
    step = [record for record in map(json.loads, lines) if record["kind"] == "step"][-1]
    assert {"rows_up", "rows_down", "row_counts"} <= set(step["traffic"])
    assert not {"tokens", "counts"} & set(step["traffic"])


@pytest.mark.nightly("two trainings that lose a worker")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_worker_of_either_half_costs_nothing_before_the_last_checkpoint(
    engine: dict[str, Any],
    own: FoldTrainer,
    storage: Path,
    rank: int,
) -> None:
    trainer = FoldTrainer(apart(storage, **engine))
    killer = threading.Thread(target=signal_after, args=(trainer, rank, 30, signal.SIGKILL), daemon=True)
    killer.start()
    trainer.fit()
    killer.join()
    assert trainer.run is not None
    assert len(trainer.run.folder.history.resumes) == 1, "the worker must have been killed in mid-run"
    assert losses(trainer) == losses(own)


@pytest.mark.nightly("three trainings more")
def test_a_run_goes_from_shared_workers_to_workers_of_their_own_and_back(
    engine: dict[str, Any],
    whole: FoldTrainer,
    storage: Path,
) -> None:
    first = fit(recipe(storage, **engine, training={"stop_after": 20}))
    assert first.run is not None
    name = first.run.folder.path.name
    second = fit(apart(storage, **engine, training={"stop_after": 40}), resume=name)
    assert second.run is not None
    assert second.run.folder.history.resumes[-1] == 20
    third = fit(recipe(storage, **engine), resume=name)
    assert third.run is not None
    assert third.run.folder.history.resumes[-1] == 40
    assert losses(third) == pytest.approx(losses(whole), rel=1e-4)


def test_a_trainer_from_python_places_any_recipe(storage: Path) -> None:
    trainer = DisagTrainer(recipe(storage, training={"steps": 2}, fold={"ep": 1}), attention=1, experts=1)
    assert trainer.recipe == apart(storage, training={"steps": 2})


def test_what_a_trainer_cannot_place_is_one_line(storage: Path) -> None:
    with pytest.raises(UserError, match=r"placement\.experts=nothing: is required"):
        DisagTrainer(recipe(storage), attention=2)
    with pytest.raises(UserError, match=r"fold=1·2·1: etp·ep·expert_pp must divide the experts' 1 ranks"):
        DisagTrainer(recipe(storage), attention=1, experts=1)


def test_nodes_without_the_label_are_named(storage: Path) -> None:
    placed = apart(storage)
    values = placed.model_dump()
    values["placement"]["expert_nodes"] = "role=experts"
    with pytest.raises(UserError, match=r"placement\.expert_nodes=role=experts: needs room for 1 on nodes with this label"):
        FoldTrainer(Recipe.parse(values)).fit()
