"""Experts and sums without autograd: all gradients have the bits that they have with it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from foldray.moe import MoELayer
from foldray.recipe import Recipe
from foldray.runtime.op_graphs import HandGraph
from tests.foldray.parity import make_recipe
from tests.foldray.runtime.test_graphs import same, steps

STREAM = {"kind": "stream", "degree": 2}
CASES: dict[str, dict[str, Any]] = {
    "together": {"schedule": STREAM},
    "apart": {"schedule": {**STREAM, "weight_gradients": "apart"}},
    "again": {"schedule": {**STREAM, "recompute": ["expert"]}},
    "biases": {"schedule": STREAM, "model": {"expert_bias": True, "ffn": "gelu"}},
    "large products": {"schedule": STREAM, "model": {"expert_hidden": 512, "hidden": 256, "head_dim": 32}},
    "dropped": {"schedule": STREAM, "model": {"router": {"capacity_factor": 0.5}}},
    "padded": {"schedule": STREAM, "model": {"router": {"capacity_factor": 1.0, "pad": True}}},
}


def with_autograd(rank: int, recipe: Recipe) -> Any:
    none = {"return_value": None}
    with mock.patch.object(MoELayer, "experts_by_hand", **none), mock.patch.object(MoELayer, "sums_by_hand", **none):
        return steps(rank, recipe, False)


@pytest.mark.gate(3)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_bits_of_autograd(case: str, precision: str) -> None:
    recipe = make_recipe(1, **{"precision": precision, "moe": {"experts": "grouped"}, **CASES[case]})
    with mock.patch.object(HandGraph, "differentiate", autospec=True, side_effect=HandGraph.differentiate) as spied:
        by_hand = steps(0, recipe, False)
    assert spied.called
    assert same(with_autograd(0, recipe), by_hand)


@pytest.mark.gate(1 / 2)
def test_over_ranks(ranks) -> None:
    recipe = make_recipe(2, {"ep": 2}, schedule=STREAM, precision="float32", moe={"experts": "grouped"})
    assert all(map(same, ranks(2).run(with_autograd, recipe), ranks(2).run(steps, recipe, False)))
