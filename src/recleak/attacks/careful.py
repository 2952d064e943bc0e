"""The learner that chooses what to read of a row and how, by cross-validation. Letters as in `learners`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy.stats import rankdata

from recleak.attacks.learners import Learner, Logistic, Network, Prepared, Svc, cross_validated
from recleak.attacks.preparation import TINY, Floats, Ints, Parts, Preparation, Rows, places
from recleak.errors import ConfigError
from recleak.training.chunks import one_thread


def of_parts(learner: Learner, parts: Parts) -> Learner:
    """A learner that is told of which parts rows are made, if it asks for that."""
    if isinstance(learner, Careful):
        return learner if learner.parts else replace(learner, parts=parts)
    if isinstance(learner, Prepared) and learner.prepare.scale == "parts" and not learner.prepare.parts:
        return replace(learner, prepare=replace(learner.prepare, parts=parts))
    return learner


def _candidates() -> tuple[Prepared, ...]:
    """A linear learner, the paper's, and one with a kernel; each as it is by default."""
    return (Logistic(), Network(), Svc())


@dataclass(frozen=True, kw_only=True)
class Careful:
    """Whoever does not know which part of a row tells, at which scale, to which learner, tries all of them.

    The whole row and each kind of its parts (what stands before the first dot of their names) are prepared in each
    scale and given to each learner; by cross-validation on the labelled users, and nobody else, the one of the highest
    AUC (the mean over classes, one against the rest) is taken. Then, on the same guesses, how far to make up for rare
    classes: probabilities are divided by a power of the class's share, 0, 1/2 or 1, that of the best macro-F1.

    What is tried was written down before any of it was run, and no graded user decides between them. Rows are turned
    into fewer columns first, as many as there are users for each part: lengths, means and principal components stay.
    """

    learners: tuple[Prepared, ...] = field(default_factory=_candidates)
    scales: tuple[Literal["unit", "parts"], ...] = ("unit", "parts")
    dimensions: int = 50
    folds: int = 5
    parts: Parts = ()  # whoever made the rows gives them

    def __post_init__(self) -> None:
        wrong = [scale for scale in self.scales if scale not in ("unit", "parts")]
        if wrong or not self.scales or not self.learners:
            raise ConfigError(
                f"Got scales={list(self.scales)} and {len(self.learners)} learners, expected some of 'unit' and "
                "'parts' (a scale of single columns would not survive the turn) and at least one learner."
            )
        if self.folds < 2:
            raise ConfigError(f"folds is {self.folds}, expected at least 2.")

    def fit_predict(self, x: Rows, label: Ints, classes: int, others: Rows, seed: int) -> Floats:
        """Probabilities, f64[n, K]; a class that no labelled user has gets 0."""
        with one_thread():
            rows, parts = turned(np.concatenate([x, others]).astype(np.float32, copy=False), self.parts)
            prepared = self._prepared(rows, parts, seed)
        learners = [replace(each, prepare=Preparation("none", "none")) for each in self.learners]
        best, choice, guess = -1.0, (learners[0], prepared[0]), np.zeros((0, classes))
        for some in prepared:
            for learner in learners:
                found = cross_validated(learner, some[: len(x)], label, classes, seed, self.folds)
                if (score := _mean_auc(found, label)) > best:
                    best, choice, guess = score, (learner, some), found
        share = np.bincount(label, minlength=classes) / len(label)
        power = max((0.0, 0.5, 1.0), key=lambda each: _macro_f1(_evened(guess, share, each).argmax(1), label))
        learner, some = choice
        return _evened(learner.fit_predict(some[: len(x)], label, classes, some[len(x) :], seed), share, power)

    def _prepared(self, rows: Rows, parts: Parts, seed: int) -> list[Rows]:
        """The whole and each kind of parts, in each scale that makes a difference."""
        every = places(parts, rows.shape[1])
        kinds = dict.fromkeys(name.partition(".")[0] for name, _ in parts)
        found = []
        for kind in (None, *(kinds if len(kinds) > 1 else ())):
            some = [(name, columns) for name, columns in every if kind is None or name.partition(".")[0] == kind]
            picked = np.concatenate([rows[:, columns] for _, columns in some], axis=1)
            widths = tuple((name, columns.stop - columns.start) for name, columns in some)
            for scale in self.scales:
                if scale == "unit" or len(some) > 1 or "unit" not in self.scales:
                    prepare = Preparation(scale, "pca", self.dimensions, widths)
                    found.append(prepare.together(picked.copy(), seed))
        return found


def turned(rows: Rows, parts: Parts) -> tuple[Rows, Parts]:
    """Rows f32[n, p] in at most n columns for each part, and these parts: a turn, so inner products are the same."""
    found, widths = [], []
    for name, columns in places(parts or (("all", rows.shape[1]),), rows.shape[1]):
        some = rows[:, columns]
        if some.shape[1] > len(rows):
            value, vector = np.linalg.eigh((some @ some.T).astype(np.float64))
            some = (vector * np.sqrt(np.maximum(value, 0))).astype(np.float32)
        found.append(some)
        widths.append((name, some.shape[1]))
    return np.concatenate(found, axis=1), tuple(widths)


def _mean_auc(chance: Floats, label: Ints) -> float:
    """The mean over the classes that occur, one against the rest; 0.5 where there is only one."""
    found = []
    for each in np.unique(label).tolist():
        yes = label == each
        if (count := int(yes.sum())) < len(label):
            rank = rankdata(chance[:, each])[yes].sum()
            found.append((rank - count * (count + 1) / 2) / (count * (len(label) - count)))
    return float(np.mean(found)) if found else 0.5


def _macro_f1(guess: Ints, label: Ints) -> float:
    """The mean over the classes that occur."""
    right = [2 * float(((guess == each) & (label == each)).sum()) for each in np.unique(label)]
    total = [float((guess == each).sum() + (label == each).sum()) for each in np.unique(label)]
    return float(np.mean(np.divide(right, total)))


def _evened(chance: Floats, share: Floats, power: float) -> Floats:
    """Probabilities divided by a power of the classes' shares; a class that nobody has keeps 0."""
    weight = np.divide(1.0, share**power, out=np.zeros_like(share), where=share > 0)
    weighed = chance * weight
    even: Floats = weighed / np.maximum(weighed.sum(axis=1, keepdims=True), TINY)
    return even
