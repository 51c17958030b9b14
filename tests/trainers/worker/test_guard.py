"""A step that trains nothing ends the training, with every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import Engine, TorchEngine
from tests.foldray.parity import batches, engine_of, make_recipe
from trainers.worker.guard import Guard, NothingTrained

_ADAMW = {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1}
_TORCH, _DEEPSPEED = {"kind": "torch", "zero": 1}, {"kind": "deepspeed", "zero": 2}


def _steps(rank: int, recipe: Recipe, harm: Callable[[Any], None] | None, rates: list[float]) -> str:
    """Run some steps with a guard, and return its error; an empty text if it raises none."""
    groups = Groups.create(recipe.placed_fold, rank)
    engine: Engine = engine_of(recipe, groups)
    guard = Guard(engine, groups, recipe.model)
    if harm is not None:
        harm(engine)
    try:
        for step, rate in enumerate(rates):
            engine.train(batches(recipe, groups.dp_rank, step))
            guard.update(step + 1, rate)
    except NothingTrained as error:
        return str(error)
    finally:
        engine.close()
        groups.close()
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


def _become_nan(engine: TorchEngine) -> None:
    sum_of = engine.gradients.sum_of
    engine.execution.gradients.sum_of = lambda p: sum_of(p).fill_(float("nan"))  # type: ignore[method-assign]


def _stand_still(engine: TorchEngine) -> None:
    for optimizer, _ in engine.optimizers:
        optimizer.step = lambda: None  # type: ignore[assignment, method-assign, misc]


@pytest.mark.parametrize(
    ("harm", "engine", "precision", "rates", "said"),
    [
        (_lose_gradients, _DEEPSPEED, "bfloat16", [1e-3], "step 1: the gradient norm of dense weights is 0.0"),
        (_forget_experts, _TORCH, "float32", [1e-3], "step 1: the gradient norm of expert weights is 0.0"),
        (_become_nan, _TORCH, "float32", [1e-3], "step 1: the gradient norm of dense weights is nan"),
        (_stand_still, _TORCH, "float32", [0.0, 1e-3], "step 2: no dense weight has changed, at a learning rate of 0.001"),
    ],
    ids=["lost gradients", "experts without gradients", "not a number", "no update"],
)
def test_what_trains_nothing_is_stopped_on_every_rank(
    ranks, harm: Callable, engine: dict[str, Any], precision: str, rates: list[float], said: str
) -> None:
    recipe = make_recipe(
        2, 2, engine=engine, precision=precision, optimizer=_ADAMW, schedule={"reduction": "buckets"}
    )  # weight decay changes weights without a gradient
    assert ranks(2).run(_steps, recipe, harm, rates) == [said] * 2
