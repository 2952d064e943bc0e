"""Lower bounds on epsilon: they exceed the truth as seldom as they say, and come near it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import numpy as np
import pytest
from scipy import stats

from recleak.metrics.intervals import clopper_pearson
from recleak.metrics.lower_bound import from_one_run, from_rates, p_value

REPEATS = 2000


def seldom(events: int, share: float) -> bool:
    """Whether so many events in REPEATS are no sign that they happen more often than they should."""
    return float(stats.binomtest(events, REPEATS, share, alternative="greater").pvalue) > 1e-3


def test_the_test_of_seldom_has_power() -> None:
    assert seldom(100, 0.05)
    assert not seldom(150, 0.05)


# --- one run, many canaries


def naive_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2, term by term."""
    q = exp(epsilon) / (1 + exp(epsilon))

    def between(low: int, high: int) -> float:
        return sum(float(stats.binom.pmf(w, r, q)) for w in range(max(low, 0), high))

    worst = max((between(v - i, v) / i for i in range(1, m + 1)), default=0.0)
    return min(1.0, between(v, r + 1) + 2 * m * delta * worst)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize(("m", "r", "v"), [(20, 20, 20), (20, 12, 9), (20, 12, 0), (20, 0, 0), (1, 1, 1), (40, 33, 5)])
def test_the_p_value_is_that_of_the_theorem(m: int, r: int, v: int, epsilon: float, delta: float) -> None:
    assert p_value(m, r, v, epsilon, delta) == pytest.approx(naive_p_value(m, r, v, epsilon, delta), rel=1e-9)


def test_the_example_of_the_paper() -> None:
    """Appendix D: 1000 canaries, 100 guesses, 75 right, delta 1e-4, 95 %."""
    assert from_one_run(1000, 100, 75, delta=1e-4, level=0.95) == pytest.approx(0.673, abs=5e-4)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize(("r", "v"), [(100, 100), (100, 80), (1000, 560), (500, 499)])
def test_the_bound_is_where_the_p_value_meets_the_level(r: int, v: int, delta: float) -> None:
    bound = from_one_run(1000, r, v, delta=delta, level=0.9)
    if bound > 0:
        assert p_value(1000, r, v, bound, delta) == pytest.approx(0.1, rel=1e-6)
    else:
        assert p_value(1000, r, v, 0.0, delta) >= 0.1


def test_all_right_gives_what_the_number_of_guesses_can_show() -> None:
    q = 0.05 ** (1 / 300)
    assert from_one_run(300, 300, 300) == pytest.approx(log(q / (1 - q)))


@pytest.mark.parametrize(("r", "v"), [(0, 0), (100, 50), (100, 0), (1000, 500), (2, 2)])
def test_what_chance_explains_shows_nothing(r: int, v: int) -> None:
    assert from_one_run(1000, r, v) == 0


def test_more_right_guesses_show_more_and_delta_shows_less() -> None:
    by_right = [from_one_run(500, 200, v, delta=1e-5) for v in range(100, 201, 5)]
    assert by_right == sorted(by_right)
    assert by_right[-1] > by_right[8] > 0
    by_delta = [from_one_run(500, 200, 190, delta=delta) for delta in (0.0, 1e-6, 1e-4, 1e-3, 0.1)]
    assert by_delta == sorted(by_delta, reverse=True)
    assert by_delta[0] > by_delta[2] > by_delta[-1] == 0
    assert from_one_run(500, 200, 190, level=0.9) > from_one_run(500, 200, 190, level=0.99) > 0


def audit(guess: Callable[[np.random.Generator], int], m: int, r: int, delta: float, level: float) -> list[float]:
    """The bounds of many runs; `guess` returns how many of r guesses were right."""
    known: dict[int, float] = {}

    def once(repeat: int) -> float:
        v = guess(np.random.default_rng([7, repeat]))
        if v not in known:
            known[v] = from_one_run(m, r, v, delta=delta, level=level)
        return known[v]

    return [once(repeat) for repeat in range(REPEATS)]


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_scores_that_know_nothing_show_something_as_seldom_as_stated(level: float) -> None:
    def guess(rng: np.random.Generator) -> int:
        score, coin = rng.random(400), rng.random(400) < 0.5
        order = score.argsort()
        return int(coin[order[-100:]].sum() + (~coin[order[:100]]).sum())

    above = sum(bound > 0 for bound in audit(guess, 400, 200, 0.0, level))
    assert seldom(above, 1 - level)
    assert above > 0


@pytest.mark.heavy
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomized_response_is_bounded_from_below_and_closely(epsilon: float) -> None:
    def guess(rng: np.random.Generator) -> int:
        return int((rng.random(5000) < exp(epsilon) / (1 + exp(epsilon))).sum())

    bounds = np.array(audit(guess, 5000, 5000, 0.0, 0.95))
    assert seldom(int((bounds > epsilon).sum()), 0.05)
    assert (bounds > epsilon).sum() > 0.03 * REPEATS  # the theorem is exact here
    assert np.median(bounds) > 0.85 * epsilon


def test_delta_pays_for_what_is_given_away_by_accident() -> None:
    """(0.5, 0.01): each canary is given away with probability 0.01, and the adversary guesses on those first."""
    m, r, epsilon, delta = 1000, 8, 0.5, 0.01
    chance = exp(epsilon) / (1 + exp(epsilon))

    def guess(rng: np.random.Generator) -> int:
        sure = min(r, int(rng.binomial(m, delta)))
        return sure + int((rng.random(r - sure) < chance).sum())

    with_delta = sum(bound > epsilon for bound in audit(guess, m, r, delta, 0.95))
    without = sum(bound > epsilon for bound in audit(guess, m, r, 0.0, 0.95))
    assert seldom(with_delta, 0.05)
    assert not seldom(without, 0.05)


@pytest.mark.parametrize(("m", "r", "v"), [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_impossible_counts_are_refused(m: int, r: int, v: int) -> None:
    with pytest.raises(ValueError, match="expected right <= guesses <= canaries"):
        from_one_run(m, r, v)


@pytest.mark.parametrize(("delta", "level"), [(-0.1, 0.95), (1.0, 0.95), (float("nan"), 0.95), (0.0, 0.0), (0.0, 1.0)])
def test_impossible_settings_are_refused(delta: float, level: float) -> None:
    with pytest.raises(ValueError, match="expected a"):
        from_one_run(10, 5, 5, delta=delta, level=level)
    with pytest.raises(ValueError, match="expected a"):
        from_rates(5, 10, 1, 10, delta=delta, level=level)


# --- rates of many runs


def test_rates_by_hand() -> None:
    t, f = clopper_pearson(90, 100, 0.95).low, clopper_pearson(2, 100, 0.95).high
    assert from_rates(90, 100, 2, 100, delta=0.01) == pytest.approx(log((t - 0.01) / f))
    assert from_rates(98, 100, 10, 100, delta=0.01) == pytest.approx(log((t - 0.01) / f))  # mirrored
    assert from_rates(98, 100, 10, 100) > log(clopper_pearson(98, 100, 0.95).low / clopper_pearson(10, 100, 0.95).high)


@pytest.mark.parametrize("counts", [(50, 100, 50, 100), (0, 100, 0, 100), (100, 100, 100, 100), (10, 100, 90, 100)])
def test_rates_that_do_not_differ_show_nothing(counts: tuple[int, int, int, int]) -> None:
    assert from_rates(*counts) == 0
    assert from_rates(*counts, delta=0.5) == 0


@pytest.mark.heavy
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_rates_of_randomized_response_are_bounded_from_below(epsilon: float) -> None:
    rng, n, chance = np.random.default_rng(5), 2000, exp(epsilon) / (1 + exp(epsilon))
    bounds = np.array(
        [from_rates(int(rng.binomial(n, chance)), n, int(rng.binomial(n, 1 - chance)), n) for _ in range(REPEATS)]
    )
    assert seldom(int((bounds > epsilon).sum()), 0.05)
    assert np.median(bounds) >= 0.85 * epsilon
