"""The metrics of an adversary's answers against naive references, with ties, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from recleak.metrics.inference import (
    PerUser,
    advantage,
    auc,
    auc_by_user,
    f1_by_user,
    most_probable,
    precision_by_user,
    recall_by_user,
    roc,
    tpr_at_fpr,
)

Answers = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]  # score, truth, user


@st.composite
def answers(draw: st.DrawFn, both: bool = False) -> Answers:
    """Some questions about some users with codes near or far apart; few distinct scores, hence many ties."""
    far = draw(st.sampled_from([1, 10**9]))
    row = st.tuples(st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.25, 3.0]), st.booleans(), st.integers(-2, 3))
    rows = draw(st.lists(row, min_size=1, max_size=40))
    if both:
        rows += [(0.0, True, 0), (0.0, False, 1)]
    score, truth, user = zip(*rows, strict=True)
    return np.array(score), np.array(truth), np.array(user, np.int64) * far


def naive_auc(score: NDArray[np.float64], truth: NDArray[np.bool_]) -> float | None:
    pairs = [(t, f) for t in score[truth] for f in score[~truth]]
    return None if not pairs else sum((t > f) + (t == f) / 2 for t, f in pairs) / len(pairs)


def test_equally_probable_classes_are_drawn() -> None:
    """Half of each for two of three; what is more probable is taken; a user's lot does not depend on the others."""
    user = np.arange(4_000)
    chance = np.tile([0.4, 0.2, 0.4], (4_000, 1))
    chance[:10] = [0.3, 0.6, 0.1]
    guess = most_probable(chance, user)
    assert (guess[:10] == 1).all()
    assert set(guess[10:]) == {0, 2}
    assert abs((guess[10:] == 0).mean() - 0.5) < 4 * (0.25 / 3_990) ** 0.5
    assert (most_probable(chance[2_000:], user[2_000:]) == guess[2_000:]).all()
    assert (most_probable(chance, user, seed=1) != guess).any()


def naive_curve(score: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """(FPR, TPR) at every threshold, nothing claimed first."""
    claims = [np.zeros_like(truth), *(score >= threshold for threshold in np.unique(score)[::-1])]
    return [(float(claim[~truth].mean()), float(claim[truth].mean())) for claim in claims]


def assert_by_user(
    got: PerUser, user: NDArray[np.int64], reference: Callable[[NDArray[np.bool_]], float | None]
) -> None:
    """`got` is the reference on each user's questions, without those where it is None."""
    each = {int(one): reference(user == one) for one in np.unique(user)}
    defined = {one: value for one, value in each.items() if value is not None}
    assert got.user.dtype == np.int64
    assert got.user.tolist() == list(defined)
    assert got.value.tolist() == pytest.approx(list(defined.values()), rel=1e-12)
    assert got.left_out == len(each) - len(defined)


@given(answers())
def test_answers_by_user_equal_the_naive_loop(given_answers: Answers) -> None:
    score, truth, user = given_answers
    claim = score > 0

    def ratio(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    def f1(mine: NDArray[np.bool_]) -> float | None:
        hits, yes, true = ((claim & truth & mine).sum(), (claim & mine).sum(), (truth & mine).sum())
        if not yes and not true:
            return None
        if not hits:
            return 0.0
        precision, recall = hits / yes, hits / true
        return float(2 * precision * recall / (precision + recall))

    assert_by_user(f1_by_user(claim, truth, user), user, f1)
    assert_by_user(
        precision_by_user(claim, truth, user),
        user,
        lambda mine: ratio(int((claim & truth & mine).sum()), int((claim & mine).sum())),
    )
    assert_by_user(
        recall_by_user(claim, truth, user),
        user,
        lambda mine: ratio(int((claim & truth & mine).sum()), int((truth & mine).sum())),
    )


@given(answers())
def test_auc_by_user_equals_the_naive_loop(given_answers: Answers) -> None:
    score, truth, user = given_answers
    assert_by_user(auc_by_user(score, truth, user), user, lambda mine: naive_auc(score[mine], truth[mine]))


@given(answers(both=True))
def test_curve_equals_the_naive_loop(given_answers: Answers) -> None:
    score, truth, _ = given_answers
    points = naive_curve(score, truth)
    assert np.stack(roc(score, truth), axis=1).tolist() == [pytest.approx(point) for point in points]
    assert auc(score, truth) == pytest.approx(naive_auc(score, truth), rel=1e-12)
    assert advantage(score, truth) == pytest.approx(max(tpr - fpr for fpr, tpr in points), rel=1e-12)
    for fpr in (0.0, 0.1, 0.5, 1.0):
        expected = max(point[1] for point in points if point[0] <= fpr)
        assert tpr_at_fpr(score, truth, fpr, minimum=0) == pytest.approx(expected)


def test_many_users_and_the_pooled_curve_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    user = rng.integers(0, 300, 20_000)
    truth = rng.random(20_000) < 0.3
    score = np.round(rng.normal(truth, 2), 1)
    got = auc_by_user(score, truth, user)
    expected = [roc_auc_score(truth[user == one], score[user == one]) for one in got.user]
    assert got.value == pytest.approx(expected, rel=1e-12)
    assert (len(got.user), got.left_out) == (300, 0)
    assert auc(score, truth) == pytest.approx(roc_auc_score(truth, score), rel=1e-12)


@pytest.mark.parametrize("n_users", [200, 300, 70_000])  # places in 1, 2 and 4 bytes
def test_order_of_questions_does_not_matter(n_users: int) -> None:
    rng = np.random.default_rng(1)
    user = np.repeat(np.arange(n_users), 3)
    score, truth = rng.integers(0, 4, len(user)) / 2, rng.random(len(user)) < 0.5
    mixed = rng.permutation(len(user))
    for metric in (auc_by_user, lambda s, t, u: f1_by_user(s > 1, t, u)):
        one, other = metric(score, truth, user), metric(score[mixed], truth[mixed], user[mixed])
        assert np.array_equal(one.user, other.user)
        assert np.array_equal(one.value, other.value)
    s, t = score.reshape(-1, 3), truth.reshape(-1, 3)
    wins = ((s[:, :, None] > s[:, None]) + (s[:, :, None] == s[:, None]) / 2) * (t[:, :, None] & ~t[:, None])
    both = t.any(1) & ~t.all(1)
    expected = wins.sum((1, 2))[both] / (t.sum(1) * (~t).sum(1))[both]
    assert np.array_equal(auc_by_user(score, truth, user).value, expected)


def test_users_without_a_value_are_left_out() -> None:
    user = np.array([5, 5, 6, 6, 7, 7, 8, 8])
    truth = np.array([1, 0, 0, 0, 1, 1, 0, 0], bool)
    claim = np.array([0, 1, 0, 0, 1, 0, 1, 0], bool)
    got = f1_by_user(claim, truth, user)
    assert got.user.tolist() == [5, 7, 8]  # user 6: nothing true, nothing claimed
    assert got.value.tolist() == pytest.approx([0, 2 / 3, 0])
    assert got.left_out == 1
    assert f1_by_user(np.ones_like(truth), truth, user).value.tolist() == pytest.approx([2 / 3, 0, 1, 0])
    assert recall_by_user(claim, truth, user).user.tolist() == [5, 7]
    assert precision_by_user(claim, truth, user).user.tolist() == [5, 7, 8]
    assert auc_by_user(claim.astype(float), truth, user).user.tolist() == [5]


def test_no_question_is_no_user() -> None:
    nothing, nobody = np.zeros(0, bool), np.zeros(0, np.int64)
    for got in (f1_by_user(nothing, nothing, nobody), auc_by_user(np.zeros(0), nothing, nobody)):
        assert (len(got.user), len(got.value), got.left_out) == (0, 0, 0)


def test_a_constant_score_says_nothing() -> None:
    truth, user = np.arange(40) % 4 == 0, np.arange(40) % 3
    assert auc(np.zeros(40), truth) == 0.5
    assert auc_by_user(np.zeros(40), truth, user).value.tolist() == [0.5] * 3
    assert advantage(np.zeros(40), truth) == 0
    assert tpr_at_fpr(np.zeros(40), truth, 0.9) == 0  # no interpolation: all or nothing
    assert tpr_at_fpr(np.zeros(40), truth, 1.0) == 1


def test_rate_is_exact_at_decimal_false_positive_rates() -> None:
    """0.29 * 100 is less than 29 in floating-point numbers; 29 of 100 false positives are a rate of 0.29."""
    score = np.arange(200.0)
    truth = np.arange(200) % 2 == 0
    for percent in range(10, 101):
        got = tpr_at_fpr(score, truth, percent / 100)  # the scores go false, true, false, true, ... from above
        assert got == percent / 100 if percent < 100 else got == 1


@pytest.mark.parametrize(
    ("negatives", "fpr", "shown"), [(9_999, 0.001, False), (10_000, 0.001, True), (100, 0.1, True)]
)
def test_rate_that_rests_on_few_false_positives_is_not_given(negatives: int, fpr: float, shown: bool) -> None:
    truth = np.arange(negatives + 5) < 5
    assert (tpr_at_fpr(np.arange(len(truth), dtype=np.float64), truth, fpr) is not None) == shown
    assert tpr_at_fpr(np.arange(len(truth), dtype=np.float64), truth, fpr, minimum=11) is None


@pytest.mark.parametrize("points", [4, 5, 100, 1000])
def test_thinned_curve_holds_points_of_the_curve(points: int) -> None:
    rng = np.random.default_rng(2)
    truth = rng.random(30_000) < 0.4
    score = rng.normal(truth, 1)
    whole, thin = (np.stack(roc(score, truth, n), axis=1) for n in (10**6, points))
    assert len(whole) == 30_001
    assert points / 2 <= len(thin) <= points
    assert {tuple(point) for point in thin.tolist()} <= {tuple(point) for point in whole.tolist()}
    assert thin[0].tolist() == [0, 0]
    assert thin[-1].tolist() == [1, 1]
    assert (np.diff(thin, axis=0) >= 0).all()
    if points == 1000:
        assert np.trapezoid(thin[:, 1], thin[:, 0]) == pytest.approx(auc(score, truth), abs=1e-3)
        assert (np.diff(thin.sum(1)) < 0.01).all()  # no gaps
        assert (thin[:, 0] < 1e-3).sum() > 20  # and enough for a logarithmic axis


def good(**changes: Any) -> dict[str, Any]:
    return {"score": np.array([0.1, 0.2]), "truth": np.array([True, False]), "user": np.array([0, 0]), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": np.array([0.1, np.nan])}, "1 of 2 scores that are NaN"),
        ({"score": np.array([0.1])}, r"score \(1,\), truth \(2,\)"),
        ({"truth": np.array([1, 0])}, "truth of type int64, expected bool"),
        ({"user": np.array([0.0, 1.0])}, "users of type float64"),
        ({"user": np.array([[0, 1]])}, r"user \(1, 2\)"),
    ],
)
def test_refuses_what_is_no_answer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auc_by_user(**good(**changes))


def test_refuses_curves_that_do_not_exist() -> None:
    score, one_kind = np.array([0.1, 0.2]), np.array([True, True])
    for metric in (auc, advantage, roc):
        with pytest.raises(ValueError, match="2 true and 0 false ones"):
            metric(score, one_kind)
        with pytest.raises(ValueError, match="0 true and 0 false ones"):
            metric(score[:0], one_kind[:0])
    with pytest.raises(ValueError, match=r"fpr=1\.5"):
        tpr_at_fpr(score, ~one_kind, 1.5)
    with pytest.raises(ValueError, match="points=3"):
        roc(score, np.array([True, False]), 3)
    with pytest.raises(ValueError, match="claim of type float64, expected bool"):
        f1_by_user(score, one_kind, np.array([0, 1]))
