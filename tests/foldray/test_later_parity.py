"""Gradients of weights that are ops of their own have the same bits as those that backward computes at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from foldray.recipe import Recipe
from tests.foldray.parity import engine_on, go_on, make_recipe

STEPS = 2


class Case(NamedTuple):
    """A recipe, as `make_recipe` takes it."""

    workers: int
    fold: dict[str, int]
    sections: Mapping[str, Any] = MappingProxyType({})


def schedule(**keys: Any) -> dict[str, Any]:
    return {"schedule": keys}


def passes(count: int, **keys: Any) -> dict[str, Any]:
    """Return sections for `count` micro-batches of each of two data-parallel places."""
    return {"training": {"global_batch": 8, "micro_batch": 4 // count}, "schedule": keys}


CASES = {
    "one rank": Case(1, {}),
    "one rank, eight micro-batches": Case(1, {}, {"training": {"micro_batch": 1}}),
    "EP2": Case(2, {"ep": 2}),
    "EP2, four micro-batches, stream": Case(2, {"ep": 2}, passes(4, kind="stream", degree=2)),
    "EP2, parts, flow": Case(2, {"ep": 2}, passes(1, kind="flow", degree=2)),
    "EP4, one_a_one_m": Case(4, {"ep": 4}, schedule(kind="one_a_one_m", degree=4)),
    "EP2 ETP2": Case(4, {"ep": 2, "etp": 2}, schedule(kind="moe_only", degree=2)),
    "EP2 EDP2, chunks": Case(4, {"ep": 2}, schedule(reduction="chunks", sp_bytes=4096)),
    "TP2 EP2": Case(2, {"tp": 2, "ep": 2}),
    "TP4 ETP2": Case(4, {"tp": 4, "etp": 2}, schedule(kind="aaam", degree=2)),
    "CP2 EP2, whole sequences": Case(2, {"cp": 2, "ep": 2}),
    "CP2 EP2, slices, chunks": Case(
        4, {"cp": 2, "ep": 2}, schedule(kind="one_a_one_m", degree=4, reduction="chunks", sp_bytes=4096)
    ),
    "CP2, slices that run again": Case(
        2, {"cp": 2, "ep": 2}, schedule(kind="stream", degree=2, recompute=["attention", "ffn", "expert"])
    ),
    "TP2 CP2 EP4": Case(4, {"tp": 2, "cp": 2, "ep": 4}, schedule(kind="stream", degree=4)),
    "PP2": Case(2, {"pp": 2}, {"training": {"micro_batch": 1}}),
    "PP2 EP2, stream": Case(4, {"pp": 2, "ep": 2}, schedule(kind="stream", degree=2)),
    "PP2, virtual stages, chunks": Case(
        4, {"pp": 2}, schedule(virtual_stages=2, reduction="chunks", sp_bytes=4096, kind="one_a_one_m", degree=2)
    ),
    "PP4": Case(4, {"pp": 4}, {"training": {"micro_batch": 1}}),
    "TP2 CP2 PP2 EP4": Case(8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    "every other block, tied, no shared expert": Case(
        2, {"ep": 2}, {"model": {"layers": 4, "moe_every": 2, "tied_embeddings": True, "shared_hidden": 0}}
    ),
    "tied over PP2": Case(2, {"pp": 2}, {"model": {"tied_embeddings": True, "norm": "layernorm", "positions": "learned"}}),
    "ZeRO-1": Case(2, {"ep": 2}, {"engine": {"zero": 1}}),
    "ZeRO-2, chunks": Case(4, {"ep": 2}, {"engine": {"zero": 2}, **schedule(reduction="chunks", sp_bytes=4096)}),
    "run again": Case(2, {"ep": 2}, schedule(recompute=["attention", "ffn", "expert"])),
    "float32": Case(2, {"ep": 2}, {"precision": "float32"}),
    "bfloat16, buckets": Case(2, {"ep": 2}, {"precision": "bfloat16", **schedule(reduction="buckets")}),
    "experts apart": Case(4, {"tp": 2, "ep": 2}, {"placement": {"attention": 2, "experts": 2}}),
    "experts apart, two positions": Case(4, {"pp": 2}, {"placement": {"attention": 2, "experts": 2, "expert_pp": 2}}),
    "experts apart, two parts": Case(2, {}, {"placement": {"attention": 1, "experts": 1}, **schedule(batch_degree=2)}),
    "DeepSpeed, ZeRO-1": Case(2, {"ep": 2}, {"engine": {"kind": "deepspeed", "zero": 1}, "precision": "float32"}),
    "DeepSpeed, ZeRO-2, chunks": Case(
        4, {"ep": 2},
        {"engine": {"kind": "deepspeed", "zero": 2}, "precision": "float32", **schedule(reduction="chunks", sp_bytes=4096)},
    ),
}  # fmt: skip


def both(rank: int, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Train with gradients of weights together with those of inputs, then apart. Return both, and the number of ops apart."""
    found, count = [], 0
    for apart in (False, True):
        with engine_on(recipe, rank) as (engine, groups):
            engine.execution.reorder(engine.execution.ordering._replace(weights_apart=apart))
            found.append(go_on(engine, groups, recipe, range(STEPS)))
            if apart:
                count = sum(op.direction == "W" for op in engine.execution.order(engine.execution.last))
    return found[0], found[1], count


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_weights_apart_have_the_same_bits(ranks: Any, name: str) -> None:
    workers, fold, sections = CASES[name]
    recipe = make_recipe(workers, fold, **{"moe": {"experts": "grouped"}, **sections})
    for rank, (together, apart, count) in enumerate(ranks(workers).run(both, recipe)):
        assert count, f"rank {rank} has no gradients of weights apart"
        assert apart["losses"] == together["losses"]
        assert apart["norms"] == together["norms"]
        for key, held in together["weights"].items():
            assert torch.equal(apart["weights"][key].tensor, held.tensor), f"{key} on rank {rank}"
