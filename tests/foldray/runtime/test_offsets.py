"""Steps whose experts read on the device where their rows end have the gradients of steps whose host reads it, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from tests.foldray.grouped import as_on_gpus
from tests.foldray.parity import engine_of, make_recipe, own_batches

STREAM = {"kind": "stream", "degree": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {"schedule": STREAM}),
    "biases": (1, {}, {"schedule": STREAM, "model": {"expert_bias": True, "ffn": "gelu"}}),
    "apart": (1, {}, {"schedule": {**STREAM, "weight_gradients": "apart"}}),
    "again": (1, {}, {"schedule": {**STREAM, "recompute": ["expert"]}}),
    "dropping": (1, {}, {"model": {"router": {"capacity_factor": 0.5}}}),
    "padded": (1, {}, {"model": {"router": {"capacity_factor": 0.5, "pad": True}}}),
    "experts over ranks": (2, {"ep": 2}, {"schedule": STREAM}),
    "padded over ranks": (2, {"ep": 2}, {"model": {"router": {"capacity_factor": 0.5, "pad": True}}}),
    "slices over ranks": (4, {"ep": 2, "etp": 2}, {}),
    "once to each rank": (2, {"ep": 2}, {"moe": {"experts": "grouped", "dispatch": "rank"}}),
    "once to each node": (4, {"ep": 4, "ep_inside": 2}, {"moe": {"experts": "grouped", "dispatch": "rank"}}),
}


def gradients(rank: int, recipe: Recipe, on_gpus: bool) -> list[torch.Tensor]:
    groups = Groups.create(recipe.placed_fold, rank)
    engine = engine_of(recipe, groups)
    with as_on_gpus() if on_gpus else nullcontext():
        engine.train(own_batches(recipe, groups, 0))
    found = [buffer.sums.clone() for buffer in engine.execution.gradients.buffers]
    engine.close()
    groups.close()
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.gate(3)
def test_gradients_are_those_of_counts_on_the_host(ranks, case: str) -> None:
    workers, fold, sections = CASES[case]
    recipe = make_recipe(workers, fold, **{"moe": {"experts": "grouped"}, **sections})
    host, device = (ranks(workers).run(gradients, recipe, on_gpus, timeout=240) for on_gpus in (False, True))
    for one, other in zip(host, device, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.norm() > 0
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
