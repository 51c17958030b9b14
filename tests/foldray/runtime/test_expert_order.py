"""Experts that change places between steps: the training goes on as it would have, whatever holds their optimizer state."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from foldray.blueprint.placing import overload_of, spread
from foldray.model import all_losses
from foldray.runtime.expert_order import reorder_experts
from tests.foldray.parity import BATCH, Held, check_equal, engine_on, make_recipe, own_batches, weights

STEPS = 4
ADAMW = {"kind": "adamw", "lr": 0.05, "decay": "constant", "clip": 1.0}
_ENGINES: list[dict[str, Any]] = [
    *({"kind": "torch", "zero": zero} for zero in (0, 1, 2)),
    {"kind": "torch", "zero": 1, "offload": "optimizer"},
]
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "tensor parallel, slices of experts": (4, {"tp": 2, "ep": 2, "etp": 2}, {}),
    "context parallel": (4, {"cp": 2, "ep": 4}, {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart"}}),
    "pipeline": (4, {"pp": 2, "ep": 2}, {"schedule": {"kind": "one_a_one_m", "degree": 2}}),
    "two copies of experts": (8, {"ep": 2, "tp": 2}, {"engine": {"kind": "torch", "zero": 1}}),
    "chunks": (4, {"ep": 2}, {"schedule": {"reduction": "chunks", "sp_bytes": 2048}, "engine": {"kind": "torch", "zero": 2}}),
    "biased sigmoids": (
        2,
        {"ep": 2},
        {"model": {"router": {"score": "sigmoid", "bias_rate": 0.05, "normalize": True, "balance_scope": "global_batch"}}},
    ),
    "biases": (2, {"ep": 2}, {"model": {"router": {"logit_bias": True}, "expert_bias": True}}),
    "once to each node": (4, {"ep": 4, "ep_inside": 2}, {"moe": {"dispatch": "rank"}}),
    "muon": (2, {"ep": 2}, {"optimizer": {"kind": "muon", "lr": 0.05, "decay": "constant"}}),
    "further tokens": (2, {"ep": 2}, {"model": {"mtp_depth": 1}}),
    "a pattern": (4, {"ep": 4}, {"model": {"router": {"skew": 1.0}}}),
    "ranks of experts": (4, {"ep": 2}, {"placement": {"attention": 2, "experts": 2}}),
}


def orders_of(recipe: Any, step: int) -> dict[int, list[int]]:
    """Return random orders of some blocks' experts."""
    generator = torch.Generator().manual_seed(step)
    layers = recipe.model.moe_layers if step % 2 else recipe.model.moe_layers[:1]
    return {layer: torch.randperm(recipe.model.experts, generator=generator).tolist() for layer in layers}


def train(rank: int, recipe: Any, moves: bool) -> dict[str, Any]:
    with engine_on(recipe, rank) as (engine, groups):
        losses, norms = [], []
        for step in range(STEPS):
            passes = engine.train(own_batches(recipe, groups, step))
            norms.append(engine.update(recipe.optimizer.lr).total)
            total = all_losses(passes, groups.control)
            losses.append(total.means().tolist())
            engine.model.update_biases(total.count_ME)
            if moves:
                reorder_experts(engine, groups, orders_of(recipe, step))
        return {"weights": weights(engine), "losses": losses, "norms": norms}


def reference(recipe: Any) -> dict[str, Any]:
    """Train in one process without moves, and give the weights the numbers that experts have in the end."""
    sections = {key: getattr(recipe, key).model_dump(mode="json") for key in ("model", "optimizer")}
    found = train(0, make_recipe(1, training={"micro_batch": BATCH}, **sections), False)
    places = {layer: list(range(recipe.model.experts)) for layer in recipe.model.moe_layers}
    for step in range(STEPS):
        for layer, order in orders_of(recipe, step).items():
            places[layer] = [places[layer][old] for old in order]
    renamed = {}
    for name, held in found["weights"].items():
        if expert := re.fullmatch(r"(.*blocks\.(\d+)\.moe\.experts\.)(\d+)(\..*)", name):
            place = places[int(expert[2])].index(int(expert[3]))
            renamed[f"{expert[1]}{place}{expert[4]}"] = held
        elif router := re.fullmatch(r".*blocks\.(\d+)\.moe\.router\..*", name):
            renamed[name] = Held(held.tensor[..., places[int(router[1])]], held.box)
        else:
            renamed[name] = held
    return {**found, "weights": renamed}


def _check(ranks: Any, recipe: Any) -> None:
    check_equal(ranks(recipe.cluster.workers).run(train, recipe, True, timeout=240), reference(recipe))


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("engine", _ENGINES, ids=str)
@pytest.mark.parametrize("optimizer", [ADAMW, {"kind": "sgd", "lr": 0.5, "momentum": 0.9, "decay": "constant"}], ids=str)
@pytest.mark.parametrize(("workers", "fold"), [(2, {"ep": 2}), (4, {"ep": 2}), (4, {"ep": 4}), (8, {"ep": 2, "cp": 2})], ids=str)
def test_every_optimizer_and_stage(ranks, workers: int, fold: dict[str, int], optimizer: dict, engine: dict) -> None:
    _check(ranks, make_recipe(workers, fold, optimizer=optimizer, engine=engine))


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_fold(ranks, case: str) -> None:
    workers, fold, sections = CASES[case]
    _check(ranks, make_recipe(workers, fold, **{"optimizer": ADAMW, **sections}))


def test_loads_are_spread() -> None:
    zipf = [(expert + 1) ** -1.0 for expert in range(8)]
    assert overload_of(zipf, 2) == pytest.approx(1.533, abs=1e-3)
    order = spread(zipf, 2)
    assert overload_of(zipf, 2, order) == pytest.approx(1.056, abs=1e-3)
    assert sum(expert != place for place, expert in enumerate(order)) == 2  # the others stay
    assert spread([zipf[expert] for expert in order], 2) == spread([1.0] * 8, 2) == spread([0.0] * 8, 2) == [*range(8)]
    assert spread([4, 4, 1, 1, 1, 1, 1, 1], 2) == [4, 1, 2, 3, 0, 5, 6, 7]
    generator = torch.Generator().manual_seed(0)
    for experts, ranks in ((8, 4), (64, 8), (60, 4), (16, 16)):
        load = torch.rand(experts, generator=generator).square().tolist()
        order = spread(load, ranks)
        assert sorted(order) == [*range(experts)]
        assert overload_of(load, ranks, order) <= overload_of(load, ranks) + 1e-12
    assert overload_of([0.0] * 4, 2) == 0
