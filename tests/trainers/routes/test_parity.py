"""Routes recorded under one fold and replayed under another: the same experts, and the same training as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.model import all_losses
from foldray.runtime import Trace
from tests.foldray.parity import BATCH, check_equal, engine_on, make_recipe, own_batches, weights
from tests.foldray.test_replay_parity import CASES, FOLDS, SCHEDULES
from trainers.data.order import NEWEST
from trainers.folders import Folder
from trainers.routes.files import About
from trainers.routes.recorded import Recorded
from trainers.worker.routes import StepRoutes

RECORD = {"record": 1, "record_tokens": 1}


def train(rank: int, recipe: Any, run: str, steps: int = 2) -> dict[str, Any]:
    """Train as a worker does, with the routes of the recipe."""
    with engine_on(recipe, rank) as (engine, groups):
        about = About.of(recipe, NEWEST, None)
        routes = StepRoutes(recipe, groups, engine.execution, Folder(run), about)
        losses, replaced = [], 0
        for step in range(1, steps + 1):
            engine.execution.trace = Trace() if engine.execution.lacks_costs else None
            routes.begin(step)
            batches = own_batches(recipe, groups, step - 1)
            passes = engine.train([routes.replayed(step, m, batch) for m, batch in enumerate(batches)])
            if engine.execution.lacks_costs:
                engine.execution.learn_costs()
            engine.update(recipe.optimizer.lr)
            total = all_losses(passes, groups.control)
            routes.record(step, passes)
            losses.append(total.means().tolist())
            replaced += int(total.replaced)
            engine.model.update_biases(total.count_ME)
        routes.close()
        return {"weights": weights(engine), "losses": losses, "replaced": replaced}


def whole(recipe: Any, run: Path, **sections: Any) -> dict[str, Any]:
    """Train the same model in one process."""
    alone = make_recipe(1, model=recipe.model.model_dump(mode="json"), training={"micro_batch": BATCH}, **sections)
    return train(0, alone, str(run))


def _check(ranks: Any, tmp_path: Path, workers: int, fold: dict[str, int], **sections: Any) -> None:
    recipe = make_recipe(workers, fold, **sections, routes=RECORD)
    ranks(workers).run(train, recipe, str(tmp_path / "recorded"), timeout=240)
    whole(recipe, tmp_path / "whole", routes=RECORD)
    found, reference = (Recorded(str(tmp_path / name), "routes.replay") for name in ("recorded", "whole"))
    assert found.steps == reference.steps == [1, 2]
    for step in found.steps:
        experts = reference.experts(step, range(BATCH))
        np.testing.assert_array_equal(found.experts(step, range(BATCH)), experts)
        counts = np.stack([np.bincount(block.flatten(), minlength=recipe.model.experts) for block in experts])
        for recorded in (found, reference):
            np.testing.assert_array_equal(recorded.counts(step).sum(axis=0), counts)
    # Another training, whose routers would choose other experts, takes these. The fold is that of above.
    seeded = {**sections, "training": {**sections.get("training", {}), "seed": 1}}
    replays = make_recipe(workers, fold, **seeded, routes={"replay": str(tmp_path / "whole")})
    replayed = ranks(workers).run(train, replays, str(tmp_path / "replayed"), timeout=240)
    given = {"model": recipe.model.model_dump(mode="json"), "routes": {"replay": str(tmp_path / "recorded")}}
    alone = train(0, make_recipe(1, **given, training={"micro_batch": BATCH, "seed": 1}), str(tmp_path / "alone"))
    check_equal(replayed, alone)
    assert alone["replaced"] > 0
    assert {part["replaced"] for part in replayed} == {alone["replaced"]}


@pytest.mark.gate(1 / 6)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("workers", "fold"), FOLDS, ids=str)
def test_every_fold_and_schedule_records_and_replays(
    ranks, tmp_path: Path, workers: int, fold: dict[str, int], schedule: dict
) -> None:
    _check(ranks, tmp_path, workers, fold, schedule=schedule)


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("case", CASES)
def test_where_routes_meet_other_rules(ranks, tmp_path: Path, case: str) -> None:
    workers, fold, sections = CASES[case]
    _check(ranks, tmp_path, workers, fold, **sections)


def test_own_routes_change_no_bit(tmp_path: Path) -> None:
    recorded = train(0, make_recipe(1, routes=RECORD), str(tmp_path / "run"))
    replayed = train(0, make_recipe(1, routes={"replay": str(tmp_path / "run")}), str(tmp_path / "again"))
    check_equal([replayed], recorded, tolerance=0.0)
    assert replayed["replaced"] == 0
