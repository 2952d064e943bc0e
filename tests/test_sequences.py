"""What users did after what, against loops; splits that keep the order."""

from __future__ import annotations

from itertools import chain, pairwise
from math import asin, cos, pi, radians, sin, sqrt

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recleak.data.catalog import locate
from recleak.data.interactions import Interactions
from recleak.data.sequences import (
    Transitions,
    held_out,
    leave_last_out,
    sequence_split,
)
from recleak.data.source import open_data
from recleak.errors import DataError
from recleak.geometry import EARTH, kilometers, on_sphere


def checkins(rows: list[tuple[int, int, int]], n_items: int | None = None) -> Interactions:
    """From (user, item, time); item i lies at latitude i and longitude 2 i."""
    user, item, time = (list(column) for column in zip(*rows, strict=True))
    known = list(range(n_items if n_items is not None else max(item) + 1))
    items = pl.DataFrame(
        {"id": known, "latitude": [float(i) for i in known], "longitude": [2.0 * i for i in known]},
    )
    return Interactions.build(pl.DataFrame({"user": user, "item": item, "time": time}), items=items)


ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=60)


def by_loop(parts: list[Interactions]) -> list[tuple[int, int, int, int]]:
    """(user, before, item, gap) into the rows of the last part."""
    found = []
    for user in range(parts[0].n_users):
        mine = [
            (time, number, item)
            for number, part in enumerate(parts)
            for who, item, time in part.rows.select("user", "item", "time").iter_rows()
            if who == user
        ]
        mine.sort(key=lambda row: row[:2])  # stable: rows of a part stay as they are
        for (earlier, _, before), (later, number, item) in pairwise(mine):
            if number == len(parts) - 1 and before != item:
                found.append((user, before, item, later - earlier))
    return found


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_transitions_are_those_of_a_loop(rows: list[tuple[int, int, int]]) -> None:
    data = checkins(rows)
    got = Transitions.of(data)
    assert list(zip(got.user, got.before, got.item, got.gap, strict=True)) == by_loop([data])
    assert (got.count == np.bincount(got.user, minlength=data.n_users)).all()
    assert (got.user == np.repeat(np.arange(data.n_users), got.count)).all()
    for before, item, km in zip(got.before, got.item, got.distance, strict=True):
        assert km == pytest.approx(haversine(*(data.items.row(int(i))[1:] for i in (before, item))), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_held_out_transitions_start_where_the_user_was(rows: list[tuple[int, int, int]]) -> None:
    split = sequence_split(checkins(rows), (0.5, 0.25, 0.25))
    for got, parts in (
        (held_out(split), [split.train, split.valid, split.test]),
        (held_out(split, "valid"), [split.train, split.valid]),
    ):
        assert list(zip(got.user, got.before, got.item, got.gap, strict=True)) == by_loop(parts)


def test_a_second_visit_moves_nobody() -> None:
    data = checkins([(0, 1, 10), (0, 1, 20), (0, 2, 50), (1, 0, 5), (1, 0, 6)])
    got = Transitions.of(data)
    assert (got.before.tolist(), got.item.tolist(), got.gap.tolist()) == ([1], [2], [30])
    assert got.offset.tolist() == [0, 1, 1]
    assert len(got.select(np.zeros(0, np.int64))) == 0


# --- distances --------------------------------------------------------------------------------------------------------


def haversine(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The textbook's formula."""
    (north, east), (north_2, east_2) = (tuple(map(radians, place)) for place in (one, other))
    h = sin((north_2 - north) / 2) ** 2 + cos(north) * cos(north_2) * sin((east_2 - east) / 2) ** 2
    return 2 * EARTH * asin(sqrt(min(h, 1.0)))


DEGREES = st.tuples(st.floats(-90, 90), st.floats(-180, 180))


@settings(max_examples=200, deadline=None)
@given(DEGREES, DEGREES)
def test_the_way_is_the_haversine_formula(one: tuple[float, float], other: tuple[float, float]) -> None:
    first, second = on_sphere(*np.array([one, other]).T)
    assert float(kilometers(first, second)) == pytest.approx(haversine(one, other), abs=1e-3)
    assert float(kilometers(first, first)) == 0


def test_known_ways() -> None:
    statue, empire_state = on_sphere(np.array([40.6892, 40.7484]), np.array([-74.0445, -73.9857]))
    assert float(kilometers(statue, empire_state)) == pytest.approx(8.25, abs=0.02)
    pole, other_pole, equator = on_sphere(np.array([90.0, -90.0, 0.0]), np.array([0.0, 0.0, 45.0]))
    assert float(kilometers(pole, other_pole)) == pytest.approx(pi * EARTH)
    assert float(kilometers(pole, equator)) == pytest.approx(pi * EARTH / 2)


# --- splits -----------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(ROWS, st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.0, 0.5), (1.0, 0.0, 0.0), (0.3, 0.6, 0.1)]), st.booleans())
def test_splits_cut_sequences(rows: list[tuple[int, int, int]], shares: tuple[float, float, float], last: bool) -> None:
    data = checkins(rows)
    split = leave_last_out(data) if last else sequence_split(data, shares)
    parts = (split.train, split.valid, split.test)
    together = pl.concat([part.rows for part in parts]).sort("user", "time", "item")
    assert together.equals(data.rows.sort("user", "time", "item")), "every check-in is in one part"
    for part in parts:
        assert part.users.equals(data.users)
        assert part.items.equals(data.items)
    for user in range(data.n_users):
        size = int(data.activity[user])
        times = [part.rows.filter(pl.col("user") == user)["time"].to_list() for part in parts]
        whole = list(chain.from_iterable(times))
        assert whole == sorted(whole), "in the order of time"
        assert len(times[0]) >= min(size, 2)
        if last:
            assert [len(each) for each in times[1:]] == ([1, 1] if size >= 4 else [0, 0])
        elif size >= 4:
            assert abs(len(times[0]) - max(2, shares[0] * size)) <= 0.5
    assert split.decisions.get("users kept whole in train (too few check-ins)", 0) == int(
        ((split.train.activity == data.activity) & (data.activity > 0)).sum()
    )


def test_the_last_without_validation() -> None:
    data = checkins([(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 1), (1, 1, 2)])
    split = leave_last_out(data, validation=False)
    assert split.test.item.tolist() == [2]
    assert len(split.valid) == 0
    assert split.decisions == {"users kept whole in train (too few check-ins)": 1}
    assert "last check-in" in split.recipe


def test_ties_at_a_cut_are_told() -> None:
    split = sequence_split(checkins([(0, i, 7) for i in range(10)]))
    assert sum(split.decisions.values()) == 2
    assert all("in the second in which" in what for what in split.decisions)


# --- what data lack ---------------------------------------------------------------------------------------------------


def test_errors_say_what_is_lacking() -> None:
    data = checkins([(0, 0, 1), (0, 1, 2), (0, 2, 3)])
    events = data.rows.select("user", "item")
    with pytest.raises(DataError, match=r"no time is known\n  Give data with times"):
        sequence_split(Interactions.build(events, items=data.items))
    with pytest.raises(DataError, match="no time is known"):
        Transitions.of(Interactions.build(events, items=data.items))
    with pytest.raises(DataError, match="1 of 3 check-ins have no time"):
        Transitions.of(Interactions.build(events.with_columns(time=pl.Series([1, None, 3])), items=data.items))
    with pytest.raises(DataError, match=r"no coordinates \(they have id\)"):
        Transitions.of(Interactions.build(data.rows))
    holes = data.items.with_columns(latitude=pl.Series([1.0, None, 3.0]))
    with pytest.raises(DataError, match="1 of 3 items have no coordinates"):
        Transitions.of(Interactions.build(data.rows, items=holes))
    with pytest.raises(DataError, match="shares are"):
        sequence_split(data, (0.5, 0.1, 0.1))


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "users"), [("gowalla-nyc", 725), ("foursquare-nyc", 1083)])
def test_published_checkins(name: str, users: int) -> None:
    if locate(name) is None:
        pytest.skip(f"{name} is not here; `recleak data get {name}` or RECLEAK_DATA")
    data = open_data(name, "cda")
    split = sequence_split(data)
    train, test = Transitions.of(split.train), held_out(split)
    assert data.n_users == users
    assert train.count.min() > 0
    assert (train.gap >= 0).all()
    assert train.distance.max() < 80, "New York is not larger"
    assert 0.08 < len(test) / len(train) < 0.16
