"""How an audit compares: differences on the same users, rates over pairs, many tests at once, the attacker's choice.

Values come by seed, for users that are mostly the same in every seed. Which attack is strongest is decided on
validation users, how strong it is on the others.

Axis letters: S seeds, U users of a seed, n questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from recleak.metrics.inference import PerUser
from recleak.metrics.intervals import Estimate, bootstrap_crossed, clopper_pearson, crossed_p
from recleak.random import uniform

_Bools: TypeAlias = NDArray[np.bool_]
_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Difference:
    """A difference with the ends of its interval, and the p value of there being none."""

    value: float
    low: float
    high: float
    users: int  # different ones, over all seeds
    seeds: int
    p: float


def paired(
    first: Sequence[PerUser], second: Sequence[PerUser], *, seed: int, level: float = 0.95, resamples: int = 2000
) -> Difference:
    """The mean over seeds and users of first - second, on the users that both have in the same seed.

    The interval is that of `bootstrap_crossed`, because the users of all seeds are the same people: if they differ more
    than seeds do, `bootstrap_two_level` covers the truth in 60 % instead of 95 % with five seeds. The two-sided p value
    is `crossed_p`, which turns that interval round: Student's test over users for one seed, widened by Student's law
    for the few seeds if there are several.
    """
    if len(first) != len(second):
        raise ValueError(f"Got {len(first)} and {len(second)} seeds, expected the same seeds twice.")
    users, values = [], []
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        if any(np.any(np.diff(each.user) <= 0) for each in (one, other)):
            raise ValueError(f"Got users of seed number {place + 1} out of order or twice, expected them ascending.")
        common, of_one, of_other = np.intersect1d(one.user, other.user, assume_unique=True, return_indices=True)
        if len(common) == 0:
            raise ValueError(
                f"Got {len(one.user):,} and {len(other.user):,} users in seed number {place + 1} that have no user in "
                "common, expected some users with both values."
            )
        users.append(common)
        values.append(one.value[of_one] - other.value[of_other])
    found = bootstrap_crossed(users, values, seed=seed, level=level, resamples=resamples)
    return Difference(found.value, found.low, found.high, found.n, len(first), crossed_p(users, values))


def holm(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """p values adjusted for as many tests as there are (Holm 1979), in the order given.

    The i-th smallest of m is multiplied with m - i + 1, and none falls below a smaller one. Rejecting where the result
    is at most α rejects any true hypothesis with a chance of at most α, however the tests depend on each other. NaN was
    not tested: it stays NaN and is not among the m.

    >>> holm(np.array([0.01, 0.04, np.nan, 0.03])).tolist()
    [0.03, 0.06, nan, 0.06]
    """
    p = np.asarray(p, np.float64)
    tested = np.flatnonzero(~np.isnan(p))
    if p.ndim != 1 or np.any((p < 0) | (p > 1)):
        raise ValueError(f"Got p values of shape {p.shape}, expected a vector of numbers from 0 to 1, or NaN.")
    order = tested[np.argsort(p[tested], kind="stable")]
    adjusted = np.full_like(p, np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1)
    return adjusted


@dataclass(frozen=True, eq=False)
class Counts:
    """How many of a user's trials were hits, for the users of one seed."""

    user: NDArray[np.int64]  # i64[U], ascending
    hits: NDArray[np.int64]  # i64[U]
    trials: NDArray[np.int64]  # i64[U], 0 at least

    @classmethod
    def of(cls, hit: _Bools, user: _Ints) -> Counts:
        """From one element per trial, bool[n] and i64[n].

        The true positives of claims are `Counts.of(claim[truth], user[truth])`, the false ones the same for `~truth`.
        """
        users, code = np.unique(user, return_inverse=True)
        hits, trials = (np.bincount(each, minlength=len(users)) for each in (code[hit], code))
        return cls(users, hits, trials)


def bootstrap_rate(
    counts: Sequence[Counts],
    *,
    seed: int,
    level: float = 0.95,
    resamples: int = 2000,
    alarms: Sequence[Counts] = (),
    slopes: Sequence[float] = (),
) -> Estimate:
    """All hits over all trials, with the interval of `bootstrap_crossed`: users and seeds are drawn, not single trials.

    Resampled ratios are linearized: the mean of rate + (hits - rate trials) / mean trials (Cochran 1977, section 6.3).
    Where hits (or misses) are few, resamples know too little of the larger rates that are possible. So the interval
    also holds that of Clopper and Pearson for as many trials as are worth the variance, rate (1 - rate) / variance
    (Korn and Graubard 1998), or for one trial per user if there is no hit or no miss. If the hits are those of a
    handful of users, the upper end is still too low. `n` is the number of users with a trial.

    True positives at a false positive rate rest on a threshold that other users would put elsewhere. `alarms` are the
    false positives at it, of the same users, and `slopes` those of the ROC curve there, by seed: then a user's share is
    hits minus slope times alarms, because a user's own alarms move the threshold up (Pepe 2003, section 5.2).
    """
    rate = _rate(counts)
    users = [each.user for each in counts]
    values = _linearized(counts, rate)
    if alarms:
        false = [_linearized([each], _rate([each]))[0] for each in alarms]
        values = [one - slope * (other - other.mean()) for one, slope, other in zip(values, slopes, false, strict=True)]
    drawn = bootstrap_crossed(users, values, seed=seed, level=level, resamples=resamples)
    n = len(np.unique(np.concatenate([each.user[each.trials > 0] for each in counts])))
    if rate in (0, 1):
        return clopper_pearson(round(rate) * n, n, level)
    tail = (1 - level) / 2
    variance = ((drawn.high - drawn.low) / 2 / stats.norm.isf(tail)) ** 2
    trials = float(sum(each.trials.sum() for each in counts))
    worth = min(trials, rate * (1 - rate) / variance) if variance > 0 else trials
    hits, misses = rate * worth, (1 - rate) * worth
    low, high = stats.beta.ppf(tail, hits, misses + 1), stats.beta.isf(tail, hits + 1, misses)
    return Estimate(rate, max(0.0, min(drawn.low, float(low))), min(1.0, max(drawn.high, float(high))), n)


def bootstrap_rate_difference(
    first: Sequence[Counts], second: Sequence[Counts], *, seed: int, level: float = 0.95, resamples: int = 2000
) -> Estimate:
    """The rate of the first minus that of the second, over the users of either, as in `bootstrap_rate`.

    True minus false positives at a threshold that was fixed on other users are an attack's advantage. A user is drawn
    with both counts, so what they share cancels. A rate of 0 or 1 shares nothing: then the two intervals are combined
    as if independent, each end as far off as the root of the summed squares (Zou and Donner 2008).
    """
    if len(first) != len(second):
        raise ValueError(f"Got {len(first)} and {len(second)} seeds, expected the same seeds twice.")
    users = [np.union1d(one.user, other.user) for one, other in zip(first, second, strict=True)]
    first, second = ([_spread(one, to) for one, to in zip(each, users, strict=True)] for each in (first, second))
    rates = _rate(first), _rate(second)
    value, n = rates[0] - rates[1], len(np.unique(np.concatenate(users)))
    if 0 in rates or 1 in rates:
        one, other = (bootstrap_rate(each, seed=seed, level=level, resamples=resamples) for each in (first, second))
        below = np.hypot(one.value - one.low, other.high - other.value)
        above = np.hypot(one.high - one.value, other.value - other.low)
        return Estimate(value, max(-1.0, float(value - below)), min(1.0, float(value + above)), n)
    pairs = zip(_linearized(first, rates[0]), _linearized(second, rates[1]), strict=True)
    differences = [one - other for one, other in pairs]
    drawn = bootstrap_crossed(users, differences, seed=seed, level=level, resamples=resamples)
    return Estimate(value, max(-1.0, drawn.low), min(1.0, drawn.high), n)


def strongest(candidates: Mapping[str, Sequence[PerUser]]) -> str:
    """The attack whose AUC, the mean over seeds and users, is largest; of equals, the first by name.

    Pass validation users only, and grade the choice on others.
    """
    if not candidates:
        raise ValueError("Got no candidates, expected at least one attack with values.")
    found = {}
    for name, by_seed in sorted(candidates.items()):
        means = [each.value.mean() if len(each.value) else np.nan for each in by_seed]
        found[name] = round(float(np.mean(means)), 12) if means else np.nan  # ties in spite of rounding
        if not np.isfinite(found[name]):
            raise ValueError(f"Got an AUC of {name!r} that is NaN or of no user, expected values in every seed.")
    return max(found, key=lambda each: found[each])


def is_validation(user: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Which users the attacker is selected on, about `share` of all; the same users for all seeds and systems."""
    if not 0 < share < 1:
        raise ValueError(f"Got share={share}, expected a share of the users between 0 and 1, such as 0.3.")
    return uniform(0, "validation users", user) < share


def is_known(user: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Whose attributes the adversary knows, about `share` of all; the same users for all seeds and systems."""
    if not 0 < share < 1:
        raise ValueError(f"Got share={share}, expected a share of the users between 0 and 1, such as 0.1.")
    return uniform(0, "known users", user) < share


def _rate(counts: Sequence[Counts]) -> float:
    if any(np.any((each.hits < 0) | (each.hits > each.trials)) for each in counts):
        raise ValueError("Got a user with more hits than trials or with less than none, expected 0 <= hits <= trials.")
    hits, trials = sum(int(each.hits.sum()) for each in counts), sum(int(each.trials.sum()) for each in counts)
    if trials == 0:
        raise ValueError("Got no trial, expected at least one.")
    return hits / trials


def _linearized(counts: Sequence[Counts], rate: float) -> list[_Floats]:
    """A value for each user of each seed, whose mean over seeds of the mean over users moves like the rate."""
    mean = sum(each.trials.sum() for each in counts) / len(counts)  # trials of a seed
    return [rate + (each.hits - rate * each.trials) * (len(each.user) / mean) for each in counts]


def _spread(counts: Counts, users: _Ints) -> Counts:
    """The same counts with a place for each of `users`."""
    place = np.searchsorted(users, counts.user)
    hits, trials = np.zeros(len(users), np.int64), np.zeros(len(users), np.int64)
    hits[place], trials[place] = counts.hits, counts.trials
    return Counts(users, hits, trials)
