"""DisagTrainer: a trainer whose experts have workers of their own."""

from __future__ import annotations

from typing import Any

from foldray.errors import UserError
from foldray.orders import AF_PIPE
from foldray.recipe import Recipe
from trainers.driver.trainer import FoldTrainer


class DisagTrainer(FoldTrainer):
    """Trains a recipe whose experts have workers of their own (DisagMoE).

    It is a `FoldTrainer` that sets the recipe's section `placement`. A recipe that has this section already needs nothing
    else; `FoldTrainer` trains it, too. Checkpoints do not depend on the placement, so `resume` and `start` take those of any
    other run of the model.

    Args:
        recipe: the recipe to train.
        attention: number of workers for attention; None is that of the recipe.
        experts: number of workers for the experts; None is that of the recipe.
        expert_pp: pipeline positions of the experts; None is those of the recipe, or `fold.pp`.
        **arguments: the other arguments of `FoldTrainer`.

    Raises:
        UserError: the numbers of workers are missing or illegal, or those of `FoldTrainer`.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        attention: int | None = None,
        experts: int | None = None,
        expert_pp: int | None = None,
        **arguments: Any,
    ):
        given = {"attention": attention, "experts": experts, "expert_pp": expert_pp}
        super().__init__(_placed(recipe, {key: value for key, value in given.items() if value is not None}), **arguments)


def _placed(recipe: Recipe, given: dict[str, int]) -> Recipe:
    """Return the recipe with these keys of `placement`, and with as many workers."""
    values = recipe.model_dump()
    placement = (values["placement"] or {}) | given
    if missing := [key for key in ("attention", "experts") if key not in placement]:
        raise UserError(f"placement.{missing[0]}", "nothing", "is required: the number of workers for this half")
    if recipe.placement is None:
        values["schedule"].update(kind=AF_PIPE.name, backward=None)
    values["cluster"]["workers"] = placement["attention"] + placement["experts"]
    return Recipe.parse({**values, "placement": placement})
