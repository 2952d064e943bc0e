"""Interactions on disk: three Parquet files and `dataset.json`, which says what they are and how to check them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import polars as pl
import pydantic

from recleak.data.interactions import ITEM_FACTS, Interactions, Note
from recleak.errors import DataError
from recleak.files import read_json, read_table

MANIFEST = "dataset.json"
_TABLES = ("rows", "users", "items")
_LISTS = [name for name, dtype in ITEM_FACTS.items() if isinstance(dtype, pl.List)]
_COLUMNS = {"rows": ("user", "item", "rating", "time"), "users": None, "items": ("id", *ITEM_FACTS)}


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
    """Writes a data set; nothing that is there already is overwritten."""
    for name_of in (MANIFEST, *[f"{table}.parquet" for table in _TABLES]):
        if (folder / name_of).exists():
            remedy = "Nothing is overwritten: choose another folder, or delete it."
            raise DataError("there is such a file already", file=folder / name_of, remedy=remedy)
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
    (folder / MANIFEST).write_text(
        manifest.model_dump_json(indent=2) + "\n", encoding="utf-8"
    )  # last: its presence means complete
    return manifest


def load(folder: Path) -> Interactions:
    """Reads a data set back and checks it against its manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError("no dataset.json", file=folder, remedy="Give a folder written by `recleak data convert`.")
    try:
        manifest = Manifest.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"not a valid manifest ({error!s:.500})", file=path, remedy="Convert the data again."
        ) from error
    tables = {}
    for table in _TABLES:
        tables[table] = read_table(folder / f"{table}.parquet", lists=_LISTS, columns=_COLUMNS[table])
    _check_tables(folder, tables)
    data = Interactions(**tables, notes=tuple(manifest.notes))
    said = (manifest.users, manifest.items, manifest.rows, manifest.pairs, manifest.attributes)
    if said != (data.n_users, data.n_items, len(data), data.n_pairs, data.attributes):
        raise DataError("the manifest does not describe the tables", file=path, remedy="Convert the data again.")
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
        and all(side.schema["id"] in (pl.String, pl.Int64) for side in (users, items))
        and max(users.height, items.height) < 2**31
        and set(items.columns) <= facts
        and rows.height > 0
        and rows["user"].is_sorted()
        and all(dtype in (pl.String, pl.Float64) for dtype in users.dtypes[1:])
        and all(items.schema[name] == dtype for name, dtype in ITEM_FACTS.items() if name in items.columns)
        and all(side["id"].null_count() == 0 and side["id"].is_unique().all() for side in (users, items))
        and rows.select("user", "item").null_count().sum_horizontal().item() == 0
        and _codes_below(rows["user"], users.height)
        and _codes_below(rows["item"], items.height)
        and all(_finite(table) for table in tables.values())
    )
    if not ok:
        raise DataError("the tables do not fit together", file=folder, remedy="Convert the data again.")


def _finite(table: pl.DataFrame) -> bool:
    """Whether numbers are numbers: neither infinite nor NaN."""
    return all(table[name].is_finite().all() for name, dtype in table.schema.items() if dtype.is_float())


def _codes_below(codes: pl.Series, bound: int) -> bool:
    return bool(codes.is_between(0, bound, closed="left").all())
