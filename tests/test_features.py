from __future__ import annotations

import time

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recleak.data.features import UserFeatures, user_features
from recleak.data.interactions import Interactions
from recleak.data.synthetic import Synthetic
from recleak.errors import DataError, NotFoundError

Rated = list[tuple[int, int, int]]
N_USERS = 5
AGES = (34.0, 35.0, 45.0, 46.0, None)
GENDERS = ("M", "F", None, "F", "M")


def interactions(rated: Rated) -> Interactions:
    """Five users, of whom some may have no row."""
    schema = {"user": pl.Int32, "item": pl.Int32, "rating": pl.Float32}
    rows = pl.DataFrame(rated, schema=schema, orient="row").sort("user", "item")
    users = pl.DataFrame({"id": range(N_USERS), "gender": GENDERS, "age": AGES})
    return Interactions(rows, users, pl.DataFrame({"id": range(10)}))


def naive(rated: Rated) -> NDArray[np.float64]:
    """User by user: the rating columns, scaled; f64[U, 18]."""
    table = np.zeros((N_USERS, 18))
    active = sorted({user for user, _, _ in rated})
    for user in active:
        own = [rating for who, _, rating in rated if who == user]
        share = [own.count(level) / len(own) for level in range(1, 6)]
        table[user] = [
            len(own),
            *[own.count(level) for level in range(1, 6)],
            *share,
            sum(rating >= 4 for rating in own) / len(own),
            sum(rating <= 2 for rating in own) / len(own),
            -sum(p * np.log(p) for p in share if p > 0),
            np.median(own),
            min(own),
            max(own),
            np.mean(own),
        ]
    for column in table.T:
        low, high = column[active].min(), column[active].max()
        column[active] = 0 if high - low < 1e-12 else 2 * (column[active] - low) / (high - low) - 1
    return table


@settings(max_examples=60, deadline=None)
@example([(0, 0, 5), (0, 1, 3), (0, 2, 4), (1, 0, 4)])  # the same average, but for rounding
@given(
    st.lists(
        st.tuples(st.integers(0, N_USERS - 1), st.integers(0, 9), st.integers(1, 5)),
        min_size=1,
        max_size=30,
        unique_by=lambda row: row[:2],
    )
)
def test_as_the_loop_over_users(rated: Rated) -> None:
    found = user_features(interactions(rated), attributes=())
    assert found.values.dtype == torch.float32
    np.testing.assert_allclose(found.values.numpy(), naive(rated), atol=1e-5)


def one_hot(found: UserFeatures, attribute: str) -> list[list[float]]:
    values: list[list[float]] = found.values[:, found.groups[attribute]].tolist()
    return values


def test_attributes_are_one_hot_and_missing_ones_zero() -> None:
    found = user_features(interactions([(0, 0, 3), (1, 1, 4)]), attributes=("gender", "age"))
    assert found.names[18:] == ("gender=F", "gender=M", "age=35 to 45", "age=over 45", "age=under 35")
    assert one_hot(found, "gender") == [[0, 1], [1, 0], [0, 0], [1, 0], [0, 1]]
    assert one_hot(found, "age") == [[0, 0, 1], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_table_of_the_papers() -> None:
    data = Synthetic(n_users=300, n_items=400, mean_activity=40).generate()
    found = user_features(data)
    assert found.values.shape == (300, 18 + 2 + 3 + 21) == (300, len(found.names))
    assert found.values.abs().max() == 1
    numeric = found.values[:, :18]
    assert (numeric.amax(0) == 1).all()
    assert (numeric.amin(0) >= -1).all()
    for attribute in ("gender", "age", "occupation"):
        assert (found.values[:, found.groups[attribute]].sum(1) == 1).all()
    assert found.groups == {"gender": slice(18, 20), "age": slice(20, 23), "occupation": slice(23, 44)}


def test_only_the_given_rows_count() -> None:
    data = Synthetic(n_users=300, n_items=400, mean_activity=40).generate()
    kept = np.random.default_rng(0).random(len(data)) < 0.5
    kept[data.user == 7] = False
    train = user_features(data.take(kept))
    assert not torch.equal(train.values, user_features(data).values)
    assert not train.values[7, :18].any()
    assert train.values[7, 18:].sum() == 3


def test_constant_columns_are_zero() -> None:
    found = user_features(interactions([(user, 0, 3) for user in range(N_USERS)]), attributes=())
    assert not found.values.any()


def test_without_ratings_only_products_are_counted() -> None:
    rated = interactions([(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (1, 2, 1), (2, 0, 1)])
    plain = Interactions(rated.rows.drop("rating"), rated.users, rated.items)
    found = user_features(plain, attributes=("gender",), levels=())
    assert found.names == ("number of products", "gender=F", "gender=M")
    assert found.values[:, 0].tolist() == [0, 1, -1, 0, 0]
    with pytest.raises(DataError, match=r"no rating\n.*levels=\(\)"):
        user_features(plain)


def test_other_scales_and_bins() -> None:
    half = interactions([(0, 0, 1), (1, 1, 5)])
    half = Interactions(half.rows.with_columns(pl.col("rating") / 2), half.users, half.items)
    found = user_features(half, attributes=("age",), levels=(0.5, 2.5), middle_ages=(36, 44))
    assert found.names[1:5] == ("number of 0.5", "number of 2.5", "ratio of 0.5", "ratio of 2.5")
    assert found.names[-2:] == ("age=over 44", "age=under 36")  # nobody is in between
    assert one_hot(found, "age") == [[0, 1], [0, 1], [1, 0], [1, 0], [0, 0]]


def test_errors_say_what_to_do() -> None:
    data = interactions([(0, 0, 3), (1, 1, 4)])
    with pytest.raises(DataError, match="1 ratings are not in levels"):
        user_features(data, levels=(1, 2, 3))
    with pytest.raises(DataError, match="ascending"):
        user_features(data, levels=(5, 4, 3))
    with pytest.raises(NotFoundError, match="gender"):
        user_features(data, attributes=("gendre",))
    with pytest.raises(DataError, match="'height' has 1 different values"):
        user_features(data.with_attributes(height=pl.Series([1.0] * N_USERS)), attributes=("height",))
    holes = Interactions(data.rows.with_columns(rating=pl.Series([3, None], dtype=pl.Float32)), data.users, data.items)
    with pytest.raises(DataError, match="1 of 2 rows have no rating"):
        user_features(holes)


def test_an_attribute_that_nobody_has_takes_no_column() -> None:
    data = interactions([(0, 0, 3)]).with_attributes(hobby=pl.Series([None] * N_USERS, dtype=pl.String))
    found = user_features(data, attributes=("hobby", "gender"))
    assert found.groups == {"hobby": slice(18, 18), "gender": slice(18, 20)}


def test_quick() -> None:
    data = Synthetic(n_users=3_000, n_items=2_000, mean_activity=100).generate()
    start = time.perf_counter()
    user_features(data)
    assert time.perf_counter() - start < 1
