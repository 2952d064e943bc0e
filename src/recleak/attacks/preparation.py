"""What is done with rows before a learner sees them: an attacker has few labelled users and very many columns.

Statistics come from the labelled and the other users together: the attacker has seen everybody's rows, and labels are
not needed for them. Axis letters: k labelled users, n others, p columns, q prepared columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.extmath import randomized_svd

from recleak import random
from recleak.errors import ConfigError

Rows: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

Parts: TypeAlias = tuple[tuple[str, int], ...]  # the components of a row in order: names, and how many columns
Scale = Literal["none", "standard", "unit", "parts"]
Reduce = Literal["none", "pca", "random"]
TINY = 1e-12
_ALIKE = 1e-6  # of rows of length 1: a smaller spread is rounding


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

    def apply(self, x: Rows, others: Rows, seed: int) -> tuple[Rows, Rows]:
        """f32[k, p] and f32[n, p] -> f32[k, q] and f32[n, q]."""
        rows = self.together(np.concatenate([x, others]).astype(np.float32, copy=False), seed)
        return rows[: len(x)], rows[len(x) :]

    def together(self, rows: Rows, seed: int) -> Rows:
        """The same for all at once, f32[n, p] -> f32[n, q]; what is given may be changed."""
        if self.scale == "parts":
            for _, columns in places(self.parts or (("all", rows.shape[1]),), rows.shape[1]):
                self._even(rows[:, columns])
            return self._reduced(rows, seed)
        if self.scale == "unit":
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY)
        if self.scale != "none":
            rows -= rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        if self.scale == "standard":
            spread = np.sqrt(np.einsum("ij,ij->j", rows, rows, dtype=np.float64) / len(rows))
            rows *= np.divide(1, spread, out=np.zeros_like(spread), where=spread > TINY).astype(np.float32)
        return self._reduced(rows, seed)

    @staticmethod
    def _even(part: Rows) -> None:
        """Rows of length 1, then columns of mean 0, then a total variance of 1; in place."""
        part /= np.maximum(np.linalg.norm(part, axis=1, keepdims=True), TINY)
        part -= part.mean(axis=0, dtype=np.float64).astype(np.float32)
        spread = float(np.sqrt(np.einsum("ij,ij->", part, part, dtype=np.float64) / len(part)))
        part *= np.float32(1 / spread if spread > _ALIKE else 0.0)

    def _reduced(self, rows: Rows, seed: int) -> Rows:
        """The rows in fewer columns; what is given may be changed."""
        width = min(self.dimensions, *rows.shape) if self.reduce == "pca" else self.dimensions
        if self.reduce == "none" or width >= rows.shape[1]:
            return rows
        if self.reduce == "random":
            generator = np.random.default_rng(int(random.bits(seed, "random directions")))
            rows = rows @ generator.standard_normal((rows.shape[1], width), dtype=np.float32)
        else:
            rows -= rows.mean(axis=0)
            left, size, _ = randomized_svd(rows, width, n_iter=4, random_state=sklearn_seed(seed, "pca"))
            rows = left * size
        unit: Rows = (rows / max(float(np.sqrt(np.square(rows).mean())), TINY)).astype(np.float32)
        return unit


def places(parts: Parts, width: int) -> list[tuple[str, slice]]:
    """Where each part is."""
    ends = np.cumsum([0, *(columns for _, columns in parts)]).tolist()
    if ends[-1] != width:
        raise ValueError(f"Got parts of {ends[-1]} columns in rows of {width}, expected as many.")
    return [(name, slice(*ends[place : place + 2])) for place, (name, _) in enumerate(parts)]


def sklearn_seed(seed: int, purpose: str) -> int:
    """A seed as scikit-learn takes it."""
    return int(random.bits(seed, purpose) >> np.uint64(32))
