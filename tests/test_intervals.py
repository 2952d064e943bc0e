from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from recleak.metrics import intervals
from recleak.metrics.intervals import Estimate, bootstrap_mean, clopper_pearson


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
