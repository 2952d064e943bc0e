"""Learners: from the rows of labelled users to the classes of others. Attribute inference attacks are made of them.

A learner is a frozen dataclass. `fit_predict` takes rows of users whose class is known and of others whose class is
not, and gives each of the others a probability for every class. Every learner has a `Preparation`.

Nothing is drawn but from `seed`, and products run on one thread: the same call gives the same bits.
Axis letters: k labelled users, n others, p columns, K classes, E epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.naive_bayes import BernoulliNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor
from torch.nn import functional

from recleak import random
from recleak.attacks.preparation import TINY, Floats, Ints, Preparation, Rows, sklearn_seed
from recleak.training.chunks import one_thread


class Learner(Protocol):
    """What an attack needs of a learner."""

    def fit_predict(self, x: Rows, label: Ints, classes: int, others: Rows, seed: int) -> Floats:
        """f32[k, p], i64[k] and f32[n, p] -> probabilities, f64[n, K]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What learners have in common: a subclass says how it learns, in `_chances`."""

    prepare: Preparation = field(default_factory=Preparation)

    def fit_predict(self, x: Rows, label: Ints, classes: int, others: Rows, seed: int) -> Floats:
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

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        """Probabilities of the classes 0 to max(code), all of which occur."""
        raise NotImplementedError


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

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        found = [
            self._one(x, others, code, int(random.bits(seed, "member", each) >> np.uint64(1)))
            for each in range(self.members)
        ]
        mean: Floats = np.mean(found, axis=0)
        return mean

    def _one(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        network = MLPClassifier(
            self.hidden,
            alpha=self.penalty,
            batch_size=min(32, len(x)),
            learning_rate_init=self.learning_rate,
            random_state=sklearn_seed(seed, "network"),
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

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        order = np.random.default_rng(sklearn_seed(seed, "validation users")).permutation(len(x))
        held, rest = order[: round(self.valid * len(x))], order[round(self.valid * len(x)) :]
        epochs = self.epochs
        if len(held) and len(rest):
            found = self._walk(x[rest], x[held], code[rest], int(code.max()) + 1, self.epochs, seed)
            right = found[:, np.arange(len(held)), code[held]]  # f64[E, n]
            epochs = int(np.log(np.maximum(right, TINY)).mean(axis=1).argmax()) + 1
        last: Floats = self._walk(x, others, code, int(code.max()) + 1, epochs, seed)[-1]
        return last

    def path(self, x: Rows, label: Ints, classes: int, others: Rows, seed: int) -> Floats:
        """Probabilities after each epoch, f64[E, n, K], for rows as in `fit_predict`."""
        present, code = np.unique(label, return_inverse=True)
        chance = np.zeros((self.epochs, len(others), classes))
        with one_thread():
            mine, theirs = self.prepare.apply(x, others, seed)
            chance[:, :, present] = self._walk(mine, theirs, code, len(present), self.epochs, seed)
        return chance

    def _walk(self, x: Rows, others: Rows, code: Ints, classes: int, epochs: int, seed: int) -> Floats:
        """Probabilities after each of so many epochs, f64[E, n, K]."""
        generator = torch.Generator().manual_seed(sklearn_seed(seed, "perceptron"))
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

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        x, others = x.astype(np.float64), others.astype(np.float64)
        if x.shape[1] > x.shape[0]:
            value, vector = np.linalg.eigh(x @ x.T)
            kept = value > TINY * max(float(value[-1]), TINY)
            basis = x.T @ (vector[:, kept] / np.sqrt(value[kept]))  # f64[p, r], orthonormal
            x, others = x @ basis, others @ basis
        width, n_classes = x.shape[1], int(code.max()) + 1
        target = np.eye(n_classes)[code]

        def loss(flat: Floats) -> tuple[float, Floats]:
            weight, bias = flat[:-n_classes].reshape(width, n_classes), flat[-n_classes:]
            logs = log_softmax(x @ weight + bias, axis=1)
            error = self.C * (np.exp(logs) - target)
            slope = np.concatenate([(x.T @ error + weight).ravel(), error.sum(axis=0)])
            return float(-self.C * (logs * target).sum() + np.square(weight).sum() / 2), slope

        start = np.concatenate([np.zeros(width * n_classes), np.log(target.mean(axis=0))])
        found: Floats = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
        return _wide(softmax(others @ found[:-n_classes].reshape(width, n_classes) + found[-n_classes:], axis=1))


@dataclass(frozen=True, kw_only=True)
class Svc(Prepared):
    """A support vector machine with a Gaussian kernel of the width 1 / (p variance).

    Probabilities are the sigmoid (two classes) or the softmax of its decision values: an order, not a calibration, and
    no labelled user is set aside for one.
    """

    C: float = 1.0
    balanced: bool = True

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        machine = SVC(C=self.C, class_weight="balanced" if self.balanced else None, decision_function_shape="ovr")
        value = _wide(machine.fit(x, code).decision_function(others))
        if value.ndim == 1:
            value = np.stack([-value / 2, value / 2], axis=1)
        chance: Floats = softmax(value, axis=1)
        return chance


@dataclass(frozen=True, kw_only=True)
class Neighbors(Prepared):
    """The shares of the classes among the nearest labelled users."""

    count: int = 15

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        return _fitted(KNeighborsClassifier(min(self.count, len(x)), algorithm="brute"), x, code, others)


@dataclass(frozen=True, kw_only=True)
class Tree(Prepared):
    """A decision tree with leaves of at least `leaf` labelled users."""

    leaf: int = 5

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        tree = DecisionTreeClassifier(min_samples_leaf=self.leaf, random_state=sklearn_seed(seed, "tree"))
        return _fitted(tree, x, code, others)


@dataclass(frozen=True, kw_only=True)
class Boosting(Prepared):
    """Gradient-boosted trees on histograms."""

    trees: int = 100
    leaf: int = 5
    learning_rate: float = 0.05

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        boosted = HistGradientBoostingClassifier(
            learning_rate=self.learning_rate,
            max_iter=self.trees,
            max_depth=3,
            min_samples_leaf=self.leaf,
            early_stopping=False,
            random_state=sklearn_seed(seed, "boosting"),
        )
        return _fitted(boosted, x, code, others)


@dataclass(frozen=True, kw_only=True)
class Bayes(Prepared):
    """Naive Bayes for items that a user has or has not (Bernoulli), with one pseudo-user of each kind.

    Columns count as had where they are above 0, so it needs rows that are not centered.
    """

    prepare: Preparation = field(default_factory=lambda: Preparation("none", "none"))
    smoothing: float = 1.0

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        return _fitted(BernoulliNB(alpha=self.smoothing, binarize=0.0), x, code, others)


@dataclass(frozen=True, kw_only=True)
class GaussianProcess(Prepared):
    """A Gaussian process classifier with a squared exponential kernel, one class against the rest.

    Its length is the median distance between users, and is not fitted: that would take hours for twenty classes.
    """

    amplitude: float = 4.0

    def _chances(self, x: Rows, others: Rows, code: Ints, seed: int) -> Floats:
        some = x[:200].astype(np.float64)
        apart = np.sqrt(np.maximum(((some[:, None] - some[None]) ** 2).sum(2), 0))
        length = float(np.median(apart[apart > 0])) if bool((apart > 0).any()) else 1.0
        kernel = ConstantKernel(self.amplitude, "fixed") * RBF(length, "fixed")
        process = GaussianProcessClassifier(kernel, optimizer=None, random_state=sklearn_seed(seed, "process"))
        return _fitted(process, x, code, others)


def cross_validated(learner: Learner, x: Rows, label: Ints, classes: int, seed: int, folds: int = 5) -> Floats:
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


def _fitted(estimator: Any, x: Rows, code: Ints, others: Rows) -> Floats:
    return _wide(estimator.fit(x, code).predict_proba(others))


def _wide(values: Any) -> Floats:
    found: Floats = np.asarray(values, np.float64)
    return found
