"""Interactions: canonical order, codes, fingerprints, and that nobody can change them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from numpy.typing import NDArray

from recleak.data.interactions import Interactions, Note
from recleak.errors import DataError

Row = tuple[str, str, float | None, int | None]

EVENTS = pl.DataFrame(
    {
        "user": ["b", "a", "b", "a", "a", "c", "a"],
        "item": ["y", "z", "x", "x", "z", "x", "y"],
        "rating": [5.0, 4.0, 3.0, 2.0, 1.0, None, 4.5],
        "time": [30, 20, 30, None, 10, 5, 20],
    }
)
USERS = pl.DataFrame({"id": ["c", "a", "b"], "gender": ["F", "M", None], "age": [40, 20, None]})
ITEMS = pl.DataFrame(
    {
        "id": ["x", "y", "z"],
        "title": ["X", "Y", None],
        "categories": [["p", "q"], [], None],
        "latitude": [40.5, None, 40.75],
        "longitude": [-74.5, None, -74.25],
    }
)


def sample() -> Interactions:
    return Interactions.build(EVENTS, USERS, ITEMS)


def mask(*rows: int) -> NDArray[np.bool_]:
    return np.isin(np.arange(len(EVENTS)), rows)


# Building


def test_rows_are_in_canonical_order() -> None:
    data = sample()
    assert data.rows.columns == ["user", "item", "rating", "time"]
    assert data.rows.dtypes == [pl.Int32, pl.Int32, pl.Float32, pl.Int64]
    assert data.rows.rows() == [
        (0, 0, 2.0, None),  # an unknown time comes first
        (0, 2, 1.0, 10),
        (0, 1, 4.5, 20),
        (0, 2, 4.0, 20),
        (1, 0, 3.0, 30),
        (1, 1, 5.0, 30),
        (2, 0, None, 5),
    ]
    assert data.users.rows() == [("a", "M", 20.0), ("b", None, None), ("c", "F", 40.0)]
    assert data.items.rows() == ITEMS.rows()
    assert data.notes == ()
    assert repr(data) == "Interactions(3 users, 3 items, 7 rows)"


def test_columns_may_be_absent() -> None:
    data = Interactions.build(EVENTS.select("item", "user"))
    assert data.rows.columns == ["user", "item"]
    assert data.users.columns == data.items.columns == ["id"]
    assert data.attributes == {}
    assert [(each.what, each.count) for each in data.notes] == [("rows equal another one in user, item; kept", 1)]


def test_item_facts_have_an_order_and_others_are_left_out() -> None:
    data = Interactions.build(EVENTS, items=ITEMS.select("longitude", "id", "title").with_columns(colour=pl.lit("red")))
    assert data.items.columns == ["id", "title", "longitude"]


def test_kinds_of_attributes() -> None:
    users = pl.DataFrame(
        {
            "id": ["a", "b", "c"],
            "whole": [1, 2, None],
            "real": [1.5, float("nan"), None],
            "word": ["x", "", None],
            "flag": [True, False, None],
        }
    )
    data = Interactions.build(EVENTS, users)
    assert data.attributes == {
        "whole": "continuous",
        "real": "continuous",
        "word": "categorical",
        "flag": "categorical",
    }
    assert data.users["real"].to_list() == [1.5, None, None]  # NaN is missing
    assert data.users["flag"].to_list() == ["true", "false", None]


@pytest.mark.parametrize("name", ["key", "code", "label", "user", "item"])
def test_attributes_may_have_any_name(name: str) -> None:
    data = Interactions.build(EVENTS, USERS.rename({"gender": name}))
    assert data.users[name].to_list() == ["M", None, "F"]


def test_what_cannot_be_built() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: Interactions.build(EVENTS.drop("user")), r"no column \['user'\] among .*\n.*Name them in the map"),
        (lambda: Interactions.build(EVENTS.select("time")), r"no column \['item', 'user'\]"),
        (lambda: Interactions.build(EVENTS.clear()), r"there is no interaction\n.*no row was left"),
        (
            lambda: Interactions.build(EVENTS.with_columns(item=pl.Series(["x", None, None, *"xyzx"]))),
            r"2 rows have no user or no item\n.*Drop or complete",
        ),
        (lambda: Interactions.build(EVENTS, USERS.drop("id")), r"no column 'id' among .* of the users"),
        (
            lambda: Interactions.build(EVENTS.with_columns(rating=pl.lit(1e300))),
            r"7 ratings are infinite or above 3e38",
        ),
    ]
    for build, message in cases:
        with pytest.raises(DataError, match=message):
            build()


def test_mismatches_are_noted_both_ways() -> None:
    users = pl.DataFrame({"id": ["a", "d", "e", "a"], "gender": ["M", "F", "F", "X"]})
    items = pl.DataFrame({"id": ["x", "y", "z", "w"], "title": list("XYZW")})
    data = Interactions.build(EVENTS, users, items, [Note("something", 3), Note("nothing", 0)])
    assert [str(each) for each in data.notes] == [
        "something (3).",
        "users described more than once; the first description was kept (1).",
        "users with interactions but without a description (2). They keep empty user facts. "
        "Check that both files use the same ids (first: b).",
        "users described but without any interaction (2). They are left out (first: d).",
        "items described but without any interaction (1). They are left out (first: w).",
    ]
    assert data.users.rows() == [("a", "M"), ("b", None), ("c", None)]


def test_a_note_says_where() -> None:
    assert str(Note("rows dropped", 1234)) == "rows dropped (1,234)."
    assert str(Note("rows dropped", 1, "Mend them.", "x.csv")) == "x.csv: rows dropped (1). Mend them."
    assert str(Note("rows dropped", 1, file="x.csv", line=7)) == "x.csv, line 7: rows dropped (1)."


# Ids

TRICKY_IDS = [
    "0",
    "-0",
    "7",
    "07",
    "007",
    "-7",
    "+7",
    "1e5",
    "1.0",
    "٣",
    " ",
    "",
    "é",
    "Z",
    "a",
    "10",
    "9",
    "NULL",
    "nan",
]
WHOLE = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(WHOLE, min_size=1) | st.lists(st.integers(-20, 20), min_size=1))
@example([2**62, 5, -(2**63)])
def test_ids_that_are_all_integers_sort_as_such(ids: list[int]) -> None:
    data = Interactions.build(pl.DataFrame({"user": [str(each) for each in ids], "item": "x"}))
    assert data.users["id"].to_list() == sorted(set(ids))
    assert data.users["id"].dtype == pl.Int64


@given(
    st.lists(st.sampled_from(TRICKY_IDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), min_size=1)
)
@example(["007", "8"])
@example(["-0", "8"])
@example([str(2**63), "8"])
def test_ids_sort_by_number_or_by_text(ids: list[str]) -> None:
    def canonical(each: str) -> bool:
        try:
            return str(int(each)) == each and -(2**63) <= int(each) < 2**63
        except ValueError:
            return False

    data = Interactions.build(pl.DataFrame({"user": ids, "item": "x"}))
    unique = set(ids)
    if all(canonical(each) for each in unique):
        assert data.users["id"].to_list() == sorted(int(each) for each in unique)
    else:
        assert data.users["id"].to_list() == sorted(unique, key=str.encode)
    known = [str(each) for each in data.users["id"].to_list()]
    assert sorted(known[code] for code in data.user) == sorted(ids)


@given(st.lists(st.tuples(WHOLE, st.integers(-5, 5)), min_size=1))
@example([(2**62, 1), (9, 2), (10, 3)])
def test_integers_and_their_spellings_are_the_same_ids(pairs: list[tuple[int, int]]) -> None:
    whole = pl.DataFrame(pairs, schema={"user": pl.Int64, "item": pl.Int64}, orient="row")
    users = pl.DataFrame({"id": whole["user"].unique(), "n": 1.0})
    first = Interactions.build(whole, users).fingerprint
    assert Interactions.build(whole.cast(pl.String), users).fingerprint == first
    assert Interactions.build(whole, users.cast({"id": pl.String})).fingerprint == first


def test_other_types_of_ids() -> None:
    ids = [3, 1, 2]
    first = Interactions.build(pl.DataFrame({"user": ids, "item": ids})).fingerprint
    for dtype in (pl.UInt64, pl.Int8, pl.String):
        column = pl.Series(ids).cast(dtype)
        assert Interactions.build(pl.DataFrame({"user": column, "item": column})).fingerprint == first
    large = pl.Series([2**64 - 1, 5], dtype=pl.UInt64)
    assert Interactions.build(pl.DataFrame({"user": large, "item": large})).users["id"].to_list() == [
        "18446744073709551615",
        "5",
    ]


# Fingerprints

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["1", "2", "10", "u"]),
        st.sampled_from(["1", "2", "é"]),
        st.none() | st.sampled_from([0.0, -0.0, 1.0, 0.1, float("nan")]),
        st.none() | st.integers(-2, 2),
    ),
    min_size=1,
    max_size=12,
)


def frame(rows: list[Row]) -> pl.DataFrame:
    schema = {"user": pl.String, "item": pl.String, "rating": pl.Float64, "time": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


@given(rows=ROWS, draw=st.data())
@example(rows=[("1", "1", 0.0, None), ("1", "1", -0.0, None)], draw=None)
def test_order_of_rows_does_not_matter(rows: list[Row], draw: st.DataObject | None) -> None:
    shuffled = rows[::-1] if draw is None else draw.draw(st.permutations(rows))
    first, second = Interactions.build(frame(rows)), Interactions.build(frame(shuffled))
    assert first.rows.equals(second.rows)
    assert first.fingerprint == second.fingerprint


def test_order_of_side_tables_and_notes_do_not_matter() -> None:
    first = sample()
    other = Interactions.build(EVENTS[::-1], USERS[::-1], ITEMS[::-1], [Note("something", 1)])
    assert other.notes != first.notes
    assert other.fingerprint == first.fingerprint


CHANGES: dict[str, tuple[str, str, int, object]] = {
    "user": ("events", "user", 0, "a"),
    "new user id": ("events", "user", 5, "d"),
    "item": ("events", "item", 0, "x"),
    "rating": ("events", "rating", 0, 4.0),
    "rating to null": ("events", "rating", 0, None),
    "rating from null": ("events", "rating", 5, 0.0),
    "time": ("events", "time", 0, 31),
    "time to null": ("events", "time", 0, None),
    "time from null": ("events", "time", 3, 0),
    "word": ("users", "gender", 0, "M"),
    "word to null": ("users", "gender", 0, None),
    "word from null": ("users", "gender", 2, ""),
    "number": ("users", "age", 0, 41),
    "number to null": ("users", "age", 0, None),
    "number from null": ("users", "age", 2, 0),
    "title": ("items", "title", 0, "x"),
    "title to null": ("items", "title", 0, None),
    "title from null": ("items", "title", 2, ""),
    "category": ("items", "categories", 0, ["p", "r"]),
    "category joined": ("items", "categories", 0, ["pq"]),
    "category cut elsewhere": ("items", "categories", 0, ["", "pq"]),
    "categories swapped": ("items", "categories", 0, ["q", "p"]),
    "category to null": ("items", "categories", 0, ["p", None]),
    "categories emptied": ("items", "categories", 0, []),
    "categories to null": ("items", "categories", 1, None),
    "categories from null": ("items", "categories", 2, []),
    "no category to an empty one": ("items", "categories", 1, [""]),
    "no category to a null one": ("items", "categories", 1, [None]),
    "latitude": ("items", "latitude", 0, 40.500001),
    "latitude to null": ("items", "latitude", 0, None),
    "latitude from null": ("items", "latitude", 1, 0.0),
    "longitude": ("items", "longitude", 2, 74.25),
}


def changed(table: str, column: str, row: int, value: object) -> Interactions:
    tables = {"events": EVENTS, "users": USERS, "items": ITEMS}
    values = tables[table][column].to_list()
    assert values[row] != value
    values[row] = value
    tables[table] = tables[table].with_columns(pl.Series(column, values, dtype=tables[table].schema[column]))
    return Interactions.build(tables["events"], tables["users"], tables["items"])


def test_every_cell_counts() -> None:
    prints = {name: changed(*change).fingerprint for name, change in CHANGES.items()}
    prints["nothing"] = sample().fingerprint
    assert len(set(prints.values())) == len(prints)


def test_names_and_shapes_count() -> None:
    first = sample()
    others = [
        Interactions.build(EVENTS.drop("time"), USERS, ITEMS),
        Interactions.build(EVENTS.drop("rating"), USERS, ITEMS),
        Interactions.build(EVENTS, USERS.rename({"gender": "sex"}), ITEMS),
        Interactions.build(EVENTS, USERS.drop("age"), ITEMS),
        Interactions.build(EVENTS, USERS, ITEMS.drop("title")),
        Interactions.build(EVENTS, USERS.with_columns(pl.col("age").cast(pl.String)), ITEMS),
        Interactions.build(pl.concat([EVENTS, EVENTS[:1]]), USERS, ITEMS),
        first.take(mask(0, 1, 2, 3, 4, 5)),
    ]
    assert len({first.fingerprint, *[each.fingerprint for each in others]}) == len(others) + 1


def test_fingerprint_stays_the_same_between_versions() -> None:
    assert sample().fingerprint == "5d72d5aa9dd710b6dc42fdfad9441c37097f641a74fe5c532edc34e919766085"


# Nobody changes them


def test_fields_are_frozen() -> None:
    data = sample()
    for name in ("rows", "users", "items", "notes"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(data, name, None)


@pytest.mark.parametrize("part", ["built", "taken", "restricted", "distinct"])
def test_arrays_are_read_only(part: str) -> None:
    data = {
        "built": sample(),
        "taken": sample().take(mask(1, 3, 4)),
        "restricted": sample().restrict(mask(1, 3, 4), "a test"),
        "distinct": sample().distinct(),
    }[part]
    for array in (data.user, data.item, data.indptr, data.activity, data.popularity):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_matrix_is_a_copy() -> None:
    data = sample()
    data.matrix().data[:] = 7
    assert data.matrix().data.tolist() == [1.0] * 6


# Counts and views


@given(ROWS)
def test_counts_agree_with_a_loop(rows: list[Row]) -> None:
    data = Interactions.build(frame(rows))
    users, items = [str(each) for each in data.users["id"]], [str(each) for each in data.items["id"]]
    assert data.activity.tolist() == [sum(row[0] == each for row in rows) for each in users]
    assert data.popularity.tolist() == [sum(row[1] == each for row in rows) for each in items]
    assert data.indptr.tolist() == [0, *np.cumsum(data.activity).tolist()]
    assert data.indptr.dtype == data.activity.dtype == data.popularity.dtype == np.int64
    pairs = {(row[0], row[1]) for row in rows}
    assert data.n_pairs == len(pairs)
    matrix = data.matrix()
    assert matrix.shape == (data.n_users, data.n_items)
    assert matrix.dtype == np.float32
    assert matrix.has_sorted_indices
    dense = [[float((one, other) in pairs) for other in items] for one in users]
    assert matrix.toarray().tolist() == dense
    for code in range(data.n_users):
        assert set(data.user[data.indptr[code] : data.indptr[code + 1]].tolist()) == {code}
    repeats = [each.count for each in data.notes if "rows equal another one" in each.what]
    unlike = {(*row[:2], None if row[2] is None or row[2] != row[2] else row[2] + 0.0, row[3]) for row in rows}
    assert sum(repeats) == len(rows) - len(unlike)


def test_take_keeps_the_codes() -> None:
    part = sample().take(mask(4, 6))
    assert part.rows.rows() == [(1, 0, 3.0, 30), (2, 0, None, 5)]
    assert (part.n_users, part.n_items, len(part)) == (3, 3, 2)
    assert part.activity.tolist() == [0, 1, 1]
    assert part.popularity.tolist() == [2, 0, 0]
    assert part.indptr.tolist() == [0, 0, 1, 2]
    nothing = sample().take(mask())
    assert (len(nothing), nothing.n_pairs, nothing.n_users) == (0, 0, 3)
    assert nothing.matrix().nnz == 0


def test_restrict_renumbers_and_says_so() -> None:
    part = sample().restrict(mask(4, 5, 6), "a test")
    assert part.rows.rows() == [(0, 0, 3.0, 30), (0, 1, 5.0, 30), (1, 0, None, 5)]
    assert part.users["id"].to_list() == ["b", "c"]
    assert part.items["title"].to_list() == ["X", "Y"]
    assert [str(each) for each in part.notes] == ["rows dropped by a test, with 1 users, 1 items (4)."]
    rebuilt = Interactions.build(EVENTS.filter(pl.col("user") != "a"), USERS, ITEMS)
    assert part.fingerprint == rebuilt.fingerprint


def test_restrict_without_effect() -> None:
    data = sample()
    assert data.restrict(np.ones(len(data), bool), "a test") is data
    with pytest.raises(DataError, match=r"no interaction is left after a test\n.*Loosen the filter"):
        data.restrict(mask(), "a test")
    part = data.take(mask(4, 6)).restrict(np.ones(2, bool), "a test")  # all rows stay, but not all users
    assert (part.n_users, part.n_items) == (2, 1)


def test_distinct_keeps_the_last_or_the_first() -> None:
    data = sample()
    assert data.n_pairs == 6
    last, first = data.distinct(), data.distinct("first")
    assert [row for row in last.rows.rows() if row[:2] == (0, 2)] == [(0, 2, 4.0, 20)]
    assert [row for row in first.rows.rows() if row[:2] == (0, 2)] == [(0, 2, 1.0, 10)]
    assert len(last) == len(first) == last.n_pairs == 6
    assert str(last.notes[-1]) == "repeats of a (user, item) pair dropped, the last kept (1)."
    assert last.distinct() is last


@settings(max_examples=50)
@given(ROWS)
def test_parts_stay_in_canonical_order(rows: list[Row]) -> None:
    data = Interactions.build(frame(rows))
    odd = np.arange(len(data)) % 2 == 0
    for part in (data.take(odd), data.restrict(odd, "a test"), data.distinct(), data.distinct("first")):
        keys = [(user, -3 if time is None else time, item) for user, item, _, time in part.rows.rows()]
        assert keys == sorted(keys)


def test_with_attributes() -> None:
    data = sample().with_attributes(age=pl.Series(["young", "old", None]), height=pl.Series([1.8, float("nan"), 2]))
    assert data.users.rows() == [("a", "M", "young", 1.8), ("b", None, "old", None), ("c", "F", None, 2.0)]
    assert data.attributes == {"gender": "categorical", "age": "categorical", "height": "continuous"}
    assert data.rows.equals(sample().rows)
    assert data.fingerprint != sample().fingerprint
    assert sample().with_attributes().fingerprint == sample().fingerprint
