"""User features as in APM and GERAI: what a user's ratings look like, and who the user is.

Both papers feed a client with the number of rated products, the number and ratio of each rating level, the ratios of
positive and of negative ratings, their entropy, median, minimum, maximum and average, and with gender, occupation and
age group. APM: Zhang et al., "Comprehensive Privacy Analysis on Federated Recommender System against Attribute
Inference Attacks", Table 1. GERAI: Zhang et al., "Graph Embedding for Recommendation against Attribute Inference
Attacks", WWW 2021.

Numbers are scaled to [-1, 1]. Attributes are one-hot, 0 or 1. The zeros are what makes APM's leak visible: the row of
the user matrix E_U that belongs to a zero entry gets a gradient of exactly zero, and that of the true value does not.

Axis letters: U users, L rating levels, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from recleak.data.interactions import Interactions
from recleak.data.prepare import age_groups, thirds
from recleak.errors import DataError, unknown_name

POSITIVE, NEGATIVE = 4, 2  # ratings from 4 are positive, up to 2 negative


@dataclass(frozen=True, eq=False)
class UserFeatures:
    """One row per user code; `groups` says which columns are the one-hot code of which attribute."""

    values: Tensor  # f32[U, F], in [-1, 1]
    names: tuple[str, ...]
    groups: dict[str, slice]


def user_features(
    train: Interactions,
    *,
    attributes: Sequence[str] = ("gender", "age", "occupation"),
    levels: Sequence[float] = (1, 2, 3, 4, 5),
    middle_ages: tuple[int, int] = (35, 45),
) -> UserFeatures:
    """The features of every user, from the rows given alone: pass the training part, and no test item leaks in.

    Numeric columns are scaled by their minimum and maximum over the users who have a row; a constant column is 0, and
    so are the numeric columns of a user without a row. A missing attribute is all zeros. Data without ratings have no
    levels: `levels=()` leaves the number of products alone. Age in years gets three groups around `middle_ages`. A
    class that no user has gets no column.
    """
    values, names = _numeric(train, levels)
    columns, groups = [_scaled(values, train.activity > 0)], {}
    for attribute in attributes:
        code, labels = classes_of(train, attribute, middle_ages=middle_ages)
        groups[attribute] = slice(len(names), len(names) + len(labels))
        names += [f"{attribute}={label}" for label in labels]
        columns.append((code[:, None] == np.arange(len(labels))).astype(np.float64))
    return UserFeatures(torch.from_numpy(np.hstack(columns).astype(np.float32)), tuple(names), groups)


def classes_of(
    data: Interactions, attribute: str, *, middle_ages: tuple[int, int] = (35, 45)
) -> tuple[NDArray[np.int64], list[str]]:
    """The class of each user, i64[U], -1 where it is not known, and the names of the classes.

    Age in years gets three groups around `middle_ages`; another number three groups of about as many users
    (`prepare.thirds`).
    """
    if attribute not in data.attributes:
        raise unknown_name("attribute", attribute, data.attributes)
    known = data.users[attribute]
    if known.dtype.is_float():
        cut = age_groups(data, middle=middle_ages) if attribute == "age" else thirds(data, attribute)
        known = cut.users[attribute]
    return _categories(known)


def _numeric(train: Interactions, levels: Sequence[float]) -> tuple[NDArray[np.float64], list[str]]:
    """The columns that speak of ratings, unscaled, and their names; all follow from how often each level was given."""
    total = train.activity.astype(np.float64)  # f64[U]
    if not levels:
        return total[:, None], ["number of products"]
    count = _level_counts(train, levels)  # i64[U, L]
    level = np.asarray(levels, np.float64)
    ratio = count / np.maximum(total, 1)[:, None]
    entropy = -(ratio * np.log(np.where(ratio > 0, ratio, 1))).sum(axis=1)  # -sum p log p
    upto = np.cumsum(count, axis=1)

    def nth(n: NDArray[np.int64]) -> NDArray[np.float64]:
        """The n-th smallest rating of each user, from 0."""
        at: NDArray[np.int64] = (upto <= n[:, None]).sum(axis=1)
        return level[np.minimum(at, len(level) - 1)]

    size = train.activity
    columns = {
        "number of products": total,
        **{f"number of {v:g}": count[:, k] for k, v in enumerate(levels)},
        **{f"ratio of {v:g}": ratio[:, k] for k, v in enumerate(levels)},
        "ratio of positive": ratio[:, level >= POSITIVE].sum(axis=1),
        "ratio of negative": ratio[:, level <= NEGATIVE].sum(axis=1),
        "entropy": entropy,
        "median": (nth((size - 1) // 2) + nth(size // 2)) / 2,
        "minimum": nth(np.zeros_like(size)),
        "maximum": nth(size - 1),
        "average": ratio @ level,
    }
    return np.column_stack(list(columns.values())), list(columns)


def _level_counts(train: Interactions, levels: Sequence[float]) -> NDArray[np.int64]:
    """How often each user gave each level, i64[U, L]."""
    remedy = "Name all levels in ascending order, or give levels=() for data without ratings."
    if list(levels) != sorted(set(levels)):
        raise DataError(f"levels is {tuple(levels)}", remedy=remedy)
    if "rating" not in train.rows.columns:
        raise DataError("the interactions have no rating", remedy="Give levels=(): then only products are counted.")
    rating = train.rows["rating"]
    if rating.null_count():
        raise DataError(f"{rating.null_count():,} of {len(train):,} rows have no rating", remedy=remedy)
    value = rating.to_numpy()
    scale = np.asarray(levels, np.float32)
    code = np.minimum(np.searchsorted(scale, value), len(scale) - 1)
    off = scale[code] != value
    if off.any():
        example = f"{value[np.argmax(off)]:g}"
        raise DataError(f"{off.sum():,} ratings are not in levels={tuple(levels)} (first: {example})", remedy=remedy)
    cell = train.user.astype(np.int64) * len(scale) + code
    return np.bincount(cell, minlength=train.n_users * len(scale)).reshape(train.n_users, len(scale))


def _scaled(values: NDArray[np.float64], active: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Columns from [min, max] over the active users to [-1, 1]; 0 where they differ by no more than rounding."""
    scaled = np.zeros_like(values)
    if active.any():
        low, high = values[active].min(axis=0), values[active].max(axis=0)
        differ = high - low > 1e-12 * np.maximum(np.abs(low), np.abs(high))
        width = np.where(differ, high - low, np.inf)
        scaled[active] = np.where(differ, 2 * (values[active] - low) / width - 1, 0)
    return scaled


def _categories(values: pl.Series) -> tuple[NDArray[np.int64], list[str]]:
    """The position of each user's value among the sorted ones, -1 where it is missing; i64[U]."""
    labels = values.drop_nulls().unique().sort().to_list()
    code = values.cast(pl.Enum(labels)).to_physical().cast(pl.Int64).fill_null(-1)
    return code.to_numpy(), labels
