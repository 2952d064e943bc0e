"""How well a plain reader tells an attribute from the raw interactions: what every attribute attack compares with.

Whoever attacks a model sees the interactions through it, so no attack should be judged without knowing what the
interactions themselves give away. The reader is plain on purpose: a logistic regression on the binary user by item
matrix, graded on users it was not fitted on. A better reader may tell more: this is a reference, not a bound.

Axis letters: U users (with a known value), I items, K classes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import polars as pl
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import normalize
from threadpoolctl import threadpool_limits

from recleak.data.interactions import Interactions, Note
from recleak.errors import DataError, unknown_name
from recleak.random import bits


@dataclass(frozen=True)
class Predictability:
    """The AUC on users not fitted on (macro one-vs-rest for more than two classes) with its 95 % interval."""

    attribute: str
    auc: float
    low: float
    high: float
    n_users: int
    classes: tuple[str, ...]
    majority: float  # the share of the largest class
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.attribute}: AUC {self.auc:.3f} [{self.low:.3f}, {self.high:.3f}] (a blind guess 0.5), "
            f"{self.n_users:,} users, {len(self.classes)} classes, majority {self.majority:.3f}"
        )


def attribute_auc(
    data: Interactions, attribute: str, *, folds: int = 10, seed: int = 0, C: float = 1.0
) -> Predictability:
    """Stratified cross-validated AUC of a categorical attribute from who met what: the mean over folds.

    Rows of the binary matrix are scaled to length 1: the weights of many items do not add up to more certainty than
    those of few, and one regularization fits heavy and light users. `C = 1` is the same for all data and attributes;
    of 0.1, 1, 10 and 100 it is the best on MovieLens-100K (`benchmarks/calibrate_synthetic.py regularization`).

    Folds share most of the users they were fitted on, so their AUCs are not independent. With k folds whose AUCs have
    the standard deviation s, the interval is mean ± t(k - 1) s sqrt(1 / k + 1 / (k - 1)), the corrected resampled t of
    Nadeau and Bengio (2003). Where nothing can be told it held 0.5 in 151 of 160 cases
    (`benchmarks/calibrate_synthetic.py coverage --first 1000 --seeds 40`).

    Users without a value are left out, as are classes with fewer members than folds; notes say so.
    """
    if attribute not in data.attributes:
        raise unknown_name("attribute", attribute, data.attributes)
    if data.attributes[attribute] == "continuous":
        raise DataError(
            f"{attribute!r} is continuous",
            remedy="Cut it into groups first: recleak.data.prepare.grouped(data, name, edges), or age_groups(data).",
        )
    if folds < 2:
        raise DataError(f"folds is {folds}", remedy="Give at least 2: every user is graded by a fit without that user.")
    label, notes = _known(data.users[attribute], folds)
    who = label.is_not_null().to_numpy()
    classes, y = np.unique(label.drop_nulls().to_numpy(), return_inverse=True)  # K names, i64[U]
    if len(classes) < 2:
        raise DataError(
            f"{attribute!r} has {len(classes)} classes of at least {folds} users",
            remedy="Two or more are needed: lower folds, choose other groups or an attribute that more users have.",
        )
    auc = _fold_aucs(normalize(data.matrix()[np.flatnonzero(who)]), y, folds, seed, C)
    half = float(stats.t.ppf(0.975, folds - 1) * auc.std(ddof=1) * np.sqrt(1 / folds + 1 / (folds - 1)))
    mean = float(auc.mean())
    majority = float(np.bincount(y).max() / len(y))
    names = tuple(str(name) for name in classes)
    return Predictability(attribute, mean, max(0.0, mean - half), min(1.0, mean + half), len(y), names, majority, notes)


def _known(label: pl.Series, folds: int) -> tuple[pl.Series, tuple[Note, ...]]:
    """Labels with the classes too small for one member per fold made null, and notes on all that is left out."""
    notes = []
    if label.null_count():
        notes.append(Note(f"users without {label.name!r} left out", label.null_count()))
    counts = label.drop_nulls().value_counts(name="count").filter(pl.col("count") < folds)
    small = counts[label.name].sort().to_list()
    if small:
        what = f"users of classes with fewer than {folds} members left out: {', '.join(small)}"
        notes.append(Note(what, int(counts["count"].sum())))
        label = pl.select(pl.when(~label.is_in(small)).then(label).alias(label.name)).to_series()
    return label, tuple(notes)


def _fold_aucs(x: sp.csr_array, y: NDArray[np.int64], folds: int, seed: int, C: float) -> NDArray[np.float64]:
    """The AUC of each fold, f64[folds]."""
    split = StratifiedKFold(folds, shuffle=True, random_state=int(bits(seed, "predictability/folds")) % 2**32)
    found = []
    with warnings.catch_warnings(), threadpool_limits(1):  # products too small for threads: up to 15 times slower
        warnings.simplefilter("ignore", ConvergenceWarning)  # a ranking needs no last digit
        for fitted, graded in split.split(y, y):
            chance = (
                LogisticRegression(C=C, max_iter=200).fit(x[fitted], y[fitted]).predict_proba(x[graded])
            )  # f64[., K]
            score = chance[:, 1] if chance.shape[1] == 2 else chance
            found.append(float(roc_auc_score(y[graded], score, multi_class="ovr", average="macro")))
    return np.array(found)
