"""Recommenders that only count: what a trained model has to beat.

A configuration is a frozen value; `fit` returns another one that scores.
Axis letters: U users, I items, B users of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.interactions import Interactions

_BYTES = 64  # of working memory per pair of items in a block


@dataclass(frozen=True)
class MostPop:
    """The same list for everybody: an item's score is the number of distinct users who have it."""

    def fit(self, train: Interactions) -> Popularity:
        """Count."""
        count = np.bincount(train.matrix().indices, minlength=train.n_items)
        return Popularity(torch.from_numpy(count.astype(np.float32)))


@dataclass(frozen=True, eq=False)
class Popularity:
    """Fitted `MostPop`."""

    count: Tensor  # f32[I]

    def scores(self, users: Tensor) -> Tensor:
        """The counts, once per user; f32[B, I]."""
        return self.count.to(users.device).expand(len(users), -1)


@dataclass(frozen=True)
class ItemKNN:
    """Item-based nearest neighbours on the binary matrix (Deshpande and Karypis 2004).

    With n_i users of item i and n_ij users of both, sim(i, j) = n_ij / (sqrt(n_i n_j) + shrink): the cosine of their
    columns, shrunk where little was seen (as in Ferrari Dacrema, Cremonesi and Jannach 2019). Each item j keeps its
    `neighbors` most similar items, the lower code first where similarities are equal. The score of item i for user u is
    the sum of sim(i, j) over those items j in the history of u that keep i as a neighbour.
    """

    neighbors: int = 100
    shrink: float = 10.0

    def __post_init__(self) -> None:
        if self.neighbors < 1 or self.shrink < 0:
            raise ValueError(
                f"Got neighbors={self.neighbors}, shrink={self.shrink}; expected neighbors >= 1 and shrink >= 0."
            )

    def fit(self, train: Interactions, *, block_bytes: int = 1 << 26) -> Neighborhoods:
        """Similarities of a block of items with all items at a time, in about `block_bytes` of working memory."""
        history = train.matrix()  # f32[U, I]
        users_of = history.T.tocsr()  # f32[I, U]
        count = np.diff(users_of.indptr).astype(np.float64)  # f64[I]
        n_items = train.n_items
        step = max(1, block_bytes // (_BYTES * n_items))
        blocks = []
        for start in range(0, n_items, step):
            both = (users_of[start : start + step] @ history).toarray()  # f32[block, I]
            own = np.arange(len(both)), np.arange(start, start + len(both))
            norm = np.sqrt(count[own[1], None] * count) + self.shrink  # f64[block, I]
            similarity = np.divide(both, norm, out=np.zeros_like(norm), where=both > 0)
            similarity[own] = 0
            blocks.append(sp.csr_array(np.where(_largest(similarity, self.neighbors), similarity, 0)))
        return Neighborhoods(history, sp.csr_array(sp.vstack(blocks)))


@dataclass(frozen=True, eq=False)
class Neighborhoods:
    """Fitted `ItemKNN`."""

    history: sp.csr_array  # f32[U, I], binary
    similarity: sp.csr_array  # f64[I, I]; row j holds the neighbours of item j

    def scores(self, users: Tensor) -> Tensor:
        """The sums of similarities, taken in double precision; f32[B, I]."""
        total = (self.history[users.numpy(force=True)] @ self.similarity).toarray()
        return torch.from_numpy(total.astype(np.float32)).to(users.device)


def _largest(values: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """A mask of the k largest values of each row; of equal values the leftmost are taken."""
    if k >= values.shape[1]:
        return np.ones(values.shape, bool)
    least = np.partition(values, -k, axis=1)[:, -k, None]
    over, equal = values > least, values == least
    room = k - over.sum(axis=1, keepdims=True)
    kept: NDArray[np.bool_] = over | (equal & (np.cumsum(equal, axis=1) <= room))
    return kept
