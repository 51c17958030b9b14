"""AdamW in one pass over memory, as on a GPU, trains as AdamW tensor by tensor, and goes on from its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import TorchEngine, optimizer
from tests.foldray.parity import engine_of, go_on, make_recipe

ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip": 1.0}


def engine(recipe: Recipe, fused: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    plain = optimizer.make_optimizer
    monkeypatch.setattr("foldray.runtime.engine.make_optimizer", lambda spec, groups, _: plain(spec, groups, fused))
    made: Any = engine_of(recipe, Groups.create(recipe.placed_fold))
    assert isinstance(made, TorchEngine)
    return made


def test_one_pass_equals_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(1, optimizer=ADAMW)
    groups = Groups.create(recipe.placed_fold)
    found = [go_on(engine(recipe, fused, monkeypatch), groups, recipe, range(4))["weights"] for fused in (False, True)]
    for name, (tensor, _) in found[0].items():
        torch.testing.assert_close(found[1][name].tensor, tensor, rtol=1e-10, atol=1e-12)


def test_one_pass_goes_on_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(1, optimizer=ADAMW)
    groups = Groups.create(recipe.placed_fold)
    first = engine(recipe, True, monkeypatch)
    go_on(first, groups, recipe, range(2))
    saved = [shard.tensor.clone() for shard in first.shards()]
    expected = go_on(first, groups, recipe, range(2, 4))["weights"]
    second = engine(recipe, True, monkeypatch)
    for shard, tensor in zip(second.shards(), saved, strict=True):
        shard.tensor.copy_(tensor)
    second.load_shards()
    found = go_on(second, groups, recipe, range(2, 4))["weights"]
    assert all(torch.equal(found[name].tensor, tensor) for name, (tensor, _) in expected.items())
