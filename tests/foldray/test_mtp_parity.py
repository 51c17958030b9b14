"""Multi-token prediction under folds and schedules gives what a plain model gives that shares no code with foldray's.

The weights after SGD with lr 1 have every gradient, in float64.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from foldray.errors import UserError
from foldray.model import all_losses
from foldray.recipe import Recipe
from tests.foldray.parity import Held, check_equal, engine_on, make_recipe, one_process, own_batches, train
from tests.foldray.random_recipes import Case
from tests.foldray.strict import StrictPools
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


_PLACED: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"attention": 1, "experts": 1}, {}),
    ({"attention": 2, "experts": 1}, {}),
    ({"attention": 2, "experts": 2}, {"tp": 2, "ep": 2}),
    ({"attention": 2, "experts": 2}, {"cp": 2, "etp": 2}),
    ({"attention": 2, "experts": 2, "expert_pp": 1}, {"pp": 2, "ep": 2}),
    ({"attention": 2, "experts": 2, "expert_pp": 2}, {"pp": 2}),
    ({"attention": 1, "experts": 2, "expert_pp": 2}, {}),
]
_PLACED_SCHEDULES: dict[str, dict[str, Any]] = {
    "af_pipe": {},
    "together": {"weight_gradients": "together", "recompute": ["attention", "expert", "ffn", "shared"]},
    "pieces": {"degree": 2, "reduction": "chunks", "sp_bytes": 512},
    "whole": {"degree": 4, "attention_degree": 2, "weight_gradients": "whole", "reduction": "buckets", "sp_bytes": 3000},
    "list": {"kind": "list", "reduction": "chunks", "sp_bytes": 3000},
    "list-pieces": {"kind": "list", "degree": 2, "recompute": ["expert"]},
}


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("schedule", _PLACED_SCHEDULES)
@pytest.mark.parametrize(("placement", "fold"), _PLACED, ids=str)
def test_experts_with_workers_of_their_own(ranks, placement: dict, fold: dict, schedule: str) -> None:
    """Attention of further tokens is on attention's ranks, and their experts are on those of the experts. Models take turns.

    The communicator is strict, because heads of several micro-batches come by turns.
    """
    model = list(_MODELS)[(_PLACED.index((placement, fold)) + list(_PLACED_SCHEDULES).index(schedule)) % len(_MODELS)]
    sections = {"placement": placement, "schedule": _PLACED_SCHEDULES[schedule]}
    two = {"layers": 5} if model == "one-dense" else {}  # MoE blocks, for two positions of experts
    _check(StrictPools(ranks), make_recipe(_workers(placement), fold, model={**_MODELS[model], **two}, **sections))


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("reduction", ["end", "chunks"])
@pytest.mark.parametrize(("model", "zero"), [("one", 1), ("two-tied", 1), ("two", 2), ("one-tied", 2)])
def test_sharded_optimizers_of_both_halves(ranks, model: str, zero: int, reduction: str) -> None:
    placement, engine = {"attention": 2, "experts": 2}, {"kind": "torch", "zero": zero}
    sections = {"placement": placement, "schedule": {"reduction": reduction}, "engine": engine}
    _check(ranks, make_recipe(4, {}, model=_MODELS[model], **sections))


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize(("documents", "masked"), [(True, False), (False, True)], ids=["documents", "masked"])
@pytest.mark.parametrize("kind", ["af_pipe", "list"])
@pytest.mark.parametrize(("placement", "fold"), [_PLACED[0], _PLACED[5]], ids=str)
def test_both_halves_count_further_tokens(ranks, placement: dict, fold: dict, kind: str, documents: bool, masked: bool) -> None:
    sections = {"placement": placement, "schedule": {"kind": kind, "degree": 2, "virtual_stages": fold.get("pp", 1)}}
    recipe = make_recipe(_workers(placement), fold, model={**_MODELS["two"], "layers": 4}, **sections)
    _check(ranks, recipe, documents, masked)


def evaluated(rank: int, recipe: Recipe) -> float:
    with engine_on(recipe, rank) as (engine, groups):
        batches = own_batches(recipe, groups, 0)
        return float(all_losses(engine.execution.evaluate(batches), groups.control).means()[0])


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("placement", "fold"), [_PLACED[4], _PLACED[5]], ids=str)
def test_evaluation_needs_no_experts_of_further_tokens(ranks, placement: dict, fold: dict) -> None:
    """With two positions of experts, those of both further tokens are alone on the last one, which then does nothing."""
    recipe = make_recipe(4, fold, model={**_MODELS["two"], "layers": 2}, placement=placement)
    wanted = one_process(recipe, steps=1)["losses"][0][0]
    assert ranks(4).run(evaluated, recipe) == pytest.approx([wanted] * 4, abs=1e-10)


def _workers(placement: dict[str, int]) -> int:
    return placement["attention"] + placement["experts"]


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
