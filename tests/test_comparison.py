"""Differences, rates and many tests at once, against naive references; and a whole audit of labels that say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from recleak.metrics.comparison import (
    Counts,
    Difference,
    bootstrap_rate,
    bootstrap_rate_difference,
    holm,
    is_validation,
    paired,
    strongest,
)
from recleak.metrics.inference import PerUser, auc_by_user
from recleak.metrics.intervals import bootstrap_crossed, clopper_pearson, crossed_p

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def per_user(values: Sequence[float] | Floats, user: Sequence[int] | Ints | None = None) -> PerUser:
    return PerUser(np.arange(len(values)) if user is None else np.asarray(user), np.asarray(values, float), 0)


# --- differences


def test_paired_takes_the_users_that_both_have_in_the_same_seed() -> None:
    first = [per_user([1.0, 5.0, 3.0, 100.0], [1, 2, 3, 9]), per_user([10.0, 100.0, 12.0], [2, 4, 7])]
    second = [per_user([100.0, 0.5, 2.0, 1.0], [0, 1, 2, 3]), per_user([4.0, 2.0, 100.0], [2, 7, 8])]
    got = paired(first, second, seed=3)
    users, values = [np.array([1, 2, 3]), np.array([2, 7])], [np.array([0.5, 3.0, 2.0]), np.array([6.0, 10.0])]
    interval = bootstrap_crossed(users, values, seed=3)
    p = crossed_p(users, values)
    assert got == Difference(interval.value, interval.low, interval.high, users=4, seeds=2, p=p)
    assert got.value == pytest.approx((5.5 / 3 + 8) / 2)
    mirrored = paired(second, first, seed=3)
    assert (mirrored.value, mirrored.p) == (-got.value, got.p)


def test_paired_passes_its_settings_on() -> None:
    first, second = [per_user(np.random.default_rng(0).normal(size=50))], [per_user(np.zeros(50))]
    wide, narrow = (paired(first, second, seed=0, level=level) for level in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high
    assert paired(first, second, seed=0) == paired(first, second, seed=0) != paired(first, second, seed=1)
    assert paired(first, second, seed=0, resamples=10) != paired(first, second, seed=0)


@pytest.mark.parametrize("seeds", [1, 3])
def test_equals_do_not_differ(seeds: int) -> None:
    same = [per_user(np.random.default_rng(each).random(20)) for each in range(seeds)]
    assert paired(same, same, seed=0) == Difference(0.0, 0.0, 0.0, users=20, seeds=seeds, p=1.0)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([per_user([1.0, 2.0])], [per_user([1.0, 2.0], [5, 6])], "seed number 1 that have no user in common"),
        ([per_user([1.0, 2.0])] * 2, [per_user([1.0, 2.0]), per_user([])], "2 and 0 users in seed number 2"),
        ([per_user([1.0, 2.0])] * 2, [per_user([1.0, 2.0])], "Got 2 and 1 seeds"),
        ([per_user([1.0, 2.0])], [per_user([1.0, 2.0], [1, 1])], "out of order or twice"),
        ([per_user([1.0, 2.0])], [per_user([1.0, 2.0], [1, 7])], "Got one user, expected at least two"),
        ([per_user([1.0, np.nan])], [per_user([1.0, 2.0])], "1 of 2 values that are NaN"),
        ([], [], "Got no seed"),
    ],
)
def test_paired_refuses(first: list[PerUser], second: list[PerUser], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired(first, second, seed=0)


# --- many tests


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # as R's p.adjust(p, "holm")
        ([0.01, 0.011, 0.012], [0.03, 0.03, 0.03]),
        ([0.9, 0.6, np.nan], [1.0, 1.0, np.nan]),
        ([np.nan, 0.02], [np.nan, 0.02]),
        ([0.5, 0.0, 1.0], [1.0, 0.0, 1.0]),
        ([np.nan], [np.nan]),
        ([], []),
    ],
)
def test_holm_known_values(p: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(holm(np.array(p)), expected)


@given(st.lists(st.sampled_from([0.0, 0.004, 0.01, 0.02, 0.3, 1.0, np.nan]), max_size=8), st.floats(0.001, 0.999))
def test_holm_rejects_as_the_steps_of_the_paper_do(p: list[float], level: float) -> None:
    """From the smallest on, reject while p <= level / (number of hypotheses left)."""
    tested = sorted(each for each in p if not np.isnan(each))
    steps = [each <= level / (len(tested) - place) for place, each in enumerate(tested)]
    rejected = tested[: steps.index(False) if False in steps else len(steps)]
    got = holm(np.array(p))
    assert np.array_equal(np.isnan(got), np.isnan(p))
    assert sorted(each for each, adjusted in zip(p, got, strict=True) if adjusted <= level) == rejected


@pytest.mark.parametrize("p", [[0.1, 1.5], [-0.1], [[0.1, 0.2]]])
def test_holm_refuses(p: list[float]) -> None:
    with pytest.raises(ValueError, match="expected a vector of numbers from 0 to 1"):
        holm(np.array(p))


# --- rates


def counts(hits: Sequence[int] | Ints, trials: Sequence[int] | Ints, user: Sequence[int] | None = None) -> Counts:
    return Counts(np.arange(len(hits)) if user is None else np.array(user), np.array(hits), np.array(trials))


def drawn(rng: np.random.Generator, share: Floats, seeds: int, largest: int = 40) -> list[Counts]:
    """The same users in every seed, with a share of hits of their own."""
    trials = rng.integers(2, largest, len(share))
    return [counts(rng.binomial(trials, share), trials) for _ in range(seeds)]


def test_counts_by_user() -> None:
    got = Counts.of(np.array([True, False, True, True, False]), np.array([7, 7, 2, 7, 4]))
    assert got.user.tolist() == [2, 4, 7]
    assert got.hits.tolist() == [1, 0, 2]
    assert got.trials.tolist() == [1, 1, 3]
    none = Counts.of(np.array([], bool), np.array([], np.int64))
    assert len(none.user) == len(none.hits) == len(none.trials) == 0


def test_rate_is_that_of_all_trials_together() -> None:
    got = bootstrap_rate([counts([1, 0, 5], [2, 10, 5]), counts([3, 0], [3, 0], [8, 9])], seed=0)
    assert got.value == 9 / 20
    assert got.n == 4  # with a trial
    assert 0 <= got.low < 9 / 20 < got.high <= 1


@pytest.mark.parametrize("seeds", [1, 3])
def test_rate_has_the_spread_of_resampled_ratios(seeds: int) -> None:
    """Users with many trials have a higher rate: the trials' part of the ratio matters."""
    rng = np.random.default_rng(1)
    trials = rng.integers(1, 100, 300)
    hits = rng.binomial(trials, 0.2 + 0.5 * trials / 100)
    got = bootstrap_rate([counts(hits, trials)] * seeds, seed=0)
    which = rng.integers(300, size=(4000, 300))
    ratios = hits[which].sum(axis=1) / trials[which].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert got.value == hits.sum() / trials.sum()
    assert [got.low, got.high] == pytest.approx([low, high], abs=0.12 * (high - low))


def test_rate_of_one_trial_per_user_is_never_narrower_than_clopper_pearson() -> None:
    for hits in (1, 3, 50, 98):
        got = bootstrap_rate([counts([1] * hits + [0] * (100 - hits), [1] * 100)], seed=0)
        exact = clopper_pearson(hits, 100)
        slack = 0.15 * (exact.high - exact.low)  # Student's law and resamples instead of the normal law
        assert exact.low - slack < got.low < exact.low + 0.05 * slack
        assert exact.high + slack > got.high > exact.high - 0.05 * slack


def test_rate_of_few_users_with_hits_may_be_much_larger() -> None:
    """Clopper and Pearson's end for rate (1 - rate) / variance trials instead of 2,000."""
    hits = np.array([10, 6, 4] + [0] * 97)
    got = bootstrap_rate([counts(hits, [20] * 100)], seed=0, resamples=20_000)
    drawn_means = bootstrap_crossed([np.arange(100)], [hits / 20], seed=0, resamples=20_000)
    worth = 0.01 * 0.99 / ((drawn_means.high - drawn_means.low) / 2 / 1.96) ** 2
    end = stats.beta.isf(0.025, 0.01 * worth + 1, 0.99 * worth)
    assert got.high == pytest.approx(end, rel=0.02)
    assert end > 1.5 * clopper_pearson(20, 2000).high


def test_rate_without_a_hit_or_a_miss_knows_as_much_as_one_trial_per_user() -> None:
    none, every = (bootstrap_rate([counts([hits] * 40 + [0], [20] * 40 + [0])] * 3, seed=0) for hits in (0, 20))
    end = 1 - 0.025 ** (1 / 40)
    assert [none.value, none.low, none.high, none.n] == pytest.approx([0, 0, end, 40])
    assert [every.value, every.low, every.high, every.n] == pytest.approx([1, 1 - end, 1, 40])


def test_rate_of_users_that_are_all_alike_has_the_width_of_its_trials() -> None:
    got, exact = bootstrap_rate([counts([5] * 40, [20] * 40)], seed=0), clopper_pearson(200, 800)
    assert [got.value, got.low, got.high, got.n] == pytest.approx([0.25, exact.low, exact.high, 40])


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 3, 5])
@pytest.mark.parametrize(("rate", "alike"), [(0.01, 100.0), (0.05, 20.0), (0.3, 20.0), (0.3, 2.0)])
def test_rates_cover_the_truth(seeds: int, rate: float, alike: float) -> None:
    """Shares of hits by user are Beta; both rates of the difference are of the same users, who differ."""
    rng = np.random.default_rng(5)
    repetitions, missed, missed_difference = 200, 0, 0
    for i in range(repetitions):
        share = rng.beta(rate * alike, (1 - rate) * alike, 150)
        first, second = drawn(rng, share, seeds), drawn(rng, share / 2, seeds)
        one = bootstrap_rate(first, seed=i, resamples=300)
        both = bootstrap_rate_difference(first, second, seed=i, resamples=300)
        missed += not one.low <= rate <= one.high
        missed_difference += not both.low <= rate / 2 <= both.high
    for count in (missed, missed_difference):
        assert stats.binomtest(count, repetitions, 0.05, alternative="greater").pvalue > 0.001


def test_rate_difference_draws_a_user_with_both_counts() -> None:
    """Users who are hit often or seldom, alike in both: their differences hardly vary."""
    rng = np.random.default_rng(2)
    share, trials = rng.random(200), np.full(200, 100)
    first, second = [counts(rng.binomial(trials, share), trials)], [counts(rng.binomial(trials, share), trials)]
    got = bootstrap_rate_difference(first, second, seed=0)
    one, other = bootstrap_rate(first, seed=0), bootstrap_rate(second, seed=0)
    assert got.value == pytest.approx(one.value - other.value)
    assert got.high - got.low < 0.3 * (one.high - one.low)
    differences = (first[0].hits - second[0].hits) / 100
    half = 1.97 * differences.std() / np.sqrt(200)
    assert [got.low, got.high] == pytest.approx([got.value - half, got.value + half], abs=0.1 * half)


def test_rate_difference_of_different_users_adds_their_spread() -> None:
    rng = np.random.default_rng(3)
    first = [counts(rng.binomial(10, 0.6, 100), [10] * 100)]
    second = [counts(rng.binomial(10, 0.3, 100), [10] * 100, list(range(100, 200)))]
    got = bootstrap_rate_difference(first, second, seed=0)
    variance = (np.var(first[0].hits / 10) + np.var(second[0].hits / 10)) / 100
    half = 1.97 * np.sqrt(variance)
    assert got.n == 200
    assert [got.low, got.high] == pytest.approx([got.value - half, got.value + half], abs=0.1 * half)


def test_rate_difference_with_a_rate_of_nothing() -> None:
    half, none = [counts([5, 0, 10, 5] * 10, [10] * 40)], [counts([0] * 40, [90] * 40)]
    got = bootstrap_rate_difference(half, none, seed=0)
    one, other = bootstrap_rate(half, seed=0), bootstrap_rate(none, seed=0)
    assert got.value == 0.5
    assert got.low == pytest.approx(0.5 - np.hypot(0.5 - one.low, other.high))
    assert got.high == pytest.approx(one.high)
    mirrored = bootstrap_rate_difference(none, half, seed=0)
    assert [mirrored.low, mirrored.high] == pytest.approx([-got.high, -got.low])
    sure = bootstrap_rate_difference([counts([10] * 40, [10] * 40)], none, seed=0)
    assert (sure.value, sure.high) == (1.0, 1.0)
    assert 0.8 < sure.low < 0.9  # 40 users


def test_rates_stay_between_their_limits() -> None:
    few = [counts([1, 0, 0], [1, 1, 1]), counts([1, 1, 0], [1, 1, 1])]
    got = bootstrap_rate(few, seed=0)
    assert (got.low, got.high) == (0.0, 1.0)
    got = bootstrap_rate_difference(few, few[::-1], seed=0)
    assert (got.low, got.high) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("given_counts", "message"),
    [
        ([], "Got no trial"),
        ([counts([0, 0], [0, 0])], "Got no trial"),
        ([counts([3], [2])], "0 <= hits <= trials"),
        ([counts([-1], [2])], "0 <= hits <= trials"),
        ([counts([1, 1], [2, 2], [4, 4])], "a user twice"),
    ],
)
def test_rate_refuses(given_counts: list[Counts], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_rate(given_counts, seed=0)


def test_rate_difference_refuses_other_seeds() -> None:
    one = counts([1, 0], [2, 2])
    with pytest.raises(ValueError, match="Got 1 and 2 seeds"):
        bootstrap_rate_difference([one], [one, one], seed=0)


# --- the attacker's choice


def test_the_strongest_has_the_largest_mean() -> None:
    assert strongest({"weak": [per_user([0.6])], "good": [per_user([0.9, 0.4])]}) == "good"


def test_the_strongest_weighs_seeds_alike() -> None:
    uneven = [per_user([0.9] * 10), per_user([0.4])]  # 0.65, not 0.85
    assert strongest({"uneven": uneven, "even": [per_user([0.7])] * 2}) == "even"


@pytest.mark.parametrize("order", [1, -1])
def test_the_strongest_of_equals_is_the_first_by_name(order: int) -> None:
    candidates = [("b", [per_user([0.7])]), ("a", [per_user([0.7])]), ("c", [per_user([0.7])])][::order]
    assert strongest(dict(candidates)) == "a"
    a, b = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]  # the sum of one is larger, by rounding
    assert strongest({"b": [per_user(a)], "a": [per_user(b)]}) == "a"
    assert strongest({"b": [per_user(b)], "a": [per_user(a)]}) == "a"


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ({}, "Got no candidates"),
        ({"a": []}, "of 'a' that is NaN or of no user"),
        ({"a": [per_user([0.5])], "b": [per_user([0.5]), per_user([])]}, "of 'b' that is NaN or of no user"),
        ({"a": [per_user([np.nan])]}, "of 'a' that is NaN"),
    ],
)
def test_the_strongest_refuses(candidates: dict[str, list[PerUser]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strongest(candidates)


def test_validation_users_are_a_function_of_the_user() -> None:
    users = np.arange(20_000)
    chosen = is_validation(users, 0.3)
    assert chosen.mean() == pytest.approx(0.3, abs=0.01)  # three standard errors
    assert np.array_equal(is_validation(users[::-1], 0.3), chosen[::-1])
    assert np.array_equal(is_validation(users[500:510], 0.3), chosen[500:510])
    assert np.all(is_validation(users, 0.4) >= chosen)
    assert abs(np.corrcoef(chosen[1:], chosen[:-1])[0, 1]) < 0.03
    assert np.flatnonzero(chosen)[:8].tolist() == [0, 2, 4, 8, 12, 14, 21, 26]  # published results stay what they are


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 30.0])
def test_validation_refuses(share: float) -> None:
    with pytest.raises(ValueError, match="expected a share of the users"):
        is_validation(np.arange(3), share)


# --- a whole audit

USERS, QUESTIONS = 60, 40


def graded(rng: np.random.Generator, truth: NDArray[np.bool_], seeds: int, leak: float = 0.0) -> list[PerUser]:
    """AUC by user and seed of scores that are noise, plus `leak` where the answer is yes."""
    user = np.repeat(np.arange(USERS), QUESTIONS)
    return [auc_by_user(rng.normal(size=len(user)) + leak * truth, truth, user) for _ in range(seeds)]


def part(values: list[PerUser], validation: bool) -> list[PerUser]:
    """Of validation users or the others; read the other way round in the seeds where validation users say so."""
    found = []
    for each in values:
        valid = is_validation(each.user, 0.3)
        value = 1 - each.value if each.value[valid].mean() < 0.5 else each.value
        which = valid == validation
        found.append(PerUser(each.user[which], value[which], 0))
    return found


def audit(rng: np.random.Generator, seeds: int, repetition: int, leak: float = 0.0) -> Difference:
    """Three attacks, one of them with a leak if there is one, and two nulls; each side chosen on validation users."""
    truth = rng.random(USERS * QUESTIONS) < 0.3
    attacks = {name: graded(rng, truth, seeds, leak if name == "b" else 0.0) for name in "abc"}
    nulls = {name: graded(rng, truth, seeds) for name in "de"}
    chosen = []
    for side in (attacks, nulls):
        name = strongest({each: part(values, validation=True) for each, values in side.items()})
        chosen.append(part(side[name], validation=False))
    return paired(*chosen, seed=repetition)


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 3])
def test_an_audit_of_nothing_seldom_finds_something(seeds: int) -> None:
    """The interval of 95 % lies above 0 in at most 2.5 % of all audits."""
    rng = np.random.default_rng(seeds)
    alarms = sum(audit(rng, seeds, each).low > 0 for each in range(400))
    assert stats.binomtest(alarms, 400, 0.025, alternative="greater").pvalue > 0.001


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("leak", [0.45, -0.45])
def test_an_audit_finds_a_small_leak(seeds: int, leak: float) -> None:
    """An AUC of 0.625, or as far below 0.5."""
    rng = np.random.default_rng(10 + seeds)
    found = [audit(rng, seeds, each, leak) for each in range(60)]
    assert np.mean([each.low > 0 for each in found]) > 0.95
    assert np.mean([each.value for each in found]) == pytest.approx(0.125, abs=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 3])
def test_five_comparisons_seldom_hold_a_false_alarm(seeds: int) -> None:
    """All five are with the same null, so they are not independent."""
    rng = np.random.default_rng(20 + seeds)
    families, single = 0, 0
    for repetition in range(400):
        truth = rng.random(USERS * QUESTIONS) < 0.3
        null = graded(rng, truth, seeds)
        p = np.array([paired(graded(rng, truth, seeds), null, seed=repetition, resamples=1).p for _ in range(5)])
        families += bool(np.any(holm(p) <= 0.05))
        single += bool(np.any(p <= 0.05))
    assert stats.binomtest(families, 400, 0.05, alternative="greater").pvalue > 0.001
    if seeds == 1:
        assert single > 40  # without the correction there are more than 10 %: the test above can fail
