"""Tables in memory: polars frames, mappings, and frames of pandas, real ones and stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas
import polars as pl
import pytest
from numpy.typing import NDArray

from recleak.data import from_frame
from recleak.data.columns import ColumnMap, read_columns
from recleak.data.features import classes_of
from recleak.data.prepare import in_groups, thirds
from recleak.errors import DataError

EVENTS: dict[str, list[Any]] = {"user_id": [1, 1, 2], "item_id": ["a", "b", "a"], "rating": [1.0, 2.0, None]}


@dataclass
class Column:
    """As a pandas Series: missing values are odd objects that must not be compared."""

    values: list[Any]

    def to_numpy(self) -> NDArray[Any]:
        return np.array([Missing() if each is None else each for each in self.values], dtype=object)

    def isna(self) -> Column:
        return Flags([each is None for each in self.values])


class Flags(Column):
    def to_numpy(self) -> NDArray[Any]:
        return np.array(self.values)


class Missing:
    def __bool__(self) -> bool:
        raise TypeError("ambiguous")


@dataclass
class Index:
    names: list[str | None] = field(default_factory=lambda: [None])


@dataclass
class Pandas:
    """As a pandas DataFrame."""

    table: dict[str, list[Any]]
    indexed: str | None = None

    @property
    def columns(self) -> list[str]:
        return [name for name in self.table if name != self.indexed]

    @property
    def index(self) -> Index:
        return Index([self.indexed])

    def reset_index(self) -> Pandas:
        if self.indexed not in self.table:  # as pandas, where a column has the name of the index
            raise ValueError(f"cannot insert {self.indexed}, already exists")
        return Pandas(self.table)

    def __getitem__(self, name: str) -> Column:
        return Column(self.table[name])


def test_all_kinds_of_frames_are_the_same_data() -> None:
    users: dict[str, list[Any]] = {"user_id": [1, 2], "sex": ["f", None], "age": [31, None], "vip": [True, False]}
    kinds = [
        (EVENTS, users),
        (pl.DataFrame(EVENTS), pl.DataFrame(users)),
        (pl.LazyFrame(EVENTS), pl.LazyFrame(users)),
        (Pandas(EVENTS), Pandas(users)),
        (Pandas(EVENTS), Pandas(users, indexed="user_id")),
    ]
    made = [from_frame(*each) for each in kinds]
    assert len({each.fingerprint for each in made}) == 1
    assert made[0].attributes == {"sex": "categorical", "age": "continuous", "vip": "categorical"}
    assert made[0].users.rows() == [(1, "f", 31.0, "true"), (2, None, None, "false")]


def test_a_frame_is_what_its_file_is(tmp_path: Any) -> None:
    table = pl.DataFrame(EVENTS)
    table.write_parquet(tmp_path / "events.parquet")
    assert from_frame(table).fingerprint == read_columns(tmp_path / "events.parquet").fingerprint


def test_columns_are_mapped_and_errors_name_the_frame() -> None:
    odd = {"who": [1], "what": [2]}
    assert len(from_frame(odd, columns=ColumnMap(user="who", item="what"))) == 1
    with pytest.raises(DataError, match=r"^events: cannot tell which column is the user; there is \['who', 'what'\]"):
        from_frame(odd)
    with pytest.raises(DataError, match="events: got int, expected named columns"):
        from_frame(3)
    with pytest.raises(DataError, match="users: cannot tell"):
        from_frame(EVENTS, {"name": ["x"]})
    with pytest.raises(DataError, match="events: a column cannot be used"):
        from_frame({"user": [1, 2], "item": [[1, 2], [3]]})


def test_mixed_objects_are_text() -> None:
    data = from_frame(Pandas({"user": [1, "x"], "item": [1, 2]}))
    assert data.users["id"].to_list() == ["1", "x"]


def test_an_index_that_cannot_be_a_column_is_told() -> None:
    with pytest.raises(
        DataError, match=r"events: the index cannot be a column \(cannot insert x.*\n  Rename the index"
    ):
        from_frame(Pandas(EVENTS, indexed="x"))


# --- pandas itself, where it is installed -------------------------------------------------------------------------

USERS: dict[str, list[Any]] = {"user_id": [1, 2], "sex": ["f", None], "age": [31, None], "vip": [True, False]}


@pytest.mark.parametrize(
    ("events", "users"),
    [
        ({}, {}),
        ({"item_id": "category"}, {"sex": "category"}),
        ({"user_id": "category", "item_id": "category"}, {"user_id": "category", "sex": "category"}),
        ({"user_id": "Int64", "rating": "Float64"}, {"age": "Int64", "vip": "boolean"}),
        ({"item_id": "string"}, {"sex": "string", "age": "Int8"}),
        (
            {"item_id": "string[pyarrow]", "user_id": "int64[pyarrow]"},
            {"sex": "string[pyarrow]", "vip": "bool[pyarrow]"},
        ),
    ],
)
def test_types_of_pandas(events: dict[str, str], users: dict[str, str]) -> None:
    first, second = pandas.DataFrame(EVENTS).astype(events), pandas.DataFrame(USERS).astype(users)
    expected = from_frame(EVENTS, USERS).fingerprint
    assert from_frame(first, second).fingerprint == expected
    assert from_frame(first, second.set_index("user_id")).fingerprint == expected
    assert from_frame(first.set_index(["user_id", "item_id"]), second).fingerprint == expected


def test_times_and_bands_of_pandas() -> None:
    events, noon = pandas.DataFrame(EVENTS), 1_706_702_400
    naive = pandas.Series(pandas.to_datetime(["2024-01-31 12:00"] * 3))
    zoned = naive.dt.tz_localize("America/New_York")
    times = [(naive, noon), (zoned, noon + 5 * 3600), (zoned.dt.tz_convert("UTC"), noon + 5 * 3600)]
    for column, seconds in times:
        assert from_frame(events.assign(time=column)).rows["time"].to_list() == [seconds] * 3
        missing = from_frame(events.assign(time=column.where([True, False, True]))).rows["time"]
        assert (missing.null_count(), missing.drop_nulls().to_list()) == (1, [seconds] * 2)
    days = from_frame(events.assign(time=naive.dt.to_period("D"))).rows["time"]
    assert days.to_list() == [noon - 12 * 3600] * 3
    bands = pandas.DataFrame({"user_id": [1, 2], "band": pandas.cut(pandas.Series([10, 30]), [0, 18, 65])})
    assert from_frame(events, bands).users["band"].to_list() == ["(0, 18]", "(18, 65]"]


def test_an_index_of_pandas_that_is_a_column_too() -> None:
    frame = pandas.DataFrame(EVENTS, index=pandas.Index([7, 8, 9], name="user_id"))
    with pytest.raises(DataError, match="the index cannot be a column"):
        from_frame(frame)


# --- numbers as classes -------------------------------------------------------------------------------------------


def numbered(values: list[float | None]) -> Any:
    events = {"user": list(range(len(values))), "item": [0] * len(values)}
    users = {"user": events["user"], "height": pl.Series(values, dtype=pl.Float64)}
    return from_frame(events, users)


def test_numbers_are_cut_into_thirds_that_their_names_tell() -> None:
    data = numbered([None, *map(float, range(9))])
    code, names = classes_of(data, "height")
    assert [names[each] if each >= 0 else None for each in code] == [
        None,
        *["under 3"] * 3,
        *["3 to under 6"] * 3,
        *["from 6"] * 3,
    ]
    assert in_groups(data, "height").users["height"].to_list() == thirds(data, "height").users["height"].to_list()


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ([0.0] * 8 + [1.0, 2.0], {"under 1": 8, "from 1": 2}),  # most have the smallest
        ([0.0] * 4 + [5.0] * 6, {"under 5": 4, "from 5": 6}),
        ([0.0, 1.0], {"under 1": 1, "from 1": 1}),
    ],
)
def test_a_quantile_that_many_share_is_one_edge(values: list[float | None], sizes: dict[str, int]) -> None:
    found = thirds(numbered(values), "height").users["height"].value_counts()
    assert dict(found.iter_rows()) == sizes


@pytest.mark.parametrize("values", [[2.0, 2.0], [None, None]])
def test_numbers_that_tell_nothing_are_refused(values: list[float | None]) -> None:
    with pytest.raises(DataError, match="different values"):
        thirds(numbered(values), "height")
