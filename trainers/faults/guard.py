"""Stops a training whose steps do not train, before a checkpoint saves the result, and finds losses that stand out.

A gradient that is not finite may also come from a few numbers of a text. A recipe may let training skip such steps.

Some combinations of precision, ZeRO stage and reduction may lose a gradient on its way to the optimizer. The loss may still
fall, because other weights train or by chance. Two signs are certain with every engine: the gradient of a class is zero in
the whole model, or no bit of a class's weights changes at a learning rate above zero.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch

from foldray.blueprint import ModelSpec, parameter_table
from foldray.blueprint.parameters import CLASSES, GradientClass
from foldray.comm import Groups
from foldray.runtime import Engine, Norms

_WINDOW, _FEWEST = 64, 20  # losses to compare with; with fewer, training has just begun
_TIMES, _LEAST = 8.0, 0.2  # a spike is so many deviations above the median, and so many nats


class NothingTrained(RuntimeError):
    """The gradient of a step is zero, infinite or NaN, or a step did not change any weight of a class."""


class Guard:
    """Checks the updates of an engine. Every rank has a guard, and all guards raise together.

    At most `most` steps in a row may be skipped because their gradient is not finite. `skipped` counts all that were skipped, and
    `in_a_row` those of them that are the newest steps.
    """

    def __init__(self, engine: Engine, groups: Groups, model: ModelSpec, most: int = 0):
        self.engine, self.groups, self.most = engine, groups, most
        self.skipped = self.in_a_row = 0
        self.classes = [
            name for name in CLASSES if name in {spec.gradient_class for spec in parameter_table(model) if spec.trained}
        ]
        self._moved = False

    def update(self, step: int, lr: float) -> Norms:
        """Call `Engine.update` for step number `step`, counted from 1. A skipped step changes nothing.

        Weights are compared only in the first step with a learning rate above zero.
        """
        compares = lr > 0 and not self._moved
        before = self._bits() if compares else {}
        norms = self.engine.update(lr, skips=self.in_a_row < self.most)
        if not math.isfinite(norms.total) and self.in_a_row < self.most:
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            return norms
        for name in self.classes:
            if norms[name] == 0 or not math.isfinite(norms[name]):
                after = f", after {self.in_a_row} skipped steps" if self.in_a_row else ""
                raise NothingTrained(f"step {step}: the gradient norm of {name} weights is {norms[name]}{after}")
        self.in_a_row = 0
        if compares:
            self._compare(step, lr, before)
            self._moved = True
        return norms

    def _compare(self, step: int, lr: float, before: dict[GradientClass, int]) -> None:
        after, device = self._bits(), next(self.engine.model.parameters()).device
        flags = [(name in after, after.get(name) != before.get(name)) for name in self.classes]
        counts = self.groups.control.all_reduce(torch.tensor(flags, dtype=torch.int64, device=device)).tolist()
        for name, (holding, changed) in zip(self.classes, counts, strict=True):
            if holding and not changed:  # an engine may count the weights of a class as another class; then no rank holds it
                raise NothingTrained(f"step {step}: no {name} weight has changed, at a learning rate of {lr:g}")

    def _bits(self) -> dict[GradientClass, int]:
        """Sum the bits of this rank's weights, read as integers, for each class. The sum changes if a weight changes."""
        sums: dict[GradientClass, int] = {}
        for name, weights in self.engine.weights():
            sums[name] = sums.get(name, 0) + int(weights.flatten().view(torch.int32).sum(dtype=torch.int64))
        return sums


class Spikes:
    """Compares every loss with the median of those before.

    The deviation is the median distance from that median, which one spike does not change.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = False

    def look(self, loss: float) -> float | None:
        """Add the loss of a step. Return the median before, if a spike begins with this loss."""
        before, was_high = list(self._losses), self._high
        self._losses.append(loss)
        if len(before) < _FEWEST or not math.isfinite(loss):
            return None
        median = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(earlier - median) for earlier in before)  # of a normal distribution
        self._high = loss - median > max(_TIMES * deviation, _LEAST)
        return median if self._high and not was_high else None
