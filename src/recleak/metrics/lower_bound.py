"""What epsilon is at least, from how well an adversary told what was in from what was out.

A guarantee of (epsilon, delta) limits how often a guess about one record can be right. If an adversary is right more
often than that, the guarantee does not hold, whatever was claimed. A lower bound of 0 shows nothing: a better adversary
may do better.

Every bound here is above the true epsilon in at most a share 1 - level of the audits, if the guesses (how many, and by
which threshold) were settled before the truth was looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log

import numpy as np
from scipy import special, stats

from recleak.metrics.intervals import clopper_pearson


def from_rates(
    true_positives: int,
    positives: int,
    false_positives: int,
    negatives: int,
    *,
    delta: float = 0.0,
    level: float = 0.95,
) -> float:
    """The largest epsilon that is refuted by guesses on independent runs, some with the record and some without.

    Under (epsilon, delta), TPR <= e^epsilon FPR + delta and TNR <= e^epsilon FNR + delta (Kairouz, Oh and Viswanath
    2015). With probability `level` the true TPR is at least t and the true FPR at most f, the ends of exact intervals
    that share the error (Clopper and Pearson 1934); then FNR <= 1 - t and TNR >= 1 - f as well, and

        epsilon >= max(log((t - delta) / f), log((1 - f - delta) / (1 - t)), 0).

    Many guesses on one run are not independent: `from_one_run` is for those.
    """
    _check_delta(delta)
    t = clopper_pearson(true_positives, positives, level).low
    f = clopper_pearson(false_positives, negatives, level).high
    return max(_log_ratio(t - delta, f), _log_ratio(1 - f - delta, 1 - t), 0.0)


def from_one_run(canaries: int, guesses: int, right: int, *, delta: float = 0.0, level: float = 0.95) -> float:
    """The largest epsilon that is refuted by one run with many canaries, each in it by a fair coin of its own.

    Of m canaries, r were guessed to be in or out and v of these guesses were right; on the others the adversary kept
    silent. Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", theorem 5.2 and appendix D.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(
            f"Got {right} right of {guesses} guesses on {canaries} canaries, expected right <= guesses <= canaries."
        )
    _check_delta(delta)
    if not 0 < level < 1:
        raise ValueError(f"Got level={level}, expected a confidence level between 0 and 1, such as 0.95.")
    return _largest(lambda epsilon: p_value(canaries, guesses, right, epsilon, delta) < 1 - level)


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The chance, at most, of so many right guesses in one run that is (epsilon, delta)-differentially private.

    With W from Binomial(r, e^epsilon / (1 + e^epsilon)), the guesses of randomized response,

        P[W >= v] + 2 m delta max over i of P[v > W >= v - i] / i,    i = 1, ..., v.
    """
    chance = special.expit(epsilon)
    tail = float(stats.binom.sf(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return min(tail, 1.0)
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))  # P[v > W >= v - i]
    return min(tail + 2 * canaries * delta * float(np.max(below / np.arange(1, right + 1))), 1.0)


def _largest(refuted: Callable[[float], bool]) -> float:
    """A refuted epsilon next to one that is not, by bisection; 0 if not even 0 is refuted."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _log_ratio(more: float, less: float) -> float:
    return log(more / less) if more > 0 else 0.0


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"Got delta={delta}, expected a number from 0 to below 1.")
