"""Splits: what must hold for any data, and the rules for time, ties and unknown times."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recleak.data.interactions import Interactions
from recleak.data.split import Order, Split, leave_one_out, ratio
from recleak.errors import DataError, NotFoundError

Row = tuple[int, int, int | None]
rows_of_any_kind = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 8), st.one_of(st.none(), st.integers(1, 5))), min_size=1, max_size=60
)


def interactions(rows: list[Row]) -> Interactions:
    return Interactions.build(
        pl.DataFrame(rows, schema={"user": pl.Int64, "item": pl.Int64, "time": pl.Int64}, orient="row")
    )


def pairs(data: Interactions) -> set[tuple[int, int]]:
    return set(zip(data.user.tolist(), data.item.tolist(), strict=True))


def splits(rows: list[Row], by: Order, seed: int) -> list[Split]:
    data = interactions(rows)
    return [
        leave_one_out(data, by=by, seed=seed),
        leave_one_out(data, by=by, validation=False, seed=seed),
        ratio(data, by=by, seed=seed),
        ratio(data, (0.5, 0, 0.5), by=by, seed=seed),
    ]


def order_of(rows: list[Row], draw: bool) -> Order:
    return "random" if draw or all(time is None for _, _, time in rows) else "time"


@given(rows_of_any_kind, st.booleans(), st.integers(0, 3))
def test_parts_partition_the_rows_and_no_held_out_item_is_in_train(rows: list[Row], draw: bool, seed: int) -> None:
    data = interactions(rows)
    for split in splits(rows, order_of(rows, draw), seed):
        train, valid, test = (pairs(part) for part in (split.train, split.valid, split.test))
        assert not train & valid
        assert not train & test
        assert not valid & test
        assert train | valid | test == pairs(data)
        assert len(split.train) + len(split.valid) + len(split.test) == len(data)
        assert set(np.unique(split.train.user)) == set(np.unique(data.user))  # nobody is left without an item
        assert split.test.users.equals(data.users)  # one code space
        assert split.test.items.equals(data.items)


@given(rows_of_any_kind, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[Row], draw: bool, shuffle: object) -> None:
    mixed = list(rows)
    shuffle.shuffle(mixed)  # type: ignore[attr-defined]
    by = order_of(rows, draw)
    for one, other in zip(splits(rows, by, 0), splits(mixed, by, 0), strict=True):
        assert one.train.rows.equals(other.train.rows)
        assert one.test.rows.equals(other.test.rows)
        assert one.decisions == other.decisions


@given(rows_of_any_kind, st.booleans())
def test_leave_one_out_holds_out_one_item_of_every_user_that_has_enough(rows: list[Row], validation: bool) -> None:
    data = interactions(rows)
    split = leave_one_out(data, by="random", validation=validation)
    items = np.bincount([user for user, _ in pairs(data)], minlength=data.n_users)
    held = np.bincount([user for user, _ in pairs(split.test)], minlength=data.n_users)
    assert np.array_equal(held, items > 1 + validation)
    tuned = np.bincount([user for user, _ in pairs(split.valid)], minlength=data.n_users)
    assert np.array_equal(tuned, held * validation)
    short = split.decisions.get("users kept whole in train (too few items)", 0)
    assert short == (items <= 1 + validation).sum()


@given(rows_of_any_kind, st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.0, 0.5), (1.0, 0.0, 0.0), (0.1, 0.0, 0.9)]))
def test_ratio_cuts_each_user_by_the_shares(rows: list[Row], shares: tuple[float, float, float]) -> None:
    data = interactions(rows)
    split = ratio(data, shares)
    for user in range(data.n_users):
        size = sum(u == user for u, _ in pairs(data))
        train = sum(u == user for u, _ in pairs(split.train))
        test = sum(u == user for u, _ in pairs(split.test))
        assert train == max(1, int(size * shares[0] + 0.5))
        assert abs(test - size * shares[2]) <= 1


def test_by_time_the_last_item_is_test_and_the_one_before_validation() -> None:
    data = interactions([(1, 10, 5), (1, 11, 9), (1, 12, 1), (1, 13, 7)])
    split = leave_one_out(data)
    assert split.test.items["id"][int(split.test.item[0])] == 11
    assert split.valid.items["id"][int(split.valid.item[0])] == 13
    assert split.decisions == {}


def test_repeats_of_the_held_out_item_leave_train_too() -> None:
    data = interactions([(1, 10, 1), (1, 11, 2), (1, 10, 3), (1, 12, 2), (1, 10, 2)])
    split = leave_one_out(data, validation=False)
    assert len(split.test) == 3
    assert pairs(split.train) == {(0, 1), (0, 2)}


def test_unknown_times_count_as_earliest_and_leave_the_choice_to_a_draw() -> None:
    rows: list[Row] = [(1, item, None) for item in range(50)] + [(1, 99, 7)]
    chosen = set()
    for seed in range(8):
        split = leave_one_out(interactions(rows), seed=seed)
        assert split.test.items["id"][int(split.test.item[0])] == 99
        assert split.decisions == {
            "users whose validation item was drawn (time unknown)": 1,
            "users with some unknown times, taken as earlier than the known ones": 1,
        }
        chosen.add(int(split.valid.item[0]))
    assert len(chosen) > 3


def test_ties_are_drawn_evenly_and_counted() -> None:
    rows: list[Row] = [(user, item, 5) for user in range(4000) for item in range(4)]
    split = leave_one_out(interactions(rows), validation=False)
    assert split.decisions == {"users whose test item was drawn (tie in time)": 4000}
    counts = np.bincount(split.test.item, minlength=4)
    assert abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)


@pytest.mark.parametrize(
    ("times", "decided"),
    [
        ([1, 2, 3], {}),
        ([1, 5, 5], {"validation (tie": 1, "test (tie": 1}),
        ([5, 5, 9], {"validation (tie": 1}),
        ([1, 1, 2, 3], {}),
        ([None, None, 4, 5], {"earlier": 1}),
        ([None, None, 5], {"validation (time": 1, "earlier": 1}),
        ([None, 5, 5], {"validation (tie": 1, "test (tie": 1, "earlier": 1}),
    ],
)
def test_what_a_draw_decided_is_counted(times: list[int | None], decided: dict[str, int]) -> None:
    split = leave_one_out(interactions([(1, item, time) for item, time in enumerate(times)]))
    words = {"validation (tie", "validation (time", "test (tie", "test (time", "earlier"}
    found = {
        word: count
        for what, count in split.decisions.items()
        for word in words
        if all(piece in what for piece in word.split(" "))
    }
    assert found == decided


def test_a_user_without_a_validation_item_has_none_drawn() -> None:
    split = ratio(interactions([(1, 1, 5), (1, 2, 5)]), (0.5, 0.1, 0.4), by="time")
    assert len(split.valid) == 0
    assert split.decisions == {"users whose test item was drawn (tie in time)": 1}


def test_a_misspelt_order_is_refused() -> None:
    with pytest.raises(NotFoundError, match="Did you mean 'time'"):
        leave_one_out(interactions([(1, 1, 1), (1, 2, 2)]), by="tiem")  # type: ignore[arg-type]


def test_a_later_test_share_is_later_in_time() -> None:
    rows: list[Row] = [(1, item, item) for item in range(10)]
    split = ratio(interactions(rows), (0.8, 0.1, 0.1), by="time")
    assert split.train.item.tolist() == list(range(8))
    assert split.valid.item.tolist() == [8]
    assert split.test.item.tolist() == [9]


def test_seeds_differ() -> None:
    data = interactions([(user, item, None) for user in range(30) for item in range(9)])
    first, second = leave_one_out(data, by="random", seed=0), leave_one_out(data, by="random", seed=1)
    assert not first.test.rows.equals(second.test.rows)


def test_a_split_by_time_needs_times() -> None:
    with pytest.raises(DataError, match="no time is known"):
        leave_one_out(interactions([(1, 1, None), (1, 2, None)]))


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1)])
def test_shares_that_make_no_sense_are_refused(shares: tuple[float, float, float]) -> None:
    with pytest.raises(DataError, match="sum to 1"):
        ratio(interactions([(1, 1, 1)]), shares)
