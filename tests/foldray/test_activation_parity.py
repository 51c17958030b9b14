"""Folds and schedules that keep activations on the host: the bits of the same training without, and one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.orders import LIST, WEAVE
from foldray.recipe import Recipe
from tests.foldray.lanes import strict_lanes
from tests.foldray.parity import check_equal, engine_on, go_by_times, make_recipe, one_process
from tests.foldray.strict import StrictPools

_STEPS = 2
_ALL = ["attention", "expert", "ffn", "shared"]
_FOUR = {"layers": 4}
_MIXED = {"layers": 4, "moe_every": 2}  # dense blocks, too
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    # Workers, fold, schedule, further sections.
    "one worker": (1, {}, {"offload": _ALL}, {}),
    "one worker, dense blocks": (1, {}, {"offload": _ALL}, {"model": _MIXED}),
    "EP2, stream": (2, {"ep": 2}, {"kind": "stream", "degree": 4, "offload": _ALL}, {}),
    "EP2, grouped, one_a_one_m": (
        2, {"ep": 2}, {"kind": "one_a_one_m", "degree": 2, "offload": ["expert"]}, {"moe": {"experts": "grouped"}},
    ),
    "EP4, fewer slices, weights apart": (
        4, {"ep": 4}, {"kind": "stream", "degree": 4, "attention_degree": 2, "weight_gradients": "apart", "offload": _ALL},
        {"moe": {"experts": "grouped"}},
    ),
    "EP2, weights whole": (2, {"ep": 2}, {"kind": "stream", "degree": 2, "weight_gradients": "whole", "offload": _ALL}, {}),
    "EP2, experts again": (2, {"ep": 2}, {"recompute": ["expert"], "offload": ["shared", "attention"]}, {}),
    "EP2, attention again": (2, {"ep": 2}, {"recompute": ["attention"], "offload": ["expert"]}, {"model": _MIXED}),
    "EP2, flow": (2, {"ep": 2}, {"kind": "flow", "offload": _ALL}, {"engine": {"kind": "torch", "zero": 1}}),
    "EP2, four parts, stream": (
        2, {"ep": 2}, {"kind": "stream", "degree": 2, "batch_degree": 4, "offload": _ALL},
        {"training": {"micro_batch": 4}},
    ),
    "TP2 EP2, weave, ZeRO-1": (
        2, {"tp": 2, "ep": 2}, {"kind": WEAVE.name, "reduction": "chunks", "sp_bytes": 2048, "offload": _ALL},
        {"engine": {"kind": "torch", "zero": 1}, "training": {"micro_batch": 2}},
    ),
    "CP2 EP2, slices, ZeRO-2": (
        4, {"cp": 2, "ep": 2}, {"kind": "stream", "degree": 2, "reduction": "buckets", "offload": _ALL},
        {"engine": {"kind": "torch", "zero": 2}},
    ),
    "CP2 EP2, whole sequences": (2, {"cp": 2, "ep": 2}, {"offload": ["attention"]}, {}),
    "PP2": (2, {"pp": 2}, {"offload": _ALL}, {"training": {"micro_batch": 1}}),
    "PP2 EP2, virtual stages": (4, {"pp": 2, "ep": 2}, {"virtual_stages": 2, "offload": _ALL}, {}),
    "PP2, weave, weights apart": (
        2, {"pp": 2}, {"kind": WEAVE.name, "degree": 2, "weight_gradients": "apart", "offload": _ALL},
        {"training": {"micro_batch": 1}},
    ),
    "PP4, one block a stage": (4, {"pp": 4}, {"offload": ["attention", "expert"]}, {"training": {"micro_batch": 1}}),
    "list": (2, {"ep": 2}, {"kind": LIST.name, "degree": 2, "offload": _ALL}, {}),
    "PP2, list": (2, {"pp": 2}, {"kind": LIST.name, "offload": ["expert", "attention"]}, {"training": {"micro_batch": 1}}),
    "ETP2 TP2": (2, {"tp": 2, "etp": 2}, {"offload": _ALL}, {}),
    "tokens once to each rank": (2, {"ep": 2}, {"offload": _ALL}, {"moe": {"dispatch": "rank"}}),
    "adapters": (2, {"ep": 2}, {"offload": _ALL}, {"model": {"adapter": {"rank": 4}, **_FOUR}}),
    "adapters, grouped": (
        2, {"ep": 2}, {"offload": ["expert"]}, {"model": {"adapter": {"rank": 4}, **_FOUR}, "moe": {"experts": "grouped"}},
    ),
    "linear attention, slices": (
        2, {"ep": 2}, {"kind": "stream", "degree": 2, "offload": ["attention"]},
        {"model": {"windows": ["linear", "full"], "linear_key_heads": 4, "qk_norm": "head", **_FOUR}},
    ),
    "latent attention": (
        2, {"tp": 2}, {"offload": ["attention", "ffn"]},
        {"model": {"latent_rank": 10, "latent_query_rank": 6, "kv_heads": 8, "rope_dim": 2, **_MIXED}},
    ),
    "further tokens": (1, {}, {"offload": _ALL}, {"model": {"mtp_depth": 1}}),
    "norms behind, gates": (
        1, {}, {"offload": _ALL}, {"model": {"norms": "both", "attention_gate": "element", "shared_gate": True, **_FOUR}},
    ),
}  # fmt: skip


def recipe_of(name: str, offloads: bool = True, **changes: Any) -> Recipe:
    world, fold, schedule, sections = CASES[name]
    schedule = {**schedule, "offload": schedule["offload"] if offloads else []}
    given = {"model": _FOUR, **sections, **changes, "schedule": schedule}
    given["model"] = {"layers": 4, **given["model"]}
    return make_recipe(world, fold, **given)


def train(rank: int, recipe: Recipe) -> dict[str, Any]:
    """Train over strict lanes. Return the results, with the bytes that went to the host and back."""
    with strict_lanes(), engine_on(recipe, rank) as (engine, groups):
        found = go_by_times(engine, groups, recipe, _STEPS)
        return {**found, "host": (engine.execution.host.sent, engine.execution.host.fetched)}


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_the_host_gives_back_the_same_bits(ranks: Any, name: str) -> None:
    """Float64, over communicators and lanes whose results are poison until somebody has waited."""
    recipe, without = recipe_of(name), recipe_of(name, offloads=False)
    found = StrictPools(ranks)(recipe.cluster.workers).run(train, recipe)
    sent, fetched = zip(*(ours.pop("host") for ours in found), strict=True)
    assert sent == fetched
    assert any(sent), "nothing has travelled"
    plain = ranks(recipe.cluster.workers).run(train, without)
    assert all(each.pop("host") == (0, 0) for each in plain)
    check_equal(found, one_process(recipe, steps=_STEPS))
    if not recipe.ordering.forward.row.found:  # whose lists, and so the order of sums, depend on times
        for ours, theirs in zip(found, plain, strict=True):
            assert ours["losses"] == theirs["losses"]
            assert all(torch.equal(ours["weights"][key].tensor, held.tensor) for key, held in theirs["weights"].items())


def _plainly(rank: int, recipe: Recipe) -> dict[str, Any]:
    with engine_on(recipe, rank) as (engine, groups):
        found = go_by_times(engine, groups, recipe, _STEPS)
        return {**found, "sent": engine.execution.host.sent}


@pytest.mark.nightly("DeepSpeed six times")
@pytest.mark.parametrize(("zero", "reduction"), [(1, "end"), (1, "buckets"), (2, "chunks")])
def test_deepspeed_computes_the_same_bits(ranks: Any, zero: int, reduction: str) -> None:
    """DeepSpeed has collectives of its own, so communicators and lanes are plain."""
    found = []
    for kinds in (_ALL, []):
        schedule = {"kind": "stream", "degree": 2, "reduction": reduction, "offload": kinds}
        engine, moe = {"kind": "deepspeed", "zero": zero}, {"experts": "grouped"}
        recipe = make_recipe(2, 2, precision="float32", model=_FOUR, engine=engine, schedule=schedule, moe=moe)
        found.append(ranks(2).run(_plainly, recipe))
    for ours, theirs in zip(*found, strict=True):
        assert (ours["sent"] > 0, theirs["sent"]) == (True, 0)
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(ours["weights"][key].tensor, held.tensor) for key, held in theirs["weights"].items())
