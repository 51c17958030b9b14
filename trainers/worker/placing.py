"""When experts change places between ranks: by the loads of the last steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from foldray.blueprint.placing import overload_of, spread
from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import Engine
from foldray.runtime.expert_order import reorder_experts
from trainers.telemetry.records import Placed

GAIN = 1.05  # overload before over overload behind; less would not be worth the way


class ExpertPlacing:
    """Gives experts new places, as a recipe says (`moe.place_every`). All ranks must make one.

    Args:
        tell: takes a record; rank 0 calls it.
    """

    def __init__(self, recipe: Recipe, groups: Groups, engine: Engine, tell: Callable[[Placed], None]):
        self._every, self._ep, self._layers = recipe.moe.place_every, recipe.fold.ep, recipe.model.moe_layers
        self._groups, self._engine, self._tell = groups, engine, tell
        self._loads: list[torch.Tensor] = []

    def after(self, step: int, count_ME: torch.Tensor) -> None:
        """Take the assignments of a finished step on all ranks, and perhaps move experts. All ranks must call this."""
        if self._every is None:
            return
        self._loads.append(count_ME)
        if step % self._every:
            return
        load_ME, orders = torch.stack(self._loads).sum(0).tolist(), dict[int, list[int]]()
        self._loads.clear()
        before = after = 0.0
        for layer, load_E in zip(self._layers, load_ME, strict=True):
            order, now = spread(load_E, self._ep), overload_of(load_E, self._ep)
            then = overload_of(load_E, self._ep, order)
            if now > GAIN * then:
                orders[layer] = order
            before, after = before + now, after + (then if layer in orders else now)
        if not orders:
            return
        reorder_experts(self._engine, self._groups, orders)
        if self._groups.control.index == 0:
            moved, blocks = sum(a != b for order in orders.values() for a, b in enumerate(order)), len(self._layers)
            self._tell({
                "kind": "placed", "step": step, "experts": moved, "overload": before / blocks, "expected": after / blocks,
            })  # fmt: skip
