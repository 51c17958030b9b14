"""Folds and schedules over the strict communicator (`strict.py`) give the results of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from foldray.fold import Fold
from foldray.model import all_losses
from foldray.orders import LIST, WEAVE
from foldray.recipe import Recipe
from tests.foldray import test_found_parity as found_parity
from tests.foldray.folds import name
from tests.foldray.parity import BATCH, batches, check_equal, engine_on, make_recipe, one_process, train
from tests.foldray.strict import StrictPools

_STEPS = 2
AGAIN = {"recompute": ["attention", "ffn", "expert"]}
FOLDS: list[tuple[int, dict[str, int]]] = [
    (2, {"ep": 2}), (2, {"pp": 2}), (2, {"tp": 2, "etp": 2}), (2, {"cp": 2, "ep": 2}), (4, {"ep": 2}), (4, {"tp": 2, "ep": 4}),
    (4, {"pp": 2, "ep": 2}), (4, {"pp": 4}), (4, {"pp": 2, "cp": 2, "etp": 2}), (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    (2, {}), (4, {"ep": 2, "etp": 2}), (8, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}), (8, {"pp": 4, "ep": 2}),
]  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"kind": "sequential"},
    {"kind": "sequential", **AGAIN},
    {"kind": "stream", "degree": 2},
    {"kind": "stream", "degree": 4, **AGAIN},
    {"kind": "stream", "degree": 2, "batch_degree": 2},
    {"kind": "one_a_one_m", "degree": 4, "virtual_stages": 2},
    {"kind": WEAVE.name},
    {"kind": WEAVE.name, "degree": 2, "virtual_stages": 2, "weight_gradients": "apart"},
    {"kind": LIST.name},
    {"kind": LIST.name, "degree": 2, "virtual_stages": 2},
    {"kind": LIST.name, "degree": 4, **AGAIN},
    {"kind": LIST.name, "degree": 4, "attention_degree": 2},
    {"kind": "stream", "degree": 4, "attention_degree": 2, "weight_gradients": "whole", **AGAIN},
]
REDUCTIONS: list[tuple[int, dict[str, Any]]] = [  # ZeRO, and keys of the schedule
    (0, {"reduction": "end"}),
    (1, {"reduction": "buckets", "sp_bytes": 4096}),
    (2, {"reduction": "chunks", "sp_bytes": 4096}),
    (0, {"reduction": "chunks", "sp_bytes": 2000}),
    (1, {"reduction": "end"}),
    (2, {"reduction": "buckets", "sp_bytes": 3000}),
]


def check(ranks: Any, recipe: Recipe, masked: bool = False) -> None:
    found = StrictPools(ranks)(recipe.cluster.workers).run(train, recipe, _STEPS, False, masked)
    check_equal(found, one_process(recipe, steps=_STEPS, masked=masked))


@pytest.mark.gate(1)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("world", "fold"), FOLDS, ids=str)
def test_every_schedule(ranks: Any, world: int, fold: dict[str, int], schedule: dict[str, Any]) -> None:
    """Folds and schedules take turns with the ways of gradients. A fold without pipeline has no virtual stages."""
    zero, reduction = REDUCTIONS[(FOLDS.index((world, fold)) + SCHEDULES.index(schedule)) % len(REDUCTIONS)]
    schedule = {key: value for key, value in schedule.items() if key != "virtual_stages" or fold.get("pp", 1) > 1}
    micro_batch = max(schedule.get("batch_degree", 1), BATCH // (Fold(world, **fold).dp * 4))
    sections = {"engine": {"zero": zero}, "training": {"micro_batch": micro_batch}}
    check(ranks, make_recipe(world, fold, schedule={**schedule, **reduction}, **sections), masked=bool(zero))


PLACED: list[tuple[int, dict[str, int], dict[str, int]]] = [
    (2, {}, {"attention": 1, "experts": 1}),
    (3, {}, {"attention": 2, "experts": 1}),
    (4, {"tp": 2, "ep": 2}, {"attention": 2, "experts": 2}),
    (4, {"pp": 2}, {"attention": 2, "experts": 2, "expert_pp": 2}),
    (4, {"cp": 2, "etp": 2}, {"attention": 2, "experts": 2}),
    (8, {"tp": 2, "pp": 2, "ep": 2}, {"attention": 4, "experts": 4, "expert_pp": 2}),
    (6, {"ep": 4, "ep_inside": 2}, {"attention": 2, "experts": 4}),
]
PLACED_SCHEDULES: list[dict[str, Any]] = [
    {},
    {"degree": 2, "batch_degree": 2},
    {"reduction": "chunks", "sp_bytes": 4096, **AGAIN},
    {"kind": LIST.name, "degree": 2},
    {"degree": 4, "attention_degree": 2, "weight_gradients": "whole"},
]


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("schedule", PLACED_SCHEDULES, ids=str)
@pytest.mark.parametrize(("world", "fold", "placement"), PLACED, ids=str)
def test_experts_apart(ranks: Any, world: int, fold: dict, placement: dict, schedule: dict[str, Any]) -> None:
    """AF-Pipe, and found lists."""
    dp = placement["attention"] // (fold.get("tp", 1) * fold.get("cp", 1) * fold.get("pp", 1))
    training = {"micro_batch": max(schedule.get("batch_degree", 1), BATCH // (dp * 4))}
    check(ranks, make_recipe(world, fold, placement=placement, schedule=schedule, training=training))


def evaluated(rank: int, recipe: Recipe) -> list[float]:
    with engine_on(recipe, rank) as (engine, groups):
        return all_losses(engine.execution.evaluate(batches(recipe, groups.dp_rank, 0)), groups.control).means().tolist()


@pytest.mark.gate(1)
@pytest.mark.parametrize("fold", [{"tp": 2, "ep": 4}, {"pp": 2, "cp": 2, "ep": 2}, {"pp": 4}], ids=name)
def test_evaluation(ranks: Any, fold: dict[str, int]) -> None:
    recipe = make_recipe(4, fold, schedule={"kind": "stream", "degree": 2})
    wanted = one_process(recipe, steps=_STEPS)["losses"][0]
    for losses in StrictPools(ranks)(4).run(evaluated, recipe):
        assert losses == pytest.approx(wanted, abs=1e-10)


# DeepSpeed has collectives of its own, past the communicators.
_LISTS = {name: case for name, case in {**found_parity.CASES, **found_parity.APART}.items() if "DeepSpeed" not in name}


@pytest.mark.nightly("five steps of random lists each")
@pytest.mark.parametrize("name", _LISTS)
def test_random_lists(ranks: Any, name: str) -> None:
    """Lists that no measured times lead to, but that may run, against one micro-batch after the other."""
    found_parity.compare(StrictPools(ranks), _LISTS[name], LIST.name)
