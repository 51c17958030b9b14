"""The search in the first steps of a training: for the degree, and for the number of gradient bytes that travel at once.

The latter is FlowMoE's Bayesian search for S_p (section 4.1).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import optuna

from trainers.worker.online import Knobs
from tuners.record import TrialRecord, write_trial
from tuners.samplers import MeasuredTime, TableSampler
from tuners.table import Table

_STARTS = 3  # random rows, each from its third of the sizes; few, so that the model chooses most samples
_PER_OCTAVE = 4  # sizes; neighbours differ by a fifth, far less than shows in a step's time


class OnlineSearch:
    """Proposes degrees and sizes by a Gaussian process of the steps measured so far.

    Small chunks pay for their starts, and large ones leave gaps; many pieces of a sequence pay for their kernels.

    Args:
        degrees: degrees to choose from.
        sizes: the smallest and the largest number of bytes; None if the size is settled.
        samples: how many rows to try; None is 8 for each of degree and size that there is a choice of.
        seed: equal seeds give equal proposals for equal answers.
    """

    def __init__(self, degrees: Sequence[int], sizes: tuple[int, int] | None = None, samples: int | None = None, seed: int = 0):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        chances, scale = random.Random(seed), _scale(*sizes) if sizes else [0]
        self.table = Table(Knobs(degree, size) for degree in degrees for size in scale)
        wanted = samples or 8 * ((len(degrees) > 1) + (len(scale) > 1))
        self.samples = min(max(1, wanted), len(self.table.rows))
        self._study = optuna.create_study(sampler=TableSampler(self.table, MeasuredTime(self.table, seed)))
        self._asked: dict[Knobs, optuna.Trial] = {}
        self.measured: list[tuple[Knobs, float]] = []
        orders = chances.sample(list(degrees), len(degrees))
        for start in range(min(_STARTS, self.samples)):
            third = scale[start * len(scale) // _STARTS : (start + 1) * len(scale) // _STARTS] or scale
            row = Knobs(orders[start % len(orders)], chances.choice(third))
            self._study.enqueue_trial(self.table.params(row), skip_if_exists=True)

    def ask(self) -> Knobs | None:
        """Return what to try next; None if all samples were taken."""
        if len(self.measured) == self.samples:
            return None
        trial = self._study.ask(self.table.distributions)
        knobs = self.table.row(trial.params)
        self._asked[knobs] = trial
        return knobs

    def tell(self, knobs: Knobs, seconds: float) -> None:
        """Report the step's duration with knobs that `ask` returned."""
        trial = self._asked.pop(knobs)
        write_trial(trial, TrialRecord(seconds=seconds))
        self._study.tell(trial, seconds)
        self.measured.append((knobs, seconds))

    @property
    def ranked(self) -> list[Knobs]:
        """What was tried, by the *measured* step and not by what the model expects; the fastest first."""
        return [knobs for knobs, _ in sorted(self.measured, key=lambda pair: pair[1])]


def _scale(smallest: int, largest: int) -> list[int]:
    """Sizes from the smallest to the largest, in equal steps of their logarithm."""
    count = max(1, round(math.log2(largest / smallest) * _PER_OCTAVE))
    return sorted({round(smallest * (largest / smallest) ** (number / count)) for number in range(count + 1)})
