"""Learners: what they find where there is something, nothing where there is nothing, and the parts against others."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression

from recleak.attacks.careful import Careful, of_parts, turned
from recleak.attacks.learners import (
    Bayes,
    Boosting,
    GaussianProcess,
    Learner,
    Logistic,
    Neighbors,
    Network,
    Svc,
    Tree,
    cross_validated,
)
from recleak.attacks.preparation import Preparation, Reduce
from recleak.errors import ConfigError

LEARNERS: dict[str, Learner] = {
    "network": Network(epochs=20, members=2),
    "logistic": Logistic(),
    "svc": Svc(),
    "neighbors": Neighbors(),
    "tree": Tree(),
    "boosting": Boosting(trees=30),
    "bayes": Bayes(),
    "process": GaussianProcess(),
    "careful": Careful(learners=(Logistic(), Svc())),
}
PARTS = (("user.encoder", 40), ("item", 3000), ("head.1", 20), ("head.2", 20))
Rows = NDArray[np.float32]


def drawn(k: int, p: int, signal: float, classes: int = 2, seed: int = 0) -> tuple[Rows, NDArray[np.int64]]:
    """Normal rows; those of a class are shifted along a direction of their own, in 10 of the columns."""
    rng = np.random.default_rng(seed)
    label = np.arange(k) % classes
    rows = rng.normal(size=(k, p))
    rows[:, :10] += signal * np.random.default_rng(99).normal(size=(classes, 10))[label]
    return rows.astype(np.float32), label


def auc(score: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    rank, count = rankdata(score), int(truth.sum())
    return float((rank[truth].sum() - count * (count + 1) / 2) / (count * (len(truth) - count)))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_finds_what_is_there_and_nothing_else(name: str) -> None:
    rows, label = drawn(300, 12, 3.0)
    chance = LEARNERS[name].fit_predict(rows[:100], label[:100], 2, rows[100:], 0)
    assert chance.shape == (200, 2)
    np.testing.assert_allclose(chance.sum(1), 1, atol=1e-6)
    assert auc(chance[:, 1], label[100:] == 1) > 0.95
    plain, _ = drawn(300, 12, 0.0, seed=3)
    label = np.random.default_rng(5).permutation(label)
    chance = LEARNERS[name].fit_predict(plain[:100], label[:100], 2, plain[100:], 0)
    yes = label[100:] == 1
    assert abs(auc(chance[:, 1], yes) - 0.5) < 3.3 * np.sqrt(201 / (12 * yes.sum() * (~yes).sum()))


@pytest.mark.parametrize("name", LEARNERS)
def test_classes_that_nobody_known_has_get_nothing(name: str) -> None:
    rows, label = drawn(120, 12, 3.0, classes=3)
    chance = LEARNERS[name].fit_predict(rows[:60], 2 * label[:60], 6, rows[60:], 0)  # classes 0, 2, 4 of 6
    assert chance.shape == (60, 6)
    assert np.all(chance[:, [1, 3, 5]] == 0)
    np.testing.assert_allclose(chance.sum(1), 1, atol=1e-6)
    assert np.mean(chance.argmax(1) == 2 * label[60:]) > 0.7
    alone = LEARNERS[name].fit_predict(rows[:5], np.full(5, 1), 3, rows[60:], 0)
    assert np.array_equal(alone, np.eye(3)[np.full(60, 1)])
    assert LEARNERS[name].fit_predict(rows[:60], label[:60], 3, rows[:0], 0).shape == (0, 3)


@pytest.mark.parametrize("name", LEARNERS)
def test_the_same_call_gives_the_same_bits_and_no_warning(name: str) -> None:
    rows, label = drawn(70, 400, 1.0)
    rows[:, 20:40] = 0  # constant columns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (LEARNERS[name].fit_predict(rows[:23], label[:23], 2, rows[23:], 7) for _ in range(2))
    assert np.array_equal(first, second)
    if name == "careful":  # prepares rows by itself, with all of them
        return
    plain = replace(LEARNERS[name], prepare=Preparation("standard", "none"))  # type: ignore[type-var]
    order = np.random.default_rng(0).permutation(47)
    first, again = (plain.fit_predict(rows[:23], label[:23], 2, rows[23:][at], 7) for at in (np.arange(47), order))
    np.testing.assert_allclose(again, first[order], atol=2e-3)  # nobody's answer hangs on the place in the list


@pytest.mark.parametrize("name", ["network", "logistic", "svc"])
@pytest.mark.parametrize("reduce", ["none", "pca", "random"])
def test_many_more_columns_than_users(name: str, reduce: Reduce) -> None:
    """Columns of very different sizes, most of them noise; one direction in many columns tells the class."""
    rng = np.random.default_rng(1)
    label = rng.integers(2, size=400)
    rows = rng.normal(size=(400, 3000)) + 0.3 * (2 * label[:, None] - 1) * rng.choice([-1, 1], 3000)
    rows = (rows * np.geomspace(1e-6, 1e3, 3000)).astype(np.float32)
    learner = replace(LEARNERS[name], prepare=Preparation("standard", reduce, 40))  # type: ignore[type-var]
    chance = learner.fit_predict(rows[:40], label[:40], 2, rows[40:], 0)
    assert auc(chance[:, 1], label[40:] == 1) > 0.9


@pytest.mark.parametrize(("k", "p", "classes"), [(60, 5, 2), (60, 5, 3), (30, 80, 2), (30, 80, 3)])
def test_logistic_regression_is_that_of_scikit_learn(k: int, p: int, classes: int) -> None:
    rows, label = (
        drawn(k + 20, p, 0.5, classes=classes)
        if p >= 10
        else (
            np.random.default_rng(0).normal(size=(k + 20, p)).astype(np.float32),
            np.arange(k + 20) % classes,
        )
    )
    # scikit-learn gives two classes one vector; two vectors that halve it have half its penalty
    for C in (0.1, 3.0):
        ours = Logistic(C=C, prepare=Preparation("none", "none")).fit_predict(rows[:k], label[:k], classes, rows[k:], 0)
        theirs = LogisticRegression(C=2 * C if classes == 2 else C, tol=1e-8, max_iter=5000)
        expected = theirs.fit(rows[:k].astype(float), label[:k]).predict_proba(rows[k:].astype(float))
        np.testing.assert_allclose(ours, expected, atol=2e-3)


def test_scales_are_those_of_all_users() -> None:
    rng = np.random.default_rng(0)
    x, others = (rng.normal(3, 5, size=(n, 4)).astype(np.float32) for n in (6, 9))
    x[:, 2] = others[:, 2] = 7.0
    every = np.concatenate([x, others])
    one, other = Preparation("standard", "none").apply(x, others, 0)
    spread = np.where(every.std(0) > 0, every.std(0), 1)
    np.testing.assert_allclose(np.concatenate([one, other]), (every - every.mean(0)) / spread, atol=1e-5)
    one, other = Preparation("unit", "none").apply(x, others, 0)
    unit = every / np.linalg.norm(every, axis=1, keepdims=True)
    np.testing.assert_allclose(np.concatenate([one, other]), unit - unit.mean(0), atol=1e-6)
    assert np.array_equal(np.concatenate(Preparation("none", "none").apply(x, others, 0)), every)
    assert np.array_equal(np.concatenate([x, others]), every)  # what was given stays as it is


def test_reductions_keep_distances() -> None:
    """PCA those of a low-dimensional table exactly, random directions those of any table within a few percent."""
    rng = np.random.default_rng(0)

    def distances(rows: Rows) -> NDArray[np.float64]:
        each = np.linalg.norm(rows[:, None] - rows[None], axis=2)[np.triu_indices(len(rows), 1)]
        return np.asarray(each / np.sqrt(np.square(each).mean()), np.float64)

    low = (rng.normal(size=(40, 5)) @ rng.normal(size=(5, 300))).astype(np.float32)
    found = np.concatenate(Preparation("none", "pca", 5).apply(low[:10], low[10:], 0))
    assert found.shape == (40, 5)
    np.testing.assert_allclose(distances(found), distances(low), rtol=1e-3)
    high = rng.normal(size=(40, 3000)).astype(np.float32)
    found = np.concatenate(Preparation("none", "random", 800).apply(high[:10], high[10:], 0))
    np.testing.assert_allclose(distances(found), distances(high), rtol=0.15)
    other = np.concatenate(Preparation("none", "random", 800).apply(high[:10], high[10:], 1))
    assert not np.array_equal(found, other)


def in_parts(n: int = 240, signal: float = 1.0, classes: int = 2) -> tuple[Rows, NDArray[np.int64]]:
    """Rows of `PARTS`, in which small numbers of the user part tell the class, beside a large table of noise."""
    rng = np.random.default_rng(4)
    label = rng.choice(classes, n, p=[0.8, *[0.2 / (classes - 1)] * (classes - 1)])
    rows = rng.normal(size=(n, sum(width for _, width in PARTS)))
    rows[:, :40] = 0.01 * (rows[:, :40] + signal * np.random.default_rng(9).normal(size=(classes, 40))[label])
    return rows.astype(np.float32), label


def test_parts_are_scaled_by_themselves() -> None:
    """Each is what "unit" makes of it alone, at a total variance of 1, whatever the sizes are; a still one is zero."""
    rows, _ = in_parts(30)
    rows[:, -20:] = 3.0
    found = Preparation("parts", "none", parts=PARTS).together(rows.copy(), 0)
    start = 0
    for _, width in PARTS[:-1]:
        alone = Preparation("unit", "none").together(rows[:, start : start + width].copy(), 0)
        part = found[:, start : start + width]
        assert np.square(part).sum() / len(part) == pytest.approx(1, rel=1e-4)
        np.testing.assert_allclose(part, alone / np.sqrt(np.square(alone).sum() / len(alone)), rtol=1e-3, atol=1e-6)
        start += width
    assert not found[:, -20:].any()
    whole = Preparation("parts", "none").together(rows.copy(), 0)  # nobody said which parts there are
    alone = Preparation("unit", "none").together(rows.copy(), 0)
    np.testing.assert_allclose(whole, alone / np.sqrt(np.square(alone).sum() / 30), rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="parts of 5 columns in rows of 3080"):
        Preparation("parts", parts=(("a", 5),)).together(rows, 0)


def test_a_small_part_is_not_drowned_by_a_large_one() -> None:
    rows, label = in_parts()
    drowned, even = (
        of_parts(Logistic(prepare=Preparation(scale)), PARTS).fit_predict(rows[:80], label[:80], 2, rows[80:], 0)
        for scale in ("unit", "parts")
    )
    yes = label[80:] == 1
    assert auc(drowned[:, 1], yes) < 0.7
    assert auc(even[:, 1], yes) > 0.9
    assert of_parts(Careful(), PARTS).parts == PARTS  # type: ignore[attr-defined]
    assert of_parts(Logistic(), PARTS) == Logistic()


def test_turned_rows_have_the_same_products() -> None:
    rows, _ = in_parts(30)
    found, parts = turned(rows, PARTS)
    assert parts == (("user.encoder", 30), ("item", 30), ("head.1", 20), ("head.2", 20))
    one, other = 0, 0
    for (_, wide), (_, narrow) in zip(PARTS, parts, strict=True):
        mine, theirs = rows[:, one : one + wide], found[:, other : other + narrow]
        np.testing.assert_allclose(
            theirs @ theirs.T, mine @ mine.T, rtol=1e-3, atol=1e-3 * np.square(mine).sum(1).max()
        )
        one, other = one + wide, other + narrow


def test_who_is_careful_finds_the_part_that_tells() -> None:
    rows, label = in_parts()
    chance = Careful(parts=PARTS, learners=(Logistic(), Svc())).fit_predict(rows[:80], label[:80], 2, rows[80:], 0)
    yes = label[80:] == 1
    assert auc(chance[:, 1], yes) > 0.95
    plain = Logistic().fit_predict(rows[:80], label[:80], 2, rows[80:], 0)
    assert auc(plain[:, 1], yes) < 0.7
    blind = Careful(learners=(Logistic(),))  # all in one
    assert auc(blind.fit_predict(rows[:80], label[:80], 2, rows[80:], 0)[:, 1], yes) < 0.8


def test_who_is_careful_does_not_forget_rare_classes() -> None:
    """Where a learner guesses the frequent class for nearly all, whose macro-F1 is that of a constant."""
    rows, label = in_parts(400, signal=0.25)
    known, others = label[:150], label[150:]
    careful = Careful(parts=PARTS, learners=(Logistic(C=0.1),), scales=("unit",))
    plain = Logistic(C=0.1, prepare=Preparation("unit", "pca"))
    mine = rows[:, :40]
    rare = plain.fit_predict(mine[:150], known, 2, mine[150:], 0).argmax(1)
    found = careful.fit_predict(rows[:150], known, 2, rows[150:], 0).argmax(1)
    assert (rare == 1).mean() < 0.02
    assert (found == 1).mean() > 0.1
    assert ((found == 1) & (others == 1)).sum() > 0.4 * (others == 1).sum()


def test_nobody_is_guessed_by_who_saw_the_answer() -> None:
    """Each user has a column that says its class to who saw it, and nothing of anybody else."""
    label = np.arange(60) % 2
    rows = (np.eye(60) * (2 * label - 1)).astype(np.float32)
    plain = Logistic(C=100.0, prepare=Preparation("none", "none"))
    assert np.array_equal(plain.fit_predict(rows, label, 2, rows, 0).argmax(1), label)
    found = cross_validated(plain, rows, label, 2, 0)
    np.testing.assert_allclose(found, 0.5, atol=1e-3)
    assert np.array_equal(found, cross_validated(plain, rows, label, 2, 0))
    np.testing.assert_allclose(cross_validated(plain, rows[:1], label[:1], 2, 0), 0.5)


def test_what_cannot_be_is_refused() -> None:
    rows, label = np.zeros((10, 3), np.float32), np.zeros(10, np.int64)
    with pytest.raises(ConfigError, match=r"Got scales=\['standard'\] and 3 learners"):
        Careful(scales=("standard",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="folds is 1"):
        Careful(folds=1)
    with pytest.raises(ConfigError, match="scale is 'sigma', expected one of none, standard, unit, parts"):
        Preparation(scale="sigma")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dimensions is 0"):
        Preparation(dimensions=0)
    with pytest.raises(ValueError, match=r"Got rows \(10, 3\) with 9 labels"):
        Tree().fit_predict(rows, label[:9], 2, rows, 0)
    with pytest.raises(ValueError, match=r"labels from 0 to 0, expected them in \[0, 0\)"):
        Tree().fit_predict(rows, label, 0, rows, 0)
