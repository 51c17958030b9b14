"""Batches that bring the experts of their tokens: every fold and schedule trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.foldray.parity import check_equal, engine_on, make_recipe, one_process, own_batches, some_experts, train

FOLDS: list[tuple[int, dict[str, int]]] = [
    (2, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"cp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "etp": 2}), (4, {"cp": 2, "ep": 4}),
    (8, {"tp": 2, "cp": 2, "ep": 4}), (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}),
]  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"kind": "sequential"},
    {"kind": "one_a_one_m", "degree": 4, "recompute": ["attention", "expert"]},
    {"kind": "stream", "degree": 2, "weight_gradients": "apart"},
    {"kind": "list", "degree": 2},
]
SEQUENCE = {"capacity_factor": 0.5, "drop": "position", "drop_scope": "sequence"}
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "dropped by position in whole sequences": (4, {"tp": 2, "cp": 2}, {"model": {"router": SEQUENCE}}),
    "padded, dropped by weight": (2, {"ep": 2}, {"model": {"router": {"capacity_factor": 0.5, "pad": True}}}),
    "biased sigmoids": (2, {"ep": 2}, {"model": {"router": {"score": "sigmoid", "bias_rate": 0.01, "normalize": True}}}),
    "softmax behind top-k": (2, {"cp": 2}, {"model": {"router": {"softmax": "after_topk", "normalize": False}}}),
    "once to each rank": (2, {"ep": 2}, {"moe": {"dispatch": "rank"}}),
    "further tokens, dense blocks": (2, {"tp": 2}, {"model": {"mtp_depth": 1, "layers": 4, "moe_every": 2}}),
    "parts of micro-batches": (2, {"ep": 2}, {"schedule": {"kind": "flow", "batch_degree": 2}}),
    "ranks of experts": (4, {"ep": 2}, {"placement": {"attention": 2, "experts": 2}}),
}


def _check(ranks: Any, workers: int, fold: dict[str, int], **sections: Any) -> None:
    recipe = make_recipe(workers, fold, **sections)
    found = ranks(workers).run(train, recipe, 2, False, False, True, timeout=240)
    reference = one_process(recipe, steps=2, replayed=True)
    check_equal(found, reference)
    assert reference["replaced"] > 0
    assert {part["replaced"] for part in found} == {reference["replaced"]}


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("workers", "fold"), FOLDS, ids=str)
def test_every_fold_and_schedule_equals_one_process(ranks, workers: int, fold: dict[str, int], schedule: dict) -> None:
    _check(ranks, workers, fold, schedule=schedule)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("case", CASES)
def test_where_replay_meets_other_rules(ranks, case: str) -> None:
    workers, fold, sections = CASES[case]
    _check(ranks, workers, fold, **sections)


def test_experts_of_the_routers_change_no_bit() -> None:
    """If no expert is given, nothing is replaced. If the given ones are the routers' own, nothing is replaced, either."""
    recipe = make_recipe(1)
    with engine_on(recipe) as (engine, groups):
        (batch, *_), model = own_batches(recipe, groups, 0), engine.model
        own, chosen = model(batch), _choices(model, batch)
        assert not torch.equal(chosen[0], some_experts(recipe, 0)[0, : len(batch.token_BL)].flatten(0, 1))
        replays = torch.stack(chosen).unflatten(1, batch.token_BL.shape)
        for given in (replays, torch.full_like(replays, -1)):
            objective, losses = model(batch._replace(expert_MBLK=given))
            assert torch.equal(objective, own[0])
            assert all(torch.equal(a, b) for a, b in zip(losses, own[1], strict=True))
        (losses,) = engine.execution.evaluate([batch._replace(expert_MBLK=replays)])
        assert int(losses.replaced) == 0


def _choices(model: Any, batch: Any) -> list[torch.Tensor]:
    """Return the experts that the routers of all blocks choose."""
    found: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda *args: found.append(args[2].expert_TK)) for _, router in model.routers()]
    model(batch)
    for hook in hooks:
        hook.remove()
    return found
