"""The search for the degree and the size of gradient chunks in the first steps of a training.

The search for the size is FlowMoE's Bayesian search for S_p (section 4.1).
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

_STARTS = 3  # random first rows, one from each third of the sizes; few, so that the model chooses most rows
_PER_OCTAVE = 4  # sizes from one power of 2 to the next; neighbours differ by a fifth, which hardly changes a step's time


class OnlineSearch:
    """Proposes degrees and sizes with a Gaussian process that learns from the steps measured so far.

    Small chunks take more time to start, and large chunks leave gaps empty. Many pieces of a sequence start more kernels.

    Args:
        degrees: degrees to choose from.
        sizes: smallest and largest size of a chunk, in bytes; None if the size is settled.
        samples: number of rows to try; None tries 8 if only the degree or only the size is open, and 16 if both are.
        seed: equal seeds and equal measured times give equal proposals.
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
        """Return the next row to try; None if all samples were taken."""
        if len(self.measured) == self.samples:
            return None
        trial = self._study.ask(self.table.distributions)
        knobs = self.table.row(trial.params)
        self._asked[knobs] = trial
        return knobs

    def tell(self, knobs: Knobs, seconds: float) -> None:
        """Take the seconds of a step with a row that `ask` returned."""
        trial = self._asked.pop(knobs)
        write_trial(trial, TrialRecord(seconds=seconds))
        self._study.tell(trial, seconds)
        self.measured.append((knobs, seconds))

    @property
    def finalists(self) -> list[Knobs]:
        return self.ranked[:2]

    @property
    def ranked(self) -> list[Knobs]:
        """The tried rows by their *measured* times, not by the model's expectation; the fastest first."""
        return [knobs for knobs, _ in sorted(self.measured, key=lambda pair: pair[1])]


def _scale(smallest: int, largest: int) -> list[int]:
    """Return sizes from the smallest to the largest, in equal steps of their logarithm."""
    count = max(1, round(math.log2(largest / smallest) * _PER_OCTAVE))
    return sorted({round(smallest * (largest / smallest) ** (number / count)) for number in range(count + 1)})
