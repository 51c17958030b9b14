"""A step that trains nothing ends the training: with a message, before a checkpoint keeps it.

Where a precision, a ZeRO stage and a way of reducing meet, a gradient may get lost on its way to the optimizer. The loss may
still fall, by other weights or by chance. Two signs are certain, whatever the engine: the gradient of a class of weights is zero
over the whole model, or no bit of a class changes at a learning rate above zero.
"""

from __future__ import annotations

import math

import torch

from foldray.blueprint import ModelSpec, parameter_table
from foldray.blueprint.parameters import CLASSES, GradientClass
from foldray.comm import Groups
from foldray.runtime import Engine, Norms


class NothingTrained(RuntimeError):
    """A step whose gradient is zero or no number, or that left weights as they were."""


class Guard:
    """An engine's updates, looked at. Every rank holds one, and all raise together.

    Args:
        model: tells which classes of weights there are.
    """

    def __init__(self, engine: Engine, groups: Groups, model: ModelSpec):
        self.engine, self.groups = engine, groups
        self.classes = [name for name in CLASSES if name in {spec.gradient_class for spec in parameter_table(model)}]
        self._moved = False

    def update(self, step: int, lr: float) -> Norms:
        """`Engine.update` as step number `step`, from 1.

        Raises:
            NothingTrained: what the class says; weights are compared at the first step with a learning rate above zero.
        """
        looks = lr > 0 and not self._moved
        before = self._bits() if looks else {}
        norms = self.engine.update(lr)
        for name in self.classes:
            if norms[name] == 0 or not math.isfinite(norms[name]):
                raise NothingTrained(f"step {step}: the gradient norm of {name} weights is {norms[name]}")
        if looks:
            self._compare(step, lr, before)
            self._moved = True
        return norms

    def _compare(self, step: int, lr: float, before: dict[GradientClass, int]) -> None:
        after, device = self._bits(), next(self.engine.model.parameters()).device
        told = [(name in after, after.get(name) != before.get(name)) for name in self.classes]
        ranks = self.groups.control.all_reduce(torch.tensor(told, dtype=torch.int64, device=device)).tolist()
        for name, (holding, changed) in zip(self.classes, ranks, strict=True):
            if holding and not changed:  # an engine may keep a class among another one's weights
                raise NothingTrained(f"step {step}: no {name} weight has changed, at a learning rate of {lr:g}")

    def _bits(self) -> dict[GradientClass, int]:
        """For each class, the sum of what its weights here are as integers: a weight that changes, changes it."""
        found: dict[GradientClass, int] = {}
        for name, weights in self.engine.weights():
            found[name] = found.get(name, 0) + int(weights.flatten().view(torch.int32).sum(dtype=torch.int64))
        return found
