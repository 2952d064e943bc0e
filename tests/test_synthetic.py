from __future__ import annotations

from functools import cache

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from recleak.data import synthetic
from recleak.data.interactions import Interactions
from recleak.data.predictability import attribute_auc
from recleak.data.prepare import age_groups
from recleak.data.synthetic import Synthetic
from recleak.errors import DataError, NotFoundError

# MovieLens-100K: quantiles at 5, 25, 50, 75 and 95 %, and the rest.
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
ACTIVITY = (21, 33, 65, 148, 311)
POPULARITY = (1, 6, 27, 80, 230)
POPULARITY_GINI, TOP_TENTH = 0.629, 0.427
GENDER_AUC, AGE_AUC = 0.784, 0.814


@cache
def made(coupling: float = 0.5, seed: int = 0) -> Interactions:
    return Synthetic(coupling=coupling, seed=seed).generate()


@cache
def small(coupling: float, seed: int = 0) -> Interactions:
    return Synthetic(n_users=500, n_items=600, mean_activity=50, coupling=coupling, seed=seed).generate()


def auc(data: Interactions, attribute: str, seed: int = 0) -> float:
    return attribute_auc(age_groups(data), attribute, seed=seed).auc


def item_community(data: Interactions) -> NDArray[np.int64]:
    """The first category of an item, which follows from its community; i64[I]."""
    return data.items["categories"].list.first().str.extract(r"(\d+)").cast(pl.Int64).to_numpy()


def test_margins_are_those_of_movielens() -> None:
    data = made()
    assert (data.n_users, data.n_items) == (943, 1682)
    assert abs(len(data) - 100_000) < 1_000
    assert data.activity.min() == 20
    assert data.activity.max() <= 1682 // 2
    np.testing.assert_allclose(np.quantile(data.activity, LEVELS), ACTIVITY, rtol=0.1)
    np.testing.assert_allclose(np.quantile(data.popularity, LEVELS), POPULARITY, rtol=0.1, atol=1)
    assert data.popularity.min() == 1
    ordered = np.sort(data.popularity)
    gini = (2 * np.arange(1, 1683) - 1683) @ ordered / (1682 * ordered.sum())
    assert gini == pytest.approx(POPULARITY_GINI, abs=0.015)
    assert ordered[-168:].sum() / len(data) == pytest.approx(TOP_TENTH, abs=0.02)


def test_attributes_are_those_of_movielens() -> None:
    users = made().users
    assert users["gender"].value_counts().sort("gender")["count"].to_list() == [273, 670]
    age = users["age"].to_numpy()
    assert (age.min(), age.max()) == (7, 73)
    assert (age == np.floor(age)).all()
    assert [(age < 35).sum(), ((age >= 35) & (age <= 45)).sum(), (age > 45).sum()] == [544, 209, 190]
    trades = users["occupation"].value_counts(sort=True)["count"]
    assert len(trades) == 21
    assert abs(trades[0] - 196) <= 1
    assert users["community"].n_unique() == 12


def test_ratings_times_and_items() -> None:
    data = made()
    shares = np.bincount(data.rows["rating"].to_numpy().astype(int), minlength=6)[1:] / len(data)
    np.testing.assert_allclose(shares, synthetic.RATING_SHARES, atol=0.001)
    time = data.rows["time"].to_numpy()
    assert time.min() >= synthetic.START
    assert time.max() <= synthetic.START + synthetic.PERIOD
    assert np.ptp(time) > 200 * synthetic.DAY
    gap = np.diff(time)[np.diff(data.user) == 0]
    assert np.median(gap) < 60
    assert 0.01 < (gap > 3600).mean() < 0.03
    for name, (low, high) in synthetic.BOX.items():
        assert data.items[name].is_between(low, high).all()
    assert data.items["title"][16] == "Item 17"
    assert set(data.items["categories"].list.len()) == {1, 2}
    assert data.items["categories"].list.explode().n_unique() == synthetic.CATEGORIES


@pytest.mark.parametrize("coupling", [0, 0.5, 1])
def test_no_pair_twice_and_everybody_has_rows(coupling: float) -> None:
    data = made(coupling)
    assert data.n_pairs == len(data)
    assert data.activity.min() >= 20
    assert data.popularity.min() >= 1
    assert data.notes == ()


def test_people_who_want_more_than_they_like_still_get_their_rows() -> None:
    data = Synthetic(n_users=60, n_items=40, min_activity=20, mean_activity=20, coupling=1).generate()
    assert (data.activity == 20).all()
    assert data.n_pairs == len(data)


def test_same_seed_same_data() -> None:
    again = Synthetic().generate()
    assert again.fingerprint == made().fingerprint
    assert made(seed=1).fingerprint != again.fingerprint


def test_rows_do_not_depend_on_missing_values() -> None:
    recipe = {"n_users": 2000, "n_items": 300, "mean_activity": 25.0}
    whole, holes = (Synthetic(**recipe, missing=share).generate() for share in (0.0, 0.3))  # type: ignore[arg-type]
    assert holes.rows.equals(whole.rows)
    for name in ("gender", "age", "occupation"):
        assert holes.users[name].null_count() == pytest.approx(600, abs=5 * np.sqrt(2000 * 0.3 * 0.7))
        known = holes.users[name].is_not_null()
        assert holes.users[name].filter(known).equals(whole.users[name].filter(known))
    assert holes.users["community"].null_count() == 0
    none = Synthetic(**recipe, missing=1.0).generate()  # type: ignore[arg-type]
    assert none.users["gender"].null_count() == 2000


def test_without_coupling_nobody_has_a_taste() -> None:
    recipe = Synthetic(coupling=0)
    woman, age, trade = np.arange(943) % 2 == 0, np.linspace(0, 0.999, 943), np.arange(943) % 21
    assert not recipe._taste(woman, age, trade).any()
    assert Synthetic(coupling=0.01)._taste(woman, age, trade).any()


@pytest.mark.heavy
@pytest.mark.parametrize("attribute", ["gender", "age", "community"])
def test_without_coupling_nothing_can_be_told(attribute: str) -> None:
    """The standard deviation of the AUC over such data sets is about 0.04 (40 seeds), so 4 errors of the mean."""
    seeds = range(8)
    found = [attribute_auc(age_groups(small(0, seed)), attribute, seed=seed) for seed in seeds]
    assert np.mean([one.auc for one in found]) == pytest.approx(0.5, abs=4 * 0.04 / np.sqrt(len(seeds)))
    assert sum(one.low <= 0.5 <= one.high for one in found) >= 6  # 95 % each: fewer by chance in 1 case of 170


def test_without_coupling_ratings_times_and_places_tell_nothing() -> None:
    """Two-sample statistics between the genders, for what a user's rows look like; 4.5 is beyond chance."""
    data = made(0)
    items = data.items.select("latitude", "longitude").with_row_index("item").cast({"item": pl.Int32})
    looks = (
        data.rows.join(items, on="item")
        .sort("user", "time")
        .with_columns(jump=pl.col("latitude").diff().abs().over("user"), gap=pl.col("time").diff().over("user"))
        .group_by("user", maintain_order=True)
        .agg(pl.mean("rating", "latitude", "longitude", "jump", "gap"), spread=pl.std("rating"), first=pl.min("time"))
    )
    woman = (data.users["gender"] == "F").to_numpy()
    for name in looks.columns[1:]:
        her, him = looks[name].to_numpy()[woman], looks[name].to_numpy()[~woman]
        error = np.sqrt(her.var() / len(her) + him.var() / len(him))
        assert abs(her.mean() - him.mean()) / error < 4.5, name


@pytest.mark.heavy
def test_with_full_coupling_everything_can_be_told() -> None:
    data = made(1)
    assert auc(data, "gender") > 0.98
    assert auc(data, "age") > 0.96
    assert auc(data, "community") > 0.95
    assert auc(data, "occupation") > 0.68


@pytest.mark.heavy
def test_the_default_is_as_telling_as_movielens() -> None:
    """Single data sets differ by 0.03 (standard deviation over seeds), so a mean of four."""
    assert np.mean([auc(made(seed=s), "gender", s) for s in range(4)]) == pytest.approx(GENDER_AUC, abs=0.04)
    assert np.mean([auc(made(seed=s), "age", s) for s in range(4)]) == pytest.approx(AGE_AUC, abs=0.04)


@pytest.mark.heavy
@pytest.mark.parametrize("attribute", ["gender", "age", "community"])
def test_more_coupling_tells_more(attribute: str) -> None:
    found = [np.mean([auc(small(dial, s), attribute, s) for s in range(3)]) for dial in (0, 0.3, 0.65, 1)]
    assert (np.diff(found) > 0).all(), found


def test_with_coupling_time_and_places_follow_communities() -> None:
    together, near = [], []
    for dial in (0, 0.5, 1):
        data = made(dial)
        kind, same_user = item_community(data), np.diff(data.user) == 0
        together.append((np.diff(kind[data.item]) == 0)[same_user].mean())
        place = data.items["latitude"].to_numpy()
        near.append(np.mean([place[kind == k].std() for k in np.unique(kind)]) / place.std())
        shuffled = np.random.default_rng(0).permutation(len(data))  # chance of the same kind, whatever the order
        by_chance = (kind[data.item] == kind[data.item[shuffled]]).mean()
        if dial == 0:
            assert together[0] == pytest.approx(by_chance, abs=0.01)
    assert together[0] + 0.05 < together[1] < together[2] - 0.2
    assert near[0] > near[1] > near[2]
    assert near[0] == pytest.approx(1, abs=0.05)


def test_larger_data_have_the_same_shape() -> None:
    data = Synthetic(n_users=5_000, n_items=4_000).generate()
    assert (data.n_users, data.n_items) == (5_000, 4_000)
    assert data.activity.mean() == pytest.approx(106, rel=0.01)
    np.testing.assert_allclose(np.quantile(data.activity, LEVELS), ACTIVITY, rtol=0.1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"coupling": 1.5}, "coupling is 1.5"),
        ({"coupling": float("nan")}, "coupling is nan"),
        ({"missing": -0.1}, "missing is -0.1"),
        ({"n_users": 1}, "n_users is 1"),
        ({"n_items": 100}, "n_items 100"),
        ({"min_activity": 0}, "min_activity is 0"),
        ({"mean_activity": 10}, "mean_activity 10"),
        ({"communities": 4}, "communities is 4"),
        ({"n_items": 60_000}, "too few for 60000 items"),
    ],
)
def test_errors_say_what_was_got(change: dict[str, float], says: str) -> None:
    with pytest.raises(DataError, match=says):
        Synthetic(**change)  # type: ignore[arg-type]


def test_predictability_says_what_it_left_out() -> None:
    data = small(1)
    gender = ["X", "X", None, *data.users["gender"][3:]]
    found = attribute_auc(data.with_attributes(gender=pl.Series(gender, dtype=pl.String)), "gender")
    assert found.classes == ("F", "M")
    assert found.n_users == 497
    assert found.low < found.auc < found.high
    assert 0.69 < found.majority < 0.73
    assert [note.count for note in found.notes] == [1, 2]
    assert "X" in found.notes[1].what
    assert "AUC 0.9" in str(found)


def test_predictability_is_reproducible_and_needs_groups() -> None:
    data = small(0.65)
    assert attribute_auc(data, "gender", seed=3) == attribute_auc(data, "gender", seed=3)
    age = data.users["age"].clone().scatter(range(10), None)
    by_age = attribute_auc(age_groups(data.with_attributes(age=age)), "age")
    assert by_age.n_users == 490
    assert by_age.classes == ("35 to 45", "over 45", "under 35")
    with pytest.raises(DataError, match="continuous"):
        attribute_auc(data, "age")
    with pytest.raises(DataError, match="folds is 1"):
        attribute_auc(data, "gender", folds=1)
    with pytest.raises(DataError, match="1 classes"):
        attribute_auc(data.with_attributes(same=pl.Series(["a"] * 500)), "same")
    with pytest.raises(NotFoundError, match="gender"):
        attribute_auc(data, "gendr")
