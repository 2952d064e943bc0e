"""Metrics of a whole group as means over its users, so that they are compared and resampled like any other value.

AUC and macro F1 of an attribute are no means over users: each user's share depends on the others. To first order they
are: the metric plus each user's influence on it. The values below have exactly the metric as their mean, and a spread
that gives the metric's standard error (for AUC that of DeLong et al. 1988). They are not bounded by 0 and 1.

Adversaries who look for their communities among the same users are users twice: each is an adversary, and a victim of
the others. Victims of whom all hear the same (a popular one, say) move all adversaries at once, so the spread of
adversaries alone says little of how sure their mean is.

Axis letters: n users, K classes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]


def auc_values(probability: NDArray[np.float64], label: NDArray[np.int64]) -> NDArray[np.float64]:
    """AUC of one class against the rest, the mean over the classes that some have and some have not.

    probability f64[n, K], label i64[n] -> f64[n]. Of two classes both say the same, so the second is taken.
    """
    classes = range(1, 2) if probability.shape[1] == 2 else range(probability.shape[1])
    each = [_auc_values(probability[:, place], label == place) for place in classes if 0 < (label == place).mean() < 1]
    if not each:
        raise ValueError("Got users of one class only, expected at least two classes: there is no AUC.")
    return np.mean(each, axis=0)  # type: ignore[no-any-return]


def _auc_values(score: _Floats, positive: NDArray[np.bool_]) -> _Floats:
    """1 / n1 sum over positives of the share of negatives below it, and the same the other way round."""
    n, yes, no = len(score), int(positive.sum()), int((~positive).sum())
    rank = stats.rankdata(score)
    within = np.empty(n)
    within[positive], within[~positive] = stats.rankdata(score[positive]), stats.rankdata(score[~positive])
    placed = (rank - within) / np.where(positive, no, yes)  # those of the other kind that score lower, ties half
    share = np.where(positive, placed, 1 - placed)
    auc = share[positive].mean()
    values: _Floats = auc + (share - auc) * n / np.where(positive, yes, no)
    return values


def auc_both_ways(
    score: NDArray[np.float64], truth: NDArray[np.bool_], aside: NDArray[np.bool_] | None = None
) -> tuple[_Floats, _Floats]:
    """AUC of each of n adversaries who tell n victims apart, and what each user adds as a victim to their mean.

    f64[n, n], bool[n, n] -> f64[n], NaN where an adversary has victims of one kind only, and f64[n], 0 on average: both
    for `metrics.intervals.both_ways`. Nobody is its own victim, nor one of whom it stands `aside` for, bool[n, n].
    """
    n = len(score)
    off = np.eye(n, dtype=bool) if aside is None else aside | np.eye(n, dtype=bool)
    auc, column = np.full(n, np.nan), np.zeros(n)
    for a, (own, mine) in enumerate(zip(score, truth, strict=True)):
        others = ~off[a]
        if mine[others].any() and not mine[others].all():
            values = _auc_values(own[others], mine[others])
            auc[a] = values.mean()
            column[others] += (values - auc[a]) / len(values)
    known = int((~np.isnan(auc)).sum())
    return auc, column * n / max(1, known)


def macro_f1_values(guess: NDArray[np.int64], label: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Macro F1, the mean over the classes that somebody has: guess and label i64[n] -> f64[n].

    F1 of a class is a / b with a the share of users who have it and are told so, b the mean of the shares who have it
    and who are told so; a user's influence on a ratio is (a_u - F1 b_u) / b.
    """
    values = []
    for place in range(classes):
        is_one, is_told = label == place, guess == place
        if is_one.any():
            hit, either = (is_one & is_told).astype(float), (is_one.astype(float) + is_told) / 2
            f1 = hit.mean() / either.mean()
            values.append(f1 + (hit - f1 * either) / either.mean())
    return np.mean(values, axis=0)  # type: ignore[no-any-return]
