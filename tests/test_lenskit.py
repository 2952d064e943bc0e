"""LensKit's data sets on disk. The layout is that of `Dataset.save` of LensKit 2025.8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import polars as pl
import pytest
from lenskit.data import DatasetBuilder

from recleak.data.lenskit import read_lenskit
from recleak.data.source import open_data
from recleak.errors import DataError

SCALAR, LIST, VECTOR = ({"layout": each, "vector_size": None} for each in ("scalar", "list", "vector"))
SCHEMA: dict[str, Any] = {
    "version": "2025.3",
    "name": "tiny",
    "default_interaction": "rating",
    "entities": {
        "item": {"id_type": "str", "attributes": {"title": SCALAR, "genres": LIST, "tags": VECTOR}},
        "user": {"id_type": "int", "attributes": {"gender": SCALAR, "age": SCALAR}},
    },
    "relationships": {
        "rating": {
            "entities": {"user": None, "item": None},
            "interaction": True,
            "repeats": "present",
            "attributes": {"rating": SCALAR, "timestamp": SCALAR},
        },
        "click": {"entities": {"user": None, "item": None}, "interaction": True, "attributes": {"count": SCALAR}},
    },
}
TABLES: dict[str, dict[str, Any]] = {
    "user": {"user_id": [10, 20, 30], "gender": ["f", "m", None], "age": [31.0, None, 44.0]},
    "item": {
        "item_id": ["a", "b", "c"],
        "title": ["A", None, "C"],
        "genres": [["x", "y"], None, ["x"]],
        "tags": [[1.0], [2.0], [3.0]],
    },
    "rating": {"user_num": [0, 0, 2], "item_num": [0, 1, 1], "rating": [5.0, 3.0, 1.0], "timestamp": [17, 18, 19]},
    "click": {"user_num": [1], "item_num": [2], "count": [4]},
}


def write(folder: Path, schema: dict[str, Any] = SCHEMA, **tables: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "schema.json").write_text(json.dumps(schema))
    for name, table in {**TABLES, **tables}.items():
        frame = pl.DataFrame(table)
        numbers = [pl.col(each).cast(pl.Int32) for each in frame.columns if each.endswith("_num")]
        frame.with_columns(numbers).write_parquet(folder / f"{name}.parquet")
    return folder


def test_a_data_set_is_read_whole(tmp_path: Path) -> None:
    data = open_data(str(write(tmp_path / "tiny")))
    assert data.users.rows() == [(10, "f", 31.0), (30, None, 44.0)]  # 20 has no rating
    assert data.items.rows() == [("a", "A", ["x", "y"]), ("b", None, None)]
    assert data.rows.rows() == [(0, 0, 5.0, 17), (0, 1, 3.0, 18), (1, 1, 1.0, 19)]
    assert any("attributes of items are not used: tags" in str(note) for note in data.notes)


def test_what_lenskit_itself_saves(tmp_path: Path) -> None:
    made = DatasetBuilder("own")
    rows = {"user_id": [30, 10, 10], "item_id": ["b", "a", "b"], "rating": [1.0, 5.0, 3.0], "timestamp": [19, 17, 18]}
    made.add_interactions("rating", pandas.DataFrame(rows), entities=["user", "item"], missing="insert", default=True)
    made.add_scalar_attribute("user", "gender", [10], ["f"])
    made.add_scalar_attribute("item", "title", ["a", "b"], ["A", "B"])
    made.add_list_attribute("item", "genres", ["a"], [["x", "y"]])
    made.build().save(tmp_path / "own")
    data = open_data(str(tmp_path / "own"))
    assert data.users.rows() == [(10, "f"), (30, None)]
    assert data.items.rows() == [("a", "A", ["x", "y"]), ("b", "B", None)]
    assert data.rows.rows() == [(0, 0, 5.0, 17), (0, 1, 3.0, 18), (1, 1, 1.0, 19)]


def test_another_class_of_interactions_with_aliases(tmp_path: Path) -> None:
    click = {"entities": {"viewer": "user", "item": None}, "interaction": True, "attributes": {"count": SCALAR}}
    schema = {**SCHEMA, "default_interaction": None, "relationships": {"click": click}}
    table = {"viewer_num": [1], "item_num": [2], "count": [4]}
    data = read_lenskit(write(tmp_path / "tiny", schema, click=table))
    assert (data.users["id"].to_list(), data.items["id"].to_list()) == ([20], ["c"])
    assert any("attributes of click are not used: count" in str(note) for note in data.notes)


def test_times_may_be_times(tmp_path: Path) -> None:
    nanoseconds = pl.Series([17 * 10**9, 18 * 10**9, 19 * 10**9])
    rating = {**TABLES["rating"], "timestamp": nanoseconds.cast(pl.Datetime("ns"))}
    assert read_lenskit(write(tmp_path / "tiny", rating=rating)).rows["time"].to_list() == [17, 18, 19]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default_interaction": None}, "2 classes of interactions"),
        ({"relationships": {"../rating": SCHEMA["relationships"]["rating"]}}, "not a schema of LensKit"),
        ({"entities": {"/etc/passwd": {}}}, "not a schema of LensKit"),
        ({"relationships": {"rating": {"entities": {"a": None}, "interaction": True}}}, "expected a user and an item"),
        ({"entities": 3}, "not a schema of LensKit"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_lenskit(write(tmp_path / "tiny", {**SCHEMA, **change}))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"rating": {**TABLES["rating"], "item_num": [0, 1, 3]}}, "item_num is Int32 from 0 to 3, item.parquet has 3"),
        ({"rating": {**TABLES["rating"], "user_num": [-1, 1, 2]}}, "user_num is Int32 from -1"),
        ({"user": {**TABLES["user"], "user_id": [10, None, 30]}}, "rows cannot be used; the first: id cannot be used"),
        ({"user": {"gender": ["f", "m", "f"]}}, r"no column \['user_id'"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_lenskit(write(tmp_path / "tiny", **tables))
