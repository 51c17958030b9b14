"""Samplers, which choose the next row of a table. The table `SAMPLERS` has their names.

`ratio` is the sampler to use if there are predictions. Its Gaussian process learns the logarithm of measured over predicted
time, so it does not have to learn again what the planner knows. The other samplers are for comparison.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from foldray.recipe.bounds import SamplerName
from tuners.predictions import Predictions
from tuners.record import StoredTrial, read_trials
from tuners.table import Table

_LEAST_GIB = 1 / 1024  # lower bound for the logarithm; a recipe may seem to need no memory if it reuses another's
_RANDOM_STARTS = 3  # random trials of Optuna's samplers; after their default of 10, few of 15 trials would use the model
_LEAST_MEASURED = 2  # trials before a Gaussian process is fitted
_LENGTHS = (0.3, 30.0)  # bounds of its length scales; the features of two rows differ by 1 to 20
_NOISE = (1e-5, 1e-2)  # bounds of the noise's variance, relative to the variance of the values
_SUM_WEIGHT = 0.05  # ParEGO's rho; because of it, a row that is worse at one objective and equal at the other never wins


class Request(NamedTuple):
    """The input of a sampler for one choice.

    `others` are the trials beside `trial` that have a row and were not lost. At least one row is untried.
    """

    study: optuna.Study
    trial: FrozenTrial
    others: Sequence[StoredTrial]
    untried: Sequence[int]


class RowSampler(Protocol):
    """The interface of samplers. Their constructors take a table, a seed, and predictions or None."""

    def choose(self, request: Request) -> int:
        """Return the index of one of the untried rows."""


Seed = int | np.random.Generator


class UniformRandom:
    """Chooses any untried row; all are equally likely."""

    def __init__(self, table: Table[Any], seed: Seed, predictions: Predictions | None = None):
        self._random = np.random.default_rng(seed)

    def choose(self, request: Request) -> int:
        return int(self._random.choice(request.untried))


class PlannerOrder:
    """Chooses the row with the shortest predicted step. It learns nothing from measurements."""

    def __init__(self, table: Table[Any], seed: Seed, predictions: Predictions | None = None):
        assert predictions is not None, "the planner's order needs predictions"
        self._seconds = predictions.seconds

    def choose(self, request: Request) -> int:
        return min(request.untried, key=self._seconds.__getitem__)


class OptunaProposal(ABC):
    """Chooses the untried row nearest to the proposal of one of Optuna's samplers (L1 distance of `Table.features`)."""

    proposer: ClassVar[Callable[..., BaseSampler]]

    def __init__(self, table: Table[Any], seed: int, predictions: Predictions | None = None):
        self.table = table
        self._start = UniformRandom(table, seed)
        self._proposer = type(self).proposer(n_startup_trials=_RANDOM_STARTS, seed=seed)

    def choose(self, request: Request) -> int:
        params = self._proposer.sample_relative(request.study, request.trial, self.table.distributions)
        if not params:  # Optuna's sampler has too few trials to propose anything
            return self._start.choose(request)
        distances = np.abs(self.table.features[request.untried] - self.table.encode(params)).sum(axis=1)
        return request.untried[int(distances.argmin())]


class OptunaGP(OptunaProposal):
    proposer = optuna.samplers.GPSampler


class OptunaTPE(OptunaProposal):
    proposer = optuna.samplers.TPESampler


class ExpectedImprovement(ABC):
    """Chooses the row with the largest expected improvement.

    A Gaussian process learns the objective minus a baseline. A row that is being measured counts with its expected value.
    """

    def __init__(self, table: Table[Any], seed: Seed, predictions: Predictions | None = None):
        self.table, self.predictions = table, predictions
        self.random = np.random.default_rng(seed)
        start = UniformRandom if predictions is None else PlannerOrder
        self._start: RowSampler = start(table, self.random, predictions)

    @abstractmethod
    def objective(self, measured: Sequence[StoredTrial]) -> tuple[np.ndarray, np.ndarray]:
        """Return the values to minimize of the measured trials [measured], and the baseline of all rows [rows]."""

    def can_learn_from(self, trial: StoredTrial) -> bool:
        return trial.was_measured

    def choose(self, request: Request) -> int:
        measured = [trial for trial in request.others if self.can_learn_from(trial)]
        if len(measured) < _LEAST_MEASURED:
            return self._start.choose(request)
        rows = _rows(measured)
        values, baseline = self.objective(measured)
        features, untried = self.table.features, list(request.untried)
        model = fit_gaussian_process(features[rows], values - baseline[rows])
        if running := _rows(trial for trial in request.others if trial.state == TrialState.RUNNING):
            expected = model.predict(features[running])
            rows, values = rows + running, np.concatenate([values, expected + baseline[running]])
            model.set_params(optimizer=None, kernel=model.kernel_)
            model.fit(features[rows], values - baseline[rows])
        mean, deviation = model.predict(features[untried], return_std=True)
        return untried[int(expected_improvement(mean + baseline[untried], deviation, float(values.min())).argmax())]


class MeasuredTime(ExpectedImprovement):
    """Learns the logarithm of the measured time, without predictions."""

    def objective(self, measured: Sequence[StoredTrial]) -> tuple[np.ndarray, np.ndarray]:
        return _log_seconds(measured), np.zeros(len(self.table.rows))


class MeasuredOverPredicted(ExpectedImprovement):
    """Learns the logarithm of measured over predicted time."""

    def objective(self, measured: Sequence[StoredTrial]) -> tuple[np.ndarray, np.ndarray]:
        assert self.predictions is not None, "measured over predicted time needs predictions"
        return _log_seconds(measured), np.log(self.predictions.seconds)


class TimeAndMemory(ExpectedImprovement):
    """Learns a mix of the logarithms of time and memory. Every choice draws a new random weight for the mix.

    So the choices spread over the settings that no other setting beats at both (Knowles, "ParEGO", IEEE Transactions on
    Evolutionary Computation 10(1), 2006, section II).
    """

    def can_learn_from(self, trial: StoredTrial) -> bool:
        return super().can_learn_from(trial) and trial.record.peak_gib is not None

    def objective(self, measured: Sequence[StoredTrial]) -> tuple[np.ndarray, np.ndarray]:
        log_bytes = np.log([max(trial.record.peak_gib or 0.0, _LEAST_GIB) * 2**30 for trial in measured])
        values_M2 = np.stack([_log_seconds(measured), log_bytes], axis=1)
        scalarize = _scalarization(values_M2, float(self.random.random()))
        if self.predictions is None:
            return scalarize(values_M2), np.zeros(len(self.table.rows))
        predicted_R2 = np.log(np.stack(self.predictions, axis=1))
        # A constant error of the predictions would change which of the two objectives is the worse one, so it is removed.
        shift = np.median(values_M2 - predicted_R2[_rows(measured)], axis=0)
        return scalarize(values_M2), scalarize(predicted_R2 + shift)


def fit_gaussian_process(features: np.ndarray, values: np.ndarray) -> Any:
    """Fit a Gaussian process (Matérn kernel, ν = 2.5, a length scale for every feature).

    The features are [measurements, features], the values [measurements].
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    matern = Matern(np.full(features.shape[1], 3.0), _LENGTHS, nu=2.5)
    kernel = ConstantKernel(1.0, (0.1, 10.0)) * matern + WhiteKernel(1e-3, _NOISE)
    model = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a scale at its bound: this feature does not matter
        return model.fit(features, values)


def expected_improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Return E[max(0, best − value)] of every row [rows], for normally distributed values. Smaller values are better."""
    from scipy.stats import norm

    deviation = np.maximum(deviation, 1e-12)
    z = (best - mean) / deviation
    return deviation * (z * norm.cdf(z) + norm.pdf(z))


def _rows(trials: Iterable[StoredTrial]) -> list[int]:
    return [trial.row for trial in trials if trial.row is not None]


def _log_seconds(trials: Sequence[StoredTrial]) -> np.ndarray:
    return np.log([trial.record.seconds or math.nan for trial in trials])


def _scalarization(values_M2: np.ndarray, weight: float) -> Callable[[np.ndarray], np.ndarray]:
    """Make a function from two objectives [n, 2] to the larger of both, plus a small share of their sum [n].

    Each objective is weighted, and in units of its measured range.
    """
    low, span = values_M2.min(axis=0), np.maximum(np.ptp(values_M2, axis=0), 1e-6)
    weights = np.array([weight, 1 - weight])

    def scalarize(values_N2: np.ndarray) -> np.ndarray:
        parts_N2 = weights * (values_N2 - low) / span
        return parts_N2.max(axis=1) + _SUM_WEIGHT * parts_N2.sum(axis=1)

    return scalarize


class Way(NamedTuple):
    """A row of `SAMPLERS`.

    Args:
        sampler: the class for a study with predictions.
        cold: the class for a study without predictions.
        second: the class for a study of time and memory; None takes one of the others.
        starts: whether the rows with the best predictions are measured first.
    """

    sampler: Callable[..., RowSampler]
    cold: Callable[..., RowSampler]
    second: Callable[..., RowSampler] | None = None
    starts: bool = True


SAMPLERS: Mapping[SamplerName, Way] = {
    "ratio": Way(MeasuredOverPredicted, cold=MeasuredTime, second=TimeAndMemory),
    "gp": Way(OptunaGP, cold=OptunaGP),
    "tpe": Way(OptunaTPE, cold=OptunaTPE),
    "random": Way(UniformRandom, cold=UniformRandom, starts=False),
    "planner": Way(PlannerOrder, cold=UniformRandom),
}
"""The samplers by their names in `tune.sampler`."""


class TableSampler(BaseSampler):
    """An Optuna sampler that lets a `RowSampler` choose among the untried rows.

    A row counts as tried if another row did not fit and needs no more memory, according to the predictions.
    """

    def __init__(self, table: Table[Any], sampler: RowSampler, predictions: Predictions | None = None):
        self.table, self.sampler, self.predictions = table, sampler, predictions

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.table.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        others = [known for known in read_trials(study, self.table) if known.number != trial.number and known.has_row]
        untried = self.untried_rows(others)
        row = self.sampler.choose(Request(study, trial, others, untried)) if untried else 0
        return self.table.params(self.table.rows[row])

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise AssertionError(f"{param_name} is not a parameter of the table")

    def untried_rows(self, trials: Sequence[StoredTrial]) -> list[int]:
        """Return the indices of the rows without a trial that are not predicted to need too much memory."""
        known = [trial for trial in trials if trial.has_row]
        taken = set(_rows(known))
        free = (number for number in range(len(self.table.rows)) if number not in taken)
        untried = self.table.within_reach(free, {trial.row: trial.record.seconds for trial in known if trial.row is not None})
        if self.predictions is None:
            return untried
        peak_bytes = self.predictions.peak_bytes
        too_large = [peak_bytes[row] for row in _rows(trial for trial in known if trial.record.needs_too_much_memory)]
        return [number for number in untried if peak_bytes[number] < min(too_large, default=math.inf)]


def make_sampler(
    name: SamplerName, table: Table[Any], seed: int, predictions: Predictions | None = None, second: bool = False
) -> TableSampler:
    """Make a sampler by its name. `second` says whether memory is a second objective beside time."""
    way = SAMPLERS[name]
    make = (second and way.second) or (way.cold if predictions is None else way.sampler)
    return TableSampler(table, make(table, seed, predictions), predictions)
