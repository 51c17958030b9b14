"""Muon in folds, stages of ZeRO and schedules gives the weights of `torch.optim.Muon` and AdamW in one process.

The reference is in plain torch (`plain.py`). Its matrices are those of the whole model, one by one. All is in float64.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.recipe import Recipe
from foldray.runtime import muon
from tests.foldray.parity import BATCH, Held, drifted, engine_of, make_recipe, train, weights
from tests.foldray.random_recipes import Case
from tests.foldray.strict import StrictPools
from tests.foldray.test_random_recipes import difference, reference

_STEPS = 2
MUON: dict[str, Any] = {"kind": "muon", "lr": 0.05, "weight_decay": 0.1, "eps": 1e-3, "clip": 1.0}
FOLDS: list[tuple[int, dict[str, int]]] = [
    (2, {}), (2, {"tp": 2}), (2, {"ep": 2}), (2, {"etp": 2}), (2, {"pp": 2}), (2, {"cp": 2}), (4, {"tp": 2, "ep": 2}),
    (4, {"cp": 2, "ep": 2, "etp": 2}), (4, {"pp": 2, "tp": 2, "etp": 2}), (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    (8, {"tp": 4, "etp": 2}),
]  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"reduction": "end"},
    {"reduction": "chunks", "sp_bytes": 3000},
    {"reduction": "buckets", "sp_bytes": 2000, "kind": "stream", "degree": 2},
]
MODELS: list[dict[str, Any]] = [
    {},
    {"shared_gate": True, "expert_bias": True, "norm": "layernorm", "positions": "learned", "moe_every": 2},
    {"latent_rank": 10, "latent_query_rank": 6, "rope_dim": 2, "kv_heads": 8},
]
RULES: list[dict[str, Any]] = [
    {},
    {"adjust_lr": "original", "nesterov": False, "adamw_lr": 0.01, "ns_steps": 3, "momentum": 0.5},
]


@cache
def _reference(sections: str) -> dict[str, Any]:
    return reference(Case(make_recipe(1, **json.loads(sections)), False, False), _STEPS)


def check(ranks: Any, recipe: Recipe) -> None:
    expected = _reference(recipe.model_dump_json(include={"model", "optimizer"}))
    found = StrictPools(ranks)(recipe.cluster.workers).run(train, recipe, _STEPS)
    apart, where = difference(found, expected)
    assert apart <= 1e-9, where
    assert drifted(found) == []


@pytest.mark.gate(1)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("world", "fold"), FOLDS, ids=str)
def test_every_fold_equals_torch(
    ranks: Any, world: int, fold: dict, zero: int, schedule: dict, model: dict, rule: dict[str, Any]
) -> None:
    model = {key: value for key, value in model.items() if key != "expert_bias" or fold.get("etp", 1) == 1}
    micro_batch = BATCH // (max(2, fold.get("pp", 1)) * Fold(world, **fold).dp)
    sections = {"training": {"micro_batch": micro_batch}, "engine": {"kind": "torch", "zero": zero}}
    check(ranks, make_recipe(world, fold, model=model, schedule=schedule, optimizer=MUON | rule, **sections))


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_with_the_same_key_head_equal_torch(ranks: Any, heads: int, zero: int) -> None:
    """Their matrices of keys and values are whole."""
    sections = {"training": {"micro_batch": BATCH // 2}, "engine": {"kind": "torch", "zero": zero}}
    check(ranks, make_recipe(4, {"tp": 4, "ep": 2, "etp": 2}, model={"kv_heads": heads}, optimizer=MUON, **sections))


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("world", "fold", "placement", "zero"),
    [
        (2, {}, {"attention": 1, "experts": 1}, 0),
        (4, {"tp": 2, "etp": 2}, {"attention": 2, "experts": 2}, 1),
        (4, {}, {"attention": 2, "experts": 2}, 2),
    ],
    ids=str,
)
def test_experts_with_ranks_of_their_own_equal_torch(ranks: Any, world: int, fold: dict, placement: dict, zero: int) -> None:
    """A rank of the experts has no parameter that is left to AdamW."""
    training = {"micro_batch": 1}
    check(ranks, make_recipe(world, fold, placement=placement, optimizer=MUON, training=training, engine={"zero": zero}))


@pytest.mark.gate(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1])
def test_the_bits_of_an_update_do_not_depend_on_the_fold(ranks: Any, precision: str, zero: int) -> None:
    """The iteration runs in bfloat16, so a matrix that is not whole, or in another layout, would show."""
    sections: dict[str, Any] = {"precision": precision, "optimizer": MUON | {"clip": None}}
    ((one, hidden),) = ranks(1).run(_updated, make_recipe(1, **sections))
    fold = {"tp": 2, "ep": 2, "etp": 2}
    many = ranks(8).run(_updated, make_recipe(8, fold, engine={"kind": "torch", "zero": zero}, **sections), 1)
    assert set().union(*(found for _, found in many)) == set(hidden)
    for part, _ in many:
        for name in hidden:
            if name in part:
                assert torch.equal(part[name].tensor, one[name].tensor[part[name].box]), name


def _updated(rank: int, recipe: Recipe, elements: int = muon.ROUND) -> tuple[dict[str, Held], list[str]]:
    """Return a rank's weights after two updates by gradients that depend on the name alone, and the names of what Muon updates.

    Args:
        elements: number of elements that come together at once.
    """
    groups = Groups.create(recipe.placed_fold, rank)
    with patch.object(muon, "ROUND", elements):
        engine: Any = engine_of(recipe, groups)
    model, hidden = engine.model, []
    for step in range(2):
        for local, parameter in model.named_parameters():
            whole = torch.zeros_like(parameter)
            for name, index in model.global_parts[local]:
                piece = model.pieces[name]
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
                whole[index] = torch.randn(piece.spec.shape, generator=generator)[piece.box].to(whole)
                hidden += [f"model/{name}"] if piece.spec.is_hidden_matrix else []
            engine.gradients.views[parameter].copy_(engine._own(parameter, whole))
        engine.update(recipe.optimizer.lr)
    found = weights(engine), hidden
    groups.close()
    return found
