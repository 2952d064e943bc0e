"""Metrics as means over users: the metric itself, and its standard error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import f1_score, roc_auc_score

from recleak.metrics.intervals import both_ways
from recleak.metrics.linearized import auc_both_ways, auc_values, macro_f1_values


def drawn(seed: int, n: int, classes: int, ties: bool = False) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.r_[np.arange(classes), rng.integers(classes, size=n - classes)])
    score = rng.normal(size=(n, classes)) + 0.8 * (label[:, None] == np.arange(classes))
    score = np.round(score) if ties else score
    probability = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
    return probability, label


@given(st.integers(0, 10**6), st.integers(6, 40), st.integers(2, 4), st.booleans())
def test_the_mean_is_the_metric(seed: int, n: int, classes: int, ties: bool) -> None:
    probability, label = drawn(seed, n, classes, ties)
    expected = (
        roc_auc_score(label, probability[:, 1])
        if classes == 2
        else np.mean([roc_auc_score(label == place, probability[:, place]) for place in range(classes)])
    )
    assert auc_values(probability, label).mean() == pytest.approx(expected)
    guess = probability.argmax(axis=1)
    f1 = f1_score(label, guess, average="macro", labels=np.unique(label), zero_division=0)
    assert macro_f1_values(guess, label, classes).mean() == pytest.approx(f1)


@pytest.mark.heavy
@pytest.mark.parametrize("classes", [2, 3])
def test_the_spread_is_that_of_the_metric(classes: int) -> None:
    """Over many draws, the metric spreads as its values say."""
    found: dict[str, list[tuple[float, float]]] = {"auc": [], "f1": []}
    for seed in range(400):
        probability, label = drawn(seed, 150, classes)
        both = {
            "auc": auc_values(probability, label),
            "f1": macro_f1_values(probability.argmax(axis=1), label, classes),
        }
        for name, values in both.items():
            found[name].append((float(values.mean()), float(values.var(ddof=1) / len(values))))
    for pairs in found.values():
        mean, variance = np.array(pairs).T
        ratio = mean.var(ddof=1) / variance.mean()
        low, high = (stats.chi2.ppf(q, 399) / 399 for q in (0.0005, 0.9995))
        assert 0.9 * low < ratio < 1.1 * high


def test_one_class_has_no_auc() -> None:
    with pytest.raises(ValueError, match="one class only"):
        auc_values(np.full((3, 2), 0.5), np.zeros(3, np.int64))
    assert macro_f1_values(np.array([0, 0, 1]), np.zeros(3, np.int64), 2).mean() == pytest.approx(0.8)


def test_adversaries_and_victims_have_the_mean_of_adversaries() -> None:
    rng = np.random.default_rng(4)
    truth = rng.random((12, 12)) < 0.3
    truth[3] = False  # who has no community has no AUC
    score = np.round(rng.normal(size=(12, 12)) + truth, 1)  # with ties
    auc, column = auc_both_ways(score, truth)
    others = ~np.eye(12, dtype=bool)
    expected = [roc_auc_score(truth[a, others[a]], score[a, others[a]]) for a in range(12) if a != 3]
    assert np.delete(auc, 3) == pytest.approx(expected)
    assert np.isnan(auc[3])
    assert column.mean() == pytest.approx(0)
    assert both_ways(auc, column).mean() == pytest.approx(np.mean(expected))


def test_who_stands_aside_is_no_victim() -> None:
    rng = np.random.default_rng(6)
    truth, aside, score = rng.random((20, 20)) < 0.4, rng.random((20, 20)) < 0.2, rng.normal(size=(20, 20))
    aside[:, 0] = True
    auc, column = auc_both_ways(score, truth & ~aside, aside)
    victims = ~aside & ~np.eye(20, dtype=bool)
    expected = [roc_auc_score(truth[a, victims[a]], score[a, victims[a]]) for a in range(20)]
    assert auc == pytest.approx(expected)
    assert column[0] == 0
    assert column.mean() == pytest.approx(0)


def test_a_victim_counts_by_how_much_it_moves_the_mean() -> None:
    """Twice the weight of a victim moves the mean AUC by its value over the number of users, to first order."""
    rng = np.random.default_rng(5)
    n, truth = 200, rng.random((200, 200)) < 0.2
    score = rng.normal(size=(n, n)) + rng.normal(size=n)
    _, column = auc_both_ways(score, truth)
    for victim in (0, 1, 2):
        weight = np.ones(n)
        weight[victim] = 2
        moved = []
        for a in range(n):
            at = np.flatnonzero(np.arange(n) != a)
            plain = roc_auc_score(truth[a, at], score[a, at])
            moved.append(roc_auc_score(truth[a, at], score[a, at], sample_weight=weight[at]) - plain)
        assert np.mean(moved) * n == pytest.approx(column[victim], abs=0.03 + 0.05 * abs(column[victim]))
