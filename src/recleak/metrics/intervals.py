"""A number and how sure it is: bootstrap intervals of means over users and seeds, exact intervals of a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from recleak.random import bits

_Floats: TypeAlias = NDArray[np.float64]

_CHUNK = 1 << 22  # resampled values held at a time, or one resample if the sample is larger
_LEAST_P = 1e-100  # a p value below it is given as it


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
    values = _checked(values)
    n = len(values)
    _check_level(level)
    _check_resamples(resamples)
    value = float(values.mean())
    if values.min() == values.max():
        return Estimate(value, value, value, n)
    means = _resampled_means(values, resamples, _generator(seed, "bootstrap"))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n)


def bootstrap_two_level(
    values: Sequence[NDArray[np.float64]], *, seed: int, level: float = 0.95, resamples: int = 2000
) -> Estimate:
    """The mean over seeds of the mean over users, with a bootstrap interval over seeds and over users within a seed.

    values[s] holds one value per user of seed s. A resample draws seeds with replacement, then users within each drawn
    seed with replacement. The interval covers the mean over all seeds and users that could have been drawn, if every
    seed draws its users anew. If all seeds have the same users, it covers the mean over seeds for these users; how much
    other users would differ is then not in it, because the same users are lucky or unlucky in every seed (for that,
    take `bootstrap_mean` of each user's mean over seeds). One seed says nothing about others: the interval is that of
    `bootstrap_mean`, for this seed only.

    S seeds resampled as they are give too narrow an interval if seeds differ much (their variance comes out as (S - 1)
    / S of the unbiased one, and is itself uncertain) and too wide a one if they do not (the users' part counts twice:
    it is in the seed means already). Therefore the deviations of the drawn seed means are scaled, so that the resamples
    have the variance max(k² B, W) / S with B the unbiased variance of the seed means, W the users' part of it and k the
    ratio of the quantiles of Student's t with S - 1 degrees of freedom and of the normal law: Student's interval for
    the seed means, which is exact if they are normal, but never narrower than users alone make it. Few seeds are paid
    for: k is 6.5 for two, 2.2 for three, 1.4 for five seeds. Two seeds that differ much give a somewhat narrower
    interval than Student's, because three values are all that two seeds can be resampled to.
    """
    samples = _checked_seeds(values, "values")
    _check_level(level)
    _check_resamples(resamples)
    means = _two_level_means(samples, level, resamples, _generator(seed, "two-level bootstrap"))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(_mean_of_means(samples), float(low), float(high), sum(map(len, samples)))


def bootstrap_crossed(
    user: Sequence[NDArray[np.int64]],
    values: Sequence[NDArray[np.float64]],
    *,
    seed: int,
    level: float = 0.95,
    resamples: int = 2000,
) -> Estimate:
    """The mean over seeds of the mean over users, with an interval for other seeds and users; seeds may share users.

    values[s] holds the value of each user[s] under seed s; `n` is the number of different users. Users are resampled
    with all their seeds at once (Owen 2007, "The pigeonhole bootstrap"): who is lucky in every seed counts once. Seeds
    are too few to be resampled, so their part is normal. The resamples have the variance A + max(0, k² B / S - R) with
    A the users' part, B the unbiased variance of the seed means, R what A and B / S have in common (chance by user and
    seed) and k as in `bootstrap_two_level`; A is widened as Student's interval for the users is. If every seed has
    users of its own, R is A, and this is the variance there. One seed says nothing about others: the interval is for
    this seed only. Of 60 users or fewer with very lopsided values (an exponential law) an interval of 95 % covers 92 %.
    """
    parts = _Crossed.of(user, values)
    _check_level(level)
    _check_resamples(resamples)
    n, value, tail = len(parts.by_user), parts.value, (1 - level) / 2
    of_users, of_seeds = np.sqrt(parts.squares(tail)) / stats.norm.isf(tail)  # standard errors, widened
    if of_users == of_seeds == 0:
        return Estimate(value, value, value, n)
    generator = _generator(seed, "crossed bootstrap")
    means = value + of_seeds * generator.standard_normal(resamples)
    if of_users > 0:
        widening = of_users / (parts.by_user.std() / np.sqrt(n))
        means += widening * _resampled_means(parts.by_user, resamples, generator)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n)


def both_ways(row: NDArray[np.float64], column: NDArray[np.float64]) -> _Floats:
    """A value for each user whose mean is that of adversaries, for an interval over adversaries and victims at once.

    row f64[n]: how well each user does as an adversary (NaN: it is none); column f64[n]: what each adds as a victim to
    the mean of all adversaries, 0 on average. Drawing users, each with all that it is, draws rows and columns of the
    table of pairs (a bootstrap of dyads; Davezies, D'Haultfoeuille and Guyonvarch 2021); to first order the mean moves
    by a user's row and its column together. What is chance by pair is in both, hence counted twice: where nothing else
    differs, the interval is wider than it need be by half. `tests/test_intervals.py` counts false alarms: with 120
    users, of whom few are in most communities, guesses are told from nothing in 8 % instead of 5 %.
    """
    known = ~np.isnan(row)
    if not known.any():
        raise ValueError("Got no adversary with a value, expected at least one.")
    mean = row[known].mean()
    values: _Floats = mean + column + np.where(known, row - mean, 0.0) * (len(row) / known.sum())
    return values


def quantile(values: NDArray[np.float64], share: float, *, level: float = 0.95) -> Estimate:
    """A quantile of one value per user, with the interval of order statistics, which holds for any law.

    Its ends are the values at the binomial quantiles of the rank; beyond the least or the largest value it says nothing
    and ends there.
    """
    ordered, tail = np.sort(_checked(values)), (1 - level) / 2
    _check_level(level)
    n = len(ordered)
    low, high = int(stats.binom.ppf(tail, n, share)) - 1, int(stats.binom.isf(tail, n, share))
    ends = ordered[max(0, low)], ordered[min(n - 1, high)]
    return Estimate(float(np.quantile(ordered, share)), float(ends[0]), float(ends[1]), n)


def crossed_p(user: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float64]]) -> float:
    """The two-sided p value of a mean of 0, for values as in `bootstrap_crossed`.

    One minus the level at which the interval of that variance, taken as normal, would end at 0: with one seed this is
    Student's test over users, with users that do not differ his test over seeds. No less than 2 / 2^n, what n users of
    one sign are worth; 1 if all values are 0.
    """
    parts = _Crossed.of(user, values)
    if parts.value == 0:
        return 1.0
    least = max(2.0 ** (1 - len(parts.by_user)), _LEAST_P)

    def excess(logarithm: float) -> float:
        return float(parts.squares(np.exp(logarithm) / 2).sum() - parts.value**2)

    if excess(np.log(least)) <= 0:
        return least
    return float(np.exp(optimize.brentq(excess, np.log(least), 0.0)))


def bootstrap_ratio(
    a1: Sequence[NDArray[np.float64]],
    a0: Sequence[NDArray[np.float64]],
    b1: Sequence[NDArray[np.float64]],
    b0: Sequence[NDArray[np.float64]],
    *,
    seed: int,
    level: float = 0.95,
    resamples: int = 2000,
) -> Estimate:
    """|a1 - a0| / |b1 - b0| of four means over seeds and users, each resampled by itself as in `bootstrap_two_level`.

    The ends are quantiles of the resampled ratios, the next one outwards. Where resampled denominators come to 0 the
    upper end is `inf`, and where they come close to it, it is large: then nothing bounds the ratio from above. A ratio
    of 0 to 0 may be anything, and counts as 0 for the lower end and as `inf` for the upper one; as the value it is NaN.
    Sizes without their sign are never below 0, so a numerator that is nothing but chance has a lower end above 0 too:
    whether a1 differs from a0 is a question for the interval of the difference.
    """
    named = {"a1": a1, "a0": a0, "b1": b1, "b0": b0}
    samples = {name: _checked_seeds(values, name) for name, values in named.items()}
    _check_level(level)
    _check_resamples(resamples)
    generator = _generator(seed, "ratio bootstrap")
    means = {name: _two_level_means(each, level, resamples, generator) for name, each in samples.items()}
    drawn = _size_ratio(*means.values())
    place = (resamples - 1) * np.array([(1 - level) / 2, (1 + level) / 2])
    low = np.sort(np.where(np.isnan(drawn), 0, drawn))[int(np.floor(place[0]))]  # no interpolation: inf - inf is NaN
    high = np.sort(np.where(np.isnan(drawn), np.inf, drawn))[int(np.ceil(place[1]))]
    value = _size_ratio(*(np.array(_mean_of_means(each)) for each in samples.values()))
    return Estimate(float(value), float(low), float(high), sum(len(part) for each in samples.values() for part in each))


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


def _check_resamples(resamples: int) -> None:
    if resamples < 1:
        raise ValueError(f"Got resamples={resamples}, expected at least 1.")


def _checked(values: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.asarray(values, np.float64)
    n = len(values) if values.ndim else 0
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
    return values


def _checked_seeds(values: Sequence[NDArray[np.float64]], name: str) -> list[NDArray[np.float64]]:
    if len(values) == 0:
        raise ValueError(f"Got no seed in {name}, expected at least one.")
    return [_checked(each) for each in values]


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(int(bits(seed, purpose))))


def _resampled_means(values: NDArray[np.float64], resamples: int, generator: np.random.Generator) -> _Floats:
    """The means of `resamples` draws of n values with replacement, f64[resamples]."""
    n = len(values)
    step = max(1, _CHUNK // n)
    chunks = [
        values[generator.integers(n, size=(min(step, resamples - start), n))].mean(axis=1)
        for start in range(0, resamples, step)
    ]
    return np.concatenate([np.empty(0), *chunks])


def _two_level_means(
    samples: list[NDArray[np.float64]], level: float, resamples: int, generator: np.random.Generator
) -> _Floats:
    """The resampled means of `bootstrap_two_level`, f64[resamples]."""
    seeds = len(samples)  # S
    centre = np.array([each.mean() for each in samples])  # f64[S]
    whole = _mean_of_means(samples)
    if min(each.min() for each in samples) == max(each.max() for each in samples):
        return np.full(resamples, whole)
    drawn = generator.integers(seeds, size=(resamples, seeds))
    deviation = _seed_scale(samples, level) * (centre[drawn].mean(axis=1) - whole)
    for each, mean, which in zip(samples, centre, range(seeds), strict=True):
        where = np.nonzero(drawn == which)[0]  # a resample comes as often as it has drawn this seed
        within = _resampled_means(each, len(where), generator) - mean
        deviation += np.bincount(where, within, minlength=resamples) / seeds
    means: _Floats = whole + deviation
    return means


def _seed_scale(samples: list[NDArray[np.float64]], level: float) -> float:
    """What the deviations of drawn seed means are multiplied with.

    Unscaled, the resamples have the variance ((S - 1) / S B + W) / S; the scale makes it max(k² B, W) / S.
    """
    seeds = len(samples)
    if seeds == 1:
        return 0.0
    between = float(np.var([each.mean() for each in samples], ddof=1))  # B
    within = float(np.mean([each.var() / len(each) for each in samples]))  # W
    if between == 0:
        return 0.0
    tail = (1 - level) / 2
    k = float(stats.t.isf(tail, seeds - 1) / stats.norm.isf(tail))
    return float(np.sqrt(seeds / (seeds - 1) * max(0.0, k**2 - within / between)))


@dataclass(frozen=True, eq=False)
class _Crossed:
    """The mean of values by seed and user, and how far users and seeds may move it. S seeds, n users."""

    value: float
    by_user: NDArray[np.float64]  # f64[n], the deviation of the mean by user, 0 on average
    seeds: int
    between: float  # B / S
    common: float  # R

    @classmethod
    def of(cls, user: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float64]]) -> _Crossed:
        samples = _checked_seeds(values, "values")
        names = [np.asarray(each) for each in user]
        if [each.shape for each in names] != [each.shape for each in samples]:
            got = ", ".join(str(each.shape) for each in names)
            raise ValueError(f"Got users of shape {got or 'no seed'}, expected a user for each value of each seed.")
        if any(len(np.unique(each)) < len(each) for each in names):
            raise ValueError("Got a user twice in one seed, expected one value for each user and seed.")
        users = np.unique(np.concatenate(names))
        seeds, n = len(samples), len(users)
        if n < 2:
            raise ValueError("Got one user, expected at least two: one user says nothing about others.")
        table = np.zeros((seeds, n))  # what each user adds to each seed's mean
        for row, each, sample in zip(table, names, samples, strict=True):
            row[np.searchsorted(users, each)] = 0 if np.ptp(sample) == 0 else (sample - sample.mean()) / len(sample)
        several = seeds > 1
        between = np.var([each.mean() for each in samples], ddof=1) / seeds if several else 0.0
        common = table.var(axis=0, ddof=1).sum() / seeds if several else 0.0
        return cls(_mean_of_means(samples), n * table.mean(axis=0), seeds, float(between), float(common))

    def squares(self, tail: float) -> NDArray[np.float64]:
        """What users and seeds add to the square of half the interval, f64[2]: t² A and max(0, t² B / S - z² R)."""
        n = len(self.by_user)
        of_users = special.stdtrit(n - 1, tail) ** 2 * self.by_user.var(ddof=1) / n
        if self.seeds == 1:
            return np.array([of_users, 0.0])
        of_seeds = special.stdtrit(self.seeds - 1, tail) ** 2 * self.between - special.ndtri(tail) ** 2 * self.common
        return np.array([of_users, max(0.0, of_seeds)])


def _mean_of_means(samples: list[NDArray[np.float64]]) -> float:
    return float(np.mean([each.mean() for each in samples]))


def _size_ratio(a1: _Floats, a0: _Floats, b1: _Floats, b0: _Floats) -> _Floats:
    """|a1 - a0| / |b1 - b0|; NaN for 0 / 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: _Floats = np.abs(a1 - a0) / np.abs(b1 - b0)
    return ratio
