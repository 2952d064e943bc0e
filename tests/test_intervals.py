from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from recleak.metrics import intervals
from recleak.metrics.intervals import (
    Estimate,
    bootstrap_crossed,
    bootstrap_mean,
    bootstrap_ratio,
    bootstrap_two_level,
    both_ways,
    clopper_pearson,
    crossed_p,
    quantile,
)
from recleak.metrics.linearized import auc_both_ways

Floats: TypeAlias = NDArray[np.float64]


def test_prints_value_and_interval() -> None:
    assert str(Estimate(0.37512, 0.3449, 0.4061, 943)) == "0.375 [0.345, 0.406]"


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_bootstrap_agrees_with_the_normal_approximation(level: float) -> None:
    values = np.random.default_rng(1).exponential(size=3000)
    got = bootstrap_mean(values, seed=0, level=level, resamples=4000)
    half = stats.norm.isf((1 - level) / 2) * values.std() / np.sqrt(len(values))
    assert got.value == pytest.approx(values.mean(), rel=1e-14)
    assert got.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert got.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert got.n == 3000


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_bootstrap_covers_the_truth_as_often_as_it_says(level: float) -> None:
    samples = np.random.default_rng(2).normal(3, 2, size=(600, 100))
    found = [bootstrap_mean(sample, seed=i, level=level, resamples=300) for i, sample in enumerate(samples)]
    covered = np.mean([each.low <= 3 <= each.high for each in found])
    assert abs(covered - level) < 0.05  # three standard errors of the share of 600 are 0.05 and 0.03


def test_bootstrap_is_a_function_of_the_seed() -> None:
    values = np.random.default_rng(3).random(50)
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)
    assert bootstrap_mean(values, seed=5) != bootstrap_mean(values, seed=6)


def test_bootstrap_draws_all_resamples_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_CHUNK", 130)  # three resamples of 40 at a time, the last chunk smaller
    values = np.random.default_rng(4).random(40)
    got = bootstrap_mean(values, seed=0)
    half = 1.96 * values.std() / np.sqrt(40)
    assert got.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert got.high == pytest.approx(values.mean() + half, abs=0.15 * half)


@pytest.mark.parametrize("values", [[0.3], [0.1] * 30])
def test_a_sample_without_spread_has_no_width(values: list[float]) -> None:
    got = bootstrap_mean(np.array(values), seed=0)
    assert got.low == got.value == got.high == pytest.approx(values[0])
    assert got.n == len(values)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "at least one graded user"),
        ([0.5, np.nan, np.inf], {}, "2 of 3 values that are NaN"),
        ([[0.5], [0.1]], {}, r"shape \(2, 1\)"),
        ([0.5, 0.1], {"level": 95.0}, "level=95.0"),
        ([0.5, 0.1], {"resamples": 0}, "resamples=0"),
    ],
)
def test_bootstrap_refuses(values: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(np.array(values), seed=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (5, 10, 0.1871, 0.8129), (1, 1, 0.025, 1.0)],
)
def test_clopper_pearson_known_values(successes: int, trials: int, low: float, high: float) -> None:
    got = clopper_pearson(successes, trials)
    assert [got.low, got.high] == pytest.approx([low, high], abs=5e-5)
    assert (got.value, got.n) == (successes / trials, trials)


@settings(deadline=None)
@given(st.integers(1, 2000), st.floats(0, 1), st.floats(0.5, 0.999))
def test_clopper_pearson_inverts_the_binomial_tails(trials: int, share: float, level: float) -> None:
    successes = round(share * trials)
    got = clopper_pearson(successes, trials, level)
    tail = (1 - level) / 2
    assert 0 <= got.low <= got.value <= got.high <= 1
    if successes > 0:
        assert stats.binom.sf(successes - 1, trials, got.low) == pytest.approx(tail, rel=1e-6)
    if successes < trials:
        assert stats.binom.cdf(successes, trials, got.high) == pytest.approx(tail, rel=1e-6)


@pytest.mark.parametrize(("successes", "trials", "level"), [(0, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_clopper_pearson_refuses(successes: int, trials: int, level: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        clopper_pearson(successes, trials, level)


# --- seeds and users


def seeds_of(rng: np.random.Generator, seeds: int, users: int, between: float, mean: float = 0.0) -> list[Floats]:
    """Values of standard deviation 1 around seed means, whose deviation is `between` times a seed's standard error."""
    centre = rng.normal(mean, between / np.sqrt(users), seeds)
    return [rng.normal(each, 1, users) for each in centre]


@pytest.mark.parametrize("between", [0.0, 1.0, 5.0])
def test_two_levels_cover_the_truth_at_least_as_often_as_they_say(between: float) -> None:
    """Five seeds as they are would cover it in 84 % if seeds differ much: the mean squared deviation is too small."""
    rng = np.random.default_rng(7)
    found = [bootstrap_two_level(seeds_of(rng, 5, 100, between, mean=3.0), seed=i, resamples=200) for i in range(400)]
    covered = np.mean([each.low <= 3 <= each.high for each in found])
    assert 0.92 < covered < 0.99  # three standard errors of the share of 400 are 0.03
    width = np.mean([each.high - each.low for each in found])
    assert width < 1.5 * 2 * 1.96 * np.sqrt((1 + between**2) / 500)


@pytest.mark.parametrize("level", [0.8, 0.95])
@pytest.mark.parametrize(("seeds", "between"), [(2, 3.0), (3, 0.0), (5, 1.0), (12, 4.0)])
def test_two_levels_have_the_variance_they_say(seeds: int, between: float, level: float) -> None:
    """max(k² B, W) / S; seeds have different numbers of users."""
    rng = np.random.default_rng(8)
    values = [each[: 60 - 3 * place] for place, each in enumerate(seeds_of(rng, seeds, 60, between))]
    means = [each.mean() for each in values]
    tail = (1 - level) / 2
    k = stats.t.isf(tail, seeds - 1) / stats.norm.isf(tail)
    users = np.mean([each.var() / len(each) for each in values])
    expected = max(k**2 * np.var(means, ddof=1), users) / seeds
    drawn = intervals._two_level_means(values, level, 20_000, np.random.default_rng(0))
    assert drawn.var() == pytest.approx(expected, rel=0.05)
    assert drawn.mean() == pytest.approx(np.mean(means), abs=4 * np.sqrt(expected / 20_000))


def test_two_levels_are_never_narrower_than_users_alone() -> None:
    """Seed means that happen to be equal say nothing: users within a seed still differ."""
    values = np.random.default_rng(9).normal(size=400)
    got = bootstrap_two_level([values - values.mean() + 2] * 4, seed=0)
    half = 1.96 * values.std() / np.sqrt(1600)
    assert [got.low, got.high] == pytest.approx([2 - half, 2 + half], abs=0.1 * half)
    assert got.n == 1600


def test_two_levels_with_one_seed_are_the_bootstrap_over_users() -> None:
    values = np.random.default_rng(10).exponential(size=500)
    got, expected = (
        bootstrap_two_level([values], seed=0, resamples=8000),
        bootstrap_mean(values, seed=1, resamples=8000),
    )
    width = expected.high - expected.low
    assert (got.value, got.n) == (expected.value, 500)
    assert [got.low, got.high] == pytest.approx([expected.low, expected.high], abs=0.05 * width)


def test_two_levels_weigh_seeds_alike_whatever_their_users() -> None:
    got = bootstrap_two_level([np.zeros(10), np.ones(1000)], seed=0)
    assert (got.value, got.n) == (0.5, 1010)
    assert got.low < 0  # of two seeds that differ, little is known
    assert got.high > 1


def test_two_levels_are_a_function_of_the_seed() -> None:
    values = seeds_of(np.random.default_rng(11), 4, 30, 1.0)
    assert bootstrap_two_level(values, seed=5) == bootstrap_two_level(values, seed=5)
    assert bootstrap_two_level(values, seed=5) != bootstrap_two_level(values, seed=6)


@pytest.mark.parametrize("values", [[[0.3]], [[0.1] * 30] * 3])
def test_two_levels_without_spread_have_no_width(values: list[list[float]]) -> None:
    got = bootstrap_two_level([np.array(each) for each in values], seed=0)
    assert got.low == got.value == got.high == pytest.approx(values[0][0])


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "Got no seed in values"),
        ([[0.5], []], {}, "at least one graded user"),
        ([0.5, 0.1], {}, r"shape \(\), expected one value for each"),
        ([[0.5], [0.1, np.inf]], {}, "1 of 2 values that are NaN"),
        ([[0.5, 0.1]], {"level": 95.0}, "level=95.0"),
        ([[0.5, 0.1]], {"resamples": 0}, "resamples=0"),
    ],
)
def test_two_levels_refuse(values: list[list[float]], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_two_level([np.array(each) for each in values], seed=0, **options)  # type: ignore[arg-type]


# --- seeds that share users

Ints: TypeAlias = NDArray[np.int64]


def crossed_of(
    rng: np.random.Generator, seeds: int, users: int, by_user: float, by_seed: float, by_both: float
) -> tuple[list[Ints], list[Floats]]:
    """The same users in every seed: the sum of a part by user, by seed and by both, normal with these deviations."""
    values = (
        by_user * rng.normal(size=users)
        + by_seed * rng.normal(size=(seeds, 1))
        + by_both * rng.normal(size=(seeds, users))
    )
    return [np.arange(users)] * seeds, list(values)


def test_crossed_resamples_have_the_variance_they_say() -> None:
    """t² A + max(0, t² B / S - z² R), with the mean squares of a two-way table, by their textbook formulas."""
    rng = np.random.default_rng(20)
    for seeds, users, by_user, by_seed in [(3, 50, 1.0, 0.5), (5, 20, 1.0, 0.0), (2, 40, 0.0, 0.2), (1, 30, 1.0, 0.0)]:
        user, values = crossed_of(rng, seeds, users, by_user, by_seed, 1.0)
        table = np.array(values)
        a = table.mean(axis=0).var(ddof=1) / users
        b = table.mean(axis=1).var(ddof=1) / seeds if seeds > 1 else 0.0
        chance = table - table.mean(axis=0) - table.mean(axis=1)[:, None] + table.mean()
        r = (chance**2).sum() / users**2 / seeds / max(seeds - 1, 1)
        t_users, t_seeds = (stats.t.isf(0.025, degrees) if degrees else 0.0 for degrees in (users - 1, seeds - 1))
        half = np.sqrt(t_users**2 * a + max(0, t_seeds**2 * b - 1.96**2 * r))
        got = bootstrap_crossed(user, values, seed=0, resamples=20_000)
        assert got.value == pytest.approx(table.mean())
        assert got.n == users
        assert [got.low, got.high] == pytest.approx([got.value - half, got.value + half], abs=0.05 * half)
        level = 1 - crossed_p(user, [each - got.low for each in values])
        assert level == pytest.approx(0.95, abs=0.01)  # the p value turns the interval round


@pytest.mark.parametrize("between", [0.0, 3.0])
def test_crossed_users_of_their_own_are_two_levels(between: float) -> None:
    values = [
        each[: 400 - 30 * place] for place, each in enumerate(seeds_of(np.random.default_rng(21), 4, 400, between))
    ]
    names = np.split(np.arange(sum(map(len, values))), np.cumsum([len(each) for each in values])[:-1])
    expected = intervals._two_level_means(values, 0.95, 20_000, np.random.default_rng(0))
    got = bootstrap_crossed(names, values, seed=0, resamples=20_000)
    assert got.value == pytest.approx(expected.mean(), abs=4 * expected.std() / np.sqrt(20_000))
    assert got.n == len(np.concatenate(values))
    assert (got.high - got.low) / 2 / 1.96 == pytest.approx(expected.std(), rel=0.03)


def test_crossed_users_count_once_however_many_seeds() -> None:
    """A copy of a seed adds nothing, and users missing here and there change little."""
    rng = np.random.default_rng(22)
    values = rng.normal(size=300)
    one = bootstrap_crossed([np.arange(300)], [values], seed=0, resamples=8000)
    half = (one.high - one.low) / 2
    kept = [np.sort(rng.permutation(300)[:295]) for _ in range(6)]
    for user in ([np.arange(300)] * 6, kept, [each[::-1] for each in kept]):
        got = bootstrap_crossed(user, [values[each] for each in user], seed=0, resamples=8000)
        assert got.n == 300
        assert (got.high - got.low) / 2 == pytest.approx(half, rel=0.05)


def test_crossed_p_is_students_test() -> None:
    rng = np.random.default_rng(23)
    for mean in (0.0, 0.3, 5.0):
        values = rng.normal(mean, 1, 80)
        over_users = stats.ttest_1samp(values, 0).pvalue
        assert crossed_p([np.arange(80)], [values]) == pytest.approx(max(over_users, 2.0**-79), rel=1e-6)
    seeds = [0.1, 0.2, 0.4, 0.1]
    over_seeds = stats.ttest_1samp(seeds, 0).pvalue
    assert crossed_p([np.arange(80)] * 4, [np.full(80, each) for each in seeds]) == pytest.approx(over_seeds, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ([[0.0] * 30] * 2, 1.0),
        ([[1.0, -1.0, 2.0, -2.0]], 1.0),
        ([[0.3] * 5] * 3, 2 / 2**5),
        ([[1.0, 1.0, 1.0, 1.0 + 1e-9]], 2 / 2**4),
        ([[2.0] * 1000], 1e-100),
    ],
)
def test_crossed_p_of_no_spread(values: list[list[float]], p: float) -> None:
    user = [np.arange(len(each)) for each in values]
    assert crossed_p(user, [np.array(each) for each in values]) == pytest.approx(p)


@pytest.mark.parametrize("values", [[[0.1] * 30], [[0.1] * 30] * 3])
def test_crossed_without_spread_has_no_width(values: list[list[float]]) -> None:
    got = bootstrap_crossed([np.arange(30)] * len(values), [np.array(each) for each in values], seed=0)
    assert got.low == got.value == got.high == pytest.approx(0.1)


def test_crossed_is_a_function_of_the_seed() -> None:
    user, values = crossed_of(np.random.default_rng(24), 3, 30, 1.0, 0.1, 1.0)
    assert bootstrap_crossed(user, values, seed=5) == bootstrap_crossed(user, values, seed=5)
    assert bootstrap_crossed(user, values, seed=5) != bootstrap_crossed(user, values, seed=6)


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 3, 5])
@pytest.mark.parametrize(("by_user", "by_seed", "by_both"), [(0, 0, 1), (1, 0, 0.3), (1, 0.13, 0.3), (1, 1, 0.3)])
def test_crossed_misses_and_alarms_as_seldom_as_it_says(
    seeds: int, by_user: float, by_seed: float, by_both: float
) -> None:
    """Two levels miss the truth in 40 % with five seeds whose users are the same and differ."""
    rng = np.random.default_rng(25)
    missed, missed_by_two, alarms, repetitions = 0, 0, 0, 250
    for i in range(repetitions):
        user, values = crossed_of(rng, seeds, 60, by_user, by_seed if seeds > 1 else 0.0, by_both)
        one, two = (
            bootstrap_crossed(user, values, seed=i, resamples=400),
            bootstrap_two_level(values, seed=i, resamples=100),
        )
        missed += not one.low <= 0 <= one.high
        missed_by_two += not two.low <= 0 <= two.high
        alarms += crossed_p(user, values) <= 0.05
    for count in (missed, alarms):
        assert stats.binomtest(count, repetitions, 0.05, alternative="greater").pvalue > 0.001
        assert count > 0
    if (seeds, by_user, by_seed) == (5, 1, 0):
        assert missed_by_two > 0.3 * repetitions


@pytest.mark.parametrize(
    ("user", "values", "options", "message"),
    [
        ([], [], {}, "Got no seed in values"),
        ([[1, 2]], [[0.1, 0.2], [0.1, 0.2]], {}, r"shape \(2,\), expected a user for each"),
        ([[1, 2, 3]], [[0.1, 0.2]], {}, r"shape \(3,\), expected a user for each"),
        ([[1, 1]], [[0.1, 0.2]], {}, "Got a user twice"),
        ([[1], [1]], [[0.1], [0.2]], {}, "Got one user"),
        ([[1, 2]], [[0.1, np.nan]], {}, "1 of 2 values that are NaN"),
        ([[1, 2]], [[0.1, 0.2]], {"level": 95.0}, "level=95.0"),
        ([[1, 2]], [[0.1, 0.2]], {"resamples": 0}, "resamples=0"),
    ],
)
def test_crossed_refuses(
    user: list[list[int]], values: list[list[float]], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_crossed([np.array(each) for each in user], [np.array(each) for each in values], seed=0, **options)  # type: ignore[arg-type]


# --- ratios


def test_ratio_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(12)
    found = []
    for i in range(200):
        a1, a0, b1, b0 = (seeds_of(rng, 5, 100, 1.0, mean=mean) for mean in (4.0, 3.0, 1.0, 3.0))
        found.append(bootstrap_ratio(a1, a0, b1, b0, seed=i, resamples=200))
    covered = np.mean([each.low <= 0.5 <= each.high for each in found])
    assert 0.90 < covered <= 1  # three standard errors of the share of 200 are 0.046
    assert np.mean([each.value for each in found]) == pytest.approx(0.5, abs=0.02)
    assert np.mean([each.high - each.low for each in found]) < 0.4
    assert found[0].n == 2000


def test_ratio_has_no_sign() -> None:
    rng = np.random.default_rng(13)
    a1, a0, b1, b0 = (seeds_of(rng, 3, 50, 1.0, mean=mean) for mean in (40.0, 30.0, 10.0, 30.0))
    value = bootstrap_ratio(a1, a0, b1, b0, seed=0).value
    assert value == pytest.approx(0.5, abs=0.05)
    assert bootstrap_ratio(a0, a1, b1, b0, seed=0).value == bootstrap_ratio(a1, a0, b0, b1, seed=0).value == value


def test_ratio_draws_each_of_the_four_by_itself() -> None:
    """If a1 and a0 were resampled alike, equal samples would have a difference of 0 in every resample."""
    same = seeds_of(np.random.default_rng(14), 3, 50, 1.0)
    one, zero = [np.ones(5)], [np.zeros(5)]
    got = bootstrap_ratio(same, same, one, zero, seed=0)
    assert got.value == 0
    assert 0 < got.low < got.high < 2
    half = bootstrap_ratio([np.array([3.0])], zero, [np.array([6.0])], zero, seed=0)
    assert (half.value, half.low, half.high, half.n) == (0.5, 0.5, 0.5, 12)


def test_ratio_to_nothing_is_not_bounded() -> None:
    one, zero, coin = [np.ones(4)], [np.zeros(4)], [np.array([0.0, 1.0])]  # a quarter of the coin's means are 0
    got = bootstrap_ratio(one, zero, coin, zero, seed=0)
    assert (got.value, got.low, got.high) == (2.0, 1.0, np.inf)
    got = bootstrap_ratio(one, zero, one, one, seed=0)
    assert (got.value, got.low, got.high) == (np.inf, np.inf, np.inf)
    got = bootstrap_ratio(one, one, one, one, seed=0)
    assert np.isnan(got.value)
    assert (got.low, got.high) == (0.0, np.inf)  # anything
    assert str(bootstrap_ratio(one, zero, coin, zero, seed=0)) == "2.000 [1.000, inf]"


def test_ratio_says_which_part_is_wrong() -> None:
    one = [np.ones(2)]
    with pytest.raises(ValueError, match="Got no seed in b1"):
        bootstrap_ratio(one, one, [], one, seed=0)


# --- adversaries and victims


def guesses(rng: np.random.Generator, users: int, popular: float) -> tuple[Floats, NDArray[np.bool_]]:
    """Scores that know nothing of communities, higher for some victims whoever asks; some users are in many of them."""
    near = rng.normal(size=(users, users)) + rng.normal(size=users)
    np.fill_diagonal(near, -np.inf)
    truth = np.zeros((users, users), bool)
    np.put_along_axis(truth, np.argsort(-near, axis=1)[:, : users // 10], True, axis=1)
    return rng.normal(size=(users, users)) + popular * rng.normal(size=users), truth


@pytest.mark.heavy
@pytest.mark.parametrize(("popular", "most"), [(1.0, 0.1), (0.3, 0.1), (0.0, 0.02)])
def test_guesses_about_communities_alarm_as_rarely_as_they_may(popular: float, most: float) -> None:
    """An interval of 95 % misses 0.5 in 5 %, give or take what 150 tell; of adversaries alone it misses it by far."""
    missed: list[bool] = []
    alone: list[bool] = []
    rng, users = np.random.default_rng(12), np.arange(100)
    for turn in range(150):
        auc, column = auc_both_ways(*guesses(rng, len(users), popular))
        for found, values in ((missed, both_ways(auc, column)), (alone, auc)):
            got = bootstrap_crossed([users], [values], seed=turn, resamples=300)
            found.append(not got.low <= 0.5 <= got.high)
    assert np.mean(missed) <= most
    assert np.mean(alone) > 0.3 or popular < 1


def test_who_is_no_adversary_is_a_victim_still() -> None:
    row, column = np.array([0.9, np.nan, 0.7, np.nan]), np.array([0.1, -0.1, 0.2, -0.2])
    assert both_ways(row, column) == pytest.approx([1.1, 0.7, 0.8, 0.6])
    with pytest.raises(ValueError, match="no adversary"):
        both_ways(np.array([np.nan]), np.array([0.0]))


def test_quantiles_are_covered_as_often_as_they_say() -> None:
    rng, covered = np.random.default_rng(13), []
    for _ in range(400):
        got = quantile(rng.exponential(size=80), 0.9)
        covered.append(got.low <= np.log(10) <= got.high)
    assert 0.92 < np.mean(covered) <= 1
    assert quantile(np.array([1.0, 2.0, 3.0]), 0.5) == Estimate(2.0, 1.0, 3.0, 3)
