"""Bayesian optimisation: what to try next, by a Gaussian process of what was tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.version import describe_installation

Guess = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Of weights tried, their times and others: the best of the others."""


def import_guess() -> Guess:
    """A function of the weights tried, their times and others: the best of those.

    Raises:
        OptionError: If scikit-learn is missing.
    """
    try:
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern
    except ImportError:
        raise OptionError(
            "Planner 'autoswap-bo' needs scikit-learn: "
            f'{describe_installation("autoswap")}.'
        ) from None

    def guess(tried: np.ndarray, times: np.ndarray, others: np.ndarray) -> np.ndarray:
        process = GaussianProcessRegressor(
            Matern(nu=2.5), alpha=1e-6, normalize_y=True, random_state=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', ConvergenceWarning)  # all times are equal
            process.fit(tried, times)
        mean, spread = process.predict(others, return_std=True)
        spread = np.maximum(spread, 1e-12)
        better = times.min() - mean
        improvement = better * norm.cdf(better / spread)
        improvement += spread * norm.pdf(better / spread)
        return others[int(np.argmax(improvement))]

    return guess
