"""Metrics as means over users: the metric itself, and its standard error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import f1_score, roc_auc_score

from recleak.metrics.linearized import auc_values, macro_f1_values


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
