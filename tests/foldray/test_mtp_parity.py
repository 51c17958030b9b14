"""Multi-token prediction under folds and schedules gives what a plain model gives that shares no code with foldray's.

The weights after SGD with lr 1 have every gradient, in float64.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.foldray.parity import Held, check_equal, make_recipe, train
from tests.foldray.random_recipes import Case
from tests.foldray.test_random_recipes import reference

_STEPS = 2
_MODELS: dict[str, dict[str, Any]] = {
    "one": {"mtp_depth": 1},
    "two": {"mtp_depth": 2, "mtp_weight": 1.0, "layers": 3, "windows": ["full", "sliding:5"]},
    "one-tied": {"mtp_depth": 1, "tied_embeddings": True, "shared_hidden": 0},
    "two-tied": {"mtp_depth": 2, "tied_embeddings": True, "norm": "layernorm", "ffn": "gelu", "positions": "learned"},
    "one-dense": {"mtp_depth": 1, "moe_every": 2, "layers": 3, "router": {"score": "sigmoid", "bias_rate": 0.1}},
    "two-latent": {"mtp_depth": 2, "latent_rank": 10, "latent_query_rank": 6, "kv_heads": 8, "rope_dim": 2},
}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {},
    "apart": {"weight_gradients": "apart", "recompute": ["attention", "expert", "ffn", "shared"]},
    "moe_only": {"kind": "moe_only", "degree": 2, "reduction": "chunks", "sp_bytes": 512},
    "one_a_one_m": {"kind": "one_a_one_m", "degree": 2, "recompute": ["attention"]},
    "stream": {"kind": "stream", "degree": 2, "lag": 2, "reduction": "buckets", "sp_bytes": 3000},
    "stream-apart": {
        "kind": "stream", "degree": 4, "lag": 1, "weight_gradients": "apart", "reduction": "chunks", "sp_bytes": 512,
    },
    "flow": {"kind": "flow", "degree": 2, "batch_degree": 2, "weight_gradients": "apart"},
    "weave": {"kind": "weave", "degree": 2, "weight_gradients": "apart"},
    "list": {"kind": "list", "degree": 2, "reduction": "chunks", "sp_bytes": 3000},
    "list-whole": {"kind": "list", "degree": 4, "attention_degree": 2, "weight_gradients": "whole", "recompute": ["expert"]},
}  # fmt: skip
_FOLDS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"ep": 2}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (2, {"etp": 2}),
    (4, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
    (4, {"pp": 2, "tp": 2, "ep": 2}),
    (4, {"pp": 2, "cp": 2, "etp": 2}),
]


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize(("world", "fold"), _FOLDS, ids=str)
def test_further_tokens_equal_plain_torch(ranks, world: int, fold: dict, model: str, schedule: str) -> None:
    _check(ranks, make_recipe(world, fold, model=_MODELS[model], schedule=_SCHEDULES[schedule]))


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("model", ["one", "two-tied"])
@pytest.mark.parametrize(("world", "fold"), [(4, {"tp": 2, "ep": 2}), (4, {"cp": 2, "etp": 2}), (4, {"ep": 2})])
def test_sharded_optimizers_equal_plain_torch(ranks, world: int, fold: dict, model: str, zero: int) -> None:
    schedule = _SCHEDULES["stream" if zero == 1 else "stream-apart"]
    _check(ranks, make_recipe(world, fold, model=_MODELS[model], schedule=schedule, engine={"kind": "torch", "zero": zero}))


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(
    ("world", "fold", "model", "schedule"),
    [
        (2, {"pp": 2}, "one", {"virtual_stages": 2}),
        (2, {"pp": 2}, "two-tied", {"stage_layers": [3, 1]}),
        (4, {"pp": 2, "cp": 2, "ep": 2}, "one-tied", {"virtual_stages": 2, "kind": "stream", "degree": 2}),
    ],
)
def test_further_tokens_behind_stages_of_any_length(ranks, world: int, fold: dict, model: str, schedule: dict) -> None:
    _check(ranks, make_recipe(world, fold, model={**_MODELS[model], "layers": 4}, schedule=schedule))


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("documents", "masked"), [(True, False), (False, True)], ids=["documents", "masked"])
@pytest.mark.parametrize(("world", "fold"), [(1, {}), (4, {"tp": 2, "cp": 2, "ep": 2}), (2, {"pp": 2})])
def test_further_tokens_count_as_next_tokens_do(ranks, world: int, fold: dict, documents: bool, masked: bool) -> None:
    _check(ranks, make_recipe(world, fold, model=_MODELS["two"], schedule=_SCHEDULES["stream"]), documents, masked)


def test_the_torch_engine_cannot_shard_an_embedding_of_two_stages() -> None:
    with pytest.raises(UserError, match="two pipeline stages share"):
        make_recipe(4, {"pp": 2}, model=_MODELS["one"], engine={"kind": "torch", "zero": 1})


def test_experts_with_workers_of_their_own_have_no_further_tokens() -> None:
    with pytest.raises(UserError, match=r"model\.mtp_depth"):
        make_recipe(2, 1, model=_MODELS["one"], placement={"attention": 1, "experts": 1}, schedule={"kind": "af_pipe"})


def _check(ranks, recipe: Recipe, documents: bool = False, masked: bool = False) -> None:
    found = ranks(recipe.cluster.workers).run(train, recipe, _STEPS, documents, masked)
    for part in found:
        part["weights"] = {key: held for key, held in part["weights"].items() if not key.endswith(".router.bias")}
        assert len(part["losses"][0]) == 4
    check_equal(found, _reference(recipe.model_dump_json(include={"model"}), documents, masked))


@cache
def _reference(sections: str, documents: bool, masked: bool) -> dict[str, Any]:
    plain = reference(Case(make_recipe(1, **json.loads(sections)), documents, masked), _STEPS)
    return {**plain, "weights": {f"model/{key}": Held(weight.detach(), ()) for key, weight in plain["weights"].items()}}
