"""A step that trains nothing ends the training, with every engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foldray.recipe import Recipe
from foldray.runtime import Engine, Norms, TorchEngine
from tests.foldray.parity import batches, engine_on, make_recipe
from trainers.faults.guard import Guard, NothingTrained

_ADAMW = {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1}
_TORCH, _DEEPSPEED = {"kind": "torch", "zero": 1}, {"kind": "deepspeed", "zero": 2}


def _steps(rank: int, recipe: Recipe, harm: Callable[[Any], None] | None, rates: list[float]) -> str:
    """Run some steps with a guard, and return its error; an empty text if it raises none."""
    with engine_on(recipe, rank) as (engine, groups):
        guard = Guard(engine, groups, recipe.model)
        if harm is not None:
            harm(engine)
        try:
            for step, rate in enumerate(rates):
                engine.train(batches(recipe, groups.dp_rank, step))
                guard.update(step + 1, rate)
        except NothingTrained as error:
            return str(error)
    return ""


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("engine", "precision"),
    [(_TORCH, "float64"), (_TORCH, "bfloat16"), (_DEEPSPEED, "bfloat16"), ({"kind": "deepspeed", "zero": 0}, "float32")],
    ids=str,
)
def test_training_passes(ranks, engine: dict[str, Any], precision: str) -> None:
    recipe = make_recipe(4, {"pp": 2, "ep": 2}, engine=engine, precision=precision, optimizer=_ADAMW)
    assert ranks(4).run(_steps, recipe, None, [0.0, 1e-6, 1e-3]) == [""] * 4


def _lose_gradients(engine: Any) -> None:
    """Lose the sums on their way from the list to DeepSpeed."""
    give, gradients = engine._give_sums, engine.step.gradients

    def nothing() -> None:
        give()
        for buffer in gradients.buffers:
            buffer.sums.zero_()

    engine._give_sums = nothing


def _forget_experts(engine: TorchEngine) -> None:
    sum_of, experts = engine.gradients.sum_of, set(engine.model.by_class("expert"))
    lost = lambda p: torch.zeros_like(p) if p in experts else sum_of(p)  # noqa: E731
    engine.execution.gradients.sum_of = lost  # type: ignore[method-assign]


def _become_nan(engine: Engine) -> None:
    gradients = engine.execution.gradients
    sum_of = gradients.sum_of
    gradients.sum_of = lambda p: sum_of(p).fill_(float("nan"))  # type: ignore[method-assign]


def _stand_still(engine: TorchEngine) -> None:
    for optimizer, _ in engine.optimizers:
        optimizer.step = lambda: None  # type: ignore[assignment, method-assign, misc]


@pytest.mark.parametrize(
    ("harm", "engine", "precision", "rates", "said"),
    [
        (_lose_gradients, _DEEPSPEED, "bfloat16", [1e-3], "step 1: the gradient norm of dense weights is 0.0"),
        (_forget_experts, _TORCH, "float32", [1e-3], "step 1: the gradient norm of expert weights is 0.0"),
        (_become_nan, _TORCH, "float32", [1e-3], "step 1: the gradient norm of dense weights is nan"),
        (_become_nan, _DEEPSPEED, "bfloat16", [1e-3], "step 1: the gradient norm of dense weights is nan"),
        (_stand_still, _TORCH, "float32", [0.0, 1e-3], "step 2: no dense weight has changed, at a learning rate of 0.001"),
    ],
    ids=["lost gradients", "experts without gradients", "not a number", "not a number for DeepSpeed", "no update"],
)
def test_what_trains_nothing_is_stopped_on_every_rank(
    ranks, harm: Callable, engine: dict[str, Any], precision: str, rates: list[float], said: str
) -> None:
    recipe = make_recipe(
        2, 2, engine=engine, precision=precision, optimizer=_ADAMW, schedule={"reduction": "buckets"}
    )  # weight decay changes weights without a gradient
    assert ranks(2).run(_steps, recipe, harm, rates) == [said] * 2


def _skip(rank: int, recipe: Recipe) -> list[bool]:
    """Train three steps. In the second one, a gradient of rank 0 alone is not finite. Return whether each step changed anything
    that a checkpoint holds, and whether every rank has counted the same."""
    with engine_on(recipe, rank) as (engine, groups):
        guard, changed = Guard(engine, groups, recipe.model, most=1), []
        sum_of = engine.execution.gradients.sum_of
        for step in range(3):
            before = [shard.tensor.clone() for shard in engine.shards()]
            if step == 1 and rank == 0:
                _become_nan(engine)
            engine.train(batches(recipe, groups.dp_rank, step))
            engine.execution.gradients.sum_of = sum_of  # type: ignore[method-assign]
            norms = guard.update(step + 1, 1e-3)
            changed.append(not all(map(torch.equal, before, (shard.tensor for shard in engine.shards()))))
            assert (guard.skipped, guard.in_a_row) == [(0, 0), (1, 1), (1, 0)][step]
            assert math.isfinite(norms.total) == (step != 1)
        assert all(bool(parameter.isfinite().all()) for parameter in engine.model.parameters())
    return changed


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("engine", "precision", "reduction"),
    [
        ({"kind": "torch", "zero": 2}, "float32", "buckets"),
        ({"kind": "deepspeed", "zero": 0}, "float32", "end"),
        ({"kind": "deepspeed", "zero": 1}, "bfloat16", "end"),
        ({"kind": "deepspeed", "zero": 2}, "bfloat16", "buckets"),
    ],
    ids=str,
)
def test_a_skipped_step_changes_nothing_on_any_rank(ranks, engine: dict[str, Any], precision: str, reduction: str) -> None:
    recipe = make_recipe(2, {}, engine=engine, precision=precision, optimizer=_ADAMW, schedule={"reduction": reduction})
    assert ranks(2).run(_skip, recipe) == [[True, False, True]] * 2


def test_only_so_many_steps_in_a_row_are_skipped() -> None:
    recipe = make_recipe(1, {})
    with engine_on(recipe) as (engine, groups):
        guard, given = Guard(engine, groups, recipe.model, most=2), list[float]()
        asked = list[bool]()

        def update(lr: float, skips: bool) -> Norms:
            asked.append(skips)
            return Norms(dict.fromkeys(guard.classes, given[-1]))

        engine.update = update  # type: ignore[method-assign]
        for step, norm in enumerate([1.0, math.inf, 1.0, math.nan, math.nan]):
            given.append(norm)
            guard.update(step, 0.0)
        assert (asked, guard.skipped) == ([True, True, True, True, True], 3)
        given.append(math.inf)
        with pytest.raises(NothingTrained, match="step 9: the gradient norm of dense weights is inf, after 2 skipped steps"):
            guard.update(9, 0.0)
        assert asked[-1] is False, "the engine must not skip it"
