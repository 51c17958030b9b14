"""Which row of the table to measure next.

`ratio` is the one to use where there are predictions: a Gaussian process learns the logarithm of measured over predicted time,
so that what the planner knows need not be found again, and the row with the largest expected improvement is next. The others
are what it is to be compared with: `planner` takes the predicted best one after another and learns nothing, `random` any, `gp`
and `tpe` are Optuna's samplers, whose proposals are moved to the nearest row.

Where memory is to be small as well as time, every choice weighs the two anew, by chance, and looks for the best under these
weights (Knowles, "ParEGO", IEEE Transactions on Evolutionary Computation 10(1), 2006): so choices spread over the best of both.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from tuners.table import Table

LOST = "lost"
"""User attribute of a trial whose tuner went away: nobody has measured its row."""
REASON = "reason"
"""User attribute of a trial that failed: why."""
MEMORY = "memory"
"""How the reason of a trial begins that needed more memory than there is."""

_LEAST_GIB = 1 / 1024  # a logarithm is taken; a process may seem to need nothing where others left room
_STARTS = 3  # random ones of Optuna's samplers; its default of 10 would leave few of 15 trials to the model
_SUM = 0.05  # of both objectives beside the worse one (ParEGO's rho): no setting that is worse at one and equal at the other wins
_LENGTHS, _NOISE = (0.3, 30.0), (1e-5, 1e-2)  # bounds: features differ by 1 to 20; noise is a variance of logarithms over theirs


class TableSampler(BaseSampler):
    """Picks rows that nobody has measured and nobody is measuring.

    Args:
        predicted: seconds of every row; None where nothing is predicted.
        held: bytes of every row, as predicted: what needs as much as a row that did not fit is not tried.
        both: memory is to be small as well, not only seconds.
    """

    def __init__(
        self,
        table: Table[Any],
        kind: str,
        seed: int,
        predicted: Sequence[float] | None = None,
        held: Sequence[float] | None = None,
        both: bool = False,
    ):
        self.table, self.kind, self.held, self.both = table, kind, held, both
        self.predicted = None if predicted is None else np.log(np.asarray(predicted))
        self._random = np.random.default_rng(seed)
        starts = {"n_startup_trials": _STARTS, "seed": seed}
        inner = {"gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}.get(kind)
        self._inner = inner(**starts) if inner else None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.table.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = [each for each in study.get_trials(deepcopy=False) if each.number != trial.number]
        free = self.free(trials)
        if not free:
            return self.table.params(self.table.rows[0])
        if self.kind == "random":
            number = int(self._random.choice(free))
        elif self._inner is not None:
            number = self._nearest(self._inner.sample_relative(study, trial, search_space), free)
        elif self.kind == "planner":
            number = self._best_predicted(free)
        else:
            number = self._by_ratio(trials, free)
        return self.table.params(self.table.rows[number])

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise AssertionError(f"{param_name} is no parameter of the table")

    def free(self, trials: Iterable[FrozenTrial]) -> list[int]:
        """Rows that are left to try."""
        known = [each for each in trials if each.params and not each.user_attrs.get(LOST)]
        taken = {self._number(each) for each in known}
        tight = [self._number(each) for each in known if str(each.user_attrs.get(REASON, "")).startswith(MEMORY)]
        least = min((self.held[number] for number in tight), default=math.inf) if self.held is not None else math.inf
        return [
            number
            for number in range(len(self.table.rows))
            if number not in taken and (self.held is None or self.held[number] < least)
        ]

    def _number(self, trial: FrozenTrial) -> int:
        return self.table.number[self.table.row(trial.params)]

    def _nearest(self, params: dict[str, Any], free: list[int]) -> int:
        """The free row that differs least; any, where nothing is proposed yet."""
        if not params:
            return int(self._random.choice(free))
        wanted = self.table.encoded(params)
        distances = np.abs(self.table.features[free] - wanted).sum(axis=1)
        return free[int(distances.argmin())]

    def _best_predicted(self, free: list[int]) -> int:
        if self.predicted is None:
            return int(self._random.choice(free))
        return min(free, key=self.predicted.__getitem__)

    def _by_ratio(self, trials: Sequence[FrozenTrial], free: list[int]) -> int:
        """Largest expected improvement; rows that are being measured count as if they turned out as expected."""
        done = [
            each for each in trials if each.state in (TrialState.COMPLETE, TrialState.PRUNED) and each.user_attrs.get("seconds")
        ]
        if len(done) < 2:
            return self._best_predicted(free)
        rows = [self._number(each) for each in done]
        told, base = self._objective(done, rows)
        model = _fitted(self.table.features[rows], told - base[rows])
        running = [
            self._number(each)
            for each in trials
            if each.state == TrialState.RUNNING and each.params and not each.user_attrs.get(LOST)
        ]
        if running:
            believed = model.predict(self.table.features[running])
            rows, told = rows + running, np.concatenate([told, believed + base[running]])
            model.set_params(optimizer=None, kernel=model.kernel_)
            model.fit(self.table.features[rows], told - base[rows])
        mean, deviation = model.predict(self.table.features[free], return_std=True)
        return free[int(expected_improvement(mean + base[free], deviation, float(told.min())).argmax())]

    def _objective(self, done: Sequence[FrozenTrial], rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What is to be small: of what was measured, and of every row as predicted (0 where nothing is)."""
        none = np.zeros(len(self.table.rows))
        seconds = np.log([each.user_attrs["seconds"] for each in done])
        if not self.both:
            return seconds, none if self.predicted is None else self.predicted
        held = np.log([max(each.user_attrs["peak_gib"], _LEAST_GIB) * 2**30 for each in done])
        told = np.stack([seconds, held], axis=1)
        weigh = _weighed(told, float(self._random.random()))
        if self.predicted is None or self.held is None:
            return weigh(told), none
        said = np.stack([self.predicted, np.log(np.asarray(self.held))], axis=1)
        return weigh(told), weigh(said + np.median(told - said[rows], axis=0))  # level: which of both is worse goes by it


def _weighed(told: np.ndarray, weight: float) -> Callable[[np.ndarray], np.ndarray]:
    """One number from two, the worse of both by their weights, in spans of what was measured (ParEGO, section II)."""
    low, span = told.min(axis=0), np.maximum(np.ptp(told, axis=0), 1e-6)
    weights = np.array([weight, 1 - weight])

    def weigh(values: np.ndarray) -> np.ndarray:
        parts = weights * (values - low) / span
        return parts.max(axis=1) + _SUM * parts.sum(axis=1)

    return weigh


def _fitted(features: np.ndarray, values: np.ndarray) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel(1.0, (0.1, 10.0)) * Matern(np.full(features.shape[1], 3.0), _LENGTHS, nu=2.5) + WhiteKernel(
        1e-3, _NOISE
    )
    model = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # length scales at their bounds: that feature does not matter
        return model.fit(features, values)


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Of minimising, by a normal distribution of each row: E[max(0, best - value)]."""
    from scipy.stats import norm

    deviation = np.maximum(deviation, 1e-12)
    z = (best - mean) / deviation
    return deviation * (z * norm.cdf(z) + norm.pdf(z))
