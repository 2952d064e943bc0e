"""Preprocessing steps."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recleak.data.interactions import Interactions
from recleak.data.prepare import age_groups, at_least, binarize, grouped, k_core
from recleak.errors import DataError, NotFoundError


def interactions(rows: list[tuple[int, int]], **columns: list[float]) -> Interactions:
    events = pl.DataFrame(rows, schema=["user", "item"], orient="row")
    return Interactions.build(events.with_columns(pl.Series(name, values) for name, values in columns.items()))


def test_binarize_drops_the_rating_or_the_low_ratings() -> None:
    data = interactions([(1, 1), (1, 2), (2, 1)], rating=[5.0, 2.0, float("nan")])
    assert binarize(data).rows.columns == ["user", "item"]
    liked = binarize(data, at_least=4)
    assert (liked.n_users, liked.n_items, len(liked)) == (1, 1, 1)
    assert liked.notes[-1].count == 2
    with pytest.raises(DataError, match="there are none"):
        binarize(binarize(data), at_least=4)


def test_at_least_filters_items_first_and_once() -> None:
    rows = [(1, 1), (1, 2), (2, 1), (2, 3), (3, 1)]
    left = at_least(interactions(rows), user_rows=1, item_rows=2)
    assert (left.n_users, left.n_items) == (3, 1)
    left = at_least(interactions(rows), user_rows=2)
    assert left.users["id"].to_list() == [1, 2]
    with pytest.raises(DataError, match="no interaction is left"):
        at_least(interactions(rows), user_rows=10)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_k_core_is_the_largest_part_that_holds(rows: list[tuple[int, int]], per_user: int, per_item: int) -> None:
    left = list(rows)
    while True:  # naive: peel one offender at a time
        users, items = [u for u, _ in left], [i for _, i in left]
        bad = next((r for r in left if users.count(r[0]) < per_user or items.count(r[1]) < per_item), None)
        if bad is None:
            break
        left.remove(bad)
    if not left:
        with pytest.raises(DataError, match="no interaction is left"):
            k_core(interactions(rows), user_rows=per_user, item_rows=per_item)
        return
    core = k_core(interactions(rows), user_rows=per_user, item_rows=per_item)
    assert len(core) == len(left)
    assert core.activity.min() >= per_user
    assert core.popularity.min() >= per_item
    assert np.array_equal(core.users["id"].to_numpy(), np.unique([u for u, _ in left]))


def test_age_groups_have_both_ends_in_the_middle_and_keep_unknown() -> None:
    users = pl.DataFrame({"id": [1, 2, 3, 4, 5], "age": [34, 35, 45, 46, None]})
    data = Interactions.build(pl.DataFrame({"user": [1, 2, 3, 4, 5], "item": [1] * 5}), users)
    in_groups = age_groups(data)
    assert in_groups.users["age"].to_list() == ["under 35", "35 to 45", "35 to 45", "over 45", None]
    assert in_groups.attributes == {"age": "categorical"}
    with pytest.raises(DataError, match="not a number"):
        age_groups(in_groups)


def test_groups_of_any_attribute() -> None:
    users = pl.DataFrame({"id": [1, 2, 3, 4], "income": [9.9, 10.0, 30.0, None]})
    data = Interactions.build(pl.DataFrame({"user": [1, 2, 3, 4], "item": [1] * 4}), users)
    assert grouped(data, "income", (10,)).users["income"].to_list() == ["under 10", "from 10", "from 10", None]
    three = grouped(data, "income", (10, 20)).users["income"].to_list()
    assert three == ["under 10", "10 to under 20", "from 20", None]
    for edges in ((), (20, 10)):
        with pytest.raises(DataError, match="ascending"):
            grouped(data, "income", edges)
    with pytest.raises(NotFoundError, match="Did you mean 'income'"):
        grouped(data, "incme", (10,))
