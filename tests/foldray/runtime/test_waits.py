"""The host does not wait for a GPU in the ops of a training step, except for the counts of rows that tokens choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from foldray.kernels import permutation
from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe
from tests.foldray.waits import Ran, recorded, waits_of_a_step

COUNTS = {"dispatch F": 1}
"""Rows go where tokens choose. The host must know how many before it can send them. One copy brings all counts. If a rank has all
experts, nothing is sent, and experts read on the device where their rows end."""

DROPS = {"route F": 1}
"""Without padding, the number of rows that are left after dropping sets the size of a tensor."""

CHOICE = {"between": 3}
"""The loads by which all ranks choose experts for copies; and twice for a list that they run for the first time."""

PAD = {"router": {"capacity_factor": 1.0, "pad": True}}
ONCE = {"experts": "grouped", "dispatch": "rank"}
RECOMPUTE = ["attention", "expert", "ffn"]


class Case(NamedTuple):
    """A training, and how often the host waits in each op of a kind; in others never.

    Args:
        fold: parallel sizes.
        sections: further sections of the recipe.
    """

    world: int
    fold: dict[str, int]
    sections: dict[str, Any]
    waits: dict[str, int]


CASES = {
    "plain": Case(1, {}, {}, {}),
    "biases": Case(1, {}, {"model": {"expert_bias": True}}, {}),
    "one expert after another": Case(1, {}, {"precision": "float32"}, {"expert F": 1}),
    "adapters": Case(1, {}, {"model": {"adapter": {"rank": 3}, "expert_bias": True}}, {}),
    "padded": Case(1, {}, {"model": PAD}, {}),
    "padded, by position": Case(
        1, {}, {"model": {"router": {**PAD["router"], "drop": "position"}}, "schedule": {"kind": "aaam", "degree": 4}}, {}
    ),
    "dropping": Case(1, {}, {"model": {"router": {"capacity_factor": 1.0}}}, DROPS),
    "computed again": Case(1, {}, {"model": {"moe_every": 2}, "schedule": {"recompute": RECOMPUTE}}, {}),
    "activations on the host": Case(1, {}, {"schedule": {"offload": RECOMPUTE}, "model": {"layers": 3}}, {}),
    "four pieces": Case(1, {}, {"schedule": {"kind": "stream", "degree": 4}}, {}),
    "gradients of weights apart": Case(1, {}, {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart"}}, {}),
    "other layers": Case(
        1, {}, {"model": {"dense_first": 1, "tied_embeddings": True, "positions": "learned", "norm": "layernorm", "ffn": "gelu"}},
        {},
    ),
    "experts over ranks": Case(2, {"ep": 2}, {"schedule": {"kind": "aaam", "degree": 2}}, COUNTS),
    "experts over ranks, dropping": Case(2, {"ep": 2}, {"model": {"router": {"capacity_factor": 1.0}}}, {**COUNTS, **DROPS}),
    "padded over ranks": Case(2, {"ep": 2}, {"model": PAD}, {}),
    "copies of experts, which are chosen before this step": Case(
        2, {"ep": 2}, {"moe": {"copies": 1}, "model": {"router": {"skew": 2}}}, {**COUNTS, **CHOICE}
    ),
    "tokens once to one rank": Case(1, {}, {"moe": ONCE}, COUNTS),
    "tensors and sequences over ranks": Case(4, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {"engine": {"zero": 2}}, COUNTS),
    "sequences compete for capacity": Case(
        4, {"tp": 2, "cp": 2, "ep": 4},
        {"model": {"router": {**PAD["router"], "drop_scope": "sequence"}}, "schedule": {"context": "all_gather"}}, {},
    ),
    "slices over ranks": Case(2, {"cp": 2, "ep": 2}, {"model": PAD, "schedule": {"kind": "stream", "degree": 2}}, {}),
    "tokens once to each rank": Case(2, {"ep": 2}, {"moe": ONCE, "schedule": {"kind": "aaam", "degree": 2}}, COUNTS),
    "tokens once to each node": Case(4, {"ep": 4, "ep_inside": 2}, {"moe": ONCE, "schedule": {"recompute": RECOMPUTE}}, COUNTS),
    "tokens once to each rank, dropping, computed again": Case(
        4, {"tp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"moe": ONCE, "model": {"router": {"capacity_factor": 1.0}}, "schedule": {"recompute": RECOMPUTE}}, COUNTS,
    ),
    "a pipeline": Case(
        4, {"pp": 2, "ep": 2}, {"schedule": {"virtual_stages": 2, "reduction": "chunks"}, "engine": {"zero": 1}}, COUNTS
    ),
}  # fmt: skip

# If experts have ranks of their own, a token has one row for each rank that it goes to. So the sizes of most tensors depend on
# what tokens choose.
APART_TOKENS = {"route F": 1, "dispatch F": 1, "combine F": 1, "merge B": 1}
APART_EXPERTS = {"expert F": 1, "queue": None}  # the queue's thread reads how many rows come
APART_SLICES = {"expert F": 2, "queue": None}  # ranks that share an expert tell each other how many rows they have


def recipe_of(case: Case) -> Recipe:
    sections = {"precision": "bfloat16", "moe": {"experts": "grouped"}, **case.sections}
    return make_recipe(case.world, case.fold, **{**sections, "engine": {"kind": "torch", **case.sections.get("engine", {})}})


def compare(found: list[Ran], waits: Mapping[str, int | None]) -> None:
    """Compare the waits of every op with what is expected; None is any number."""
    assert {ran.op for ran in found} >= {"dispatch F", "combine B", *waits}
    for op, places in found:
        assert waits.get(op, 0) in (None, len(places)), f"{op}: {places}"


@pytest.mark.gate(5)
@pytest.mark.parametrize("name", CASES)
def test_no_op_waits_for_the_device_but_for_counts(ranks, name: str) -> None:
    case = CASES[name]
    for found in ranks(case.world).run(waits_of_a_step, recipe_of(case)):
        compare(found, case.waits)


def test_documents_are_read_once_for_a_batch_and_before_its_ops(ranks) -> None:
    """Ops then ask the host's copy, and layers share the answers. (The record does not know on which device numbers are.)"""
    recipe = recipe_of(Case(1, {}, {}, COUNTS))
    (found,) = ranks(1).run(waits_of_a_step, recipe, True)
    between = [wait for ran in found if ran.op == "between" for wait in ran.waits]
    assert [wait.split()[0] for wait in between] == ["cpu"] * recipe.accumulation
    attention = [ran for ran in found if ran.op == "attention F"]
    assert sum(bool(ran.waits) for ran in attention) <= recipe.accumulation == len(attention) // 2
    compare([ran for ran in found if ran.op not in ("attention F", "between")], {})


@pytest.mark.parametrize(("etp", "experts"), [(1, APART_EXPERTS), (2, APART_SLICES)])
def test_experts_on_ranks_of_their_own_wait_more_often(ranks, etp: int, experts: dict[str, int | None]) -> None:
    recipe = recipe_of(
        Case(4, {"tp": 2, "ep": 2 // etp, "etp": etp}, {"placement": {"attention": 2, "experts": 2}, "engine": {"zero": 0}}, {})
    )
    for rank, found in enumerate(ranks(4).run(waits_of_a_step, recipe)):
        compare(found, APART_TOKENS if rank < 2 else experts)


@pytest.mark.parametrize("call", [
    lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: int(x[0]), lambda x: x.tolist(), lambda x: x.cpu(),
    lambda x: x[x > 1], lambda x: x.nonzero(), lambda x: x.bincount(),
    lambda x: x.repeat_interleave(x), lambda x: x.masked_select(x > 1), lambda x: torch.equal(x, x), lambda x: x.unique(),
    lambda x: torch.tensor([1], device=x.device), lambda x: x.new_tensor(1), lambda x: x.to(torch.device("cpu")),
    lambda x: x.to(x.device, torch.int32), lambda x: x.__setitem__(x > 1, x[:2].clone()),
])  # fmt: skip
def test_a_wait_is_found(call: Any) -> None:
    with recorded(immediate=True) as recorder, recorder.op("route F"):
        call(torch.tensor([3, 1, 2]))
    assert recorder.ran[0].waits


@pytest.mark.parametrize("call", [
    lambda x: x.repeat_interleave(x, output_size=6), lambda x: x[x - 1], lambda x: x.repeat_interleave(2),
    lambda x: x.to(torch.int32),
    lambda x: permutation.pad_by_expert(x[:, None], x[:, None] > 1, 4, 1), lambda x: x.where(x > 1, 0), lambda x: x.clone(),
])  # fmt: skip
def test_other_calls_are_no_waits(call: Any) -> None:
    x = torch.tensor([3, 1, 2])
    with recorded(immediate=True) as recorder, recorder.op("route F"):
        call(x)
    assert recorder.ran[0].waits == []
