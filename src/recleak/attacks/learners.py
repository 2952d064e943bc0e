"""Learners: from the rows of labelled users to the classes of others. Attribute inference attacks are made of them.

A learner is a frozen dataclass. `fit_predict` takes rows of users whose class is known and of others whose class is
not, and gives each of the others a probability for every class. An attacker has few labelled users and very many
columns, so every learner has a `Preparation`. Its statistics come from the labelled and the other users together: the
attacker has seen everybody's rows, and labels are not needed for them.

Nothing is drawn but from `seed`, and products run on one thread: the same call gives the same bits.
Axis letters: k labelled users, n others, p columns, q prepared columns, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from scipy.stats import rankdata
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.naive_bayes import BernoulliNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.extmath import randomized_svd
from torch import Tensor
from torch.nn import functional

from recleak import random
from recleak.errors import ConfigError
from recleak.training.chunks import one_thread

_Rows: TypeAlias = NDArray[np.float32]
_Ints: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]

Parts: TypeAlias = tuple[tuple[str, int], ...]  # the components of a row in order: names, and how many columns
Scale = Literal["none", "standard", "unit", "parts"]
Reduce = Literal["none", "pca", "random"]
_TINY = 1e-12
_ALIKE = 1e-6  # of rows of length 1: a smaller spread is rounding


# --- preparation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """What is done with rows before a learner sees them.

    scale "standard": every column gets mean 0 and variance 1 (a constant one becomes 0). "unit": every row gets length
    1, then columns get mean 0: so that a heavy user is like a light one with the same tastes. "parts": the same for
    each of the `parts` of a row by itself, and all parts get the same total variance: so that a table of 100,000
    numbers does not drown a matrix of 2,000 (one without a variance becomes 0). "none": as they are.
    reduce "pca": the `dimensions` directions of the largest variance. "random": as many random directions (Gaussian;
    Johnson and Lindenstrauss 1984). "none": all columns stay. Reduced columns have a mean variance of 1.

    The defaults are those that told most in one run on MovieLens-100K, far from trained, for a network and for a
    logistic regression, with a hundred or two labelled users and 100,000 columns; they were picked on the graded users.
    Whether they are best for other learners, or for a trained model, was not measured; `Careful` picks by itself.
    """

    scale: Scale = "unit"
    reduce: Reduce = "pca"
    dimensions: int = 50
    parts: Parts = ()  # whoever made the rows gives them (`of_parts`); without any, a row is one part

    def __post_init__(self) -> None:
        for name, kind in (("scale", Scale), ("reduce", Reduce)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(kind))}.")
        if self.dimensions < 1:
            raise ConfigError(f"dimensions is {self.dimensions}, expected at least 1.")

    def apply(self, x: _Rows, others: _Rows, seed: int) -> tuple[_Rows, _Rows]:
        """f32[k, p] and f32[n, p] -> f32[k, q] and f32[n, q]."""
        rows = self.together(np.concatenate([x, others]).astype(np.float32, copy=False), seed)
        return rows[: len(x)], rows[len(x) :]

    def together(self, rows: _Rows, seed: int) -> _Rows:
        """The same for all at once, f32[n, p] -> f32[n, q]; what is given may be changed."""
        if self.scale == "parts":
            for _, columns in _places(self.parts or (("all", rows.shape[1]),), rows.shape[1]):
                self._even(rows[:, columns])
            return self._reduced(rows, seed)
        if self.scale == "unit":
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
        if self.scale != "none":
            rows -= rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        if self.scale == "standard":
            spread = np.sqrt(np.einsum("ij,ij->j", rows, rows, dtype=np.float64) / len(rows))
            rows *= np.divide(1, spread, out=np.zeros_like(spread), where=spread > _TINY).astype(np.float32)
        return self._reduced(rows, seed)

    @staticmethod
    def _even(part: _Rows) -> None:
        """Rows of length 1, then columns of mean 0, then a total variance of 1; in place."""
        part /= np.maximum(np.linalg.norm(part, axis=1, keepdims=True), _TINY)
        part -= part.mean(axis=0, dtype=np.float64).astype(np.float32)
        spread = float(np.sqrt(np.einsum("ij,ij->", part, part, dtype=np.float64) / len(part)))
        part *= np.float32(1 / spread if spread > _ALIKE else 0.0)

    def _reduced(self, rows: _Rows, seed: int) -> _Rows:
        """The rows in fewer columns; what is given may be changed."""
        width = min(self.dimensions, *rows.shape) if self.reduce == "pca" else self.dimensions
        if self.reduce == "none" or width >= rows.shape[1]:
            return rows
        if self.reduce == "random":
            generator = np.random.default_rng(int(random.bits(seed, "random directions")))
            rows = rows @ generator.standard_normal((rows.shape[1], width), dtype=np.float32)
        else:
            rows -= rows.mean(axis=0)
            left, size, _ = randomized_svd(rows, width, n_iter=4, random_state=_state(seed, "pca"))
            rows = left * size
        unit: _Rows = (rows / max(float(np.sqrt(np.square(rows).mean())), _TINY)).astype(np.float32)
        return unit


def _places(parts: Parts, width: int) -> list[tuple[str, slice]]:
    """Where each part is."""
    ends = np.cumsum([0, *(columns for _, columns in parts)]).tolist()
    if ends[-1] != width:
        raise ValueError(f"Got parts of {ends[-1]} columns in rows of {width}, expected as many.")
    return [(name, slice(*ends[place : place + 2])) for place, (name, _) in enumerate(parts)]


def of_parts(learner: Learner, parts: Parts) -> Learner:
    """A learner that is told of which parts rows are made, if it asks for that."""
    if isinstance(learner, Careful):
        return learner if learner.parts else replace(learner, parts=parts)
    if isinstance(learner, Prepared) and learner.prepare.scale == "parts" and not learner.prepare.parts:
        return replace(learner, prepare=replace(learner.prepare, parts=parts))
    return learner


class Learner(Protocol):
    """What an attack needs of a learner."""

    def fit_predict(self, x: _Rows, label: _Ints, classes: int, others: _Rows, seed: int) -> _Floats:
        """f32[k, p], i64[k] and f32[n, p] -> probabilities, f64[n, K]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What learners have in common: a subclass says how it learns, in `_chances`."""

    prepare: Preparation = field(default_factory=Preparation)

    def fit_predict(self, x: _Rows, label: _Ints, classes: int, others: _Rows, seed: int) -> _Floats:
        """Probabilities, f64[n, K]; a class that no labelled user has gets 0."""
        if len(x) != len(label) or not len(x) or x.shape[1:] != others.shape[1:]:
            raise ValueError(
                f"Got rows {x.shape} with {len(label)} labels and other rows {others.shape}, expected f32[k, p], "
                "i64[k] with at least one labelled user, and f32[n, p]."
            )
        present, code = np.unique(label, return_inverse=True)  # a learner knows of these classes only
        if present[0] < 0 or present[-1] >= classes:
            raise ValueError(f"Got labels from {present[0]} to {present[-1]}, expected them in [0, {classes}).")
        chance = np.zeros((len(others), classes))
        if len(present) == 1 or not len(others):
            chance[:, present] = 1 / len(present)
            return chance
        with one_thread():
            chance[:, present] = self._chances(*self.prepare.apply(x, others, seed), code, seed)
        return chance

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        """Probabilities of the classes 0 to max(code), all of which occur."""
        raise NotImplementedError


# --- learners ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Network(Prepared):
    """APM's attacker (section 3.3): layers of 100 and 30 ReLU units, then a softmax, trained on cross-entropy (eq. 10).

    The paper says no more. Here: Adam, batches of 32 users, an l2 penalty, `epochs` passes without early stopping, the
    mean of `members` networks from different starts.
    """

    hidden: tuple[int, ...] = (100, 30)
    epochs: int = 60
    learning_rate: float = 1e-3
    penalty: float = 1e-2
    members: int = 3

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        found = [
            self._one(x, others, code, int(random.bits(seed, "member", each) >> np.uint64(1)))
            for each in range(self.members)
        ]
        mean: _Floats = np.mean(found, axis=0)
        return mean

    def _one(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        network = MLPClassifier(
            self.hidden,
            alpha=self.penalty,
            batch_size=min(32, len(x)),
            learning_rate_init=self.learning_rate,
            random_state=_state(seed, "network"),
        )
        classes = np.unique(code)
        for _ in range(self.epochs):
            network.partial_fit(x, code, classes=classes)
        return _wide(network.predict_proba(others))


@dataclass(frozen=True, kw_only=True)
class ChosenEpoch(Prepared):
    """PARD's attacker (Zhao et al., section II-B): a perceptron of three layers under SGD with momentum, full batches.

    Widths are not given in the paper; rates and epochs are those of its code. How long to train is chosen on a part of
    the labelled users, by cross-entropy; then all of them train as long. The code instead reports the epoch that is
    best for the graded users: `path` has the answer after every epoch, for whoever knows the truth and wants to repeat
    that.
    """

    prepare: Preparation = field(default_factory=lambda: Preparation("standard", "none"))
    hidden: tuple[int, ...] = (64, 32)
    epochs: int = 150
    learning_rate: float = 0.05
    momentum: float = 0.9
    valid: float = 0.2

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        order = np.random.default_rng(_state(seed, "validation users")).permutation(len(x))
        held, rest = order[: round(self.valid * len(x))], order[round(self.valid * len(x)) :]
        epochs = self.epochs
        if len(held) and len(rest):
            found = self._walk(x[rest], x[held], code[rest], int(code.max()) + 1, self.epochs, seed)
            right = found[:, np.arange(len(held)), code[held]]  # f64[E, n]
            epochs = int(np.log(np.maximum(right, _TINY)).mean(axis=1).argmax()) + 1
        last: _Floats = self._walk(x, others, code, int(code.max()) + 1, epochs, seed)[-1]
        return last

    def path(self, x: _Rows, label: _Ints, classes: int, others: _Rows, seed: int) -> _Floats:
        """Probabilities after each epoch, f64[E, n, K], for rows as in `fit_predict`."""
        present, code = np.unique(label, return_inverse=True)
        chance = np.zeros((self.epochs, len(others), classes))
        with one_thread():
            mine, theirs = self.prepare.apply(x, others, seed)
            chance[:, :, present] = self._walk(mine, theirs, code, len(present), self.epochs, seed)
        return chance

    def _walk(self, x: _Rows, others: _Rows, code: _Ints, classes: int, epochs: int, seed: int) -> _Floats:
        """Probabilities after each of so many epochs, f64[E, n, K]."""
        generator = torch.Generator().manual_seed(_state(seed, "perceptron"))
        widths = (x.shape[1], *self.hidden, classes)
        layers = []
        for i, o in pairwise(widths):
            for shape in ((i, o), (o,)):  # as torch's nn.Linear starts
                layers.append((torch.rand(shape, generator=generator) * 2 - 1) / i**0.5)
        speed = [torch.zeros_like(layer) for layer in layers]
        rows, label, asked = torch.from_numpy(x), torch.from_numpy(code), torch.from_numpy(others)
        found = np.empty((epochs, len(others), classes))
        for epoch in range(epochs):
            leaves = [layer.detach().requires_grad_() for layer in layers]
            slopes = torch.autograd.grad(functional.cross_entropy(_outputs(leaves, rows), label), leaves)
            speed = [self.momentum * old + new for old, new in zip(speed, slopes, strict=True)]
            layers = [layer.detach() - self.learning_rate * step for layer, step in zip(leaves, speed, strict=True)]
            found[epoch] = _outputs(layers, asked).softmax(1).numpy()
        return found


def _outputs(layers: list[Tensor], rows: Tensor) -> Tensor:
    """A perceptron with ReLU; weights and biases in turn."""
    hidden = rows
    for place in range(0, len(layers), 2):
        hidden = (hidden if place == 0 else hidden.relu()) @ layers[place] + layers[place + 1]
    return hidden


@dataclass(frozen=True, kw_only=True)
class Logistic(Prepared):
    """Multinomial logistic regression with an l2 penalty: minimizes C times the summed cross-entropy + |W|² / 2.

    The weights lie in the span of the labelled rows, so it is solved in at most k coordinates, whatever p is.
    """

    C: float = 1.0

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        x, others = x.astype(np.float64), others.astype(np.float64)
        if x.shape[1] > x.shape[0]:
            value, vector = np.linalg.eigh(x @ x.T)
            kept = value > _TINY * max(float(value[-1]), _TINY)
            basis = x.T @ (vector[:, kept] / np.sqrt(value[kept]))  # f64[p, r], orthonormal
            x, others = x @ basis, others @ basis
        width, n_classes = x.shape[1], int(code.max()) + 1
        target = np.eye(n_classes)[code]

        def loss(flat: _Floats) -> tuple[float, _Floats]:
            weight, bias = flat[:-n_classes].reshape(width, n_classes), flat[-n_classes:]
            logs = log_softmax(x @ weight + bias, axis=1)
            error = self.C * (np.exp(logs) - target)
            slope = np.concatenate([(x.T @ error + weight).ravel(), error.sum(axis=0)])
            return float(-self.C * (logs * target).sum() + np.square(weight).sum() / 2), slope

        start = np.concatenate([np.zeros(width * n_classes), np.log(target.mean(axis=0))])
        found: _Floats = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
        return _wide(softmax(others @ found[:-n_classes].reshape(width, n_classes) + found[-n_classes:], axis=1))


@dataclass(frozen=True, kw_only=True)
class Svc(Prepared):
    """A support vector machine with a Gaussian kernel of the width 1 / (p variance).

    Probabilities are the sigmoid (two classes) or the softmax of its decision values: an order, not a calibration, and
    no labelled user is set aside for one.
    """

    C: float = 1.0
    balanced: bool = True

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        machine = SVC(C=self.C, class_weight="balanced" if self.balanced else None, decision_function_shape="ovr")
        value = _wide(machine.fit(x, code).decision_function(others))
        if value.ndim == 1:
            value = np.stack([-value / 2, value / 2], axis=1)
        chance: _Floats = softmax(value, axis=1)
        return chance


@dataclass(frozen=True, kw_only=True)
class Neighbors(Prepared):
    """The shares of the classes among the nearest labelled users."""

    count: int = 15

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        return _fitted(KNeighborsClassifier(min(self.count, len(x)), algorithm="brute"), x, code, others)


@dataclass(frozen=True, kw_only=True)
class Tree(Prepared):
    """A decision tree with leaves of at least `leaf` labelled users."""

    leaf: int = 5

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        tree = DecisionTreeClassifier(min_samples_leaf=self.leaf, random_state=_state(seed, "tree"))
        return _fitted(tree, x, code, others)


@dataclass(frozen=True, kw_only=True)
class Boosting(Prepared):
    """Gradient-boosted trees on histograms."""

    trees: int = 100
    leaf: int = 5
    learning_rate: float = 0.05

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        boosted = HistGradientBoostingClassifier(
            learning_rate=self.learning_rate,
            max_iter=self.trees,
            max_depth=3,
            min_samples_leaf=self.leaf,
            early_stopping=False,
            random_state=_state(seed, "boosting"),
        )
        return _fitted(boosted, x, code, others)


@dataclass(frozen=True, kw_only=True)
class Bayes(Prepared):
    """Naive Bayes for items that a user has or has not (Bernoulli), with one pseudo-user of each kind.

    Columns count as had where they are above 0, so it needs rows that are not centered.
    """

    prepare: Preparation = field(default_factory=lambda: Preparation("none", "none"))
    smoothing: float = 1.0

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        return _fitted(BernoulliNB(alpha=self.smoothing, binarize=0.0), x, code, others)


@dataclass(frozen=True, kw_only=True)
class GaussianProcess(Prepared):
    """A Gaussian process classifier with a squared exponential kernel, one class against the rest.

    Its length is the median distance between users, and is not fitted: that would take hours for twenty classes.
    """

    amplitude: float = 4.0

    def _chances(self, x: _Rows, others: _Rows, code: _Ints, seed: int) -> _Floats:
        some = x[:200].astype(np.float64)
        apart = np.sqrt(np.maximum(((some[:, None] - some[None]) ** 2).sum(2), 0))
        length = float(np.median(apart[apart > 0])) if bool((apart > 0).any()) else 1.0
        kernel = ConstantKernel(self.amplitude, "fixed") * RBF(length, "fixed")
        process = GaussianProcessClassifier(kernel, optimizer=None, random_state=_state(seed, "process"))
        return _fitted(process, x, code, others)


# --- the careful one --------------------------------------------------------------------------------------------------


def cross_validated(learner: Learner, x: _Rows, label: _Ints, classes: int, seed: int, folds: int = 5) -> _Floats:
    """Probabilities of labelled users, each from a learner that was fitted to those of other folds, f64[k, K].

    Users of a class are dealt out to the folds in a random order.
    """
    fold = np.empty(len(label), np.int64)
    lot = random.bits(seed, "folds of known users", np.arange(len(label)))
    for each in np.unique(label):
        mine = np.flatnonzero(label == each)
        fold[mine[lot[mine].argsort()]] = np.arange(len(mine)) % folds
    chance = np.full((len(label), classes), 1 / classes)
    for number in np.unique(fold).tolist():
        held = fold == number
        if not held.all():
            chance[held] = learner.fit_predict(x[~held], label[~held], classes, x[held], seed)
    return chance


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

    def fit_predict(self, x: _Rows, label: _Ints, classes: int, others: _Rows, seed: int) -> _Floats:
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

    def _prepared(self, rows: _Rows, parts: Parts, seed: int) -> list[_Rows]:
        """The whole and each kind of parts, in each scale that makes a difference."""
        places = _places(parts, rows.shape[1])
        kinds = dict.fromkeys(name.partition(".")[0] for name, _ in parts)
        found = []
        for kind in (None, *(kinds if len(kinds) > 1 else ())):
            some = [(name, columns) for name, columns in places if kind is None or name.partition(".")[0] == kind]
            picked = np.concatenate([rows[:, columns] for _, columns in some], axis=1)
            widths = tuple((name, columns.stop - columns.start) for name, columns in some)
            for scale in self.scales:
                if scale == "unit" or len(some) > 1 or "unit" not in self.scales:
                    prepare = Preparation(scale, "pca", self.dimensions, widths)
                    found.append(prepare.together(picked.copy(), seed))
        return found


def turned(rows: _Rows, parts: Parts) -> tuple[_Rows, Parts]:
    """Rows f32[n, p] in at most n columns for each part, and these parts: a turn, so inner products are the same."""
    found, widths = [], []
    for name, columns in _places(parts or (("all", rows.shape[1]),), rows.shape[1]):
        some = rows[:, columns]
        if some.shape[1] > len(rows):
            value, vector = np.linalg.eigh((some @ some.T).astype(np.float64))
            some = (vector * np.sqrt(np.maximum(value, 0))).astype(np.float32)
        found.append(some)
        widths.append((name, some.shape[1]))
    return np.concatenate(found, axis=1), tuple(widths)


def _mean_auc(chance: _Floats, label: _Ints) -> float:
    """The mean over the classes that occur, one against the rest; 0.5 where there is only one."""
    found = []
    for each in np.unique(label).tolist():
        yes = label == each
        if (count := int(yes.sum())) < len(label):
            rank = rankdata(chance[:, each])[yes].sum()
            found.append((rank - count * (count + 1) / 2) / (count * (len(label) - count)))
    return float(np.mean(found)) if found else 0.5


def _macro_f1(guess: _Ints, label: _Ints) -> float:
    """The mean over the classes that occur."""
    right = [2 * float(((guess == each) & (label == each)).sum()) for each in np.unique(label)]
    total = [float((guess == each).sum() + (label == each).sum()) for each in np.unique(label)]
    return float(np.mean(np.divide(right, total)))


def _evened(chance: _Floats, share: _Floats, power: float) -> _Floats:
    """Probabilities divided by a power of the classes' shares; a class that nobody has keeps 0."""
    weight = np.divide(1.0, share**power, out=np.zeros_like(share), where=share > 0)
    weighed = chance * weight
    even: _Floats = weighed / np.maximum(weighed.sum(axis=1, keepdims=True), _TINY)
    return even


def _fitted(estimator: Any, x: _Rows, code: _Ints, others: _Rows) -> _Floats:
    return _wide(estimator.fit(x, code).predict_proba(others))


def _wide(values: Any) -> _Floats:
    found: _Floats = np.asarray(values, np.float64)
    return found


def _state(seed: int, purpose: str) -> int:
    """A seed as scikit-learn takes it."""
    return int(random.bits(seed, purpose) >> np.uint64(32))
