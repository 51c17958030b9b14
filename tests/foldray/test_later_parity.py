"""Gradients of weights that are ops of their own have the same bits as those that backward computes at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from foldray.kinds import HEAD
from foldray.orders import WeightGradients
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
        2, {"cp": 2, "ep": 2}, schedule(kind="stream", degree=2, recompute=["attention", "ffn", "expert", "shared"])
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
    "run again": Case(2, {"ep": 2}, schedule(recompute=["attention", "ffn", "expert", "shared"])),
    "EP2, parts, fewer slices, further tokens, run again": Case(
        2, {"ep": 2},
        {"model": {"mtp_depth": 1, "moe_every": 2, "layers": 3},
         **passes(1, kind="stream", degree=4, attention_degree=2, batch_degree=2, recompute=["attention", "expert", "shared"])},
    ),
    "PP2 EP2, weave": Case(4, {"pp": 2, "ep": 2}, passes(4, kind="weave", degree=2)),
    "PP2 CP2 EP2, two blocks in turns": Case(
        4, {"pp": 2, "cp": 2, "ep": 2}, schedule(kind="aaam", degree=4, recompute=["attention"], virtual_stages=2)
    ),
    "dense blocks, tied": Case(
        2, {"tp": 2, "ep": 2},
        {"model": {"layers": 4, "moe_every": 2, "tied_embeddings": True}, **schedule(kind="stream", degree=2)},
    ),
    "float32": Case(2, {"ep": 2}, {"precision": "float32"}),
    "bfloat16, buckets": Case(2, {"ep": 2}, {"precision": "bfloat16", **schedule(reduction="buckets")}),
    "experts apart": Case(4, {"tp": 2, "ep": 2}, {"placement": {"attention": 2, "experts": 2}}),
    "experts apart, two positions": Case(4, {"pp": 2}, {"placement": {"attention": 2, "experts": 2, "expert_pp": 2}}),
    "experts apart, two parts": Case(2, {}, {"placement": {"attention": 1, "experts": 1}, **schedule(batch_degree=2)}),
    "experts apart, pieces": Case(
        4, {"pp": 2}, {"placement": {"attention": 2, "experts": 2, "expert_pp": 2}, **schedule(degree=4)}
    ),
    "DeepSpeed, ZeRO-1": Case(2, {"ep": 2}, {"engine": {"kind": "deepspeed", "zero": 1}, "precision": "float32"}),
    "DeepSpeed, ZeRO-2, chunks": Case(
        4, {"ep": 2},
        {"engine": {"kind": "deepspeed", "zero": 2}, "precision": "float32", **schedule(reduction="chunks", sp_bytes=4096)},
    ),
}  # fmt: skip


WAYS: tuple[WeightGradients, ...] = ("together", "apart", "whole")


def every_way(rank: int, recipe: Recipe) -> list[tuple[dict[str, Any], int]]:
    """Train with each way to compute gradients of weights. Return what it gives, and the number of ops for them in a step."""
    found = []
    for way in WAYS if recipe.schedule.degree > 1 else WAYS[:2]:
        with engine_on(recipe, rank) as (engine, groups):
            engine.execution.reorder(engine.execution.ordering._replace(weight_gradients=way))
            trained = go_on(engine, groups, recipe, range(STEPS))
            order = engine.execution.order(engine.execution.last)
            found.append((trained, sum(op.direction == "W" and op.kind != HEAD for op in order)))
    return found


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_weights_apart_have_the_same_bits(ranks: Any, name: str) -> None:
    workers, fold, sections = CASES[name]
    recipe = make_recipe(workers, fold, **{"moe": {"experts": "grouped"}, **sections})
    for rank, ((together, none), *others) in enumerate(ranks(workers).run(every_way, recipe)):
        counts = [count for _, count in others]
        assert counts == sorted(set(counts), reverse=True), f"rank {rank} has as many ops for all pieces as for each"
        assert none == 0 < counts[-1], f"rank {rank} has no gradients of weights apart"
        for way, (found, _) in zip(WAYS[1:], others, strict=False):
            assert (found["losses"], found["norms"]) == (together["losses"], together["norms"]), way
            for key, held in together["weights"].items():
                assert torch.equal(found["weights"][key].tensor, held.tensor), f"{key} on rank {rank}, {way}"
