"""Interactions on disk: three Parquet files and `dataset.json`, which says what they are and how to check them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import polars as pl
import pydantic

from recleak.data.interactions import ITEM_FACTS, Interactions, Note
from recleak.errors import DataError

MANIFEST = "dataset.json"
_TABLES = ("rows", "users", "items")


class Manifest(pydantic.BaseModel, extra="forbid", frozen=True):
    """What `dataset.json` holds."""

    format: Literal["recleak dataset"] = "recleak dataset"
    version: Literal[1] = 1
    name: str
    fingerprint: str
    users: int
    items: int
    rows: int
    pairs: int
    attributes: dict[str, Literal["categorical", "continuous"]]
    terms: str = ""
    notes: list[Note] = []


def save(data: Interactions, folder: Path, *, name: str, terms: str = "") -> Manifest:
    """Writes a data set; a folder that holds one already is refused."""
    if (folder / MANIFEST).exists():
        raise DataError("there is a data set already", file=folder, remedy="Choose another folder or delete this one.")
    folder.mkdir(parents=True, exist_ok=True)
    for table in _TABLES:
        getattr(data, table).write_parquet(folder / f"{table}.parquet", compression="zstd")
    manifest = Manifest(
        name=name,
        fingerprint=data.fingerprint,
        users=data.n_users,
        items=data.n_items,
        rows=len(data),
        pairs=data.n_pairs,
        attributes=data.attributes,
        terms=terms,
        notes=list(data.notes),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")  # last: its presence means complete
    return manifest


def load(folder: Path) -> Interactions:
    """Reads a data set back and checks it against its manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError("no dataset.json", file=folder, remedy="Give a folder written by `recleak data convert`.")
    try:
        manifest = Manifest.model_validate(json.loads(path.read_text()))
    except (ValueError, pydantic.ValidationError) as error:
        raise DataError(f"not a valid manifest ({error})", file=path, remedy="Convert the data again.") from error
    tables = {}
    for table in _TABLES:
        file = folder / f"{table}.parquet"
        try:
            tables[table] = pl.read_parquet(file)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise DataError(f"not readable ({error})", file=file, remedy="Convert the data again.") from error
    _check_tables(folder, tables)
    data = Interactions(**tables, notes=tuple(manifest.notes))
    if data.fingerprint != manifest.fingerprint:
        raise DataError(
            f"the tables have the fingerprint {data.fingerprint[:12]}, the manifest says {manifest.fingerprint[:12]}",
            file=folder,
            remedy="A file was changed or exchanged; convert the data again.",
        )
    return data


def _check_tables(folder: Path, tables: dict[str, pl.DataFrame]) -> None:
    """Codes in range, in order and of the right type, before anything indexes with them."""
    rows, users, items = (tables[name] for name in _TABLES)
    types = {"user": pl.Int32, "item": pl.Int32, "rating": pl.Float32, "time": pl.Int64}
    facts = {"id", *ITEM_FACTS}
    ok = (
        {"user", "item"} <= set(rows.columns) <= set(types)
        and all(rows.schema[name] == types[name] for name in rows.columns)
        and users.columns[:1] == ["id"]
        and items.columns[:1] == ["id"]
        and set(items.columns) <= facts
        and rows.height > 0
        and rows["user"].is_sorted()
        and rows.select("user", "item").null_count().sum_horizontal().item() == 0
        and _codes_below(rows["user"], users.height)
        and _codes_below(rows["item"], items.height)
    )
    if not ok:
        raise DataError("the tables do not fit together", file=folder, remedy="Convert the data again.")


def _codes_below(codes: pl.Series, bound: int) -> bool:
    return bool(codes.is_between(0, bound, closed="left").all())
