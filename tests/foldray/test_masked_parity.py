"""Targets that do not count: the loss is a mean over the counted targets of the whole step, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from foldray.model import IGNORED
from foldray.recipe import Recipe
from tests.foldray.parity import batches, check_equal, make_recipe, one_process, train

FOLDS: list[tuple[int, dict[str, int]]] = [
    (2, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"cp": 2}), (2, {"pp": 2}), (4, {"ep": 2}), (4, {"tp": 2, "etp": 2}),
    (4, {"cp": 2, "ep": 4}), (4, {"pp": 2, "ep": 2}), (8, {"tp": 2, "cp": 2, "ep": 4}),
    (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}), (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
]  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"kind": "sequential"},
    {"kind": "one_a_one_m", "degree": 4, "reduction": "buckets", "sp_bytes": 4096},
    {"kind": "stream", "degree": 2, "backward": "aaam"},
    {"kind": "flow", "batch_degree": 1, "sp_bytes": 4096, "degree": 2},
]


def _equal_one_process(ranks: Any, recipe: Recipe, tolerance: float, relative: bool = False) -> None:
    found = ranks(recipe.cluster.workers).run(train, recipe, 2, False, True, timeout=240)
    check_equal(found, one_process(recipe, steps=2, masked=True), tolerance, relative)


@pytest.mark.gate(1)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("workers", "fold"), FOLDS, ids=str)
def test_every_fold_and_schedule_equals_one_process(ranks, workers: int, fold: dict[str, int], schedule: dict) -> None:
    _equal_one_process(ranks, make_recipe(workers, fold, schedule=schedule), 1e-10)


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_deepspeed_equals_one_process(ranks, zero: int) -> None:
    optimizer = {"kind": "sgd", "lr": 1.0, "clip": 0.1}
    recipe = make_recipe(
        4, {"tp": 2, "ep": 2}, engine={"kind": "deepspeed", "zero": zero}, precision="float32", optimizer=optimizer
    )
    _equal_one_process(ranks, recipe, 1e-6, relative=True)


def test_what_counts_differs_from_rank_to_rank() -> None:
    recipe = make_recipe(8, {})
    counted = [sum(int((batch.target_BL != IGNORED).sum()) for batch in batches(recipe, r, 0, masked=True)) for r in range(8)]
    assert len(set(counted)) == 8
    assert min(counted) == 0, "one rank has nothing that counts"
