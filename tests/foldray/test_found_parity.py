"""Woven and found lists: the same bits as one micro-batch after the other without pieces, and the same numbers with pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import pytest

from foldray.clock import Cost
from foldray.comm import Groups
from foldray.finding import Found, find
from foldray.graph import Schedule, StepGraph
from foldray.orders import LIST, WEAVE, Ordering
from foldray.runtime import Trace
from tests.foldray.parity import engine_on, go_by_times, go_on, make_recipe
from tests.foldray.random_lists import any_list, find_at_random

Finder = Callable[[int, StepGraph, Cost, int, Schedule | None], Found]
STEPS = 3
MORE = 5  # further steps of a found list, all but the first one by random lists
CHUNKS = {"reduction": "chunks", "sp_bytes": 4096}
AGAIN = {"recompute": ["attention", "ffn", "expert", "shared"]}
HOST = {"offload": ["attention", "ffn", "expert", "shared"]}
DEEPSPEED = {"precision": "float32"}


class Case(NamedTuple):
    """A recipe.

    Args:
        workers, fold: number of workers, and the fold.
        micro_batch: sequences of a micro-batch; a step has 8.
        schedule: keys of the section `schedule`.
        sections: further sections.
    """

    workers: int
    fold: dict[str, int]
    micro_batch: int = 1
    schedule: Mapping[str, Any] = MappingProxyType({})
    sections: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "one rank, one micro-batch": Case(1, {}, 8, {"degree": 2}),
    "one rank, eight micro-batches": Case(1, {}, 1),
    "EP2, four micro-batches": Case(2, {"ep": 2}),
    "EP2, four micro-batches, two pieces": Case(2, {"ep": 2}, 1, {"degree": 2}),
    "EP2, two micro-batches, four pieces": Case(2, {"ep": 2}, 2, {"degree": 4}),
    "EP2, two parts": Case(2, {"ep": 2}, 2, {"batch_degree": 2}),
    "EP4, chunks": Case(4, {"ep": 4}, 1, {"degree": 2, **CHUNKS}),
    "EP2 EDP2, chunks": Case(4, {"ep": 2}, 1, CHUNKS),
    "EP2 ETP2": Case(4, {"ep": 2, "etp": 2}),
    "TP2 EP2": Case(2, {"tp": 2, "ep": 2}, 2, {"degree": 2}),
    "TP4 ETP2": Case(4, {"tp": 4, "etp": 2}),
    "CP2 EP2, whole sequences": Case(2, {"cp": 2, "ep": 2}, 2),
    "CP2 EP2, slices": Case(2, {"cp": 2, "ep": 2}, 2, {"degree": 2}),
    "CP2 EP2, slices run again, chunks": Case(4, {"cp": 2, "ep": 2}, 1, {"degree": 4, **CHUNKS, **AGAIN}),
    "TP2 CP2 EP4": Case(4, {"tp": 2, "cp": 2, "ep": 4}, 2, {"degree": 2}),
    "PP2": Case(2, {"pp": 2}),
    "PP2, one micro-batch": Case(2, {"pp": 2}, 8, {"degree": 2}),
    "PP2 EP2, two pieces, chunks": Case(4, {"pp": 2, "ep": 2}, 1, {"degree": 2, **CHUNKS}),
    "PP2 EP2, virtual stages": Case(4, {"pp": 2, "ep": 2}, 1, {"virtual_stages": 2}),
    "PP2, virtual stages, pieces, buckets": Case(2, {"pp": 2}, 1, {"virtual_stages": 2, "degree": 2, "reduction": "buckets"}),
    "PP4": Case(4, {"pp": 4}, 1),
    "PP2 CP2 ETP2": Case(4, {"pp": 2, "cp": 2, "etp": 2}, 1, {"degree": 2}),
    "run again": Case(2, {"ep": 2}, 1, AGAIN),
    "weights of all pieces": Case(2, {"ep": 2}, 1, {"weight_gradients": "whole", "degree": 4, "attention_degree": 2}),
    "PP2 CP2, weights of all pieces, run again, chunks": Case(
        4, {"pp": 2, "cp": 2, "ep": 2}, 1, {"weight_gradients": "whole", "degree": 2, **CHUNKS, **AGAIN}
    ),
    "on the host": Case(2, {"ep": 2}, 1, {"degree": 2, **HOST}, {"model": {"layers": 4}}),
    "PP2 EP2, virtual stages, on the host": Case(
        4, {"pp": 2, "ep": 2}, 1, {"virtual_stages": 2, **HOST}, {"model": {"layers": 8}}
    ),
    "CP2 EP2, on the host, chunks": Case(
        2, {"cp": 2, "ep": 2}, 1, {"degree": 2, "attention_degree": 1, **CHUNKS, **HOST}, {"model": {"layers": 4}}
    ),
    "two parts, on the host": Case(2, {"ep": 2}, 2, {"batch_degree": 2, **HOST}, {"model": {"layers": 4}}),
    "weights together": Case(2, {"ep": 2}, 1, {"weight_gradients": "together", "degree": 2}),
    "every other block, tied": Case(
        2, {"ep": 2}, 1, {}, {"model": {"layers": 4, "moe_every": 2, "tied_embeddings": True, "shared_hidden": 0}}
    ),
    "ZeRO-1": Case(2, {"ep": 2}, 1, {"degree": 2}, {"engine": {"zero": 1}}),
    "ZeRO-2, chunks": Case(4, {"ep": 2}, 1, CHUNKS, {"engine": {"zero": 2}}),
    "bfloat16, buckets": Case(2, {"ep": 2}, 1, {"reduction": "buckets"}, {"precision": "bfloat16"}),
    "DeepSpeed, ZeRO-1": Case(2, {"ep": 2}, 1, {}, {"engine": {"kind": "deepspeed", "zero": 1}, **DEEPSPEED}),
    "DeepSpeed, ZeRO-2, chunks": Case(4, {"ep": 2}, 1, CHUNKS, {"engine": {"kind": "deepspeed", "zero": 2}, **DEEPSPEED}),
}  # fmt: skip
APART = {
    "experts apart": Case(4, {"tp": 2, "ep": 2}, 1, {}, {"placement": {"attention": 2, "experts": 2}}),
    "experts apart, two positions": Case(4, {"pp": 2}, 1, {}, {"placement": {"attention": 2, "experts": 2, "expert_pp": 2}}),
    "experts apart, further tokens": Case(
        4, {"pp": 2, "ep": 2}, 1, {"degree": 2},
        {"placement": {"attention": 2, "experts": 2, "expert_pp": 1}, "model": {"mtp_depth": 2, "tied_embeddings": True}},
    ),
    "experts apart, two parts": Case(2, {}, 2, {"batch_degree": 2, "degree": 2}, {"placement": {"attention": 1, "experts": 1}}),
}  # fmt: skip


def trained(rank: int, recipe: Any, kind: str, finder: Finder) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Train one micro-batch after the other, then by the recipe. Return both, and whether the latter list was another one."""
    found, lists = [], []
    for plain in (True, False):
        with engine_on(recipe, rank) as (engine, groups):
            execution = engine.execution
            if plain:
                execution.reorder(Ordering(recompute=recipe.ordering.recompute, reduction=recipe.ordering.reduction))
            with patch("foldray.runtime.found.find", partial(finder, 0) if finder is any_list else find):
                found.append(go_by_times(engine, groups, recipe, STEPS))
            lists.append([(op.direction, op.micro_batch) for op in execution.order(execution.last)])
            if kind == LIST.name:
                found[-1] = go_on_at_random(engine, groups, recipe, found[-1], None if plain else finder)
    return found[0], found[1], lists[0] != lists[1]


def go_on_at_random(engine: Any, groups: Groups, recipe: Any, before: dict[str, Any], finder: Finder | None) -> dict[str, Any]:
    """Train further steps, by a finder's lists if there is one. Measured times lead to few of the lists that may run."""
    execution, steps = engine.execution, [before]
    execution.trace = Trace()
    for step in range(STEPS, STEPS + MORE):
        steps.append(go_on(engine, groups, recipe, range(step, step + 1)))
        if finder is not None:
            with patch("foldray.runtime.found.find", partial(finder, step)):
                execution.learn_costs()
            assert execution.ordering.found.graph == execution.last, "the step had no found list"
    return {**steps[-1], **{key: [value for each in steps for value in each[key]] for key in ("losses", "norms")}}


def compare(ranks: Any, case: Case, kind: str, finder: Finder = find_at_random) -> list[bool]:
    schedule = {"kind": kind, **case.schedule}
    training = {"global_batch": 8, "micro_batch": case.micro_batch}
    sections = {"training": training, "moe": {"experts": "grouped"}, **case.sections}
    recipe = make_recipe(case.workers, case.fold, schedule=schedule, **sections)
    cut = case.schedule.get("degree", 1) * case.schedule.get("batch_degree", 1) > 1
    allowed = 1e-10 if cut else 0.0
    if finder is any_list:  # sums have another order
        allowed = 1e-5 if "precision" in case.sections else 1e-10
    others = []
    for rank, (plain, found, other) in enumerate(ranks(case.workers).run(trained, recipe, kind, finder)):
        others.append(other)
        for key, held in plain["weights"].items():
            difference = float((found["weights"][key].tensor - held.tensor).abs().max())
            assert difference <= allowed, f"{key} on rank {rank} differs by {difference}"
        for key in ("losses", "norms"):
            numpy.testing.assert_allclose(found[key], plain[key], rtol=allowed)
    return others


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_woven_lists(ranks: Any, name: str) -> None:
    case = CASES[name]
    if case.schedule.get("weight_gradients") == "together":
        case = case._replace(schedule={**case.schedule, "weight_gradients": "apart"})
    compare(ranks, case, WEAVE.name)


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("name", [*CASES, *APART])
def test_found_lists(ranks: Any, name: str) -> None:
    case = {**CASES, **APART}[name]
    others = compare(ranks, case, LIST.name)
    assert any(others) or case.workers == 1, "no list differs from one micro-batch after the other"


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("name", [*CASES, *APART])
def test_any_lists(ranks: Any, name: str) -> None:
    """Whatever `check` accepts runs to its end, and gives the same numbers."""
    compare(ranks, {**CASES, **APART}[name], LIST.name, any_list)
