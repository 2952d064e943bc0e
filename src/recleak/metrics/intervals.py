"""A number and how sure it is: bootstrap intervals of a mean over users, exact intervals of a rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from recleak.random import bits

_CHUNK = 1 << 22  # resampled values held at a time, or one resample if the sample is larger


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its confidence interval, and the number of users or trials behind it.

    >>> print(Estimate(0.375, 0.345, 0.406, n=943))
    0.375 [0.345, 0.406]
    """

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_mean(values: NDArray[np.float64], *, seed: int, level: float = 0.95, resamples: int = 2000) -> Estimate:
    """The mean of one value per user, with its percentile bootstrap interval (Efron 1979).

    `resamples` times n users are drawn with replacement; the interval holds the middle `level` of the resampled means.
    Values that are all equal, or a single value, give an interval of no width: such a sample says nothing about its
    spread. Memory does not grow with `resamples` beyond one mean each.
    """
    values = np.asarray(values, np.float64)
    n = len(values)
    if values.ndim != 1 or n == 0:
        raise ValueError(
            f"Got values of shape {values.shape}, expected one value for each of at least one graded user."
        )
    unusable = int(np.count_nonzero(~np.isfinite(values)))
    if unusable:
        raise ValueError(
            f"Got {unusable:,} of {n:,} values that are NaN or infinite, expected a number for every user. "
            "Pass graded users only: a user without a target has no value."
        )
    _check_level(level)
    if resamples < 1:
        raise ValueError(f"Got resamples={resamples}, expected at least 1.")
    value = float(values.mean())
    if values.min() == values.max():
        return Estimate(value, value, value, n)
    generator = np.random.Generator(np.random.PCG64(int(bits(seed, "bootstrap"))))
    step = max(1, _CHUNK // n)
    means = np.concatenate(
        [
            values[generator.integers(n, size=(min(step, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, step)
        ]
    )  # f64[resamples]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n)


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> Estimate:
    """A rate with its exact interval: all rates p that neither tail of Binomial(trials, p) rejects at (1 - level) / 2.

    For x successes in n trials the ends are quantiles of Beta(x, n - x + 1) and Beta(x + 1, n - x) (Clopper and Pearson
    1934). The lower end is 0 without a success, the upper end 1 without a failure.

    >>> print(clopper_pearson(5, 10))
    0.500 [0.187, 0.813]
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(
            f"Got {successes} successes in {trials} trials, expected 0 <= successes <= trials and a trial."
        )
    _check_level(level)
    tail = (1 - level) / 2
    low = float(stats.beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = float(stats.beta.isf(tail, successes + 1, trials - successes)) if successes < trials else 1.0
    return Estimate(successes / trials, low, high, trials)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"Got level={level}, expected a confidence level between 0 and 1, such as 0.95.")
