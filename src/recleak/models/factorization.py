"""Factorizations that are solved exactly, with a random linear term per item: DPMF and DPNE.

The theorem of objective perturbation is for a strongly convex objective that is minimized exactly. With user vectors
fixed, least squares are such an objective for each item, so here the theorem holds as far as it goes; what it does not
cover is said in `covers`.
Axis letters: U users, I items, d factors, n ratings of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak import random
from recleak.data.interactions import Interactions
from recleak.defenses.objective_perturbation import radial
from recleak.errors import ConfigError
from recleak.models.base import Params
from recleak.models.central import Archive, CentralModel, Examples
from recleak.models.components import Component
from recleak.streams import Streams
from recleak.update import Update

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class _Solved(CentralModel):
    """What both have in common: vectors of users and items, whose product is a score."""

    factors: int = 60
    epsilon: float = inf  # of one value, given the users' vectors; inf: no noise
    ridge: float = 1.0

    examples: ClassVar[Examples] = "solved"

    def __post_init__(self) -> None:
        if not self.epsilon > 0:  # NaN too
            raise ConfigError(f"Got epsilon={self.epsilon}, expected a number above 0, or inf for no noise.")
        if self.factors < 1 or not self.ridge > 0:
            raise ConfigError(f"Got factors={self.factors} and ridge={self.ridge}, expected numbers above 0.")

    def components(self) -> tuple[Component, ...]:
        """`user` and `item`."""
        return (
            Component("user", "per_user", "user", (self.factors,), shared=False),
            Component("item", "per_item", "item", (self.factors,)),
        )

    def all_scores(self, params: Params, archive: Archive, users: Tensor) -> Tensor:
        """Products, f32[B, I]."""
        return params["user"][users] @ params["item"].T

    def _noise(self, n_items: int, width: float, seed: int) -> _Floats:
        """eta of each item, f64[I, d]: density proportional to exp(-epsilon |eta| / Delta), Delta = 2 width.

        A value of one user changes the gradient of an item's objective by 2 (difference) u, and |u| <= 1.
        """
        if self.epsilon == inf:
            return np.zeros((n_items, self.factors))
        streams = Streams.simulated(seed, 0, np.zeros(1, np.int64)).within("objective")
        rows, item = {"item": torch.zeros(n_items, self.factors)}, torch.arange(n_items)
        trainer = Update(torch.zeros(1, dtype=torch.int64), {}, rows, item, torch.tensor([0, n_items]), n_items)
        drawn: _Floats = radial(trainer, "item", streams).double().numpy() * 2 * width / self.epsilon
        return drawn

    @staticmethod
    def _params(user: _Floats, item: _Floats) -> Params:
        return {"user": torch.from_numpy(user).float(), "item": torch.from_numpy(item).float()}


@dataclass(frozen=True)
class RatingFactorization(_Solved):
    """Minimize the sum over ratings of (r_ui - p_u . q_i)^2 + ridge (|p|^2 + |q|^2), |p_u| <= 1; then the items once
    more, with eta_i . q_i added. DPMF (Hua, Xia and Zhong 2015): epsilon of one rating's value, given the p_u.

    Ratings are taken from the middle of their range. Users' vectors come from `sweeps` of alternating least squares
    without noise, scaled to a length of at most 1.
    """

    sweeps: int = 10

    needs_ratings: ClassVar[bool] = True

    def solve(self, archive: Archive, seed: int) -> Params:
        """Alternating least squares, then items with their noise."""
        matrix, width = _ratings(archive.train)
        of_items = matrix.T.tocsr()
        place = np.arange(matrix.shape[0])[:, None], np.arange(self.factors)
        user = random.normal(seed, "first vectors", *place) / np.sqrt(self.factors)
        quiet = np.zeros((matrix.shape[1], self.factors))
        for _ in range(self.sweeps):
            item = _least_squares(of_items, user, self.ridge, quiet)
            user = _short(_least_squares(matrix, item, self.ridge, np.zeros_like(user)))
        return self._params(user, _least_squares(of_items, user, self.ridge, self._noise(matrix.shape[1], width, seed)))

    def covers(self) -> str:
        """What the noise protects, and what it does not."""
        return (
            f"The item vectors are {self.epsilon:g}-private for the value of one rating, if users' vectors were fixed "
            "before anybody rated. They are fitted to the same ratings without noise, and a user's list is computed "
            "with its own vector: nothing is promised for what the audience sees, nor for which items were rated."
        )


@dataclass(frozen=True)
class WalkFactorization(_Solved):
    """Factorize what random walks of up to `window` steps see: DPNE (Xu et al. 2018) on the graph of users and items.

    M = log max(1, vol / (b T) sum of P^r D^-1 over r up to T) (Qiu et al. 2018, eq. 1 and 3), of which only the block
    of users and items is needed, so odd r; b is the number of negatives. Users' vectors are the first left singular
    ones times the root of their values, scaled together so that none is longer than 1; items minimize the sum over
    users of (M_ui - p_u . q_i)^2 + ridge |q|^2 + eta_i . q_i.
    """

    window: int = 5
    negatives: int = 1

    def solve(self, archive: Archive, seed: int) -> Params:
        """A singular value decomposition, then items with their noise."""
        matrix = walk_matrix(archive.train.matrix(), self.window, self.negatives)
        left, value, _ = np.linalg.svd(matrix, full_matrices=False)
        width = min(self.factors, len(value))
        user = np.zeros((len(matrix), self.factors))
        user[:, :width] = left[:, :width] * np.sqrt(value[:width])
        user /= max(float(np.linalg.norm(user, axis=1).max()), 1e-12)
        gram = user.T @ user + self.ridge * np.eye(self.factors)
        noise = self._noise(matrix.shape[1], float(matrix.max() - matrix.min()), seed)
        item: _Floats = np.linalg.solve(gram, user.T @ matrix - noise.T / 2).T.astype(np.float64)
        return self._params(user, item)

    def covers(self) -> str:
        """What the noise protects, and what it does not."""
        return (
            f"The item vectors are {self.epsilon:g}-private for one entry of the matrix of walks, if users' vectors "
            "and all other entries were fixed. One interaction changes many entries, and users' vectors come from the "
            "same matrix without noise: nothing is promised for an interaction, nor for what the audience sees."
        )


def walk_matrix(matrix: sp.csr_array, window: int, negatives: int) -> _Floats:
    """log max(1, vol / (b T) sum over odd r <= T of (P^r D^-1)) between users and items, f64[U, I]."""
    if window < 1 or negatives < 1:
        raise ConfigError(f"Got window={window} and negatives={negatives}, expected at least 1.")
    dense = matrix.toarray().astype(np.float64)
    of_user, of_item = (np.maximum(dense.sum(axis), 1) for axis in (1, 0))
    step = dense / of_user[:, None] / of_item[None, :]  # (P D^-1) for one step
    back = (dense / of_user[:, None]) @ (dense / of_item[None, :]).T  # two steps, from user to user
    total, power = step.copy(), step
    for _ in range(3, window + 1, 2):
        power = back @ power
        total += power
    scaled = 2 * dense.sum() / (negatives * window) * total
    found: _Floats = np.log(np.maximum(scaled, 1.0))
    return found


def _ratings(train: Interactions) -> tuple[sp.csr_array, float]:
    """Ratings around the middle of their range, and how wide it is."""
    if "rating" not in train.rows.columns or train.rows["rating"].null_count() == len(train):
        raise ConfigError(
            "RatingFactorization needs ratings, and the interactions have none.\n"
            "  Use walk-factorization, data with ratings, or no defense that changes interactions."
        )
    rows = train.rows.drop_nulls("rating")
    value = rows["rating"].to_numpy().astype(np.float64)
    low, high = float(value.min()), float(value.max())
    if high == low:
        raise ConfigError(f"All ratings are {low:g}, expected at least two levels to factorize.")
    centred = value - (low + high) / 2
    centred[centred == 0] = 1e-9  # a rating in the middle is still one
    place = (rows["user"].to_numpy(), rows["item"].to_numpy())
    return sp.csr_array((centred, place), shape=(train.n_users, train.n_items)), high - low


def _least_squares(matrix: sp.csr_array, factors: _Floats, ridge: float, noise: _Floats) -> _Floats:
    """For each row the x that minimizes sum (m_j - x . f_j)^2 + ridge |x|^2 + noise . x, f64[rows, d]."""
    width = factors.shape[1]
    solved = np.zeros((matrix.shape[0], width))
    for row in range(matrix.shape[0]):
        mine = slice(matrix.indptr[row], matrix.indptr[row + 1])
        near, value = factors[matrix.indices[mine]], matrix.data[mine]
        solved[row] = np.linalg.solve(near.T @ near + ridge * np.eye(width), near.T @ value - noise[row] / 2)
    return solved


def _short(vectors: _Floats) -> _Floats:
    """Scaled to a length of at most 1 each."""
    found: _Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1)
    return found
