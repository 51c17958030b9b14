"""`foldray verify` on recipes whose experts have workers of their own: engines, precisions, and the cases of known faults."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe
from trainers.measure.verify import compared, judged, on_rank, on_rank_all, small

ADAM = {"kind": "adamw", "lr": 1e-3}


class Case(NamedTuple):
    """Workers of each half, and how they train."""

    attention: int
    experts: int
    fold: dict[str, int]
    expert_pp: int | None = None
    model: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    schedule: dict[str, Any] = {}  # noqa: RUF012
    training: dict[str, Any] = {}  # noqa: RUF012

    def recipe(self, engine: dict[str, Any], precision: str = "float32") -> Recipe:
        placement = {"attention": self.attention, "experts": self.experts, "expert_pp": self.expert_pp}
        return make_recipe(
            self.attention + self.experts, self.fold, placement=placement, engine=engine, precision=precision, optimizer=ADAM,
            model=self.model, schedule=self.schedule, training=self.training,
        )  # fmt: skip


PLACEMENTS = {
    "1:1": Case(1, 1, {}),
    "2:1": Case(2, 1, {"tp": 2}),
    "1:2": Case(1, 2, {"ep": 2}, schedule={"degree": 2}),
    "3:1": Case(3, 1, {"pp": 3}, 1, {"layers": 3}, training={"micro_batch": 2}),
    "2:2": Case(2, 2, {"cp": 2, "etp": 2}, schedule={"degree": 2}),
    "2:2, two stages each": Case(2, 2, {"pp": 2}, 2, {"layers": 4}, {"virtual_stages": 2}, {"micro_batch": 2}),
    "1:3": Case(1, 3, {"ep": 3}, model={"experts": 6}, training={"micro_batch": 8}),
    "4:4": Case(4, 4, {"tp": 2, "pp": 2, "ep": 2}, 2),
    "3:5": Case(3, 5, {"pp": 3, "ep": 5}, 1, {"layers": 3, "experts": 5}, training={"micro_batch": 2}),
    "one expert without a token": Case(1, 2, {"ep": 2}, model={"topk": 1, "experts": 32}, training={"micro_batch": 1}),
    "dropping": Case(2, 1, {}, model={"router": {"capacity_factor": 0.75, "balance_loss": 0.1}}),
    "parts of micro-batches": Case(1, 1, {}, schedule={"batch_degree": 2}),
    "six micro-batches": Case(2, 2, {"pp": 2, "ep": 2}, 1, training={"global_batch": 12, "micro_batch": 2}),
}
ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"kind": "torch"}, "deepspeed": {"kind": "deepspeed", "zero": 0}, "deepspeed-1": {"kind": "deepspeed", "zero": 1},
    "deepspeed-2": {"kind": "deepspeed", "zero": 2},
}  # fmt: skip


def compare(rank: int, recipe: Recipe) -> dict[str, Any] | None:
    groups = Groups.create(recipe.placed_fold, rank)
    try:
        return on_rank(recipe, groups, torch.device("cpu"))
    finally:
        groups.close()


def compare_cases(rank: int, recipe: Recipe) -> dict[str, Any]:
    groups = Groups.create(recipe.placed_fold, rank)
    try:
        return on_rank_all(recipe, groups, torch.device("cpu"))
    finally:
        groups.close()


def found(ranks: Any, recipe: Recipe) -> Any:
    return compared(recipe, ranks(recipe.cluster.workers).run(compare, recipe)[0])


@pytest.mark.gate(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_agrees_with_one_process(ranks, name: str, engine: str) -> None:
    result = found(ranks, PLACEMENTS[name].recipe(ENGINES[engine]))
    assert result.passed, result
    assert result.loss_abs_diff <= (1e-10 if engine == "torch" else 1e-6)
    assert result.norm_rel_diff <= (1e-10 if engine == "torch" else 1e-6)


@pytest.mark.gate(1)
@pytest.mark.parametrize("engine", ["torch", "deepspeed-1", "deepspeed-2"])
@pytest.mark.parametrize("reduction", ["buckets", "chunks"])
def test_gradients_that_leave_early_in_bfloat16(ranks, engine: str, reduction: str) -> None:
    zero = {"zero": 1} if engine == "torch" else {}
    case = Case(2, 2, {}, schedule={"reduction": reduction, "sp_bytes": 4096, "degree": 2})
    result = found(ranks, case.recipe({**ENGINES[engine], **zero}, "bfloat16"))
    assert result.passed, result


@pytest.mark.nightly("all known faults on four ranks")
@pytest.mark.parametrize("engine", ["torch", "deepspeed-2"])
def test_known_faults_would_show(ranks, engine: str) -> None:
    case = Case(2, 2, {"pp": 2, "ep": 2}, 1, {"router": {"softmax": "before_topk", "normalize": True}}, {"degree": 2})
    recipe = small(case.recipe(ENGINES[engine]))
    checked = judged(recipe, ranks(4).run(compare_cases, recipe)[0])
    failed = [each["case"] for each in checked if not each.get("passed")]
    assert failed == [each["case"] for each in checked if "refused" in each] == ["activations on the host", "copied experts"]


def test_a_shrunk_recipe_keeps_its_placement() -> None:
    for case in PLACEMENTS.values():
        recipe = case.recipe(ENGINES["torch"])
        assert small(recipe).placed_fold == recipe.placed_fold
