"""Folds, schedules and stages of ZeRO with the optimizer on the host: the bits of the same training without, and one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.orders import LIST, WEAVE
from foldray.recipe import Recipe
from tests.foldray.parity import check_equal, engine_on, go_on, make_recipe, one_process, train
from tests.foldray.strict import StrictPools

_STEPS = 2
_SGD: dict[str, Any] = {"kind": "sgd", "lr": 1.0, "momentum": 0.5, "clip": 0.5}
_ADAMW: dict[str, Any] = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip": 0.5}
_APART = {"placement": {"attention": 2, "experts": 2}}
CASES: dict[str, tuple[int, dict[str, int], int, dict[str, Any], dict[str, Any]]] = {
    # Workers, fold, stage of ZeRO, schedule, further sections.
    "EP2, stream": (2, {"ep": 2}, 0, {"kind": "stream", "degree": 2}, {}),
    "TP2 EP2, chunks, ZeRO-1": (4, {"tp": 2, "ep": 2}, 1, {"reduction": "chunks", "sp_bytes": 1024}, {}),
    "PP2 EP2, weave, buckets, ZeRO-2": (
        4, {"pp": 2, "ep": 2}, 2, {"kind": WEAVE.name, "degree": 2, "reduction": "buckets", "sp_bytes": 2000}, {},
    ),
    "CP2 ETP2, ZeRO-2": (4, {"cp": 2, "etp": 2}, 2, {}, {}),
    "workers of their own, ZeRO-1": (4, {"ep": 2}, 1, {}, _APART),
    "PP2, two stages, tied embeddings": (
        2, {"pp": 2}, 0, {"virtual_stages": 2}, {"model": {"tied_embeddings": True}, "training": {"micro_batch": 2}},
    ),
    "data parallel, list, ZeRO-1": (2, {}, 1, {"kind": LIST.name, "degree": 2}, {}),
    "adapters, ZeRO-2": (
        4, {"tp": 2, "ep": 2}, 2, {"reduction": "chunks", "sp_bytes": 512}, {"model": {"adapter": {"rank": 4, "alpha": 8.0}}},
    ),
    "rounded on the wire": (2, {"ep": 2}, 2, {}, {"precision": "float32", "engine": {"wire": "bfloat16"}}),
}  # fmt: skip


def recipe_of(name: str, optimizer: dict[str, Any], offload: str | None) -> Recipe:
    world, fold, zero, schedule, sections = CASES[name]
    engine = {"kind": "torch", "zero": zero, **sections.get("engine", {}), "offload": offload}
    return make_recipe(world, fold, **{**sections, "engine": engine, "schedule": schedule, "optimizer": optimizer})


@pytest.mark.gate(1)
@pytest.mark.parametrize("optimizer", [_SGD, _ADAMW], ids=lambda spec: spec["kind"])
@pytest.mark.parametrize("name", CASES)
def test_the_host_computes_the_bits_of_the_device(ranks: Any, name: str, optimizer: dict[str, Any]) -> None:
    """Here both are CPUs, so the kernels are the same."""
    recipe = recipe_of(name, optimizer, "optimizer")
    found = StrictPools(ranks)(recipe.cluster.workers).run(train, recipe, _STEPS)
    without = ranks(recipe.cluster.workers).run(train, recipe_of(name, optimizer, None), _STEPS)
    for ours, theirs in zip(found, without, strict=True):
        assert (ours["norms"], ours["losses"]) == (theirs["norms"], theirs["losses"])
        assert all(torch.equal(ours["weights"][key].tensor, held.tensor) for key, held in theirs["weights"].items())
    if recipe.precision == "float64":
        check_equal(found, one_process(recipe, steps=_STEPS))


def _interrupted(rank: int, recipe: Recipe, there: Recipe) -> list[dict[str, Any]]:
    """Train four steps: without a break, and with two on each side; what goes between the sides are shards."""
    with engine_on(recipe, rank) as (engine, groups):
        go_on(engine, groups, recipe, range(2))
        saved = {(shard.key, shard.offset): shard.tensor.clone() for shard in engine.shards()}
        straight = go_on(engine, groups, recipe, range(2, 4))
    with engine_on(there, rank) as (engine, groups):
        shards = {(shard.key, shard.offset): shard.tensor for shard in engine.shards()}
        assert shards.keys() == saved.keys()
        for key, tensor in shards.items():
            assert (tensor.shape, tensor.dtype) == (saved[key].shape, saved[key].dtype)
            tensor.copy_(saved[key])
        engine.load_shards()
        return [straight, go_on(engine, groups, there, range(2, 4))]


@pytest.mark.gate(1)
@pytest.mark.parametrize("before", [None, "optimizer"], ids=["to the host", "from the host"])
@pytest.mark.parametrize("name", [name for name in CASES if "wire" not in name])
def test_training_goes_on_on_the_other_side(ranks: Any, name: str, before: str | None) -> None:
    recipes = [recipe_of(name, _ADAMW, side) for side in (before, None if before else "optimizer")]
    for straight, resumed in ranks(recipes[0].cluster.workers).run(_interrupted, *recipes):
        assert resumed["norms"] == straight["norms"]
        assert all(torch.equal(resumed["weights"][key].tensor, held.tensor) for key, held in straight["weights"].items())


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_bfloat16_weights_come_from_wide_ones_on_the_host(ranks: Any, zero: int) -> None:
    found = []
    for offload in ("optimizer", None):
        engine = {"kind": "torch", "zero": zero, "offload": offload}
        recipe = make_recipe(2, 2, precision="bfloat16", optimizer=_ADAMW, engine=engine, moe={"experts": "grouped"})
        found.append(ranks(2).run(train, recipe, 3))
    for ours, theirs in zip(*found, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(ours["weights"][key].tensor, held.tensor) for key, held in theirs["weights"].items())
