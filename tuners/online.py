"""The search at the start of a training: the degree, and how many bytes of gradients should travel at once (FlowMoE's Bayesian
search for S_p, section 4.1), as asking and telling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import optuna

from trainers.worker.online import Knobs
from tuners.sampler import TableSampler
from tuners.table import Table

_STARTS = 3  # by chance, each from its third of the sizes; few, so that most samples are the model's
_PER_OCTAVE = 4  # sizes: neighbours differ by a fifth, far less than shows in a step's time


class OnlineSearch:
    """Proposes rows of a table of degrees and sizes, by a Gaussian process of what was measured. Small chunks pay for their
    starts, large ones leave gaps; many pieces pay for their kernels.

    Args:
        degrees: to choose from.
        sizes: smallest and largest number of bytes; None where that is settled.
        samples: rows to try in all; None is 8 for each of the two that there is a choice of.
        seed: the same one gives the same proposals for the same answers.
    """

    def __init__(self, degrees: Sequence[int], sizes: tuple[int, int] | None = None, samples: int | None = None, seed: int = 0):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        chances, scale = random.Random(seed), _scale(*sizes) if sizes else [0]
        self.table = Table(Knobs(degree, size) for degree in degrees for size in scale)
        wanted = samples or 8 * ((len(degrees) > 1) + (len(scale) > 1))
        self.samples = min(max(1, wanted), len(self.table.rows))
        self._study = optuna.create_study(sampler=TableSampler(self.table, "ratio", seed))
        self._asked: dict[Knobs, optuna.Trial] = {}
        self.measured: list[tuple[Knobs, float]] = []
        orders = chances.sample(list(degrees), len(degrees))
        for start in range(min(_STARTS, self.samples)):
            third = scale[start * len(scale) // _STARTS : (start + 1) * len(scale) // _STARTS] or scale
            row = Knobs(orders[start % len(orders)], chances.choice(third))
            self._study.enqueue_trial(self.table.params(row), skip_if_exists=True)

    def ask(self) -> Knobs | None:
        """What to try next; None when all samples have been taken."""
        if len(self.measured) == self.samples:
            return None
        trial = self._study.ask(self.table.distributions)
        knobs = self.table.row(trial.params)
        self._asked[knobs] = trial
        return knobs

    def tell(self, knobs: Knobs, seconds: float) -> None:
        """What a step took with what was asked."""
        trial = self._asked.pop(knobs)
        trial.set_user_attr("seconds", seconds)
        self._study.tell(trial, seconds)
        self.measured.append((knobs, seconds))

    @property
    def ranked(self) -> list[Knobs]:
        """By the shortest step *measured* with each, not by what the model believes; the fastest first."""
        return [knobs for knobs, _ in sorted(self.measured, key=lambda each: each[1])]


def _scale(smallest: int, largest: int) -> list[int]:
    """Sizes from the smallest to the largest, in equal steps of their logarithm."""
    count = max(1, round(math.log2(largest / smallest) * _PER_OCTAVE))
    return sorted({round(smallest * (largest / smallest) ** (number / count)) for number in range(count + 1)})
