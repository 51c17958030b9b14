"""A Gaussian process that learns a function of a table's rows, and the expected improvement of rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

_LENGTHS = (0.3, 30.0)  # bounds of length scales; the features of two rows differ by 1 to 20
_NOISE = (1e-5, 1e-2)  # bounds of the noise's variance, relative to the variance of the values


def fit_gaussian_process(features: np.ndarray, values: np.ndarray) -> Any:
    """Fit scikit-learn's Gaussian process with a Matérn kernel (ν = 2.5) and one length scale for every feature.

    Args:
        features: [measurements, features].
        values: [measurements].
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
    """Return E[max(0, best − value)] of every row [rows], for normally distributed values. Smaller values are better.

    Args:
        mean, deviation: mean and standard deviation of every row's value, [rows].
        best: the smallest value so far.
    """
    from scipy.stats import norm

    deviation = np.maximum(deviation, 1e-12)
    z = (best - mean) / deviation
    return deviation * (z * norm.cdf(z) + norm.pdf(z))
