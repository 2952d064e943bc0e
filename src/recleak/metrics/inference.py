"""How well an adversary's answers match the truth: yes-or-no questions, each about one user.

All functions take flat arrays with one element per question, in any order: `score` f64[n] (higher: rather yes) or
`claim` bool[n], `truth` bool[n], `user` i64[n]. A user counts once, however many questions are about it. Scores that
are equal are one step of every curve: the adversary has not told them apart, so no threshold does.

Axis letters: n questions, U users, T thresholds (distinct scores).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recleak import random

_Bools: TypeAlias = NDArray[np.bool_]
_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PerUser:
    """A metric by user. Users whose value is undefined are not in it, but counted."""

    user: NDArray[np.int64]  # i64[U], ascending
    value: NDArray[np.float64]  # f64[U]
    left_out: int  # users of the questions without a value


def most_probable(probability: _Floats, user: _Ints, seed: int = 0) -> _Ints:
    """The class that each user is taken for, f64[n, K] -> i64[n]; of equally probable ones one by lot.

    The lot is the user's own, whoever else is asked about.
    """
    best = probability == probability.max(axis=1, keepdims=True)
    lot = random.uniform(seed, "equally probable classes", user[:, None], np.arange(probability.shape[1]))
    guess: _Ints = np.where(best, lot, -1.0).argmax(axis=1)
    return guess


def f1_by_user(claim: _Bools, truth: _Bools, user: _Ints) -> PerUser:
    """The F1 of the yes answers, 2 hits / (claims + true ones): the harmonic mean of precision and recall.

    0 without a hit, be it that nothing was claimed or that nothing was true. A user with neither a claim nor a true one
    has no F1 (0 / 0) and is left out. Claiming everything is the null to beat: `f1_by_user(np.ones_like(truth), ...)`.
    """
    count = _Counts.of(claim, truth, user)
    return _ratios(count.users, 2 * count.hits, count.claimed + count.true)


def precision_by_user(claim: _Bools, truth: _Bools, user: _Ints) -> PerUser:
    """The share of the claims that is true; users without a claim are left out."""
    count = _Counts.of(claim, truth, user)
    return _ratios(count.users, count.hits, count.claimed)


def recall_by_user(claim: _Bools, truth: _Bools, user: _Ints) -> PerUser:
    """The share of the true ones that is claimed; users without a true one are left out."""
    count = _Counts.of(claim, truth, user)
    return _ratios(count.users, count.hits, count.true)


def auc_by_user(score: _Floats, truth: _Bools, user: _Ints) -> PerUser:
    """The chance that a true one of a user scores higher than a false one of the same user, ties counting half.

    Mann and Whitney (1947): with p true and q false ones at a score, and b false ones below it, the sum of p (b + q/2)
    over the scores of a user, over all its pairs. Users without both kinds are left out. One sort of all questions.
    """
    score, truth, user = _scores(score, truth, user)
    users, code = _codes(user)
    order = np.argsort(score)
    order = order[np.argsort(code[order], kind="stable")]  # by user, then by score; radix sort up to 65,536 users
    truth, score, code = truth[order], score[order], code[order]
    start = np.flatnonzero(_changes(score) | _changes(code))  # of each run of equal scores of one user
    of = code[start]  # the user of each run
    first = np.flatnonzero(_changes(of))  # the first run of each user
    true = np.add.reduceat(truth, start, dtype=np.int64)
    false = np.diff(start, append=len(truth)) - true
    total_true, total_false = np.add.reduceat(true, first), np.add.reduceat(false, first)
    below = np.cumsum(false) - false
    below -= below[first][of]
    doubled = np.add.reduceat(true * (2 * below + false), first)  # whole numbers: exact
    return _ratios(users, doubled, 2 * total_true * total_false)


def auc(score: _Floats, truth: _Bools) -> float:
    """The chance that a true one scores higher than a false one, ties counting half, over all questions together."""
    false, true = _curve(score, truth)
    doubled = np.sum(np.diff(false) * (true[1:] + true[:-1]))  # whole numbers: exact
    return float(doubled / (2 * true[-1] * false[-1]))


def tpr_at_fpr(score: _Floats, truth: _Bools, fpr: float, *, minimum: float = 10) -> float | None:
    """The largest true positive rate among the thresholds with a false positive rate of at most `fpr`.

    Nothing is interpolated. None if `fpr` times the number of false ones is less than `minimum`: then the rate rests on
    a handful of false positives.
    """
    if not 0 <= fpr <= 1:
        raise ValueError(f"Got fpr={fpr}, expected a rate from 0 to 1.")
    false, true = _curve(score, truth)
    if minimum / false[-1] > fpr:  # a quotient is rounded as the number that was typed; 0.29 * 100 is not 29
        return None
    return float(true[np.flatnonzero(false / false[-1] <= fpr)[-1]] / true[-1])


def roc(score: _Floats, truth: _Bools, points: int = 1000) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """False and true positive rates from (0, 0) to (1, 1), f64[at most `points`] each, to be plotted.

    Every point is one of the curve. If there are more, half of those kept are evenly spaced by how many are claimed,
    and half evenly by its logarithm, for plots with a logarithmic axis.
    """
    if points < 4:
        raise ValueError(f"Got points={points}, expected at least 4.")
    false, true = _curve(score, truth)
    if len(true) > points:
        claimed = false + true
        even = np.linspace(0, claimed[-1], points // 2)
        by_logarithm = np.geomspace(1, claimed[-1], points - points // 2)
        wanted = np.rint(np.concatenate([even, by_logarithm])).astype(np.int64)
        keep = np.unique(np.searchsorted(claimed, wanted))
        false, true = false[keep], true[keep]
    return false / false[-1], true / true[-1]


def advantage(score: _Floats, truth: _Bools) -> float:
    """The largest true minus false positive rate over all thresholds (Yeom et al. 2018), 0 at least.

    The best threshold is taken with the truth at hand, so scores that say nothing have a small positive advantage: it
    belongs beside that of a null.
    """
    false, true = _curve(score, truth)
    return float(np.max(true * false[-1] - false * true[-1]) / (true[-1] * false[-1]))


@dataclass(frozen=True, eq=False)
class _Counts:
    """What the answers to the questions about each user add up to, i64[U] each."""

    users: NDArray[np.int64]
    hits: NDArray[np.int64]
    claimed: NDArray[np.int64]
    true: NDArray[np.int64]

    @classmethod
    def of(cls, claim: _Bools, truth: _Bools, user: _Ints) -> _Counts:
        claim, truth, user = np.asarray(claim), np.asarray(truth), np.asarray(user)
        _check_lengths(claim=claim, truth=truth, user=user)
        _check_bools(claim=claim, truth=truth)
        users, code = _codes(user)
        hits, claimed, true = (
            np.bincount(code[which], minlength=len(users)) for which in (claim & truth, claim, truth)
        )
        return cls(users, hits, claimed, true)


def _ratios(users: _Ints, part: _Ints, whole: _Ints) -> PerUser:
    defined = whole > 0
    return PerUser(users[defined], part[defined] / whole[defined], int(np.count_nonzero(~defined)))


def _curve(score: _Floats, truth: _Bools) -> tuple[_Ints, _Ints]:
    """False and true positives if the scores from each threshold on are claimed, i64[T + 1] each, from 0 to all."""
    score, truth = np.asarray(score), np.asarray(truth)
    score, truth, _ = _scores(score, truth, np.broadcast_to(np.int64(0), score.shape))
    true_ones = int(np.count_nonzero(truth))
    if not 0 < true_ones < len(truth):
        raise ValueError(
            f"Got {true_ones:,} true and {len(truth) - true_ones:,} false ones, expected at least one of each."
        )
    order = np.argsort(score)[::-1]
    end = np.append(np.flatnonzero(_changes(score[order])[1:]), len(score) - 1)  # the last of each run of equal scores
    true = np.cumsum(truth[order], dtype=np.int64)[end]
    return np.append(0, end + 1 - true), np.append(0, true)


def _scores(score: _Floats, truth: _Bools, user: _Ints) -> tuple[_Floats, _Bools, _Ints]:
    score, truth, user = np.asarray(score), np.asarray(truth), np.asarray(user)
    _check_lengths(score=score, truth=truth, user=user)
    _check_bools(truth=truth)
    unusable = int(np.count_nonzero(np.isnan(score)))
    if unusable:
        raise ValueError(
            f"Got {unusable:,} of {len(score):,} scores that are NaN, expected a number for every question. "
            "An adversary that has no answer gives all such questions the same score."
        )
    return score, truth, user


def _codes(user: _Ints) -> tuple[_Ints, NDArray[np.unsignedinteger]]:
    """The users, ascending, and the place of each question's user among them, in as few bytes as hold it."""
    if not np.issubdtype(user.dtype, np.integer):
        raise ValueError(f"Got users of type {user.dtype}, expected whole numbers.")
    low, high = (int(user.min()), int(user.max())) if len(user) else (0, -1)
    if high - low < len(user) + (1 << 16):  # a table over the range of codes is faster than a sort
        present = np.bincount(user - low, minlength=high - low + 1) > 0
        users = np.flatnonzero(present) + low
        place = (np.cumsum(present) - 1).astype(_smallest(len(users)))
        return users, place[user - low]
    users, code = np.unique(user, return_inverse=True)
    return users.astype(np.int64), code.astype(_smallest(len(users)))


def _smallest(size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that counts to below `size`."""
    return np.min_scalar_type(max(size - 1, 0))


def _changes(values: NDArray[np.generic]) -> _Bools:
    """Where a value differs from the one before it; the first one does."""
    return np.append(np.ones(min(1, len(values)), bool), values[1:] != values[:-1])


def _check_lengths(**columns: NDArray[np.generic]) -> None:
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Got {got}, expected vectors of one length: one element per question.")


def _check_bools(**columns: NDArray[np.generic]) -> None:
    for name, column in columns.items():
        if column.dtype != np.bool_:
            raise ValueError(f"Got {name} of type {column.dtype}, expected bool.")
