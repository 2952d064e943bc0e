"""Preprocessing steps that papers name: binarization, activity filters, k-cores, groups of ages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import polars as pl

from recleak.data.interactions import Interactions
from recleak.errors import DataError, unknown_name


def binarize(data: Interactions, *, at_least: float | None = None) -> Interactions:
    """Implicit feedback: the rating goes; with `at_least`, rows rated lower (or not at all) go too."""
    if at_least is not None:
        if "rating" not in data.rows.columns:
            raise DataError(f"a rating of at least {at_least:g} was asked for, but there are none", remedy="Drop it.")
        liked = (data.rows["rating"] >= at_least).fill_null(False).to_numpy()
        data = data.restrict(liked, f"ratings under {at_least:g}")
    rows = data.rows.drop("rating", strict=False)
    return Interactions(rows, data.users, data.items, data.notes)


def at_least(data: Interactions, *, user_rows: int = 1, item_rows: int = 1) -> Interactions:
    """One pass: drops items with fewer than `item_rows`, then users with fewer than `user_rows` of what is left."""
    data = data.restrict(data.popularity[data.item] >= item_rows, f"items with under {item_rows} interactions")
    return data.restrict(data.activity[data.user] >= user_rows, f"users with under {user_rows} interactions")


def k_core(data: Interactions, *, user_rows: int, item_rows: int) -> Interactions:
    """The largest part in which every user has `user_rows` and every item `item_rows` interactions."""
    keep = np.ones(len(data), bool)
    while True:
        users = np.bincount(data.user[keep], minlength=data.n_users)
        items = np.bincount(data.item[keep], minlength=data.n_items)
        left = keep & (users[data.user] >= user_rows) & (items[data.item] >= item_rows)
        if left.sum() == keep.sum():
            return data.restrict(keep, f"the ({user_rows}, {item_rows})-core of users and items")
        keep = left


def grouped(
    data: Interactions, attribute: str, edges: Sequence[float], labels: Sequence[str] | None = None
) -> Interactions:
    """A continuous attribute in groups; an edge belongs to the group above it, a missing value stays missing."""
    if attribute not in data.attributes:
        raise unknown_name("attribute", attribute, data.attributes)
    values = data.users[attribute]
    if not values.dtype.is_float():
        raise DataError(f"{attribute!r} is categorical, not a number", remedy="Only a continuous attribute has groups.")
    if not edges or list(edges) != sorted(set(edges)):
        raise DataError(f"edges are {tuple(edges)}", remedy="Give at least one, ascending, for instance (35, 46).")
    names = labels or [
        f"under {edges[0]:g}",
        *[f"{low:g} to under {high:g}" for low, high in pairwise(edges)],
        f"from {edges[-1]:g}",
    ]
    at = np.searchsorted(np.asarray(edges), values.to_numpy(), side="right")
    group = pl.when(values.is_not_null()).then(pl.Series([names[int(k)] for k in at], dtype=pl.String))
    return data.with_attributes(**{attribute: pl.select(group.alias(attribute)).to_series()})


def thirds(data: Interactions, attribute: str) -> Interactions:
    """A continuous attribute in three groups of about as many users, cut at the quantiles 1/3 and 2/3 of known values.

    A quantile that many users share is an edge once: their group is larger. Where all have one value there is none.
    """
    if attribute not in data.attributes:
        raise unknown_name("attribute", attribute, data.attributes)
    values = data.users[attribute].drop_nulls()
    if not values.dtype.is_float():
        raise DataError(f"{attribute!r} is categorical, not a number", remedy="Only a continuous attribute has groups.")
    at = np.quantile(values.to_numpy(), [1 / 3, 2 / 3], method="higher") if len(values) else np.zeros(0)
    edges = [float(each) for each in np.unique(at) if each > float(values.to_numpy().min())]
    if not edges and len(values) and values.n_unique() > 1:  # more than two thirds have the smallest value
        edges = [float(values.filter(values > values.to_numpy().min()).to_numpy().min())]
    if not edges:
        remedy = "It tells nobody from anybody: leave it out."
        raise DataError(f"{attribute!r} has {values.n_unique()} different values", remedy=remedy)
    return grouped(data, attribute, edges)


def in_groups(data: Interactions, attribute: str) -> Interactions:
    """A continuous attribute as audits ask about it: age in the groups of papers, others in thirds."""
    return age_groups(data) if attribute == "age" else thirds(data, attribute)


def age_groups(data: Interactions, middle: tuple[int, int] = (35, 45)) -> Interactions:
    """Age in whole years in three groups, the middle one with both its ends, as GERAI and PARD have it."""
    low, high = middle
    return grouped(data, "age", (low, high + 1), (f"under {low}", f"{low} to {high}", f"over {high}"))
