"""How many kernels the ops of a step launch with our own ones, and that steps with them have the gradients of those without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from tests.foldray.kernels.test_fused import INTERPRETED, needs_kernels
from tests.foldray.launches import launches_of_a_step, with_kernels
from tests.foldray.parity import engine_of, make_recipe, own_batches

MOST = {
    "attention F": 32, "route F": 42, "expert F": 4, "merge F": 2,
    "attention B": 31, "route B": 43, "expert B": 7, "merge B": 1,
}  # fmt: skip
"""As counted on a CPU, whose products of routers and norms take more calls than a GPU's."""

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


@needs_kernels
@needs_interpreter
def test_ops_launch_few_kernels() -> None:
    recipe = make_recipe(
        1,
        model={"layers": 1, "shared_hidden": 0},
        schedule={"kind": "stream", "degree": 4},
        precision="bfloat16",
        moe={"experts": "grouped"},
    )
    with with_kernels():
        found = launches_of_a_step(recipe)
    assert {name: most for name in MOST if (most := found.get(name, Counter()).total()) != MOST[name]} == {}


def gradients(recipe: Recipe) -> list[torch.Tensor]:
    groups = Groups.create(recipe.placed_fold)
    engine = engine_of(recipe, groups)
    engine.train(own_batches(recipe, groups, 0))
    return [buffer.sums.clone() for buffer in engine.execution.gradients.buffers]


@needs_kernels
@needs_interpreter
@pytest.mark.parametrize(
    ("router", "schedule"),
    [
        ({"score": "sigmoid", "normalize": True, "capacity_factor": 1.0, "pad": True}, {}),
        ({}, {"kind": "stream", "degree": 2}),
    ],
    ids=["padded", "stream"],
)
def test_a_step_has_the_same_gradients(router: dict[str, Any], schedule: dict[str, Any]) -> None:
    recipe = make_recipe(
        1,
        model={"layers": 1, "router": {"balance_loss": 0.1, "z_loss": 0.01, **router}},
        schedule=schedule,
        precision="float32",
        moe={"experts": "grouped"},
    )
    want = gradients(recipe)
    with with_kernels():
        found = gradients(recipe)
    for one, other in zip(found, want, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() / other.norm() < 1e-5
