"""Draws are a pure function of their key, and look random."""

from __future__ import annotations

import numpy as np
from scipy import stats

from recleak import random


def test_equal_keys_give_equal_draws_whatever_the_batch() -> None:
    together = random.uniform(1, "noise", np.arange(100)[:, None], np.arange(7))
    alone = np.array([[random.uniform(1, "noise", user, k) for k in range(7)] for user in range(100)])
    assert np.array_equal(together, alone)


def test_seed_purpose_and_every_word_of_the_key_matter() -> None:
    draws = {
        float(random.uniform(seed, purpose, *key))
        for seed, purpose, key in [
            (1, "a", (2, 3)),
            (2, "a", (2, 3)),
            (1, "b", (2, 3)),
            (1, "a", (3, 2)),
            (1, "a", (2, 4)),
            (1, "a", (2,)),
        ]
    }
    assert len(draws) == 6


def test_uniform_is_uniform_along_each_axis_and_independent() -> None:
    grid = random.uniform(0, "test", np.arange(300)[:, None], np.arange(300))
    assert stats.kstest(grid.ravel(), "uniform").pvalue > 1e-4
    assert stats.kstest(grid.ravel() ** 1.05, "uniform").pvalue < 1e-4  # the test has power
    for axis in (0, 1):
        neighbors = np.corrcoef(np.take(grid, range(299), axis).ravel(), np.take(grid, range(1, 300), axis).ravel())
        assert abs(neighbors[0, 1]) < 0.02
    assert stats.kstest(grid.mean(axis=0), "norm", (0.5, np.sqrt(1 / 12 / 300))).pvalue > 1e-4
    assert stats.kstest(grid.mean(axis=1), "norm", (0.5, np.sqrt(1 / 12 / 300))).pvalue > 1e-4


def test_bits_are_balanced() -> None:
    drawn = random.bits(3, "bits", np.arange(20_000))
    ones = np.array([int(((drawn >> np.uint64(k)) & np.uint64(1)).sum()) for k in range(64)])
    assert np.abs(ones - 10_000).max() < 5 * np.sqrt(20_000) / 2


def test_below_stays_below_and_is_uniform() -> None:
    drawn = random.below(7, 5, "below", np.arange(70_000))
    assert drawn.min() == 0
    assert drawn.max() == 6
    assert stats.chisquare(np.bincount(drawn)).pvalue > 1e-4
    assert (random.below(np.array([1, 2, 3]), 5, "below", np.arange(3)) < [1, 2, 3]).all()
