"""Converted data sets: the same on the way back, and nothing odd is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from recleak.data import store
from recleak.data.interactions import Interactions, Note
from recleak.data.synthetic import Synthetic
from recleak.errors import DataError


@pytest.fixture
def data() -> Interactions:
    made = Synthetic(n_users=60, n_items=80, mean_activity=25, missing=0.1).generate()
    return Interactions(made.rows, made.users, made.items, (Note("something", 3, "Do it.", "a.csv", 7),))


@pytest.fixture
def folder(data: Interactions, tmp_path: Path) -> Path:
    store.save(data, tmp_path / "set", name="small", terms="none")
    return tmp_path / "set"


def test_round_trip(data: Interactions, folder: Path) -> None:
    back = store.load(folder)
    assert back.fingerprint == data.fingerprint
    assert back.rows.equals(data.rows)
    assert back.users.equals(data.users)
    assert back.items.equals(data.items)
    assert back.notes == data.notes
    manifest = json.loads((folder / "dataset.json").read_text())
    assert manifest["attributes"]["age"] == "continuous"
    assert manifest["users"] == 60


@pytest.mark.parametrize("name", ["dataset.json", "rows.parquet", "users.parquet", "items.parquet"])
def test_nothing_is_overwritten(data: Interactions, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match="already"):
        store.save(data, tmp_path, name="again")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_may_have_any_name(data: Interactions, tmp_path: Path) -> None:
    store.save(data, tmp_path / "odd [x] * é", name="né")
    assert store.load(tmp_path / "odd [x] * é").fingerprint == data.fingerprint


@pytest.mark.parametrize("change", [{"users": 999}, {"rows": 1}, {"attributes": {"age": "categorical"}}])
def test_a_manifest_that_says_something_else_is_refused(folder: Path, change: dict[str, object]) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="does not describe the tables"):
        store.load(folder)


def test_ids_are_unique(folder: Path) -> None:
    path = folder / "users.parquet"
    pl.read_parquet(path).with_columns(id=pl.lit(1, pl.Int64)).write_parquet(path)
    with pytest.raises(DataError, match="do not fit together"):
        store.load(folder)


@pytest.mark.parametrize("table", ["rows", "users", "items"])
def test_a_changed_cell_is_noticed(folder: Path, table: str) -> None:
    path = folder / f"{table}.parquet"
    frame = pl.read_parquet(path)
    name = {"rows": "time", "users": "gender", "items": "title"}[table]
    first = pl.int_range(pl.len()) == 0
    other = pl.col(name) + 1 if table == "rows" else pl.lit("changed")
    frame.with_columns(pl.when(first).then(other).otherwise(pl.col(name)).alias(name)).write_parquet(path)
    with pytest.raises(DataError, match="fingerprint"):
        store.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.with_columns(item=pl.lit(10_000, pl.Int32)),
        lambda rows: rows.with_columns(user=pl.lit(-1, pl.Int32)),
        lambda rows: rows.with_columns(item=pl.lit(None, pl.Int32)),
        lambda rows: rows.with_columns(pl.col("user").cast(pl.Int64)),
        lambda rows: rows.drop("item"),
        lambda rows: rows.with_columns(extra=1),
        lambda rows: rows.reverse(),
        lambda rows: rows.clear(),
    ],
)
def test_codes_that_do_not_fit_are_refused_before_they_index_anything(folder: Path, change: object) -> None:
    path = folder / "rows.parquet"
    change(pl.read_parquet(path)).write_parquet(path)  # type: ignore[operator]
    with pytest.raises(DataError, match=r"do not fit together|'extra', expected user, item, rating, time"):
        store.load(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "recleak dataset", "version": 2}', "\x00"])
def test_a_bad_manifest_is_a_clear_error(folder: Path, content: str) -> None:
    (folder / "dataset.json").write_text(content)
    with pytest.raises(DataError, match="not a valid manifest"):
        store.load(folder)


def test_bad_or_missing_files_are_clear_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset\.json"):
        store.load(tmp_path)
    (folder / "users.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"users\.parquet: not readable"):
        store.load(folder)
    (folder / "users.parquet").unlink()
    with pytest.raises(DataError, match=r"users\.parquet"):
        store.load(folder)
